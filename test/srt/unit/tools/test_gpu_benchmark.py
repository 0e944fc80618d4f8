"""The GPU benchmark without a GPU: its commands, its arithmetic, and the figures that a call leaves."""

import argparse
import dataclasses
import math
import random
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
from gpu import checks, measure, page, run, servers, state, trace
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Round
from gpu.parts import Part, Step, list_of_parts
from gpu.servers import (
    BUILT_IN_DFLASH,
    DFLASH,
    MIXED_ADAPTIVE,
    MIXED_WHOLE,
    NO_SPECULATION,
    USELESS,
    ServerSpec,
)
from gpu.shapes import PAIRS
from serving import ROOT
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_dflash.srt.arg_groups.resolve import load_and_check_configs
from sglang_dflash.srt.arg_groups.support import suited_backends
from sglang_dflash.srt.environ import DFlashOptions

SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}}
EVERY = {part.name: part for part in list_of_parts(GPU_SIZES)}
SPEED = "speed/fa3/qwen3-8b"


# -- commands


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


def test_sglang_takes_every_command(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "SCRATCH", tmp_path)
    monkeypatch.chdir(ROOT)
    for pair in PAIRS:
        pair.write(tmp_path / pair.name)
    for part in list_of_parts(GPU_SIZES):
        if part.spec:
            assert problems_of(part.spec) == [], part.spec.command()
    good = EVERY["smoke/own-lengths-hybrid"].spec
    misspelt = dataclasses.replace(good, arguments=(*good.arguments, "--attention-back", "triton"))
    assert "--attention-back" in problems_of(misspelt)[0]
    assert problems_of(dataclasses.replace(good, environment={"SGLANG_SIMULATE_ACCEPTS": "6.5"}))


def test_servers_differ_only_in_what_is_compared():
    def spec(variant: str) -> ServerSpec:
        return EVERY[f"{SPEED}/{variant}"].spec

    ours, built_in, none, useless = map(spec, (DFLASH, BUILT_IN_DFLASH, NO_SPECULATION, USELESS))
    assert ours.arguments == built_in.arguments == useless.arguments[:-1]
    assert ours.arguments[: len(none.arguments)] == none.arguments
    assert ours.environment | {"SGLANG_PLUGINS": "none"} == built_in.environment
    assert none.environment == useless.environment == {"SGLANG_PLUGINS": "dflash"}
    whole, adaptive = spec(MIXED_WHOLE), spec(MIXED_ADAPTIVE)
    assert (*whole.arguments, "--speculative-adaptive") == adaptive.arguments
    assert whole.environment == adaptive.environment


def test_a_rehearsal_has_the_same_figures():
    rehearsed = [part.figures() for part in list_of_parts(REHEARSAL_SIZES)]
    assert [part.figures() for part in EVERY.values()] == rehearsed


def test_logs_say_what_is_looked_for():
    product = "".join(file.read_text() for file in (ROOT / "python").rglob("*.py"))
    for line in {line for part in EVERY.values() for line in part.says}:
        assert line in product or line == "prefill CUDA graph end", line
    assert f'"{measure.OUR_WORKER}%s: ' in product


# -- figures


def test_a_second_call_measures_only_what_is_missing(tmp_path):
    called: list[str] = []

    def step(name: str) -> Step:
        def work(session) -> dict:
            called.append(name)
            if name == "fails":
                raise RuntimeError("no /opt/some/where/lib.so")
            return {"problems": []}

        return Step(name, 0.1, work)

    def call(*names: str) -> tuple[int, dict]:
        figures = state.Figures(tmp_path, SETTING)
        status = run.go_on([Part("part", tuple(map(step, names)))], figures, TimeLimit(None), GPU_SIZES)
        return status, state.Figures(tmp_path, SETTING).records

    status, records = call("a", "fails")
    assert status == run.FAILED and records["part/fails"]["error"] == "RuntimeError: no lib.so"
    _, records = call("a", "fails", "b")
    assert called == ["a", "fails", "b"] and list(records) == ["part/a", "part/fails", "part/b"]


ENDLESS = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from gpu import run, state
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES
from gpu.parts import Part, Step
step = lambda session: {{"problems": [], "padding": "x" * 1000}}
every = [Part(f"part-{{n}}", tuple(Step(f"s{{m}}", 0.1, step) for m in range(3))) for n in range(500)]
figures = state.Figures(Path({state!r}), {setting!r}, Path({back!r}))
run.go_on(every, figures, TimeLimit(None), GPU_SIZES)
"""


def test_the_archive_of_a_killed_run_opens(tmp_path):
    """Killed at a random moment, it has every figure until then."""
    folder, back = tmp_path / "state", tmp_path / "back"
    path = [str(ROOT / "benchmark")]
    script = ENDLESS.format(path=path, state=str(folder), back=str(back), setting=SETTING)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for _ in range(random.SystemRandom().randrange(4, 40)):
        process.stdout.readline()
    process.kill()
    process.wait()
    with tarfile.open(back / "figures.tar.xz") as archive:
        brought = {name for name in archive.getnames() if name.endswith(".json")}
    [machine] = folder.iterdir()
    figures = {file.relative_to(machine).as_posix() for file in machine.rglob("*.json")}
    assert len(figures) >= 3 and len(figures - brought) <= 1  # the last one may have been on its way
    assert "# DFLASH on a GPU" in (back / "page.md").read_text()


# -- arithmetic


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
    with pytest.raises(ValueError, match="no more cycles"):
        measure.slope([(pairs[0][1], pairs[0][0])])


def test_a_difference_is_reported_with_the_targets_gap():
    """The fourth answer ends where its context does, and the third too early."""
    expected = [{"ids": [1, 2, 3, 4, 5, 6, 7], "gaps": [0.5, 0.5, 0.125, 0.5, 0.5, 0.5, 0.5]}] * 4
    found = checks.compare([[1, 2, 3, 4, 5, 6, 7], [1, 2, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4, 5]], expected)
    assert found["differences"] == [
        {"request": 1, "position": 2, "gap": 0.125},
        {"request": 2, "position": 3, "gap": None},
    ]


SHARES = (0.5, 0.2, 0.15, 0.1, 0.05)
GENERATOR = random.Random(0)
DRAWS = {
    "the target's": (lambda: GENERATOR.choices(range(5), SHARES)[0], True),
    "the likeliest": (lambda: 0, False),
    "uniform": (lambda: GENERATOR.randrange(5), False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_sampled_answers_are_held_against_the_targets_distribution(name):
    draw, is_right = DRAWS[name]
    logs = [math.log(share) for share in SHARES]
    tops = [(log, token, None) for token, log in enumerate(logs)][:4]  # the server names no others

    def answer() -> dict:
        drawn = [(logs[token], token, None) for token in (draw() for _ in range(checks.SAMPLED_TOKENS))]
        return {"meta_info": {"output_token_logprobs": drawn, "output_top_logprobs": [tops] * len(drawn)}}

    server = SimpleNamespace(generate_many=lambda requests, _: [answer() for _ in requests])
    sigmas = checks.sampled_sigmas(SimpleNamespace(server=server))
    assert (abs(sigmas) < checks.MOST_SIGMAS) == is_right, sigmas


def synthetic_trace(cycles: int) -> dict:
    """Return a trace of cycles of 1000 us.

    The verify graph's two kernels of 400 and 300 us with 10 idle between them, 100 us later a copy of 20,
    30 later the draft graph's kernel of 120, 20 later the next cycle.
    """

    def event(cat: str, name: str, ts: float, dur: float, **args) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for i in range(cycles):
        t, verify, copy, draft = 1000.0 * i, 10 * i, 10 * i + 1, 10 * i + 2
        events += [
            event("user_annotation", "step[VERIFY bs=4]", t, 60),
            event("cuda_runtime", "cudaGraphLaunch", t + 5, 40, correlation=verify),
            event("kernel", "void gemm", t + 100, 400, correlation=verify),
            event("kernel", "attention", t + 510, 300, correlation=verify),
            event("cuda_runtime", "cudaMemcpyAsync", t + 70, 5, correlation=copy),
            event("gpu_memcpy", "copy", t + 910, 20, correlation=copy),
            event("cuda_runtime", "cudaGraphLaunch", t + 610, 30, correlation=draft),
            event("kernel", "draft", t + 960, 120, correlation=draft),
        ]
    return {"traceEvents": events[::-1]}  # a trace is in no order


def test_trace_summary():
    summary = trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]")
    assert [summary[key] for key in ("cycles", "wall_us", "busy_us")] == [5, 1000, 840]
    assert summary["graph_idle_us"] == 10  # gemm -> attention, one launch
    assert summary["host_gap_us"] == 150  # attention -> copy -> draft -> the next gemm
    assert summary["calls"] == {"cudaGraphLaunch": 2, "cudaMemcpyAsync": 1}
    assert [(k["name"], k["us"]) for k in summary["kernels"][:2]] == [("gemm", 400), ("attention", 300)]


def test_ratios_have_their_floors():
    speeds = {f"{DFLASH}/load-1": 760, f"{BUILT_IN_DFLASH}/load-1": 752, f"{DFLASH}/load-48": 5000}
    speeds |= {f"{USELESS}/load-1": 140, f"{NO_SPECULATION}/load-1": 150}
    records = {
        f"{SPEED}/{name}": {"result": {"tokens_per_second": speed, "problems": []}}
        for name, speed in speeds.items()
    }
    lines = page.ratios(records)
    assert f"qwen3-8b fa3 at 1: {DFLASH} / {BUILT_IN_DFLASH} 1.011" in lines
    assert f"qwen3-8b fa3 at 1: {USELESS} / {NO_SPECULATION} 0.933, MISSED 0.97" in lines
    assert not [line for line in lines if "48" in line]
