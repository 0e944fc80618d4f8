"""A target with GatedDeltaNet layers, rehearsed with CUDA graphs: `make test ARGS="-m rehearsal_full"`.

Its attention is CUDA's, its recurrence and convolution are the CPU path's. What differs from the CPU path is
what a graph freezes: rows, requests that pad them, states' slots.
"""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from serving import HYBRID_DFLASH2_DRAFT, HYBRID_DRAFT, HYBRID_TARGET, dflash_arguments
from support.families import lengthen_memory
from support.parity import assert_same
from support.rehearsal.compare import (
    CHANGING,
    CONCURRENCY,
    NO_CACHE,
    acceptance,
    greedy_requests,
    requests_across_chunks,
    verifying,
)
from support.rehearsal.play import ARGUMENTS, on_cpu, rehearse
from support.rehearsal.stage import Scene

from sglang_dflash.srt.speculative.width.row_graphs import row_sizes

pytestmark = [pytest.mark.server, pytest.mark.rehearsal_full, on_cpu]

DRAFTS = {"dflash": HYBRID_DRAFT, "dflash2": HYBRID_DFLASH2_DRAFT}
# SGLang keeps the convolution's inputs in bf16 for every --dtype.
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
GRID = ("--mamba-track-interval", "64")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The bundled target with decays near one: a trained state soon forgets, and a stale one hardly shows."""
    folder = tmp_path_factory.mktemp("hybrid") / "long-memory"
    shutil.copytree(HYBRID_TARGET, folder)
    lengthen_memory(folder)
    return folder


def test_whole_blocks(target, servers):
    requests, model = greedy_requests(), ("--model-path", target, *GRID)
    on_cpu_path = servers.get(
        *ARGUMENTS, *dflash_arguments(HYBRID_DRAFT), NO_CACHE, *model, environment=ENVIRONMENT
    )
    wanted = on_cpu_path.generate_many(requests, CONCURRENCY)
    with rehearse(Scene("fa3"), HYBRID_DRAFT, NO_CACHE, *model, environment=ENVIRONMENT) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, wanted)
        assert acceptance(answers) == acceptance(wanted)
        assert played.problems() == [] and played.steps_without_graphs() == []
        assert max(step["bs"] for step in played.notes("step")) > 1


@pytest.mark.parametrize(("backend", "draft"), [("fa3", "dflash"), ("flashinfer", "dflash2")])
def test_own_lengths(backend, draft, target, servers, tmp_path):
    """Verify another number of tokens of each request, none included, with graphs keyed by rows."""
    requests, lengths = greedy_requests(), verifying(tmp_path, 6)
    for request, cap in zip(requests, (3, 0, 7, 1, 5), strict=True):
        request["sampling_params"] |= {"custom_params": {"speculative_max_tokens": cap}}
    arguments = NO_CACHE, *lengths, "--model-path", target, *GRID
    on_cpu_path = servers.get(
        *ARGUMENTS, *dflash_arguments(DRAFTS[draft]), *arguments, environment=ENVIRONMENT
    )
    wanted = on_cpu_path.generate_many(requests, CONCURRENCY)
    with rehearse(Scene(backend), DRAFTS[draft], *arguments, environment=ENVIRONMENT) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, wanted)
        assert acceptance(answers) == acceptance(wanted)
        assert played.problems() == []
        steps = played.notes("step")
        assert {step["replays"]["target"] for step in steps} == {1}
        assert max(step["bs"] for step in steps) > 1
        captures = Counter(note["role"] for note in played.notes("capture"))
        assert captures == {"draft": 3, "target": 3 + len(row_sizes(4, 8))}
        [state] = played.server.get("/server_info")["internal_states"]
        assert state["speculative_width"]["own_lengths"]


def test_own_lengths_that_change(target, servers, tmp_path):
    """Another number for each request and cycle, with a prefix cache: output is that of whole blocks."""
    requests, model = requests_across_chunks(), ("--model-path", target, *GRID)
    plain = servers.get(*ARGUMENTS, *model, environment=ENVIRONMENT)
    wanted = plain.generate_many(requests, CONCURRENCY)
    lengths = verifying(tmp_path, *CHANGING)
    with rehearse(Scene("fa3"), HYBRID_DRAFT, *model, *lengths, environment=ENVIRONMENT) as played:
        for _ in range(2):  # the second time from states in the prefix cache
            answers = played.server.generate_many(requests, CONCURRENCY)
            assert_same(requests, answers, wanted)
        assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
        assert played.problems() == []
        assert {step["replays"]["target"] for step in played.notes("step")} == {1}
        assert sum(map(sum, acceptance(answers))) > 0
