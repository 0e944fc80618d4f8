"""Comparison of a rehearsed server's answers and reports with what is expected."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from serving import DRAFT, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.rehearsal.play import ARGUMENTS, Rehearsal, rehearse
from support.rehearsal.stage import Scene
from support.servers import Reference, Servers

from sglang_dflash.srt.patching import installed_version
from sglang_dflash.srt.plugins.compatibility import SUPPORTED
from sglang_dflash.srt.speculative.cycle.ragged_graphs import row_sizes

# Drafts may depend on what the prefix cache held when a request came; without a cache they do not.
NO_CACHE = "--disable-radix-cache"
CONCURRENCY = 3  # with graphs for 1, 2 and 4 requests: most batches are padded
CHANGING = (7, 3, 0, 0, 1, 7, 0)  # drafted tokens to verify
# Operations of a greedy step of whole blocks, those of its graphs as one: benchmark/results/launches.md.
MOST_OPERATIONS = {
    "flashinfer-dflash": 51,
    "flashinfer-peagle": 87,
    "flashinfer-late-dflash": 38,
    "flashinfer-late-peagle": 43,
    "fa3-dflash": 24,
    "fa3-peagle": 29,
}


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


def cap_lengths(requests: Sequence[dict]) -> list[int]:
    """Let each request verify another number of drafted tokens at most, none included; return the numbers."""
    caps = [3, 0, 7, 1, 5][: len(requests)]
    for request, cap in zip(requests, caps, strict=True):
        request["sampling_params"] |= {"custom_params": {"speculative_max_tokens": cap}}
    return caps


def assert_graphs_of_rows(played: Rehearsal, buckets: int = 3) -> None:
    """Assert the captures for any numbers of rows, beside those for so many batch sizes."""
    captures = Counter(note["role"] for note in played.notes("capture"))
    assert captures == {"draft": buckets, "target": buckets + len(row_sizes(4, 8))}


def assert_target_graphs(played: Rehearsal) -> dict:
    """Assert that every step replayed a graph of the target without a problem; return the server's state."""
    assert played.problems() == []
    steps = played.notes("step")
    assert {step["replays"]["target"] for step in steps} == {1}
    assert max(step["bs"] for step in steps) > 1
    return played.state()


class Expected:
    """What a rehearsed server must do: the target's answers, and the acceptance of the CPU's own path.

    That is `torch_native` in float32.
    """

    def __init__(self, servers: Servers, reference: Reference):
        self._servers, self._reference = servers, reference
        self._known: dict[str, list[dict]] = {}

    def answers(self, draft: Path, requests: Sequence[dict], *arguments: object) -> list[dict]:
        key = json.dumps([str(draft), requests, list(map(str, arguments))])
        if key not in self._known:
            server = self._servers.get(*ARGUMENTS, *dflash_arguments(draft), NO_CACHE, *arguments)
            self._known[key] = server.generate_many(requests, CONCURRENCY)
        return self._known[key]

    @contextlib.contextmanager
    def rehearsed(
        self,
        scene: Scene,
        draft: Path,
        *arguments: object,
        requests: Sequence[dict] | None = None,
        pages: Sequence[object] = (),
        environment: dict[str, str] | None = None,
    ) -> Iterator[Rehearsal]:
        """Rehearse a server, compare its answers, and yield it.

        pages: arguments that the CPU path does without.
        """
        requests = greedy_requests() if requests is None else requests
        self.answers(draft, requests, *arguments)  # first, so that fewer servers run at a time
        with rehearse(scene, draft, NO_CACHE, *arguments, *pages, environment=environment) as played:
            self.compare(played, draft, requests, *arguments)
            yield played

    def compare(
        self, played: Rehearsal, draft: Path, requests: Sequence[dict], *arguments: object
    ) -> list[dict]:
        """Assert the target's answers and the expected acceptance, and return the answers.

        Also assert that no host length differs from the device's, and that a graph ran every forward.
        """
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, self._reference.answers(requests))
        assert played.problems() == []
        assert acceptance(answers) == acceptance(self.answers(draft, requests, *arguments))
        assert played.steps_without_graphs() == []
        assert played.notes("prefill replay") != []
        assert max(step["bs"] for step in played.notes("step")) > 1
        return answers


def assert_copies_beside_drafts(scene: Scene, reference: Reference, folder: Path, *more: object) -> None:
    """Copy and draft in one batch. The host learns a cycle or two late whether there was a match."""
    requests = greedy_requests(4, 64)
    arguments = "--speculative-copy-ahead", *verifying(folder, *CHANGING), *more
    with rehearse(scene, DRAFT, *arguments) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        state = assert_target_graphs(played)
        assert played.waits() == []
        assert {step["replays"]["draft"] for step in played.notes("step")} == {0, 1}
        assert state["speculative_width"]["candidates"]
        accepted = state["speculative_copy_ahead"]["accepted_tokens"]
        assert accepted["copy"] > 10 and accepted["draft"] > 10, accepted


def assert_launches(played: Rehearsal, name: str) -> None:
    """Assert that no greedy step ran more operations than MOST_OPERATIONS, those of the newest SGLang."""
    found = played.operations()
    assert found, "no decode step was seen"
    if installed_version() == SUPPORTED[-1]:
        for operations in found:
            called = "\n".join(f"{count} {operation}" for operation, count in operations.items())
            assert sum(operations.values()) <= MOST_OPERATIONS[name], called
