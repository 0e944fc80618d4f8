"""Greedy output equals the target's own for any draft and scheduler setting.

In float32 only the order of additions differs between speculation and plain decoding, by about 1e-6 in a
logit. So no mismatch is tolerated before a near tie: the first position whose best two tokens are closer than
that in the reference. To test another draft or setting, add a row to CONFIGURATIONS.
server/test_lossless_http.py has the proofs that need HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    PEAGLE_DRAFT,
    TARGET,
    WHOLE_BLOCKS,
    dflash_arguments,
)
from support.drafts import always_wrong
from support.parity import undecided_from
from support.scheduled import Answer, Job, run
from support.servers import COPIES, FLOAT32, LATE_LENGTHS, WIDTHS_CHANGE
from support.target_answers import requests_from_prompts, target_answers
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

# Allowed share of different cycles in float32: near ties of the draft may fall either way. Wrong draft KV
# costs far more.
NEARLY_SAME = 0.01
EVERY = 13  # a configuration's share of the prompts
MIXED = ("--chunked-prefill-size", "64", "--enable-mixed-chunk")
PAGES = ("--page-size", "16")


def fixed(draft: Path) -> Callable[[Path], Path]:
    return lambda folder: draft


@dataclass(frozen=True)
class Configuration:
    """A setting under test.

    Attributes:
        name: The name of the test case.
        arguments: SGLang's flags.
        offset: First prompt. Every thirteenth one follows, so that the rows together have every prompt with
            `-m long`. Otherwise a row has every third of these.
        draft: Makes the draft in a folder.
        accept_length: Bounds on tokens per cycle, bonus included.
        is_comparable: Of the same prompts as `default_cycles`, without mixed batches or another block size.
            The cycles of a request are then those of the default setting.
        environment: Variables beside those of every server.
        is_long: Not in every run: another row has the same settings and more.
    """

    name: str
    arguments: tuple[str, ...]
    offset: int = 0
    draft: Callable[[Path], Path] = fixed(DRAFT)
    accept_length: tuple[float, float] = (1.0, 16.0)
    is_comparable: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    is_long: bool = False


CONFIGURATIONS = (
    Configuration("chunked-prefill", (WHOLE_BLOCKS, "--chunked-prefill-size", "64"), is_comparable=True),
    Configuration("page-16", (WHOLE_BLOCKS, *PAGES), is_comparable=True),
    Configuration(
        "page-16-draft-window-24",
        (*PAGES, "--speculative-draft-window-size", "24"),
        offset=1,
        accept_length=(1.5, 8.0),
    ),
    Configuration("dflash2-mixed-batches", MIXED, 3, fixed(DFLASH2_DRAFT), (2.2, 8.0)),
    Configuration("peagle-page-16-mixed-batches", (*PAGES, *MIXED), 4, fixed(PEAGLE_DRAFT), (1.8, 8.0)),
    Configuration(
        "peagle-3-tokens-no-overlap",
        ("--speculative-num-draft-tokens", "4", "--disable-overlap-schedule"),
        5,
        fixed(PEAGLE_DRAFT),
        (1.6, 4.0),
    ),
    Configuration("block-16-mixed-batches", ("--speculative-num-draft-tokens", "16", *MIXED), 6),
    Configuration(
        "block-2-no-overlap",
        ("--speculative-dflash-block-size", "2", "--disable-overlap-schedule"),
        offset=7,
        accept_length=(1.0, 2.0),
        is_long=True,
    ),
    Configuration("block-1", ("--speculative-num-draft-tokens", "1"), 8, accept_length=(1.0, 1.0)),
    Configuration("widths-change", (*WIDTHS_CHANGE, *PAGES, *MIXED), 9, accept_length=(1.3, 8.0)),
    Configuration("copy-ahead", (*COPIES, *PAGES, *MIXED), 10, accept_length=(2.2, 8.0)),
    Configuration(
        "peagle-copy-ahead-widths-change",
        (*COPIES, *WIDTHS_CHANGE, "--chunked-prefill-size", "64"),
        11,
        fixed(PEAGLE_DRAFT),
        (1.3, 8.0),
        is_long=True,
    ),
    Configuration(
        "late-lengths", (WHOLE_BLOCKS,), is_comparable=True, environment=LATE_LENGTHS, is_long=True
    ),
    Configuration(
        "dflash2-page-16-mixed-batches-late-lengths",
        (*PAGES, *MIXED),
        1,
        fixed(DFLASH2_DRAFT),
        (2.2, 8.0),
        environment=LATE_LENGTHS,
    ),
    Configuration(
        "peagle-copy-ahead-widths-change-late-lengths",
        (*COPIES, *WIDTHS_CHANGE, "--chunked-prefill-size", "64"),
        2,
        fixed(PEAGLE_DRAFT),
        (1.3, 8.0),
        environment=LATE_LENGTHS,
    ),
    Configuration("always-wrong", (), 12, always_wrong, (1.0, 1.01)),
)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Return greedy requests of every held-out prompt."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    jobs = []
    for request in requests_from_prompts():
        ids = request.get("input_ids") or tokenizer.encode(request["text"]).ids
        sampling = request["sampling_params"]
        jobs.append(Job(tuple(ids), sampling["max_new_tokens"], ignore_eos=sampling["ignore_eos"]))
    assert len(jobs) >= 200
    return jobs


@pytest.fixture(scope="module")
def answers_alone() -> list[dict]:
    """Return the answers of the target alone to `jobs`."""
    return target_answers()


def assert_the_targets(jobs: Sequence[Job], answers: Sequence[Answer], wanted: Sequence[dict]) -> None:
    """Assert that no token or finish reason differs from the target's own before a near tie."""
    for job, answer, want in zip(jobs, answers, wanted, strict=True):
        decided = undecided_from(want)
        ids = want["output_ids"]
        assert list(answer.output_ids[:decided]) == ids[:decided], job
        if decided is None:
            reason = want["meta_info"]["finish_reason"]["type"]
            assert (answer.finish_reason == "FINISH_LENGTH") == (reason == "length"), (answer, want)


def serve_twice(configuration: Configuration, jobs: Sequence[Job], folder: Path) -> list[list[Answer]]:
    """Return the answers to jobs, and those to every third job, whose prompt is in the prefix cache."""
    jobs = [replace(job, step=number // 2) for number, job in enumerate(jobs)]
    draft = configuration.draft(folder / "draft")
    arguments = ["--model-path", TARGET, *FLOAT32, *dflash_arguments(draft), *configuration.arguments]
    return run(arguments, [jobs, jobs[::3]], environment=configuration.environment)


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.long)], ids=["third", "all"])
def every(request) -> int:
    """Return the stride between a configuration's prompts."""
    return EVERY * request.param


@pytest.fixture(scope="module")
def default_cycles(every, jobs, tmp_path_factory) -> int:
    """Return the cycles of the default setting."""
    default = Configuration("default", (WHOLE_BLOCKS,))
    answers = serve_twice(default, jobs[::every], tmp_path_factory.mktemp("default"))
    return sum(len(answer.accepted) for answer in sum(answers, []))


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(each, id=each.name, marks=[pytest.mark.long] * each.is_long) for each in CONFIGURATIONS],
)
def test_float32_output_is_the_targets(configuration, every, jobs, answers_alone, request, tmp_path):
    """Send requests twice: the second pass reads KV from the prefix cache.

    Wrong draft KV cannot change the output, but it makes the draft guess worse. So equal cycles show that the
    draft's KV is right after chunked prefill and with pages.
    """
    chosen, expected = (each[configuration.offset :: every] for each in (jobs, answers_alone))
    cold, warm = serve_twice(configuration, chosen, tmp_path)

    assert_the_targets(chosen, cold, expected)
    assert_the_targets(chosen[::3], warm, expected[::3])
    kept = [count for answer in cold for count in answer.accepted]
    low, high = configuration.accept_length
    assert low <= sum(kept) / len(kept) + 1 <= high
    # SGLang always computes the last prompt token, and shares whole pages only.
    page = 16 if "--page-size" in configuration.arguments else 1
    for job, answer in zip(chosen[::3], warm):
        reusable = (len(job.input_ids) - 1) // page * page
        assert answer.cached_tokens >= reusable, f"no prefix-cache hit: {answer} for {job}"
    if configuration.is_comparable:
        cycles = sum(len(answer.accepted) for answer in (*cold, *warm))
        expected_cycles = request.getfixturevalue("default_cycles")
        assert abs(cycles - expected_cycles) <= NEARLY_SAME * expected_cycles
