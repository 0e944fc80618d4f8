"""Compare the greedy float32 answers of speculative servers with those of plain SGLang.

Plain SGLang answers first. Its log probabilities say where its best two tokens are so close that the order of
additions decides between them; how close that is, it shows itself when the shape of the batch changes. An
answer is compared up to its first such tie.
"""

from collections.abc import Sequence

from prompt_sets import PromptSet, RequestMaker
from ties import FLOAT32_TIE, differences, rounding, undecided_from

# Prompts of each set that plain SGLang answers twice, alone and in a batch.
TWICE = 4
# Times the largest change of a gap that was seen among these few prompts.
SAFETY = 4
SHOWN_DIFFERENCES = 5


def run(plain, others: Sequence, sets: Sequence[PromptSet], maker: RequestMaker, concurrency: int) -> int:
    """Serve one variant after the other, print what was compared, and return the number of differences.

    Args:
        plain: The `Variant` without speculation.
        others: Speculative variants.
        sets: Prompts, all of which are answered.
        maker: Makes the requests.
        concurrency: Requests in flight.
    """
    bodies = {
        chosen.name: [maker.body(prompt, chosen.sampling(prompt, 0)) for prompt in chosen.prompts]
        for chosen in sets
    }
    with plain.serve() as server:
        expected = {
            name: server.generate_many([with_gaps(body) for body in of_set], concurrency)
            for name, of_set in bodies.items()
        }
        server.flush_cache()
        changes = [
            rounding(
                expected[name][:TWICE],
                server.generate_many([with_gaps(body) for body in of_set[:TWICE]], 1),
            )
            for name, of_set in bodies.items()
        ]
    tie = tie_margin(max(changes))
    print(
        f"plain SGLang alone: a gap of its best two tokens changes by up to {max(changes):.1e} with the "
        f"batch; nothing is compared from the first gap below {tie:.1e} on",
        flush=True,
    )
    different = 0
    for variant in others:
        with variant.serve() as server:
            for name in (name for name in bodies if name not in variant.skips):
                answers = server.generate_many(bodies[name], concurrency)
                found = differences(bodies[name], answers, expected[name], tie)
                print(summary(variant.name, name, expected[name], len(found), tie), flush=True)
                print("".join(described(difference) for difference in found[:SHOWN_DIFFERENCES]), end="")
                different += len(found)
    return different


def with_gaps(body: dict) -> dict:
    """Return a request whose answer has the two best log probabilities of every position."""
    return {**body, "return_logprob": True, "top_logprobs_num": 2}


def tie_margin(change: float) -> float:
    """Return the gap below which two tokens are tied, given the largest change seen between batches."""
    return max(FLOAT32_TIE, SAFETY * change)


def summary(server: str, name: str, expected: Sequence[dict], different: int, tie: float) -> str:
    """Format how many answers were compared, cut at a tie, excluded and different."""
    ends = [undecided_from(answer, tie) for answer in expected]
    lengths = [len(answer["output_ids"]) for answer in expected]
    cut = sum(end is not None for end in ends)
    compared = sum(length if end is None else end for end, length in zip(ends, lengths))
    return (
        f"{server}: {name}: {len(expected)} answers, {len(expected) - cut} compared in full, {cut} up to a "
        f"tie; {compared} of {sum(lengths)} tokens compared, {sum(lengths) - compared} excluded; "
        f"{different} answers different"
    )


def described(difference: dict) -> str:
    gap = difference["gap"]
    (got, text, reason), (want, wanted_text, wanted_reason) = difference["got"], difference["want"]
    position = difference["position"]
    if position is None:
        return f"  same tokens, but {text[-80:]!r}, {reason} for {wanted_text[-80:]!r}, {wanted_reason}\n"
    return (
        f"  token {position}: {got[position : position + 4]} for {want[position : position + 4]}, whose best "
        f"two tokens are {gap if gap is None else f'{gap:.1e}'} apart\n"
    )
