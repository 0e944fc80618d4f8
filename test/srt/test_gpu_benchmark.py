"""The GPU benchmark without a GPU: its commands, its memory, its arithmetic."""

import contextlib
import dataclasses
import inspect
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench import Load
from gpu import dry_run, plans, run, state, trace, work
from gpu.limit import TimeLimit
from gpu.plans import (
    ADAPTIVE_DFLASH,
    BUILT_IN_DFLASH,
    DFLASH,
    NO_SPECULATION,
    VARIANTS,
    Part,
    Plan,
    shape_server,
)
from gpu.shapes import LLAMA_3_1_8B, PAIRS, QWEN3_8B
from serving import ROOT

from sglang_dflash.srt.speculative import dflash_worker
from sglang_dflash.srt.speculative.drafters import build

SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}, "options": {"attention_backend": "flashinfer"}}
OURS = Plan(DFLASH, ("--model-path", "models/x"), {"SGLANG_PLUGINS": "dflash"})
STOCK = Plan(NO_SPECULATION, ("--model-path", "models/x"), {})


def test_dry_run_finds_every_command_in_order():
    program = [sys.executable, "benchmark/gpu/run.py", "--dry-run"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rstrip().endswith(" 0 problems")
    for pair in PAIRS:
        for variant in (*VARIANTS, ADAPTIVE_DFLASH):
            [command] = done.stdout.split(f"\nspeed/{pair.name}/{variant}\n")[1].splitlines()[:1]
            assert f"build/gpu/{pair.name}/target --load-format dummy" in command
            assert ("SGLANG_PLUGINS=none " in command) == (variant == BUILT_IN_DFLASH)
            assert ("SGLANG_SIMULATE_ACC_LEN=6.5 " in command) == (variant in (DFLASH, BUILT_IN_DFLASH))
            assert command.endswith(" --speculative-adaptive") == (variant == ADAPTIVE_DFLASH)
            assert "real-draft-token" not in command


def test_both_dflash_servers_get_the_same_flags():
    for pair in PAIRS:
        ours, built_in = (shape_server(pair, variant, "triton") for variant in (DFLASH, BUILT_IN_DFLASH))
        assert ours.arguments == built_in.arguments
        assert ours.environment.keys() == built_in.environment.keys()
        alone = shape_server(pair, NO_SPECULATION, "triton").arguments
        assert ours.arguments[: len(alone)] == alone


def test_our_worker_still_says_the_line_that_tells_it_from_the_built_in():
    source = inspect.getsource(dflash_worker)
    for line in work.WORKER_LINES:
        names, rest = line.split(": ")
        worker, drafter = names.split(" with ")
        assert hasattr(dflash_worker, worker) and hasattr(build, drafter)
        assert f"sglang-dflash %s with %s: {rest} %d" in source


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """The configs of a pair, written where its servers read them."""
    monkeypatch.setattr(plans, "SCRATCH", tmp_path)

    def write(pair, variant=DFLASH):
        pair.write(tmp_path / pair.name)
        return shape_server(pair, variant, "flashinfer")

    return write


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--attention-back", "triton"], "--attention-back"),  # SGLang would take it for --attention-backend
        (["--load-format", "dumy"], "dumy"),
    ],
)
def test_dry_run_sees_a_wrong_flag(shapes, more, said):
    plan = shapes(QWEN3_8B)
    assert dry_run.problems_of(plan) == []
    [problem] = dry_run.problems_of(dataclasses.replace(plan, arguments=(*plan.arguments, *more)))
    assert said in problem


def test_dry_run_sees_a_variable_sglang_does_not_read(shapes):
    plan = dataclasses.replace(shapes(LLAMA_3_1_8B), environment={"SGLANG_SIMULATE_ACCEPTS": "6.5"})
    assert dry_run.problems_of(plan) == ["SGLang knows no variable SGLANG_SIMULATE_ACCEPTS"]


def test_dry_run_sees_an_attention_backend_that_does_not_run_a_draft():
    """The bundled P-EAGLE draft has windows of 2048, which FlashInfer counts differently."""
    [part] = [
        part for part in plans.rehearsed_parts("flashinfer") if part.name == "rehearsed/flashinfer-peagle"
    ]
    plan = part.servers[-1]
    assert dry_run.problems_of(plan) == []
    longer = [word.replace("1024", "4096") for word in plan.arguments]
    [problem] = dry_run.problems_of(dataclasses.replace(plan, arguments=tuple(longer)))
    assert "sliding windows" in problem


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"draft": dataclasses.replace(QWEN3_8B.draft, hidden_size=2048)}, "hidden_size is 2048"),
        ({"target_layer_ids": (1, 35)}, "target_layer_ids"),
    ],
)
def test_dry_run_sees_a_draft_that_does_not_fit(shapes, wrong, said):
    [problem] = dry_run.problems_of(shapes(dataclasses.replace(QWEN3_8B, **wrong)))
    assert said in problem


class Counting:
    """A part's work that counts its calls, and fails while told to."""

    def __init__(self, fails: bool = False):
        self.calls, self.fails = 0, fails

    def __call__(self, limit):
        self.calls += 1
        if self.fails:
            raise RuntimeError("no /opt/some/where/lib.so, see https://example.org/a/b")
        return {"problems": []}


def go_on(parts, path: Path, seconds=None, retry_failed=False) -> tuple[int, dict]:
    """Call the program once; return its status and records."""
    results = state.Results(path, SETTING)
    status = run.go_on(parts, results, TimeLimit(seconds), retry_failed)
    return status, json.loads(path.with_suffix(".json").read_text())["parts"]


def test_a_second_call_does_what_is_missing(tmp_path):
    works = [Counting(), Counting(fails=True), Counting()]
    parts = [Part(f"part/{i}", (STOCK,), each, 1) for i, each in enumerate(works)]
    status, records = go_on(parts[:2], tmp_path / "gpu")
    assert status == run.FAILED and list(records) == ["part/0", "part/1"]
    assert records["part/1"]["error"] == "RuntimeError: no lib.so, see https://example.org/a/b"

    status, records = go_on(parts, tmp_path / "gpu")
    assert status == run.FAILED and [each.calls for each in works] == [1, 1, 1]
    works[1].fails = False
    status, records = go_on(parts, tmp_path / "gpu", retry_failed=True)
    assert status == run.DONE and [each.calls for each in works] == [1, 2, 1]
    assert records["part/0"]["commands"] == [STOCK.command()]


def test_changed_source_invalidates_what_ran_it(tmp_path, monkeypatch):
    ours, stock = Counting(), Counting()
    parts = [Part("ours", (STOCK, OURS), ours, 1), Part("stock", (STOCK,), stock, 1)]
    monkeypatch.setattr(state, "ROOT", tmp_path)
    file = tmp_path / "python" / "a.py"
    file.parent.mkdir()
    for text, calls in (("x = 1\n", 1), ("x = 2\n", 2), ("x = 2\n", 2)):
        file.write_text(text)
        go_on(parts, tmp_path / "gpu")
        assert (ours.calls, stock.calls) == (calls, 1)


def test_results_of_another_machine_are_not_mixed(tmp_path):
    go_on([Part("part", (STOCK,), Counting(), 1)], tmp_path / "gpu")
    with pytest.raises(state.OtherRun, match="a GPU, now another"):
        state.Results(tmp_path / "gpu", {**SETTING, "machine": "another"})
    assert "part" in state.Results(tmp_path / "gpu", None).data["parts"]


def test_a_part_is_not_begun_without_the_time_for_it(tmp_path, capsys):
    quick, long = Counting(), Counting()
    parts = [Part("quick", (STOCK,), quick, 1), Part("long", (STOCK,), long, 10_000)]
    status, records = go_on(parts, tmp_path / "gpu", seconds=300)
    assert status == run.TIME_IS_UP and list(records) == ["quick"] and long.calls == 0
    assert "long" in capsys.readouterr().out  # below: there is never more time than at the start of a call
    status, records = go_on(parts, tmp_path / "gpu", seconds=300)
    assert status == run.DONE and long.calls == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_overruns_is_stopped_with_its_server(tmp_path, first):
    servers = []

    def hang(limit):
        servers.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        limit.guard(servers[0])
        servers[0].wait()  # as the main thread waits for threads that wait for a server

    parts = [Part("quick", (STOCK,), Counting(), 0), Part("hangs", (OURS,), hang, 0)][first:]
    status, records = go_on(parts, tmp_path / "gpu", seconds=0.5)
    assert servers[0].wait(60) == -signal.SIGKILL
    # On its own it would overrun every call, so it is called a failure; after another part it may yet fit.
    assert status == (run.FAILED if first else run.TIME_IS_UP)
    assert ("hangs" in records) == first


def event(cat: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def synthetic_trace(cycles: int) -> dict:
    """Return a trace of cycles of 1000 us.

    The verify graph's two kernels of 400 and 300 us with 10 idle between them, 100 us later a copy of 20,
    30 later the draft graph's kernel of 120, 20 later the next cycle.
    """
    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for i in range(cycles):
        t, id_ = 1000.0 * i, 10 * i
        events += [
            event("user_annotation", "step[VERIFY bs=4]", t, 60),
            event("cuda_runtime", "cudaGraphLaunch", t + 5, 40, id_),
            event("kernel", "gemm", t + 100, 400, id_),
            event("kernel", "attention", t + 510, 300, id_),
            event("cuda_runtime", "cudaMemcpyAsync", t + 70, 5, id_ + 1),
            event("gpu_memcpy", "copy", t + 910, 20, id_ + 1),
            event("cuda_runtime", "cudaEventSynchronize", t + 80, 500),
            event("user_annotation", "step[DRAFT bs=4]", t + 600, 50),
            event("cuda_runtime", "cudaGraphLaunch", t + 610, 30, id_ + 2),
            event("kernel", "draft", t + 960, 120, id_ + 2),
            event("cpu_op", "aten::add", t + 700, 5),
        ]
    return {"traceEvents": events[::-1]}  # a trace is in no order


def test_trace_summary():
    summary = trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]")
    assert [summary[key] for key in ("cycles", "wall_us", "busy_us", "kernels")] == [5, 1000, 840, 4]
    assert summary["graph_idle_us"] == 10  # gemm -> attention, one launch
    assert summary["host_gap_us"] == 150  # attention -> copy -> draft -> the next gemm
    assert summary["launches"] == {"cudaGraphLaunch": 2, "cudaMemcpyAsync": 1}
    assert summary["waits"] == {"cudaEventSynchronize": 1}
    assert summary["forward_us"] == {"between": 20, "step[DRAFT bs=4]": 120, "step[VERIFY bs=4]": 700}
    assert summary["gaps"][0] == {"before": "attention", "after": "copy", "times": 1, "us": 100}
    assert [(k["name"], k["us"]) for k in summary["top_kernels"][:2]] == [("gemm", 400), ("attention", 300)]


def test_trace_counts_overlapping_work_once_and_needs_the_forward():
    spans = synthetic_trace(3)
    for t in (0, 1000, 2000):
        spans["traceEvents"].append(event("kernel", "other stream", t + 150, 900))
    summary = trace.summarize(spans, "step[VERIFY bs=4]")
    assert [summary[key] for key in ("wall_us", "busy_us", "graph_idle_us")] == [1000, 980, 0]
    assert summary["host_gap_us"] == 20  # from the draft's end to the next cycle
    with pytest.raises(ValueError, match=r"step\[DRAFT bs=4\]': 6"):
        trace.summarize(synthetic_trace(6), "step[VERIFY bs=8]")


def answer(ids, logprobs=None) -> dict:
    meta = {"completion_tokens": len(ids), "spec_verify_ct": 2, "output_top_logprobs": logprobs}
    meta |= {
        "input_token_logprobs": [(None, 5, None)],
        "input_top_logprobs": [None, *[[(-0.1, id_, None)] for id_ in ids]],
    }
    return {"output_ids": ids, "meta_info": meta}


def test_a_difference_is_reported_with_the_targets_gap():
    tops = [[(-0.5, 1, None), (-1.0, 9, None)]] * 5
    expected = [answer([1, 2, 3, 4, 5], tops) for _ in range(3)]
    found = work.compare([answer([1, 2, 3, 4, 5]), answer([1, 2, 7, 8, 9]), answer([1, 2, 3])], expected)
    assert found["differences"] == [
        {"request": 1, "position": 2, "gap": 0.5},
        {"request": 2, "position": 3, "gap": None},
    ]
    assert found["accept_length"] == (4 + 4 + 2) / 6


class Answering:
    """A server with one answer to everything."""

    process = None

    def __init__(self, told: dict):
        self.told, self.asked = told, 0

    def generate_many(self, requests, concurrency):
        self.asked += len(requests)
        return [self.told for _ in requests]


def test_penalised_answers_are_held_against_their_best_choices():
    """After 7 was emitted once, it costs 0.9."""
    ranked = [(-0.2, 7, None), (-0.9, 8, None), (-3.0, 9, None)]
    scored = answer([])
    scored["meta_info"]["input_top_logprobs"] = [None, ranked, ranked]
    gaps = {
        ids: work.penalized_gaps(Answering(scored), [answer(list(ids))])[0]
        for ids in ((7, 8), (7, 7), (8, 7), (7, 5))
    }
    assert gaps == pytest.approx({(7, 8): 0.0, (7, 7): 0.2, (8, 7): 0.7, (7, 5): float("inf")})


def test_rehearsed_configurations_are_held_against_the_target_and_a_cpu(tmp_path, monkeypatch):
    """The target gets its requests once per machine."""
    tops = [[(-0.5, 1, None), (-1.0, 9, None)]] * 4
    right, finished = answer([1, 2, 3, 4], tops), {"finish_reason": {"type": "length"}}
    right["meta_info"] |= finished | {"spec_correct_drafts_histogram": [0, 1, 1]}
    wrong = answer([1, 2, 9, 4])
    wrong["meta_info"] |= {
        "finish_reason": {"type": "stop", "matched": "NaN happened"},
        "spec_correct_drafts_histogram": [3],
    }
    target, drafting = Answering(right), Answering(right)
    monkeypatch.setattr(
        work, "running", lambda plan, limit: contextlib.nullcontext(target if plan is STOCK else drafting)
    )
    plan = dataclasses.replace(OURS, arguments=("--speculative-draft-model-path", "models/tiny"))
    known, limit = tmp_path / "build" / "reference.json", TimeLimit(None)
    assert work.check_rehearsed(STOCK, plan, known, 2.5, limit)["problems"] == []
    asked = target.asked
    assert asked == drafting.asked - 64 - 2 * 8  # which are sampled; penalised, and those once more
    [problem] = work.check_rehearsed(STOCK, plan, known, 2.6, limit)["problems"]
    assert problem == "accept length 2.500, on a CPU 2.6"
    assert work.check_rehearsed(STOCK, plan, known, None, limit)["problems"] == []
    drafting.told = wrong
    texts, kinds, sampled = work.check_rehearsed(STOCK, plan, known, None, limit)["problems"]
    assert (
        "near no tie" in texts and "grammars, biases or a least length" in kinds and "NaN happened" in sampled
    )
    assert target.asked == asked


def test_the_most_wanted_comes_first():
    names = [part.name for part in plans.all_parts("flashinfer")]
    kinds = list(dict.fromkeys(name.rsplit("/", 1)[0] for name in names))
    wanted = ["rehearsed", "speed/qwen3-8b", "profile/qwen3-8b", "tests", "speed/llama-3.1-8b", "lossless"]
    assert kinds == wanted and len(set(names)) == len(names)
    # A fresh machine lends ten minutes at a time.
    assert max(part.seconds for part in plans.all_parts("flashinfer")) < 570


def test_what_is_rehearsed_runs_on_its_own_backend():
    for part in plans.rehearsed_parts("triton"):
        reference, ours = part.servers
        own = plans.REHEARSED[part.name.removeprefix("rehearsed/")][0]
        for flag in ("--attention-backend", "--speculative-draft-attention-backend"):
            assert ours.arguments[ours.arguments.index(flag) + 1] == own
        [target] = {plan.arguments[plan.arguments.index("--model-path") + 1] for plan in (reference, ours)}
        same = [
            other.servers[0]
            for other in plans.rehearsed_parts("flashinfer")
            if target in other.servers[0].arguments
        ]
        assert reference == same[0]


def test_junit_report_is_read():
    xml = """<testsuites><testsuite>
      <testcase name="a"/><testcase name="b"><skipped message="no CUDA"/></testcase>
      <testcase name="c"><failure message="assert 1 == 2&#10;more"/></testcase>
      <testcase name="d"><error message="boom"/></testcase></testsuite></testsuites>"""
    assert work.read_junit(xml) == {"passed": 1, "skipped": 1, "problems": ["c: assert 1 == 2", "d: boom"]}


def load(variant: str, concurrency: int, seconds: float, accepted: list[int]) -> dict:
    return dataclasses.asdict(Load(variant, concurrency, 8, 4096, seconds, accepted=accepted))


def finished(tmp_path, results: dict[str, dict]) -> str:
    """Return the page that the program writes for these results."""
    parts = [Part(name, (STOCK,), lambda limit, r=r: r, 1) for name, r in results.items()]
    go_on(parts, tmp_path / "gpu")
    return (tmp_path / "gpu.md").read_text()


def test_page_says_which_targets_are_missed(tmp_path):
    half = [0, 0, 0, 0, 0, 315, 315]  # 630 blocks of 6 and 7 tokens: accept length 6.5
    speeds = {NO_SPECULATION: (20.0, 5.0), BUILT_IN_DFLASH: (4.4, 1.0), DFLASH: (4.0, 1.1)}
    results = {
        f"speed/qwen3-8b/{variant}": {"loads": [load(variant, 1, one, half), load(variant, 4, four, half)]}
        for variant, (one, four) in speeds.items()
    }
    page = finished(tmp_path, results)
    rows = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert rows["| 1"][4:7] == ["1.10x", "5.00x", "MISSED by 4.3%"]
    assert rows["| 4"][4:7] == ["0.91x", "4.55x", "MISSED by 9.1%"]
    assert rows["| 1"][7:9] == ["6.50", "6.50"]
    assert rows["| 1"][10] == f"{4000 / 630:.2f}"
    assert rows["| 1"][11] == "– |"  # nobody knows the bound of "a GPU"


def test_page_holds_adaptive_width_against_no_speculation(tmp_path):
    widths = [
        {
            "expected": {"1": {"cycle_ms": 6.5}, "16": {"cycle_ms": 9.25}},
            "cycles_per_width": {"1": 90, "16": 4},
        }
    ] * 2
    results = {
        f"speed/qwen3-8b/{NO_SPECULATION}": {
            "loads": [load(NO_SPECULATION, 1, 20.0, []), load(NO_SPECULATION, 4, 5.0, [])]
        },
        f"speed/qwen3-8b/{ADAPTIVE_DFLASH}": {
            "loads": [load(ADAPTIVE_DFLASH, 1, 20.5, [9]), load(ADAPTIVE_DFLASH, 4, 5.2, [9])],
            "widths": widths,
        },
    }
    page = finished(tmp_path, results).split("## A draft that never helps")[1]
    one, four = (line.split(" | ") for line in page.splitlines() if line.startswith(("| 1 ", "| 4 ")))
    assert one[3:6] == ["0.976x", "reached", "1: 6.50, 16: 9.25"] and four[3:5] == ["0.962x", "MISSED"]


def test_an_error_carries_the_end_of_the_servers_log(monkeypatch):
    class Dead:
        process = None

        def log(self):
            return work.WORKER_LINES[0] + " 8\nillegal memory access"

    monkeypatch.setattr(work, "serve", lambda *arguments, **options: contextlib.nullcontext(Dead()))
    with (
        pytest.raises(RuntimeError, match="(?s)ConnectionRefusedError.*illegal memory access"),
        work.running(OURS, TimeLimit(None)),
    ):
        raise ConnectionRefusedError("no answer")
