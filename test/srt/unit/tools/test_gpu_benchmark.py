"""The GPU benchmark without a GPU: its list, its commands, its memory, its arithmetic."""

import argparse
import contextlib
import dataclasses
import inspect
import json
import math
import random
import signal
import subprocess
import time
import urllib.error
from functools import partial

import pytest
import torch
import transformers
from gpu import checks, measure, page, parts, run, servers, state, trace
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Round, Session
from gpu.parts import FIRST, Part, Step, list_of_parts
from gpu.servers import ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION, VARIANTS, ServerSpec
from gpu.shapes import PAIRS, QWEN3_8_27B, shrunk
from serving import ROOT
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from support.engine import read_config

from sglang_dflash.srt.arg_groups.resolve import load_and_check_configs
from sglang_dflash.srt.arg_groups.support import suited_backends
from sglang_dflash.srt.configs.draft_kinds import read_draft_config
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative import dflash_worker

SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}}
STOCK = ServerSpec(NO_SPECULATION, ("--model-path", "models/x"), {})
EVERY = {part.name: part for part in list_of_parts(GPU_SIZES)}


def test_a_rehearsal_has_the_same_parts():
    """Every part has figures of its own, and no test marked gpu is left out."""
    figures = [name for part in list_of_parts(GPU_SIZES) for name in part.figures()]
    assert figures == [name for part in list_of_parts(REHEARSAL_SIZES) for name in part.figures()]
    assert len(figures) == len(set(figures)) and "tests/test_kernels/run" in figures


def test_the_list_tells_what_two_calls_start():
    lines = run.table(list(EVERY.values())).splitlines()
    marks = {line[25:]: (line[9:11].strip(), line[17:19].strip()) for line in lines[1:-1]}
    assert marks.keys() == EVERY.keys()
    assert marks["speed/fa3/qwen3-8b/built-in"] == ("x", "x")  # the four that decide, in 12 minutes
    assert marks["smoke/dflash2-sampled"] == marks["speed/fa3/qwen3.8-27b/ours"] == ("x", "")
    in_all, long, short, *_ = map(float, lines[-1].split()[:3])
    assert short <= 12 * 60 < long <= 28 * 60 < in_all


def options(part: Part) -> dict[str, str]:
    words = part.spec.arguments
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


def test_servers_differ_only_in_what_is_compared():
    for backend in ("fa3", "flashinfer"):
        ours, none, adaptive, built_in = (EVERY[f"speed/{backend}/qwen3-8b/{name}"].spec for name in VARIANTS)
        assert ours.arguments == built_in.arguments == adaptive.arguments[:-1]
        assert adaptive.arguments[-1] == "--speculative-adaptive"
        assert ours.arguments[: len(none.arguments)] == none.arguments
        assert ours.environment | {"SGLANG_PLUGINS": "none"} == built_in.environment
        assert ours.environment["SGLANG_SIMULATE_ACC_LEN"] == "6.5"
        assert none.environment == adaptive.environment == {"SGLANG_PLUGINS": "dflash"}


def test_only_a_users_server_has_no_flags():
    """Its prefill graphs and its warm-up are SGLang's; the others have a share of memory each."""
    plain = [
        name for name, part in EVERY.items() if part.spec and "--mem-fraction-static" not in options(part)
    ]
    assert plain == ["target/tiny-qwen3-code", "smoke/default-flags", "target/tiny-qwen3_5-code"]
    default = EVERY["smoke/default-flags"]
    assert list(options(default)) == [
        "--model-path",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
    ]
    assert not any(default.spec.environment.values()) and default.spec.is_ours
    assert options(EVERY["speed/fa3/qwen3.8-27b/ours"])["--mem-fraction-static"] == "0.9"
    smokes = [part for name, part in EVERY.items() if name.startswith("smoke/")]
    assert {part.needs for part in smokes} <= {name for part in EVERY.values() for name in part.figures()}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def problems_of(spec: ServerSpec) -> list[str]:
    """Return what SGLang or the plugin refuses of this server: flags, environment, configs."""
    load_plugins()  # as a server does first; ours reads configs that SGLang's own parser rejects
    ours = {option.variable for name, option in vars(DFlashOptions).items() if name.isupper()}
    unknown = [name for name in spec.environment if name not in ours and not hasattr(envs, name)]
    # SGLang itself accepts any unique beginning of a flag; a command to be copied should spell it out.
    parser = Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        args = parser.parse_args(spec.arguments)
        if spec.variant != NO_SPECULATION:
            target, draft = load_and_check_configs(args)
            if spec.is_ours and args.attention_backend is not None:
                # A server would choose another backend, with a warning. The measurement means this one.
                _, unsuited = suited_backends(args, draft, target)
                if args.attention_backend in unsuited:
                    return [*unknown, unsuited[args.attention_backend]]
    except (ValueError, OSError) as error:
        return [*unknown, str(error)]
    return unknown


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """The files that servers read, written below a folder of the test's own."""
    monkeypatch.setattr(servers, "SCRATCH", tmp_path)
    monkeypatch.setattr(parts, "SCRATCH", tmp_path)
    for pair in PAIRS:
        pair.write(tmp_path / pair.name)
    monkeypatch.chdir(ROOT)


def test_sglang_takes_every_command(shapes):
    for part in list_of_parts(GPU_SIZES):
        if part.prepare:
            part.prepare()
        if part.spec:
            assert problems_of(part.spec) == [], part.spec.command()
    good = EVERY["smoke/own-lengths"].spec
    for more, said in (
        (("--no-such-flag",), "--no-such-flag"),
        (("--attention-back", "triton"), "--attention-back"),
        (("--load-format", "dumy"), "dumy"),
    ):
        [problem] = problems_of(dataclasses.replace(good, arguments=(*good.arguments, *more)))
        assert said in problem
    assert problems_of(dataclasses.replace(good, environment={"SGLANG_SIMULATE_ACCEPTS": "6.5"}))


def test_logs_say_what_is_looked_for():
    product = "".join(file.read_text() for file in (ROOT / "python").rglob("*.py"))
    for part in EVERY.values():
        for line in part.says:
            assert line in product or line == "prefill CUDA graph end", line
    assert '"sglang-dflash %s with %s: ' in inspect.getsource(dflash_worker)
    assert measure.OUR_WORKER == f"sglang-dflash {dflash_worker.DFlashWorker.__name__} with "


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


class Counting:
    """A step that counts its calls, and fails while told to."""

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


@pytest.fixture
def started(monkeypatch) -> list[StubServer]:
    """Replace servers by processes; return those started."""
    found = []

    @contextlib.contextmanager
    def running(spec, limit):
        server = StubServer()
        found.append(server)
        limit.guard(server.process)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    monkeypatch.setattr(run, "running", running)
    return found


def part_of(works: dict, name: str = "part", seconds: float = 0.1, **more) -> Part:
    return Part(name, tuple(Step(step, seconds, work) for step, work in works.items()), STOCK, 1.0, **more)


def go_on(every: list[Part], path, seconds: float | None = None) -> tuple[int, dict]:
    """Call the program once; return its status and records."""
    figures = state.Figures(path, SETTING)
    status = run.go_on(every, figures, TimeLimit(seconds), GPU_SIZES)
    return status, state.Figures(path, SETTING).records


def test_a_second_call_measures_only_what_is_missing(tmp_path, started):
    works = {"start": Counting(), "a": Counting(), "b": Counting(fails=True), "c": Counting()}
    status, records = go_on([part_of({name: works[name] for name in ("start", "a", "b")})], tmp_path)
    assert status == run.FAILED and list(records) == ["part/start", "part/a", "part/b"]
    assert records["part/b"]["error"] == "RuntimeError: no lib.so, see https://example.org/a/b"
    assert records["part/a"]["command"] == STOCK.command()

    status, records = go_on([part_of(works)], tmp_path)
    assert len(started) == 2 and status == run.FAILED and list(records)[-1] == "part/c"
    # A new server gets its first requests again.
    assert [work.calls for work in works.values()] == [2, 1, 1, 1]
    status, again = go_on([part_of(works)], tmp_path)
    assert len(started) == 2 and again == records
    (tmp_path / "figures" / "part" / "b.json").unlink()
    works["b"].fails = False
    status, records = go_on([part_of(works)], tmp_path)
    assert status == run.DONE and [work.calls for work in works.values()] == [3, 1, 2, 1]


def test_a_server_that_ends_fails_its_steps_and_no_others(tmp_path, started):
    def die(session):
        session.server.process.kill()
        session.server.process.wait()
        raise ConnectionError("refused")

    first = part_of({"a": Counting(), "b": die, "c": Counting()})
    status, records = go_on([first, part_of({"d": Counting()}, "other")], tmp_path)
    assert status == run.FAILED
    failed = [name for name, record in records.items() if "error" in record]
    assert failed == ["part/b", "part/c"] and "result" in records["other/d"]
    assert "- `part/b`: ConnectionError: refused" in (tmp_path / "page.md").read_text()


def test_figures_of_another_machine_are_not_mixed(tmp_path, started):
    go_on([part_of({"a": Counting()})], tmp_path)
    with pytest.raises(state.OtherRun, match="a GPU.*another"):
        state.Figures(tmp_path, {**SETTING, "machine": "another"})


def test_a_part_is_not_started_without_the_time_for_it(tmp_path, started):
    quick, long, later = Counting(), Counting(), Counting()
    every = [
        part_of({"a": quick}, "quick"),
        part_of({"a": long}, "long", 10_000),
        part_of({"a": later}, "later"),
    ]
    status, records = go_on(every, tmp_path, seconds=300)
    assert status == run.PARTS_ARE_LEFT and (quick.calls, long.calls, later.calls) == (1, 0, 1)
    assert list(records) == ["quick/a", "later/a"] and len(started) == 2
    assert "- not all figures yet: `long`" in (tmp_path / "page.md").read_text()


def test_a_part_waits_for_the_figure_that_it_needs(tmp_path, started):
    needing, needed = Counting(), Counting(fails=True)
    every = [part_of({"a": needed}, "target"), part_of({"a": needing}, needs="target/a")]
    status, records = go_on(every, tmp_path)
    assert status == run.PARTS_ARE_LEFT and not needing.calls and list(records) == ["target/a"]


def hang(session):
    session.server.process.wait()  # as the main thread waits for threads that wait for a server


def test_the_time_limit_stops_a_step_with_its_server(tmp_path, started):
    every = [part_of({"quick": Counting(), "hangs": hang})]
    status, records = go_on(every, tmp_path, seconds=2)
    assert status == run.PARTS_ARE_LEFT and list(records) == ["part/quick"]
    assert started[0].process.returncode == -signal.SIGKILL


def test_a_part_that_hangs_does_not_take_the_others_time(tmp_path, started, monkeypatch):
    monkeypatch.setattr(run, "MOST_OF_ESTIMATE", 1)
    every = [part_of({"hangs": hang}), part_of({"a": Counting()}, "other")]
    status, records = go_on(every, tmp_path)
    assert status == run.FAILED and "times its estimate" in records["part/hangs"]["error"]
    assert "result" in records["other/a"]


END = {"finish_reason": {"type": "length"}}


class Answering:
    """A server that answers all requests, in blocks of `per_block`, and runs at most `most` at once."""

    def __init__(self, per_block: float = 6.4, most: int = 48):
        self.per_block, self.most, self.running = per_block, most, 0
        self.asked, self.flushed, self.refused, self.said = [], 0, {}, ""

    def flush_cache(self):
        self.flushed += 1

    def log(self):
        return self.said

    def get(self, path):
        if path == "/v1/loads":
            return {"loads": [{"num_running_reqs": self.running}]}
        return {"internal_states": [{"speculative_width": {"width": 1}}]}

    def generate(self, **request):
        return self.generate_many([request], 1)[0]

    def generate_many(self, requests, concurrency):
        self.asked.append([request["sampling_params"] for request in requests])
        self.running = min(self.most, len(requests))
        lengths = [request["sampling_params"]["max_new_tokens"] for request in requests]
        time.sleep(lengths[0] / 4e3)
        self.running = 0
        ends = [self.refused if "regex" in request["sampling_params"] else {} for request in requests]
        return [
            {"meta_info": {"completion_tokens": n, "spec_verify_ct": int(n / self.per_block), **END, **end}}
            for n, end in zip(lengths, ends)
        ]


def session(server: object, spec: ServerSpec, path, sizes=GPU_SIZES, **more) -> Session:
    return Session(sizes, TimeLimit(None), state.Figures(path, SETTING), server, spec, 20.0, **more)


def test_every_kind_of_request_is_sent_before_anything_is_timed(tmp_path):
    assert all(part.steps[0] is FIRST for part in EVERY.values() if part.spec)
    server, spec = Answering(), EVERY["smoke/own-lengths"].spec
    found = measure.first_requests(session(server, spec, tmp_path))
    assert found == {"seconds": 20.0, "problems": []}
    *alone, together = server.asked
    assert len(alone) == len(together) == len(measure.KINDS | measure.TEXT_KINDS) == 7
    keys = {key for sampling in together for key in sampling}
    assert {"regex", "min_new_tokens", "logit_bias", "frequency_penalty", "top_p"} <= keys
    server.refused = {"finish_reason": {"type": "stop", "matched": "NaN happened"}}
    [problem] = measure.first_requests(session(server, spec, tmp_path))["problems"]
    assert "with a grammar" in problem and "NaN happened" in problem
    server = Answering()
    [problem] = measure.first_requests(session(server, spec, tmp_path, says=("run packed",)))["problems"]
    assert "does not say 'run packed'" in problem
    server.generate = partial(refuse, 500)
    shape = EVERY["speed/fa3/qwen3-8b/ours"].spec
    assert len(measure.first_requests(session(server, shape, tmp_path))["problems"]) == len(measure.KINDS)


def refuse(code: int, **request):
    raise urllib.error.HTTPError("http://here", code, "no", {}, fp=open("/dev/null", "rb"))


def test_a_load_is_prefill_then_short_and_long_answers(tmp_path):
    server, spec = Answering(), EVERY["speed/fa3/qwen3-8b/ours"].spec
    found = measure.measure_load(session(server, spec, tmp_path), requests=4)
    asked = [(len(each), each[0]["max_new_tokens"]) for each in server.asked]
    assert asked == [(4, 1), (4, 448), (4, 64), (4, 448), (4, 64), (4, 448)] and server.flushed == 1
    assert found["problems"] == [] and found["tokens_per_block"] == pytest.approx(6.4, abs=0.1)
    assert found["widths"] == {"width": 1} and len(found["rounds"]) == 2
    server.per_block = 3.0
    [problem] = measure.measure_load(session(server, spec, tmp_path), requests=1)["problems"]
    assert problem.startswith("3.0") and "simulates 6.5" in problem


def test_a_load_fails_if_fewer_requests_run_than_asked(tmp_path):
    server, spec = Answering(most=3), EVERY["speed/fa3/qwen3.8-27b/ours"].spec
    with pytest.raises(RuntimeError, match="3 of 4 requests ran at once"):
        measure.measure_load(session(server, spec, tmp_path), requests=4)


def measured_round(seconds: float, tokens: int, cycles: list[int]) -> Round:
    answers = [{"meta_info": {"completion_tokens": tokens, "spec_verify_ct": count}} for count in cycles]
    return Round.from_answers(answers, seconds)


def test_slope_leaves_out_what_both_rounds_have():
    """Two requests; 0.3 s of each round are no cycles'. A cycle takes 10 ms, in the second pair 12 ms."""
    pairs = [
        (measured_round(0.3 + cycle * 10, 64, [10, 9]), measured_round(0.3 + cycle * 70, 448, [70, 63]))
        for cycle in (0.010, 0.012, 0.010)
    ]
    found = measure.slope(pairs)
    assert found["cycle_ms"] == pytest.approx(10) and found["cycle_ms_range"] == pytest.approx([10, 12])
    assert found["tokens_per_second"] == pytest.approx(3 * 2 * 384 / (60 * 0.032))
    assert found["tokens_per_block"] == pytest.approx(2 * 384 / (60 + 54))
    plain = [{"meta_info": {"completion_tokens": 64}}] * 2
    assert Round.from_answers(plain, 1.0) == Round(1.0, 63, 126, 128)
    with pytest.raises(ValueError, match="no more cycles"):
        measure.slope([(pairs[0][1], pairs[0][0])])
    with pytest.raises(ValueError, match="no more time"):
        measure.slope([(pairs[0][0], measured_round(0.1, 448, [70, 63]))])


def test_an_error_carries_the_end_of_the_servers_log(monkeypatch):
    server = Answering()
    server.said = "illegal memory access"
    monkeypatch.setattr(measure, "serve", lambda *arguments, **options: contextlib.nullcontext(server))
    with (
        pytest.raises(RuntimeError, match="(?s)ConnectionRefusedError.*illegal memory access"),
        measure.running(STOCK, TimeLimit(None)),
    ):
        raise ConnectionRefusedError("no answer")
    ours = EVERY["smoke/own-lengths"].spec
    with pytest.raises(RuntimeError, match="not a server of ours"), measure.running(ours, TimeLimit(None)):
        pass


def test_a_difference_is_reported_with_the_targets_gap():
    expected = [{"ids": [1, 2, 3, 4, 5, 6, 7], "gaps": [0.5, 0.5, 0.125, 0.5, 0.5, 0.5, 0.5]}] * 4
    answers = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4, 5]]
    assert checks.compare(answers, expected) == {
        "requests": 4,
        "differences": [
            {"request": 1, "position": 2, "gap": 0.125},
            {"request": 2, "position": 3, "gap": None},  # the fourth ends where its context does
        ],
    }


def drawn(logs: list[float], chosen: int) -> dict:
    tops = sorted(((log, id_, None) for id_, log in enumerate(logs)), reverse=True)
    return {"token": (logs[chosen], chosen, None), "tops": tops[:4]}  # the server names no others


def sampled_answers(draw) -> list[dict]:
    """Return answers whose tokens `draw` takes from a distribution of five."""
    logs = [math.log(share) for share in (0.5, 0.2, 0.15, 0.1, 0.05)]
    answers = []
    for _ in range(checks.TEXTS):
        tokens = [drawn(logs, draw()) for _ in range(checks.SAMPLED_TOKENS)]
        info = {"output_token_logprobs": [t["token"] for t in tokens]}
        answers.append({"meta_info": info | {"output_top_logprobs": [t["tops"] for t in tokens]}})
    return answers


def test_sampled_answers_are_held_against_the_targets_distribution(tmp_path, monkeypatch):
    generator = random.Random(0)
    right = lambda: generator.choices(range(5), (0.5, 0.2, 0.15, 0.1, 0.05))[0]  # noqa: E731
    server, spec = Answering(), EVERY["smoke/dflash2-sampled"].spec
    for draw, is_right in ((right, True), (lambda: 0, False), (lambda: generator.randrange(5), False)):
        answers = sampled_answers(draw)
        monkeypatch.setattr(server, "generate_many", lambda requests, concurrency, a=answers: a)
        sigmas = checks.sampled_sigmas(session(server, spec, tmp_path))
        assert (abs(sigmas) < checks.MOST_SIGMAS) == is_right, sigmas


def test_answers_are_held_against_the_target_and_the_accept_length(tmp_path, monkeypatch):
    spec, asked = EVERY["smoke/triton"].spec, checks.requests()
    limits = [request["sampling_params"] for request in asked]
    assert len(asked) == checks.TEXTS + len(checks.CONSTRAINTS)
    assert all(sampling["max_new_tokens"] > 180 for sampling in limits[: checks.TEXTS])
    top = [[(-0.5, 1, None), (-1.0, 9, None)]] * 5
    info = {"output_top_logprobs": top, "completion_tokens": 5, "spec_verify_ct": 2, **END}
    target = Answering()
    target.generate_many = lambda requests, _: (
        [{"output_ids": [1, 2, 3, 4, 5], "meta_info": info}] * len(asked)
    )
    known = session(target, spec, tmp_path)
    known.figures.keep("target/x", {"result": checks.record_answers(known)}, 1.0, None)
    assert checks.check_answers(known, "target/x", least=1.9)["problems"] == []
    [problem] = checks.check_answers(known, "target/x", least=2.1)["problems"]
    assert problem == "accept length 2.00, on a CPU more than 2.1"
    wrong = {"output_ids": [1, 2, 9, 4, 5], "meta_info": info}
    target.generate_many = lambda requests, _: [wrong] * len(asked)
    [problem] = checks.check_answers(known, "target/x", least=1.9)["problems"]
    assert f"{len(asked)} answers differ where the target is near no tie" in problem


def test_pytests_report_is_read():
    output = "..s\nFAILED test_a.py::test_b - assert 1 == 2\nERROR test_a.py::test_c\n"
    output += "1 failed, 12 passed, 3 skipped"
    assert checks.read_report(output) == {
        "passed": 12,
        "skipped": 3,
        "problems": ["FAILED test_a.py::test_b - assert 1 == 2", "ERROR test_a.py::test_c"],
    }


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
            event("kernel", "void gemm", t + 100, 400, id_),
            event("kernel", "attention", t + 510, 300, id_),
            event("cuda_runtime", "cudaMemcpyAsync", t + 70, 5, id_ + 1),
            event("gpu_memcpy", "copy", t + 910, 20, id_ + 1),
            event("user_annotation", "step[DRAFT bs=4]", t + 600, 50),
            event("cuda_runtime", "cudaGraphLaunch", t + 610, 30, id_ + 2),
            event("kernel", "draft", t + 960, 120, id_ + 2),
            event("cpu_op", "aten::add", t + 700, 5),
        ]
    return {"traceEvents": events[::-1]}  # a trace is in no order


def test_trace_summary():
    summary = trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]")
    assert [summary[key] for key in ("cycles", "wall_us", "busy_us")] == [5, 1000, 840]
    assert summary["graph_idle_us"] == 10  # gemm -> attention, one launch
    assert summary["host_gap_us"] == 150  # attention -> copy -> draft -> the next gemm
    assert summary["calls"] == {"cudaGraphLaunch": 2, "cudaMemcpyAsync": 1}
    assert summary["gaps"][0] == {"name": "attention → copy", "times": 1, "us": 100}
    assert [(k["name"], k["us"]) for k in summary["kernels"][:2]] == [("gemm", 400), ("attention", 300)]


def test_trace_counts_overlapping_work_once_and_needs_the_forward():
    spans = synthetic_trace(3)
    for t in (0, 1000, 2000):
        spans["traceEvents"].append(event("kernel", "other stream", t + 150, 900))
    summary = trace.summarize(spans, "step[VERIFY bs=4]")
    assert [summary[key] for key in ("wall_us", "busy_us", "graph_idle_us")] == [1000, 980, 0]
    assert summary["host_gap_us"] == 20  # from the draft's end to the next cycle
    with pytest.raises(ValueError, match=r"step\[DRAFT bs=4\]': 6"):
        trace.summarize(synthetic_trace(6), "step[VERIFY bs=8]")


def load(seconds_a_cycle: float, requests: int = 1) -> dict:
    speed = 6.5 * requests / seconds_a_cycle
    return {"cycle_ms": 1e3 * seconds_a_cycle, "tokens_per_second": speed, "prefill_ms": 30.0}


def markdown(results: dict[str, dict], machine: str = "a GPU") -> str:
    records = {
        name: {"date": "2026-11-25", "source": "abc", "command": "python -m x", "result": result}
        for name, result in results.items()
    }
    return page.markdown({**SETTING, "machine": machine}, records, [*records, "tests/test_x/run"])


def test_page_says_what_is_missed_and_where_it_ran():
    prefix = "speed/fa3/qwen3-8b"
    loads = {
        f"{prefix}/{DFLASH}/load-1": load(0.0085),
        f"{prefix}/{BUILT_IN_DFLASH}/load-1": load(0.0086),
        f"{prefix}/{NO_SPECULATION}/load-1": load(0.0200),
        f"{prefix}/{ADAPTIVE_DFLASH}/load-1": load(0.0210),
        f"{prefix}/{DFLASH}/load-16": load(0.0120, 16),
        f"{prefix}/{BUILT_IN_DFLASH}/load-16": load(0.0114, 16),
    }
    text = markdown(loads, "NVIDIA H200, 139 GiB")
    assert "2026-11-25; NVIDIA H200, 139 GiB; sglang 0; plugin source abc." in text
    assert "- not all figures yet: `tests/test_x`" in text and "python -m x" in text
    one, sixteen = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| 1")]
    assert one[13:16] == ["1.012", "2.353", "0.952 MISSED"] and float(one[16]) > 3
    assert sixteen[13:16] == ["0.950 MISSED", "–", "–"]


def test_page_shows_answers_profiles_and_tests():
    differs = {"requests": 11, "differences": [{"request": 1, "position": 2, "gap": 0.0625}], "problems": []}
    text = markdown(
        {
            "smoke/dflash2-sampled/answers": {**differs, "accept_length": 3.5, "sigmas": 1.25},
            "profile/fa3/qwen3-8b/ours/profile-4": {
                "requests": 4,
                **trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]"),
            },
            "tests/test_kernels/run": {"passed": 3, "skipped": 0, "problems": []},
        }
    )
    assert "| dflash2-sampled | 11 | 1 | 0 | 0.0625 | 3.50 | 1.2 |" in text
    assert "waiting for the host 150 MISSED" in text and "| `gemm` | 1.0 | 400.0 |" in text
    assert "| test_kernels | 3 | 0 | 0 |" in text
