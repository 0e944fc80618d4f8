"""The GPU benchmark without a GPU: its commands, its memory, its arithmetic."""

import contextlib
import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from gpu import checks, dry_run, estimates, lane, measure, plans, run, servers, state, trace
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES, Round, Running
from gpu.plans import Builder, Check, Step, Visit
from gpu.servers import ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION, ServerSpec, shape_server
from gpu.shapes import LLAMA_3_1_8B, PAIRS, QWEN3_8_27B, QWEN3_8B, shrunk
from serving import ROOT
from support.engine import read_config

from sglang_dflash.srt.configs.peagle_config import read_draft_config
from sglang_dflash.srt.speculative import dflash_worker
from sglang_dflash.srt.speculative.drafters import build

SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}}
OURS = ServerSpec(
    DFLASH, ("--model-path", "models/x", "--speculative-algorithm", "DFLASH"), {"SGLANG_PLUGINS": "dflash"}
)
STOCK = ServerSpec(NO_SPECULATION, ("--model-path", "models/x"), {})


def test_dry_run_finds_every_command_in_order():
    program = [sys.executable, "benchmark/gpu/run.py", "--dry-run"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rstrip().endswith(" 0 problems")
    for backend, pair, variant in (
        ("fa3", QWEN3_8B, DFLASH),
        ("fa3", QWEN3_8B, BUILT_IN_DFLASH),
        ("flashinfer", QWEN3_8B, ADAPTIVE_DFLASH),
        ("fa3", LLAMA_3_1_8B, NO_SPECULATION),
        ("fa3", QWEN3_8_27B, DFLASH),
    ):
        name = f"speed/{backend}/{pair.name}/{variant}/start"
        [command] = done.stdout.split(f"\n{name}\n")[1].splitlines()[:1]
        assert f"build/gpu/{pair.name}/target --load-format dummy" in command
        assert f"--attention-backend {backend} " in command
        assert ("SGLANG_PLUGINS=none " in command) == (variant == BUILT_IN_DFLASH)
        assert ("SGLANG_SIMULATE_ACC_LEN=6.5 " in command) == (variant in (DFLASH, BUILT_IN_DFLASH))
        assert ("phase_clock" in command) == (variant in (DFLASH, ADAPTIVE_DFLASH))
        assert command.endswith(" --speculative-adaptive") == (variant == ADAPTIVE_DFLASH)
        assert "real-draft-token" not in command


def test_both_dflash_servers_get_the_same_flags():
    for pair in PAIRS:
        ours, built_in = (shape_server(pair, variant, "triton") for variant in (DFLASH, BUILT_IN_DFLASH))
        assert ours.arguments == built_in.arguments
        assert set(ours.environment) - set(built_in.environment) == set(servers.PHASE_CLOCK)
        alone = shape_server(pair, NO_SPECULATION, "triton").arguments
        assert ours.arguments[: len(alone)] == alone


def test_a_servers_own_python_path_is_kept(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/opt/site")
    ours = shape_server(QWEN3_8B, DFLASH, "triton")
    assert ours.full_environment()["PYTHONPATH"] == "benchmark:/opt/site"
    assert "PYTHONPATH=benchmark:$PYTHONPATH " in ours.command() and "/opt" not in ours.command()
    assert "PYTHONPATH" not in shape_server(QWEN3_8B, BUILT_IN_DFLASH, "triton").full_environment()


def test_our_worker_still_says_the_line_that_tells_it_from_the_built_in():
    source = inspect.getsource(dflash_worker)
    for line in measure.WORKER_LINES:
        names, rest = line.split(": ")
        worker, drafter = names.split(" with ")
        assert hasattr(dflash_worker, worker) and hasattr(build, drafter)
        assert f"sglang-dflash %s with %s: {rest} %d" in source


def test_the_hybrid_shape_has_the_published_size(tmp_path):
    """The model card: 27 billion parameters; 53.8 GB in bfloat16 without the vision tower, the draft 3.8."""
    QWEN3_8_27B.write(tmp_path)
    target = json.loads((tmp_path / "target" / "config.json").read_text())
    kinds = target["layer_types"]
    assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == list(range(3, 64, 4))
    with torch.device("meta"):
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**target))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters / 1e9 == pytest.approx(26.9, abs=0.05)
    assert 2 * parameters / 1e9 == pytest.approx(53.8, abs=0.1)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    hf_config = read_config(config, tmp_path / "draft")
    tensors = read_draft_config(hf_config, "draft").required_tensors(hf_config)
    parameters = sum(torch.empty(shape, device="meta").numel() for shape in tensors.values())
    assert parameters / 1e9 == pytest.approx(1.92, abs=0.01)


def test_a_rehearsal_has_small_models_of_the_same_kind():
    for pair in PAIRS:
        small = shrunk(pair)
        assert type(small.target) is type(pair.target)
        assert small.target_config == pair.target_config and small.dflash_config == pair.dflash_config
        assert small.target.hidden_size == small.draft.hidden_size < 100
        assert max(small.target_layer_ids) < small.target.num_hidden_layers - 1


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """The configs of a pair, written where its servers read them."""
    monkeypatch.setattr(servers, "SCRATCH", tmp_path)

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
    [part] = [check for check in Builder().all_checks() if check.name == "rehearsed/flashinfer-peagle"]
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

    def __call__(self, session):
        self.calls += 1
        if self.fails:
            raise RuntimeError("no /opt/some/where/lib.so, see https://example.org/a/b")
        return {"problems": []}


class StubServer:
    """Something to measure: a process, and no server."""

    def __init__(self):
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def log(self) -> str:
        return ""


@pytest.fixture
def started(monkeypatch) -> list[StubServer]:
    """Replace servers by processes; return those started."""
    found = []

    @contextlib.contextmanager
    def running(spec, limit, clock):
        server = StubServer()
        found.append(server)
        limit.guard(server.process)
        clock.ready()
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    monkeypatch.setattr(run, "running", running)
    return found


def visit_of(spec: ServerSpec, works: dict, name: str = "visit", seconds: float = 0.0) -> Visit:
    steps = [Step(f"{name}/start", (spec,), 0.0, measure.start_up)]
    steps += [Step(f"{name}/{step}", (spec,), seconds, work) for step, work in works.items()]
    return Visit(name, spec, tuple(steps), 0.0)


def go_on(visits, path: Path, seconds=None, retry_failed=False, checks=()) -> tuple[int, dict]:
    """Call the program once; return its status and records."""
    results = state.Results(path, SETTING)
    status = run.go_on(
        visits, checks, results, TimeLimit(seconds), GPU_SIZES, path.parent, retry_failed=retry_failed
    )
    return status, json.loads(path.with_suffix(".json").read_text())["parts"]


def test_a_second_call_does_what_is_missing(tmp_path, started):
    works = {"a": Counting(), "b": Counting(fails=True), "c": Counting()}
    first = visit_of(STOCK, {name: works[name] for name in "ab"})
    status, records = go_on([first], tmp_path / "gpu")
    assert status == run.FAILED and list(records) == ["visit/start", "visit/a", "visit/b"]
    assert records["visit/b"]["error"] == "RuntimeError: no lib.so, see https://example.org/a/b"
    assert records["visit/start"]["result"]["phases"].keys() == {"ready", "total"}

    every = [visit_of(STOCK, works), visit_of(STOCK, {"d": Counting()}, "other")]
    status, records = go_on(every, tmp_path / "gpu")
    assert status == run.FAILED and [each.calls for each in works.values()] == [1, 1, 1]
    assert len(started) == 3  # one for the first call
    works["b"].fails = False
    status, records = go_on(every, tmp_path / "gpu", retry_failed=True)
    assert status == run.DONE and [each.calls for each in works.values()] == [1, 2, 1]
    assert len(started) == 4  # the other server had nothing left to do
    assert records["visit/a"]["commands"] == [STOCK.command()]


def test_a_server_that_ends_fails_its_steps_and_no_others(tmp_path, started):
    def die(session):
        session.server.process.kill()
        session.server.process.wait()
        raise ConnectionError("refused")

    visits = [
        visit_of(STOCK, {"a": Counting(), "b": die, "c": Counting()}),
        visit_of(STOCK, {"d": Counting()}, "o"),
    ]
    status, records = go_on(visits, tmp_path / "gpu")
    assert status == run.FAILED
    failed = [name for name, record in records.items() if "error" in record]
    assert failed == ["visit/b", "visit/c"] and "o/d" in records


def test_changed_source_invalidates_what_ran_it(tmp_path, monkeypatch, started):
    ours, stock = Counting(), Counting()
    visits = [visit_of(OURS, {"a": ours}, "ours"), visit_of(STOCK, {"a": stock}, "stock")]
    monkeypatch.setattr(state, "ROOT", tmp_path)
    file = tmp_path / "python" / "a.py"
    file.parent.mkdir()
    for text, calls in (("x = 1\n", 1), ("x = 2\n", 2), ("x = 2\n", 2)):
        file.write_text(text)
        go_on(visits, tmp_path / "gpu")
        assert (ours.calls, stock.calls) == (calls, 1)


def test_results_of_another_machine_are_not_mixed(tmp_path, started):
    go_on([visit_of(STOCK, {"a": Counting()})], tmp_path / "gpu")
    with pytest.raises(state.OtherRun, match="a GPU, now another"):
        state.Results(tmp_path / "gpu", {**SETTING, "machine": "another"})
    assert "visit/a" in state.Results(tmp_path / "gpu", None).data["parts"]


def test_a_step_is_not_begun_without_the_time_for_it(tmp_path, started):
    quick, long, later = Counting(), Counting(), Counting()
    visits = [
        visit_of(STOCK, {"quick": quick}),
        visit_of(STOCK, {"long": long}, "long", 10_000),
        visit_of(STOCK, {"later": later}, "later"),
    ]
    status, records = go_on(visits, tmp_path / "gpu", seconds=300)
    assert status == run.TIME_IS_UP and (quick.calls, long.calls, later.calls) == (1, 0, 1)
    assert len(started) == 2 and "visit/quick" in records and "long/long" not in records


def test_the_time_limit_stops_a_step_with_its_server(tmp_path, started):
    def hang(session):
        session.server.process.wait()  # as the main thread waits for threads that wait for a server

    visits = [visit_of(STOCK, {"quick": Counting(), "hangs": hang})]
    status, records = go_on(visits, tmp_path / "gpu", seconds=2)
    assert status == run.TIME_IS_UP and "visit/quick" in records and "visit/hangs" not in records
    assert started[0].process.returncode == -signal.SIGKILL


def states_of(pids) -> list[str]:
    """Return the kernel's letters: T stopped, S asleep, Z ended."""
    return [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in pids]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# A process with a child that leads a group of its own, as a check with a server.
CHECK_WITH_SERVER = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid) + "\\n")
child.wait()
"""


def job(tmp_path, ended: list, name: str = "check") -> tuple[lane.Job, Path]:
    file = tmp_path / name
    command = [sys.executable, "-c", CHECK_WITH_SERVER, str(file)]
    start = lambda: subprocess.Popen(command, start_new_session=True)  # noqa: E731
    return lane.Job(name, start, lambda code, seconds: ended.append((name, code))), file


def test_checks_stand_still_while_something_is_measured(tmp_path, monkeypatch):
    sent = []
    send = lane.signal_group
    monkeypatch.setattr(lane, "signal_group", lambda group, s: (sent.append((group, s)), send(group, s)))
    waiting, ended = job(tmp_path, []), []
    first, file = job(tmp_path, ended)
    second, other = job(tmp_path, ended, "second")
    with lane.Lane([first, second, waiting[0]], width=2) as background:
        wait_for(lambda: file.exists() and file.read_text() and other.exists() and other.read_text())
        parents = [first.process.pid, second.process.pid]
        children = [int(each.read_text()) for each in (file, other)]
        with background.paused():
            wait_for(lambda: set(states_of(parents + children)) == {"T"})
            assert sent == [
                (parents[0], signal.SIGSTOP),
                (children[0], signal.SIGSTOP),
                (parents[1], signal.SIGSTOP),
                (children[1], signal.SIGSTOP),
            ]
            sent.clear()
        wait_for(lambda: "T" not in states_of(parents + children))
        continued = [group for group, s in sent if s == signal.SIGCONT]
        assert continued == [children[0], parents[0], children[1], parents[1]]
        assert background.left() == ["check", "second", "check"]
        os.kill(children[0], signal.SIGKILL)  # the first check ends, and the one that waits begins
        wait_for(lambda: ended == [("check", 0)] and waiting[0].process is not None)
    assert background.left() == ["second", "check"] and ended == [("check", 0)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in parents)
    wait_for(lambda: not Path(f"/proc/{children[1]}").exists() or states_of(children[1:]) == ["Z"])


def test_no_check_starts_while_something_is_measured(tmp_path):
    waiting, _ = job(tmp_path, [])
    background = lane.Lane([waiting], width=1)
    with background.paused(), background:
        time.sleep(3 * lane.POLL_S)
        assert waiting.process is None
    assert background.left() == ["check"]


def test_a_checks_process_leaves_its_outcome_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SCRATCH", tmp_path)
    results = state.Results(tmp_path / "gpu", SETTING)
    check = Check("tests/test_x", (), 1, Counting())
    job_ = run._job(check, results, GPU_SIZES)
    folder = tmp_path / "checks" / "tests-test_x"
    (folder / "log").write_text("one\nSegmentation fault\n")
    job_.finish(-11, 3.0)
    record = results.data["parts"]["tests/test_x"]
    assert record["error"].startswith("ended with -11: ") and "Segmentation fault" in record["error"]
    (folder / "outcome.json").write_text(json.dumps({"result": {"passed": 3, "skipped": 0, "problems": []}}))
    job_.finish(0, 4.0)
    record = results.data["parts"]["tests/test_x"]
    assert record["result"]["passed"] == 3 and record["seconds"] == 4.0
    assert results.pending([check], retry_failed=False) == []
    run._job(check, results, GPU_SIZES)
    assert not (folder / "outcome.json").exists()  # an old outcome is nobody's


def test_checks_left_by_earlier_plans_are_offered_to_later_ones():
    every = Builder().plans()
    assert run._left_by_others(every, every[:1]) == []
    assert [c.name for c in run._left_by_others(every, every[1:2])] == [c.name for c in every[0].checks]


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
    kernels = [(k["forward"], k["name"], k["us"]) for k in summary["kernel_table"]]
    verify = "step[VERIFY bs=4]"
    assert kernels[:2] == [(verify, "gemm", 400), (verify, "attention", 300)]
    assert kernels[2:] == [("step[DRAFT bs=4]", "draft", 120), ("between", "copy", 20)]
    assert trace.forwards(synthetic_trace(6)) == {verify: 6, "step[DRAFT bs=4]": 6}


def test_trace_keeps_kernels_of_the_same_name_apart_by_forward():
    spans = synthetic_trace(3)
    for event_ in spans["traceEvents"]:
        if event_.get("name") in ("gemm", "draft"):
            event_["name"] = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm, 1>(Params)"
    summary = trace.summarize(spans, "step[VERIFY bs=4]")
    name = "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>"
    found = {(k["forward"], k["us"]) for k in summary["kernel_table"] if k["name"] == name}
    assert found == {("step[VERIFY bs=4]", 400), ("step[DRAFT bs=4]", 120)}


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        ("nvjet_tst_128x64_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x64_64x4_1x2_h_bz_coopA_TNT"),
        (
            "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
            "flashinfer::norm::RMSNormKernel",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(X)",
            "at::native::vectorized_elementwise_kernel<at::native::CUDAFunctor_add>",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::M<2> > > >(P)",
            "cutlass::device_kernel<flash::FlashAttnFwdSm90>",
        ),
        ("void (anonymous namespace)::pack<int>(int*)", "pack"),
        ("triton_kernel", "triton_kernel"),
    ],
)
def test_kernel_names_lose_their_templates_and_still_tell_kernels_apart(whole, short):
    spans = synthetic_trace(3)
    for event_ in spans["traceEvents"]:
        if event_.get("name") == "gemm":
            event_["name"] = whole
    assert trace.summarize(spans, "step[VERIFY bs=4]")["kernel_table"][0]["name"] == short


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
    found = checks.compare([answer([1, 2, 3, 4, 5]), answer([1, 2, 7, 8, 9]), answer([1, 2, 3])], expected)
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
        ids: checks.penalized_gaps(Answering(scored), [answer(list(ids))])[0]
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
        checks, "running", lambda plan, limit: contextlib.nullcontext(target if plan is STOCK else drafting)
    )
    plan = dataclasses.replace(OURS, arguments=("--speculative-draft-model-path", "models/tiny"))
    known, limit = tmp_path / "build" / "reference.json", TimeLimit(None)
    assert checks.check_rehearsed(STOCK, plan, known, 2.5, GPU_SIZES, limit)["problems"] == []
    asked = target.asked
    assert asked == drafting.asked - 64 - 2 * 8  # which are sampled; penalised, and those once more
    [problem] = checks.check_rehearsed(STOCK, plan, known, 2.6, GPU_SIZES, limit)["problems"]
    assert problem == "accept length 2.500, on a CPU 2.6"
    assert checks.check_rehearsed(STOCK, plan, known, None, GPU_SIZES, limit)["problems"] == []
    drafting.told = wrong
    texts, kinds, sampled = checks.check_rehearsed(STOCK, plan, known, None, GPU_SIZES, limit)["problems"]
    assert (
        "near no tie" in texts and "grammars, biases or a least length" in kinds and "NaN happened" in sampled
    )
    assert target.asked == asked


def test_plans_begin_with_speed_and_fit_their_calls():
    plan_a, plan_b, plan_c, rest = Builder().plans()
    assert [visit.name for visit in plan_a.visits] == [
        f"speed/fa3/qwen3-8b/{variant}"
        for variant in (DFLASH, BUILT_IN_DFLASH, ADAPTIVE_DFLASH, NO_SPECULATION)
    ]
    assert plan_b.visits[0].name == "speed/flashinfer/qwen3-8b/ours"
    assert [visit.name for visit in plan_c.visits[:2]] == [
        "speed/fa3/qwen3-8b/ours-fp8",
        "speed/fa3/qwen3.8-27b/ours",
    ]
    assert rest.seconds is None
    fp8, usual = plan_c.visits[0].spec, plan_a.visits[0].spec
    assert fp8.arguments == usual.arguments and fp8.environment == usual.environment | {
        "SGLANG_DFLASH_DRAFT_HEAD_DTYPE": "fp8",
    }
    names = [part.name for plan in (plan_a, plan_b, plan_c, rest) for part in run.parts_of(plan)]
    assert len(set(names)) == len(names)
    every = {f"rehearsed/{name}" for name in plans.REHEARSED} | {
        "lossless/eager",
        "tests/test_host_transfers",
    }
    assert every <= set(names)
    for plan in (plan_a, plan_b, plan_c):
        assert plan.measured_seconds <= plan.seconds < 570  # a machine lends ten minutes a call
    measured = sum(plan.measured_seconds for plan in (plan_a, plan_b, plan_c))
    assert estimates.PREPARATION_S + measured <= 28 * 60
    limits = sum(plan.seconds for plan in (plan_a, plan_b, plan_c))
    assert estimates.PREPARATION_S + limits <= 28 * 60


def test_plan_b_checks_plans_as_soon_as_there_is_a_check(monkeypatch):
    monkeypatch.setattr(
        plans.DFlashOptions,
        "CHECK_PLANS",
        plans.DFlashOptions.NO_ADAPTIVE.__class__(plans.CHECK_PLANS, 0, int),
        raising=False,
    )
    plan = Builder().plan_b()
    [visit] = [visit for visit in plan.visits if visit.name.endswith("/ours-checked")]
    assert visit.spec.environment[plans.CHECK_PLANS] == "1" and plan.measured_seconds <= plan.seconds
    others = [other.spec.environment for other in plan.visits if other is not visit]
    assert not any(plans.CHECK_PLANS in environment for environment in others)


def test_estimates_are_those_of_the_run_they_are_from():
    """Of 8 requests one by one, 512 tokens each: 28 s plain and 7.2 s with drafts were measured."""
    result = json.loads((ROOT / "benchmark" / "results" / "2026-11-23-h100.json").read_text())
    for variant in (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH):
        part = result["parts"][f"speed/qwen3-8b/{variant}"]["result"]
        for load in part["loads"][:3]:
            each = load["output_tokens"] / load["requests"]
            rounds = load["requests"] / load["concurrency"]
            cycles = rounds * each / estimates.TOKENS_PER_CYCLE[variant]
            seconds = load["requests"] * estimates.PREFILL_S
            seconds += cycles * estimates.cycle_s(variant, load["concurrency"], 1024)
            assert seconds == pytest.approx(load["seconds"], rel=0.05)
    for name, seconds in estimates.CHECKS.items():
        assert seconds == pytest.approx(result["parts"][name]["seconds"], abs=1)


def test_the_estimate_is_printed(capsys):
    table = plans.estimate_table(Builder().plans())
    last = table.splitlines()[-1]
    assert float(last.split()[0]) <= 28 * 60 and "in all" in last
    assert "plan A, stops at 565 s" in table and "load-96" in table and "plan rest" not in table


def test_only_keeps_a_visits_start():
    plan = run._filtered(Builder().plan_a(), ["speed/fa3/qwen3-8b/ours/load-1", "rehearsed/pages"])
    [visit] = plan.visits
    names = [step.name.rsplit("/", 1)[1] for step in visit.steps]
    assert names == ["start", "load-1", "load-16", "load-1-8k", "load-1-24k"]
    assert [check.name for check in plan.checks] == ["rehearsed/pages"]


def test_what_is_rehearsed_runs_on_its_own_backend():
    rehearsed = [check for check in Builder().all_checks() if check.name.startswith("rehearsed/")]
    for check in rehearsed:
        reference, ours = check.servers
        own = plans.REHEARSED[check.name.removeprefix("rehearsed/")][0]
        for flag in ("--attention-backend", "--speculative-draft-attention-backend"):
            assert ours.arguments[ours.arguments.index(flag) + 1] == own
        [target] = {spec.arguments[spec.arguments.index("--model-path") + 1] for spec in (reference, ours)}
        same = [other.servers[0] for other in rehearsed if target in other.servers[0].arguments]
        assert reference == same[0]


def measured_round(new_tokens: int, seconds: float, cycles: list[int]) -> Round:
    answers = [{"meta_info": {"completion_tokens": new_tokens, "spec_verify_ct": count}} for count in cycles]
    return Round.from_answers(answers, seconds)


def test_slope_leaves_out_what_both_rounds_have():
    """Two requests; 0.3 s of each round are no cycles'. A cycle takes 10 ms, in the second pair 12 ms."""
    pairs = [
        (measured_round(64, 0.3 + cycle * 10, [10, 9]), measured_round(448, 0.3 + cycle * 70, [70, 63]))
        for cycle in (0.010, 0.012, 0.010)
    ]
    found = measure.slope(pairs)
    assert found["cycle_ms"] == pytest.approx(10) and found["cycle_ms_range"] == pytest.approx([10, 12])
    assert found["tokens_per_second"] == pytest.approx(3 * 2 * 384 / (60 * 0.032))
    assert found["tokens_per_block"] == pytest.approx(2 * 384 / (60 + 54))
    plain = [{"meta_info": {"completion_tokens": 64}}] * 2
    assert Round.from_answers(plain, 1.0) == Round(64, 1.0, 63, 126, 128)
    with pytest.raises(ValueError, match="no more cycles"):
        measure.slope([(pairs[0][1], pairs[0][0])])
    with pytest.raises(ValueError, match="no more time"):
        measure.slope([(pairs[0][0], measured_round(448, 0.1, [70, 63]))])


class Clocked:
    """A server that answers every request at once, `spec_verify_ct` by its length."""

    def __init__(self, per_block: float = 6.4):
        self.per_block, self.asked, self.flushed = per_block, [], 0

    def flush_cache(self):
        self.flushed += 1

    def get(self, path):
        return {"internal_states": [{"speculative_width": {"width": 1}}]}

    def generate_many(self, requests, concurrency):
        lengths = [request["sampling_params"]["max_new_tokens"] for request in requests]
        self.asked.append((len(requests), lengths[0]))
        time.sleep(lengths[0] / 1e4)
        return [
            {
                "meta_info": {
                    "completion_tokens": n,
                    "spec_verify_ct": int(n / self.per_block),
                    "cached_tokens": 7,
                }
            }
            for n in lengths
        ]


def test_a_load_is_prefill_then_short_and_long_answers(tmp_path, monkeypatch):
    phases = tmp_path / "phases.json"
    monkeypatch.setattr(measure, "PHASES", phases)
    server = Clocked()
    answer_all, calls = server.generate_many, []

    def answer_and_count(requests, concurrency):
        calls.append(1)
        phases.write_text(json.dumps({"cycles": 10 * len(calls), "seconds": {"draft": 0.02 * len(calls)}}))
        return answer_all(requests, concurrency)

    server.generate_many = answer_and_count
    session = Running(server, shape_server(QWEN3_8B, DFLASH, "fa3"), GPU_SIZES, tmp_path, {})
    found = measure.measure_load(session, requests=4, context=1024, repeats=2)
    assert server.asked == [(4, 1), (4, 64), (4, 64), (4, 448), (4, 64), (4, 448)] and server.flushed == 1
    assert found["problems"] == [] and found["tokens_per_block"] == pytest.approx(6.4, abs=0.1)
    assert found["phase_ms"] == pytest.approx({"draft": 2.0}) and found["widths"] == {"width": 1}
    assert found["cached_tokens"] == 7 and len(found["rounds"]) == 2
    server.per_block = 3.0
    [problem] = measure.measure_load(session, requests=1, context=1024, repeats=1)["problems"]
    assert problem.startswith("3.0") and "simulates 6.5" in problem


def test_start_clock_reads_phases_off_the_log():
    clock, counts = measure.StartClock(), {}
    log = ""
    for seconds, line in (
        (20.0, "Load weight begin. avail mem=70\n"),
        (30.0, "Load weight end.\n"),
        (33.0, "Load weight begin\nLoad weight end. (of the draft)\n"),
        (41.0, "Capture decode CUDA graph end. elapsed\n"),
    ):
        log += line
        clock.read(log, seconds, counts)
    assert clock.phases() == {"imports": 20.0, "weights": 13.0, "graphs": 8.0, "total": 41.0}


def test_junit_report_is_read():
    xml = """<testsuites><testsuite>
      <testcase name="a"/><testcase name="b"><skipped message="no CUDA"/></testcase>
      <testcase name="c"><failure message="assert 1 == 2&#10;more"/></testcase>
      <testcase name="d"><error message="boom"/></testcase></testsuite></testsuites>"""
    assert checks.read_junit(xml) == {"passed": 1, "skipped": 1, "problems": ["c: assert 1 == 2", "d: boom"]}


def load(seconds_a_cycle: float, requests: int = 1, context: int = 1024, **more) -> dict:
    speed = 6.5 * requests / seconds_a_cycle
    figures = {"cycle_ms": 1e3 * seconds_a_cycle, "tokens_per_second": speed, "prefill_ms": 30.0}
    return {"requests": requests, "context": context, **figures, **more}


def finished(tmp_path, results: dict[str, dict], machine: str = "a GPU") -> str:
    """Return the page that the program writes for these results."""
    written = state.Results(tmp_path / "gpu", {**SETTING, "machine": machine})
    for name, result in results.items():
        written.store(Step(name, (STOCK,), 1.0, lambda session: {}), {"result": result}, 1.0)
    return (tmp_path / "gpu.md").read_text()


def rows_of(page: str, title: str) -> dict[tuple[str, str], list[str]]:
    lines = page.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row for row in cells[2:]}


def test_page_says_which_targets_are_missed(tmp_path):
    results = {}
    for backend, ours, built_in in (("fa3", 0.0085, 0.0086), ("flashinfer", 0.0095, 0.0108)):
        for variant, seconds in ((DFLASH, ours), (BUILT_IN_DFLASH, built_in)):
            name = f"speed/{backend}/qwen3-8b/{variant}"
            results[f"{name}/load-1"] = load(seconds)
            results[f"{name}/load-16"] = load(0.012 if variant == DFLASH else 0.0114, 16)
    results["speed/fa3/qwen3-8b/no-speculation/load-1-24k"] = load(0.009, 1, 24_576)
    page = finished(tmp_path, results, "NVIDIA H200, 139 GiB")
    fa3 = rows_of(page, "Speed: qwen3-8b, fa3")
    assert fa3["1", "1024"][11:14] == ["1.01x", "reached; at most 8.7 ms: reached", "–"]
    assert fa3["16", "1024"][11:13] == ["0.95x", "MISSED by 5.0%"]
    assert fa3["1", "24576"][2:6] == ["722", "9.00", "30.0", "–"] and float(fa3["1", "1024"][14]) > 3
    flashinfer = rows_of(page, "Speed: qwen3-8b, flashinfer")
    assert flashinfer["1", "1024"][8:10] == ["1.14x", "MISSED by 5.3%; at most 8.8 ms: MISSED"]


def test_page_compares_adaptive_width_with_no_speculation_of_its_backend(tmp_path):
    widths = {"expected": {"1": {"cycle_ms": 6.5}}, "cycles_per_width": {"1": 90, "16": 4}}
    results = {
        "speed/fa3/qwen3-8b/no-speculation/load-1": load(0.0070),
        "speed/flashinfer/qwen3-8b/no-speculation/load-1": load(0.0075),
        "speed/fa3/qwen3-8b/adaptive/load-1": load(0.00715, widths=widths),
        "speed/flashinfer/qwen3-8b/adaptive/load-1": load(0.0079, widths=widths),
    }
    rows = rows_of(finished(tmp_path, results), "A draft that never helps: --speculative-adaptive")
    assert rows["fa3/qwen3-8b", "1"][4:7] == ["0.979x", "reached", "1: 6.50"]
    assert rows["flashinfer/qwen3-8b", "1"][4:6] == ["0.949x", "MISSED"]


def test_page_shows_starts_host_time_and_profiles(tmp_path):
    summary = trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]")
    prefix = "speed/fa3/qwen3-8b/ours"
    page = finished(
        tmp_path,
        {
            f"{prefix}/start": {"phases": {"imports": 20.0, "weights": 4.0, "ready": 1.0, "total": 25.0}},
            f"{prefix}/load-1": load(0.0085, phase_ms={"draft": 1.5, "verify": 0.5}),
            f"{prefix}/profile-4": {"requests": 4, **summary},
        },
    )
    assert rows_of(page, "Start-up")["fa3/qwen3-8b/ours", "20.0"][2:] == ["4.0", "1.0", "25.0"]
    assert rows_of(page, "Host time")["fa3/qwen3-8b/ours/load-1", "1.50"][2:] == ["0.50", "2.00"]
    assert "## One cycle: qwen3-8b, fa3, ours, 4 requests" in page and "(wanted: under 100: MISSED)" in page
    assert "| `step[VERIFY bs=4]` | `gemm` | 1.0 | 400.0 |" in page


def test_an_error_carries_the_end_of_the_servers_log(monkeypatch):
    class Dead:
        process = None

        def log(self):
            return measure.WORKER_LINES[0] + " 8\nillegal memory access"

    monkeypatch.setattr(measure, "serve", lambda *arguments, **options: contextlib.nullcontext(Dead()))
    with (
        pytest.raises(RuntimeError, match="(?s)ConnectionRefusedError.*illegal memory access"),
        measure.running(OURS, TimeLimit(None)),
    ):
        raise ConnectionRefusedError("no answer")
