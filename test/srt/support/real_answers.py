"""The real model's own answers to the requests of real_requests.py.

They (golden/smollm2-answers.jsonl) are stock SGLang's without speculation, in float32. Regenerate them after
a change to the model or the requests, where `make model` has fetched the model:

    PYTHONPATH=benchmark:test/srt python test/srt/support/real_answers.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.real_model import TARGET, Answers, Job, converse, pair, post, post_with_margins, served_alone
from support.real_requests import POSTED, TURNS, requests_for_stop_tokens
from support.target_answers import gaps_of, read_golden, sha256_sums, top_logprobs

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-answers.jsonl"
KEEPS_LOGPROBS = "log probabilities"
CHOICE_FIELDS = ("message", "finish_reason", "matched_stop", "response_token_ids")
USAGE_FIELDS = ("prompt_tokens", "completion_tokens", "total_tokens")


def jobs_of(ask: Callable[[dict], Job] = post) -> dict[str, Job]:
    """Return the jobs whose answers are stored; the longest ones first."""
    jobs = {name: ask(request) for name, request in (POSTED | requests_for_stop_tokens()).items()}
    return {"conversation": converse(TURNS, ask), **jobs}


def stored_answers() -> dict[str, Any]:
    """Return an answer per job of `jobs_of`, and a list of answers for the conversation.

    Of the best two log probabilities at each position only the gap is stored; the best one is stored as 0.
    """
    pair()
    lines = read_golden(GOLDEN, _made_for())
    for line in lines:
        for answer in line["answers"]:
            for choice in answer["choices"]:
                choice["meta_info"] = {"output_top_logprobs": top_logprobs(choice.pop("gaps"))}
    return {
        line["name"]: line["answers"] if line["name"] == "conversation" else line["answers"][0]
        for line in lines
    }


def shortened(answers: Mapping[str, Any]) -> list[dict]:
    """Return the lines to store of live answers."""
    return [
        {
            "name": name,
            "answers": [
                _shortened(answer, name == KEEPS_LOGPROBS)
                for answer in (found if isinstance(found, list) else [found])
            ],
        }
        for name, found in answers.items()
    ]


def _shortened(answer: dict, keeps_logprobs: bool) -> dict:
    fields = (*CHOICE_FIELDS, *(["logprobs"] if keeps_logprobs else []))
    choices = []
    for choice in answer["choices"]:
        gaps = gaps_of(choice, len(choice["response_token_ids"]))
        choices.append({**{name: choice[name] for name in fields}, "gaps": gaps})
    return {"choices": choices, "usage": {name: answer["usage"][name] for name in USAGE_FIELDS}}


def _made_for() -> dict[str, str]:
    files = "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"
    return sha256_sums(TARGET, files, [POSTED, requests_for_stop_tokens(), TURNS])


def main() -> None:
    with served_alone() as server:
        lines = [_made_for(), *shortened(Answers(server, jobs_of(post_with_margins)))]
    GOLDEN.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


if __name__ == "__main__":
    main()
