"""Greedy requests of every held-out prompt, and the bundled target's answers to them.

The answers (golden/target-answers.jsonl) are stock SGLang's without speculation, in float32. Regenerate
them after a change to the target or the requests:

    PYTHONPATH=benchmark:test/srt python test/srt/support/target_answers.py
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from serving import TARGET, heldout_prompts
from support.parity import near_tie
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "target-answers.jsonl"


def requests_from_prompts() -> list[dict]:
    """Return greedy requests, as text or ids: 24 to 64 new tokens, half past the end-of-text."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    requests = []
    for number, prompt in enumerate(heldout_prompts()):
        text = prompt["text"]
        sampling = {"temperature": 0, "max_new_tokens": 24 + number * 7 % 41, "ignore_eos": number % 2 == 0}
        start = {"input_ids": tokenizer.encode(text).ids} if number % 3 == 0 else {"text": text}
        requests.append({**start, "sampling_params": sampling})
    return requests


def target_answers() -> list[dict]:
    """Return one answer per request of `requests_from_prompts`, with the compared fields.

    Of the target's two best log probabilities at each position only the gap is stored; the best one is
    stored as 0.
    """
    answers = read_golden(GOLDEN, _made_for())
    for answer in answers:
        answer["meta_info"]["output_top_logprobs"] = top_logprobs(answer["meta_info"].pop("gaps"))
    return answers


def read_golden(path: Path, made_for: dict[str, str]) -> list[dict]:
    """Read stored answers, whose first line says what they were made for."""
    first, *answers = (json.loads(line) for line in path.read_text().splitlines())
    assert first == made_for, f"{path} is of another model or other requests: its module regenerates it"
    return answers


def gaps_of(answer: dict, length: int) -> list[float]:
    """Return the gap of the target's best two log probabilities at each position, to store it."""
    return [float(f"{near_tie(answer, i):.3g}") for i in range(length)]


def top_logprobs(gaps: list[float]) -> list[list[tuple[float, None]]]:
    """Return log probabilities with these gaps; the best one is 0."""
    return [[(0.0, None), (-gap, None)] for gap in gaps]


def sha256_sums(model: Path, files: Sequence[str], requests: object) -> dict[str, str]:
    """Return SHA-256 sums of everything that stored answers depend on."""
    contents = {name: (model / name).read_bytes() for name in files}
    contents["requests"] = json.dumps(requests).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _made_for() -> dict[str, str]:
    files = "config.json", "model.safetensors", "tokenizer.json"
    return sha256_sums(TARGET, files, requests_from_prompts())


def main() -> None:
    from support.servers import PLAIN_FLOAT32, plain_target

    lines = [_made_for()]
    with plain_target(*PLAIN_FLOAT32) as target:
        for answer in target.answers(requests_from_prompts()):
            gaps = gaps_of(answer, len(answer["output_ids"]))
            meta = {"finish_reason": answer["meta_info"]["finish_reason"], "gaps": gaps}
            lines.append({"text": answer["text"], "output_ids": answer["output_ids"], "meta_info": meta})
    GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
