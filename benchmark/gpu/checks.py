"""Checks: answers against the target's own, sampled answers against its distribution, tests marked gpu.

    python benchmark/gpu/checks.py

records the bundled target's answers anew, with a server on a CPU, in answers.json beside this file.
"""

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu.measure import Session, ends  # noqa: E402
from gpu.servers import CONTEXT_LENGTH  # noqa: E402
from serving import TARGET, Server, serve, text_prompts  # noqa: E402

ANSWERS = Path(__file__).with_name("answers.json")

# Two ways of batching the same bf16 sums may round differently in every layer. The bundled target's logits
# are 1/16 apart in bf16. Up to four such steps between its best two tokens is a near-tie, as in the tests.
NEAR_TIE = 0.25
TEXTS, LONGEST_TEXT = 8, 64  # texts, and tokens of one
# Greedy requests beside them, whose answers are compared too; and others, which must end well.
CONSTRAINTS = ({"regex": "[a-z ]{8,48}"}, {"min_new_tokens": 40}, {"logit_bias": {"13": 1.5}})
OTHERS = (
    {"sampling_params": {"temperature": 0.7, "top_p": 0.9}},
    {"sampling_params": {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3}},
    {"sampling_params": {"temperature": 0}, "return_logprob": True, "top_logprobs_num": 2},
)
END_SLACK = 2  # tokens before the end of the context at which SGLang cuts an answer
# Tokens of a sampled answer, and how many of a position's likeliest ones are looked at.
SAMPLED_TOKENS, RANKED = 64, 64
MOST_SIGMAS = 5.0


def requests() -> list[dict]:
    """Return greedy requests for TEXTS answers up to CONTEXT_LENGTH, then a constrained one of each kind."""
    prompts = [prompt for prompt in text_prompts() if prompt["num_tokens"] <= LONGEST_TEXT]
    prompts = prompts[:: len(prompts) // TEXTS][:TEXTS]
    length = [{"max_new_tokens": CONTEXT_LENGTH - 1 - p["num_tokens"], "ignore_eos": True} for p in prompts]
    length += [{"max_new_tokens": 48, **constraint} for constraint in CONSTRAINTS]
    asked = zip([*prompts, *prompts[: len(CONSTRAINTS)]], length, strict=True)
    return [{"text": p["text"], "sampling_params": {"temperature": 0, **more}} for p, more in asked]


def record_answers(server: Server) -> list[dict]:
    """Return the target's own answers: ids and, at each, the gap of its best two in log probability."""
    asked = [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in requests()]
    answers = server.generate_many(asked, len(asked))
    tops = [answer["meta_info"]["output_top_logprobs"] for answer in answers]
    gaps = [[round(best[0] - second[0], 3) for best, second, *_ in each] for each in tops]
    return [{"ids": answer["output_ids"], "gaps": each} for answer, each in zip(answers, gaps)]


def check_answers(session: Session, least: float = 0.0, is_sampled: bool = False) -> dict:
    """Compare a server's answers with those of the bundled target, recorded on a CPU.

    least: of the texts' accept length, a tenth below a CPU's: a draft that reads the wrong rows has less. 0
    where cycles may draft nothing. is_sampled: check sampled answers too.
    """
    asked, expected = requests(), json.loads(ANSWERS.read_text())
    together = [*asked, *({"text": asked[0]["text"], **other} for other in OTHERS)]
    answers = session.server.generate_many(together, len(together))
    found = compare([answer["output_ids"] for answer in answers[: len(asked)]], expected)
    texts = [answer["meta_info"] for answer in answers[:TEXTS]]
    # The first token of an answer comes from its prompt's own forward.
    drafted = sum(info["completion_tokens"] - 1 for info in texts)
    found["accept_length"] = drafted / sum(info["spec_verify_ct"] for info in texts)
    problems = ends(answers)
    if wide := [d for d in found["differences"] if d["gap"] is None or d["gap"] > NEAR_TIE]:
        problems.append(f"{len(wide)} answers differ where the target is near no tie: {wide[:3]}")
    if found["accept_length"] < least:
        problems.append(f"accept length {found['accept_length']:.2f}, on a CPU more than {least}")
    if is_sampled:
        found["sigmas"] = sampled_sigmas(session)
        if abs(found["sigmas"]) > MOST_SIGMAS:
            problems.append(f"sampled answers are {found['sigmas']:.1f} sigmas off the target's distribution")
    return found | {"problems": problems}


def compare(answers: Sequence[list[int]], expected: Sequence[dict]) -> dict:
    """Find where each answer first differs from the target's own.

    gap: distance of the target's best two tokens there, in log probability; None if one answer ends early.
    """
    differences = []
    for number, (ids, want) in enumerate(zip(answers, expected, strict=True)):
        pairs = enumerate(zip(ids, want["ids"]))
        position = next((i for i, (got, wanted) in pairs if got != wanted), None)
        if position is not None:
            differences.append({"request": number, "position": position, "gap": want["gaps"][position]})
        elif abs(len(ids) - len(want["ids"])) > END_SLACK:
            ends = min(len(ids), len(want["ids"]))
            differences.append({"request": number, "position": ends, "gap": None})
    return {"requests": len(answers), "differences": differences}


def sampled_sigmas(session: Session) -> float:
    """Sample at temperature 1, and say how far the tokens' log probabilities are from those expected.

    Among a position's RANKED tokens a drawn one has their average log probability, weighted by probability.
    Draws of other tokens are left out. The sum of the deviations is divided by its standard deviation.
    """
    length = {"temperature": 1.0, "max_new_tokens": SAMPLED_TOKENS, "ignore_eos": True}
    asked = [
        {"text": r["text"], "sampling_params": length, "return_logprob": True, "top_logprobs_num": RANKED}
        for r in requests()[:TEXTS]
    ]
    excess = variance = 0.0
    for answer in session.server.generate_many(asked, TEXTS):
        info = answer["meta_info"]
        for (log_drawn, drawn, *_), ranked in zip(info["output_token_logprobs"], info["output_top_logprobs"]):
            if drawn not in [token for _, token, *_ in ranked]:
                continue
            shares = [(math.exp(log), log) for log, *_ in ranked]
            inside = sum(share for share, _ in shares)
            mean = sum(share * log for share, log in shares) / inside
            excess += log_drawn - mean
            variance += sum(share * (log - mean) ** 2 for share, log in shares) / inside
    return excess / math.sqrt(variance)


def run_tests(session: Session, path: str) -> dict:
    """Run the tests below `path` marked gpu in a child process: {"passed", "skipped", "problems"}.

    Interrupted at the deadline, it can still end the servers that its fixtures started.
    """
    left = max(1, int(session.deadline - time.monotonic()))
    command = ["timeout", "--signal=INT", "--kill-after=20", str(left), sys.executable, "-m", "pytest"]
    command += ["-q", "-rfE", "--tb=line", "-m", "gpu", path]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    counts = {word: re.search(rf"(\d+) {word}", done.stdout) for word in ("passed", "skipped")}
    found = {word: int(count[1]) if count else 0 for word, count in counts.items()}
    is_well = done.returncode == 0 and (found["passed"] or session.sizes.is_rehearsal)
    problem = f"pytest ended with {done.returncode}; its output ends:\n{done.stdout[-2000:]}"
    return found | {"problems": [] if is_well else [problem]}


if __name__ == "__main__":
    with serve("--model-path", TARGET, env={"SGLANG_DFLASH_CPU_LAYERS": "0"}) as server:
        ANSWERS.write_text("[\n" + ",\n".join(map(json.dumps, record_answers(server))) + "\n]\n")
