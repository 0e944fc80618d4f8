"""Comparison of a rehearsed server's answers and reports with what is expected."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from serving import dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.rehearsal.play import ARGUMENTS, Rehearsal

import sglang_dflash
from sglang_dflash.srt.plugins.compatibility import SUPPORTED
from sglang_dflash.srt.plugins.patch import installed_version

# Drafts may depend on what the prefix cache held when a request came; without a cache they do not.
NO_CACHE = "--disable-radix-cache"
CONCURRENCY = 3  # with graphs for 1, 2 and 4 requests: most batches are padded
CHANGING = (7, 3, 0, 0, 1, 7, 0)  # drafted tokens to verify
LISTS = Path(__file__).parent / "launch_lists"
UPDATE = "REHEARSAL_UPDATE"  # set it to write the lists instead of comparing with them


def greedy_requests(count: int = 5, tokens: int = 32, **sampling) -> list[dict]:
    prompts = [prompt["text"] for prompt in heldout_prompts() if 8 <= prompt["num_tokens"] <= 120][:count]
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
    # A copy for each: callers change the parameters of single requests.
    return [{"text": prompt, "sampling_params": {**sampling}} for prompt in prompts]


def requests_across_chunks() -> list[dict]:
    """Return requests whose keys pass 128, where FlashInfer's first chunk ends, while they decode."""
    prompts = [prompt["text"] for prompt in heldout_prompts() if 90 <= prompt["num_tokens"] <= 110][:3]
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    assert len(prompts) == 3
    return [{"text": prompt, "sampling_params": sampling} for prompt in prompts]


def acceptance(answers: Sequence[dict]) -> list[list[int]]:
    """Return, per request, how many of its blocks kept 0, 1, 2, ... drafted tokens."""
    return [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]


def verifying(folder: Path, *lengths: int) -> tuple[object, ...]:
    """Return arguments of a server that verifies these numbers of drafted tokens in turn."""
    config = folder / "widths.json"
    config.write_text(json.dumps({"schedule": lengths}))
    return "--speculative-adaptive", "--speculative-adaptive-config", config


class Expected:
    """Answers of the CPU's own path, `torch_native` in float32."""

    def __init__(self, servers):
        self._servers = servers
        self._known: dict[str, list[dict]] = {}

    def answers(self, draft: Path, requests: Sequence[dict], *arguments: object) -> list[dict]:
        key = json.dumps([str(draft), requests, list(map(str, arguments))])
        if key not in self._known:
            server = self._servers.get(*ARGUMENTS, *dflash_arguments(draft), NO_CACHE, *arguments)
            self._known[key] = server.generate_many(requests, CONCURRENCY)
        return self._known[key]


def assert_as_expected(
    played: Rehearsal,
    draft: Path,
    requests: Sequence[dict],
    expected: Expected,
    reference,
    *arguments: object,
) -> list[dict]:
    """Assert the target's answers and the expected acceptance.

    Also assert that no host length differs from the device's, and that a graph ran every forward.
    """
    answers = played.server.generate_many(requests, CONCURRENCY)
    assert_same(requests, answers, reference.answers(requests))
    assert played.problems() == []
    assert acceptance(answers) == acceptance(expected.answers(draft, requests, *arguments))
    assert played.steps_without_graphs() == []
    assert played.notes("prefill replay") != []
    assert max(step["bs"] for step in played.notes("step")) > 1
    return answers


def assert_launches(played: Rehearsal, name: str) -> None:
    """Assert that every greedy step launched exactly what `launch_lists/NAME.txt` lists.

    The lists quote lines of the newest supported SGLang. On another one only our own lines are compared.
    """
    is_newest = installed_version() == SUPPORTED[-1]
    path = LISTS / f"{name}.txt"
    found = [
        sorted(f"{count} {operation}" for operation, count in counts.items())
        for counts in played.operations()
    ]
    if UPDATE in os.environ:
        assert is_newest, f"the lists are those of SGLang {SUPPORTED[-1]}"
        [lines] = found
        path.write_text("\n".join(lines) + "\n")
    wanted = path.read_text().splitlines()
    assert found, "no decode step was seen"
    if not is_newest:
        wanted, *found = (list(filter(_is_ours, lines)) for lines in (wanted, *found))
    for lines in found:
        more, less = sorted(set(lines) - set(wanted)), sorted(set(wanted) - set(lines))
        assert not more and not less, (
            f"{path.name}\nnow, not in the list:\n  "
            + "\n  ".join(more)
            + ("\nin the list, not now:\n  " + "\n  ".join(less))
        )


def _is_ours(line: str) -> bool:
    """Tell whether an operation of a list is called in a file of ours."""
    file = line.partition(" <- ")[2].partition(" ")[0]
    return file in {path.name for path in Path(sglang_dflash.__file__).parent.rglob("*.py")}
