"""Requests that are aborted in the block in which they meet their end: no token behind it is theirs.

An oracle drafts what the target says behind each end, so that whole blocks are kept.
"""

from dataclasses import replace

import pytest
from serving import TARGET, WHOLE_BLOCKS, dflash_arguments, heldout_prompts
from support.scheduled import Answer, Job, Oracle, run
from support.servers import FLOAT32
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

TEXT = 64
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
ENDS = {0, 2}  # of the target: the end of a text and of a turn
END_OF_TEXT = 0
PER_SETTING = 32
SERVER = ["--model-path", TARGET, *FLOAT32, "--reasoning-parser", "qwen3", "--max-running-requests", "64"]
# SGLang's own message to its scheduler, once a request runs longer than SGLANG_REQ_RUNNING_TIMEOUT.
TIME_LIMIT = {"abort_message": "Request running timeout reached.", "finished_reason": {"type": "abort"}}


def stop_token(job: Job, text: tuple[int, ...], end: int) -> Job:
    return replace(job, ignore_eos=False, sampling={**job.sampling, "stop_token_ids": [text[end - 1]]})


def stop_string(job: Job, text: tuple[int, ...], end: int) -> Job:
    stop = TOKENIZER.decode(text[end - 2 : end])
    return replace(job, sampling={**job.sampling, "stop": [stop]})


def limit(job: Job, text: tuple[int, ...], end: int) -> Job:
    return replace(job, max_new_tokens=end)


def grammar(job: Job, text: tuple[int, ...], end: int) -> Job:
    """Admit a beginning of the text alone, and prefer the end of a text behind it to that of a turn."""
    said = TOKENIZER.decode(text[: end - 1])
    pattern = "".join("\\" + c if c in r"\.^$*+?{}[]|()/-" else c for c in said)
    fields = {"regex": pattern, "logit_bias": {str(END_OF_TEXT): 100.0}}
    return replace(job, ignore_eos=False, reasons=False, sampling={**job.sampling, **fields})


# What ends a request, and what the abort says beside the request's id.
SETTINGS = {
    "stop token": (stop_token, {}),
    "stop string": (stop_string, {}),
    "limit": (limit, {}),
    "grammar": (grammar, {}),
    "time limit": (limit, TIME_LIMIT),
    "abort_all": (limit, {"abort_all": True}),
}


def end_of(job: Job, text: tuple[int, ...]) -> int:
    """Return the number of tokens of a text that a request's stop and limit allow."""
    ends = set() if job.ignore_eos else {*ENDS, *job.sampling.get("stop_token_ids", ())}
    for end in range(1, job.max_new_tokens + 1):
        said = TOKENIZER.decode(text[:end], skip_special_tokens=False)
        if text[end - 1] in ends or any(stop in said for stop in job.sampling.get("stop", ())):
            return end
    return job.max_new_tokens


@pytest.fixture(scope="module")
def plain() -> tuple[list[Job], list[Answer]]:
    """Return the target's own texts, without an end."""
    texts = [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 60][:PER_SETTING]
    jobs = [Job(tuple(TOKENIZER.encode(text).ids), TEXT, logprobs=True) for text in texts]
    return jobs, run(SERVER, [jobs])[0]


@pytest.mark.parametrize(
    ("block", "flags"),
    [
        pytest.param(16, [WHOLE_BLOCKS], id="whole-16"),
        pytest.param(8, [WHOLE_BLOCKS], id="whole-8", marks=pytest.mark.long),
        pytest.param(16, [], id="adaptive-16", marks=pytest.mark.long),
        pytest.param(8, [], id="adaptive-8", marks=pytest.mark.long),
    ],
)
def test_an_aborted_answer_ends_where_it_would_have(block, flags, plain):
    """192 requests in six settings, aborted 0 to 21 tokens before their end."""
    jobs, texts, groups = [], [], []
    for name, (ending, abort) in SETTINGS.items():
        group = []
        for number, (job, answer) in enumerate(zip(*plain, strict=True)):
            text = answer.output_ids
            job = replace(job, logprobs=number % 2 == 0, reasons=number % 3 == 0, abort=abort)
            job = ending(job, text, 23 + number % 13)
            if name == "grammar":
                text = (*text[: 22 + number % 13], *[END_OF_TEXT] * TEXT)
            end = end_of(job, text)
            before = max(end - number % 22, 1)
            if name == "abort_all" and number != 21:  # one of them is the time for all
                before = None
            group.append(replace(job, abort_after=before))
            texts.append(text)
        groups.append(group)
        jobs += group
    # Behind its end the oracle goes on with the target's own text.
    arguments = [*SERVER, *dflash_arguments(), *flags, "--speculative-num-draft-tokens", block]
    answers = [a for group in run(arguments, groups, Oracle(texts, 0.0)) for a in group]
    wrong, met = [], dict.fromkeys(SETTINGS, 0)
    for number, (job, text, answer) in enumerate(zip(jobs, texts, answers, strict=True)):
        name, end, length = list(SETTINGS)[number // PER_SETTING], end_of(job, text), len(answer.output_ids)
        is_aborted = answer.finish_reason == "FINISH_ABORT"
        met[name] += is_aborted and length == end
        sent = {
            "output_ids": length,
            "completion_tokens": length,
            "logprobs": length if job.logprobs else 0,
            "reasoning_tokens": length if job.reasons else 0,
            "verifies": len(answer.accepted),
            "correct_drafts": sum(answer.accepted),
        }
        if answer.output_ids != text[:length] or length > end or (length < end and not is_aborted):
            said = f"{answer.output_ids} instead of {text[:end]}"
            wrong.append((name, number, f"{length} tokens of {end}", answer.finish_reason, said))
        elif sent != {name: answer.counts[name] for name in sent}:
            wrong.append((name, number, length, answer.counts))
        elif job.logprobs and name != "grammar":
            whole = plain[1][number % PER_SETTING].logprobs
            assert answer.logprobs == pytest.approx(whole[:length], abs=1e-3)
    print(met)
    assert not wrong, f"{len(wrong)} of {len(jobs)} are wrong:\n" + "\n".join(map(str, wrong))
    assert min(met.values()) > 0, met
