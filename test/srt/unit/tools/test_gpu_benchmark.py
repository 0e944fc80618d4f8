"""The GPU sheet without a GPU: its commands, its figures, what a call leaves, and its arithmetic."""

import argparse
import dataclasses
import math
import os
import random
import re
import statistics
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import serving
from gpu import caches, checks, held, measure, page, run, servers, state
from gpu.measure import GPU_SIZES
from gpu.parts import Part, Step, list_of_parts, rehearsed
from gpu.servers import ServerSpec
from serving import ROOT
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from shapes import QWEN3_06B, QWEN3_4B, QWEN3_8B

from sglang_dflash.srt.arg_groups.resolve import load_and_check_configs
from sglang_dflash.srt.arg_groups.support import suited_backends
from sglang_dflash.srt.environ import DFlashOptions

SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}}
EVERY = {part.name: part for part in list_of_parts()}
FA3 = "speed/fa3/qwen3-8b"


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
        if "--speculative-algorithm" in spec.arguments:
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
    for pair in (QWEN3_8B, QWEN3_4B, QWEN3_06B):
        pair.write(tmp_path / pair.name)
    for part in list_of_parts():
        for spec in (part.spec, rehearsed(part).spec):
            assert spec is None or problems_of(spec) == [], spec.command()
    good = EVERY["smoke/peagle"].spec
    misspelt = dataclasses.replace(good, arguments=(*good.arguments, "--attention-back", "triton"))
    assert "--attention-back" in problems_of(misspelt)[0]
    assert problems_of(dataclasses.replace(good, environment={"SGLANG_SIMULATE_ACCEPTS": "6.5"}))


def test_servers_differ_only_in_what_is_compared():
    ours, built_in, none, whole, adaptive = (
        EVERY[f"{FA3}/{name}"].spec
        for name in ("ours", "built-in", "no-speculation", "mixed-whole-blocks", "mixed-adaptive")
    )
    assert ours.arguments == built_in.arguments and set(none.arguments) < set(ours.arguments)
    assert ours.environment | {"SGLANG_PLUGINS": "none"} == built_in.environment
    assert (*whole.arguments, "--speculative-adaptive") == adaptive.arguments
    assert whole.environment == adaptive.environment
    names = ("ours", "ours-wait-under-draft")
    default, wait = (EVERY[f"speed/flashinfer/qwen3-8b/{name}"].spec for name in names)
    assert default.environment | servers.WAIT_UNDER_DRAFT == wait.environment
    assert (*default.arguments[:-1], "fa3") == wait.arguments  # whose draft needs no lengths on the host


def test_our_worker_is_known_by_its_line_in_the_log():
    product = "".join(file.read_text() for file in (ROOT / "python").rglob("*.py"))
    assert f'"{measure.OUR_WORKER}%s: ' in product


CALLS = {9: "speed/flashinfer/qwen3-8b/ours-wait-under-draft", 18: f"{FA3}/useless-draft"}
CALLS |= {23: "tests/host-transfers"}


@pytest.mark.parametrize("minutes", CALLS)
def test_a_call_takes_parts_in_the_order_of_need(minutes):
    """All parts up to the last one of the sheet fit, what a machine compiles first included."""
    names, listed = list(EVERY), run.table([*EVERY.values()], 60 * minutes, frozenset()).splitlines()
    wanted = names[: names.index(CALLS[minutes]) + 1]
    assert [line.split()[-1] for line in listed[1:]][: len(wanted)] == wanted
    assert names[2] == "smoke/flashinfer"
    default, sampler = EVERY["smoke/default-flags"], frozenset({"sampler"})
    assert default.seconds(default.steps, False, frozenset()) > 180
    assert default.seconds(default.steps, False, sampler) < 180


def test_the_table_of_defaults_has_the_bars():
    table = (ROOT / "benchmark/gpu/README.md").read_text()
    for bar in page.BARS:
        assert {bar.setting, bar.other} <= servers.SETTINGS.keys()
        said = re.search(rf"`{bar.setting} / {bar.other}`([^`|]*)", table)
        assert f"{bar.least}" in said[1], bar


# -- figures


def call(folder, figures: dict[str, bool], source: str = "source") -> list[str]:
    """Run parts of one step each, by name whether it succeeds; return the names in the order of the tries."""
    called: list[str] = []

    def work(name: str, session) -> dict:
        called.append(name)
        if not figures[name]:
            raise RuntimeError("no /opt/some/where/lib.so")
        return {"problems": []}

    every = [Part(name, [Step(f"{name}/step", 0.1, partial(work, name))]) for name in figures]
    known = state.Figures(folder, SETTING, folder / "out")
    known._source = source
    status = run.Run(every, known, GPU_SIZES, 60).go_on()
    assert status == (run.DONE if all(figures.values()) else run.FAILED)
    return called


@pytest.mark.parametrize(
    "source, figures, tries",
    [
        ("source", {"a": True, "fails": False, "b": True}, ["b", "fails", "fails"]),
        ("source", {"a": True, "fails": True, "b": True}, ["b", "fails"]),
        ("mended", {"a": True, "fails": True, "b": True}, ["fails", "b"]),
    ],
)
def test_a_later_call_tries_what_is_missing_then_what_failed(tmp_path, source, figures, tries):
    assert call(tmp_path, {"a": True, "fails": False}) == ["a", "fails", "fails"]
    assert call(tmp_path, figures, source) == tries
    kept = state.Figures(tmp_path, SETTING, tmp_path / "out").records
    assert sorted(kept) == sorted(f"{name}/step" for name in figures)


ENDLESS = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from gpu import run, state
from gpu.measure import GPU_SIZES
from gpu.parts import Part, Step
step = lambda session: {{"problems": [], "padding": "x" * 1000}}
steps = lambda part: [Step(f"{{part}}/s{{m}}", 0.1, step) for m in range(3)]
every = [Part(part, steps(part)) for part in (f"part-{{n}}" for n in range({parts}))]
figures = state.Figures(Path({state!r}), {setting!r}, Path({back!r}))
if Path({archive!r}).exists():
    figures.adopt(Path({archive!r}))
run.Run(every, figures, GPU_SIZES, 600).go_on()
"""


def test_machines_that_are_killed_lose_no_figure(tmp_path):
    """Two are killed at random moments, and the next one starts from the archive that came back."""
    brought: list[set[str]] = [set()]
    for turn, kills in enumerate((True, True, False)):
        place, archive = tmp_path / str(turn), tmp_path / str(turn - 1) / "figures.tar.xz"
        settings = {"state": str(place / "state"), "back": str(place), "archive": str(archive)}
        script = ENDLESS.format(path=[str(ROOT / "benchmark")], setting=SETTING, parts=20, **settings)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        lines = random.SystemRandom().randrange(4, 30) if kills else 10_000
        printed = [line for line, _ in zip(process.stdout, range(lines))]
        if kills:
            process.kill()
        process.wait()
        taken = {line.partition(":")[0] for line in printed if ": done" in line}
        assert not taken & brought[-1], "measured twice"
        figures = state.Figures(tmp_path / f"home-{turn}", SETTING, tmp_path)
        figures.adopt(place / "figures.tar.xz")
        # The last one may have been on its way.
        assert brought[-1] <= set(figures.records) and len(taken - set(figures.records)) <= 1
        brought.append(set(figures.records))
        run.Run([], figures, GPU_SIZES, 0).go_on()  # a call that takes nothing
        assert (tmp_path / "figures.tar.xz").stat().st_size
        (tmp_path / "figures.tar.xz").unlink()
    assert len(brought[-1]) == 60
    assert "# DFLASH on a GPU" in (place / "page.md").read_text()
    other = state.Figures(tmp_path / "other", SETTING | {"machine": "another GPU"}, tmp_path)
    with pytest.raises(ValueError, match="is of a GPU with sglang 0; this is another GPU with sglang 0"):
        other.adopt(place / "figures.tar.xz")


# A server that is ready at once, and dies of its first request.
MORTAL = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("line 1 of 2\\nCUDA error: an illegal memory access", flush=True)
        os._exit(1)
    def log_message(self, *_):
        pass
print({worker!r}, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_that_dies_leaves_its_last_lines_and_the_next_part_goes_on(tmp_path, monkeypatch):
    script = MORTAL.format(worker=measure.OUR_WORKER)
    start = serving.start_cold
    monkeypatch.setattr(held, "start_cold", lambda command, *rest: start(["-c", script, *command[2:]], *rest))
    monkeypatch.setattr(held, "FOLDER", tmp_path / "held")
    spec = ServerSpec(("--speculative-algorithm", "DFLASH"))
    first = Step("dies/start", 0.0, measure.first_request)
    late, other = (Step(name, 0.0, lambda session: {"problems": []}) for name in ("dies/late", "next/other"))
    figures = state.Figures(tmp_path / "state", SETTING, tmp_path)
    every = [Part("dies", [first, late], spec, 20), Part("next", [other])]
    run.Run(every, figures, GPU_SIZES, 60).go_on()
    assert not figures.has_failed("next/other") and figures.has_failed("dies/late")
    assert "CUDA error: an illegal memory access" in (tmp_path / "page.md").read_text()
    assert not [*held.FOLDER.glob("*.json")]


def test_a_server_has_ended_when_its_children_have():
    """The child outlives its parent's end by nothing: a scheduler holds the GPU's memory."""
    parent = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True, **pipes)
    process.stdout.readline()
    process.kill()
    process.wait()
    assert serving.group_is_alive(process.pid)
    serving.stop(process)
    assert not serving.group_is_alive(process.pid)


# -- the commands of the sheet


# Of a pack of three parts.
UNPACK = """
import pathlib, sys, time
time.sleep(0.3)
part = pathlib.Path(sys.argv[1])
(part.parents[1] / part.name).touch()
is_ready = all((part.parents[1] / f"part-{n}").exists() for n in (1, 2, 3))
sys.exit(1 if (part / "damaged").exists() else 0 if is_ready else 3)
"""


@pytest.fixture
def sheet(tmp_path):
    """Return what runs a command of the sheet as a machine does: what it leaves running ends with it."""
    for folder in (".gpu/offline", "benchmark/gpu", *(f".gpu/pack/part-{n}" for n in (1, 2, 3))):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / ".gpu/offline/unpack.py").write_text(UNPACK)
    script = tmp_path / "benchmark/gpu/sheet.sh"
    script.write_text((ROOT / "benchmark/gpu/sheet.sh").read_text())

    def command(*words: str) -> str:
        how = {"env": {**os.environ, "HOME": str(tmp_path)}, "start_new_session": True, "text": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(["bash", str(script), *words], **how)
        process.wait()
        serving.stop(process)
        return process.stdout.read()

    return command


def test_parts_are_unpacked_after_their_commands(sheet, tmp_path):
    assert not any([sheet("part", "1"), sheet("part", "2"), sheet("part", "3")])
    subprocess.run(
        ["timeout", "30", "bash", "-c", f"until [ -e {tmp_path}/gpu-parts/part-3.done ]; do sleep 0.1; done"]
    )
    assert all((tmp_path / f"gpu-parts/part-{n}.done").exists() for n in (1, 2, 3))


def test_an_incomplete_pack_names_its_parts(sheet, tmp_path):
    """The second is damaged, and the third does not come."""
    (tmp_path / ".gpu/pack/part-2/damaged").touch()
    (tmp_path / ".gpu/pack/part-3").rmdir()
    assert not sheet("part", "1") + sheet("part", "2")
    assert "part 3 of the pack has not come" in sheet("ready", "3")
    said = sheet("measure", "9")
    assert [n for n in (1, 2, 3) if f"part {n} of the pack is missing" in said] == [2, 3]


def test_caches_leave_object_files_out(tmp_path):
    for name in ("k.so", "k.o"):
        state.write(tmp_path / "old/.cache/flashinfer/k" / name, "code")
    state.write(tmp_path / "old" / caches.COMPILED / "triton", "")
    assert caches.save(tmp_path / "pieces", tmp_path / "old") == 1
    caches.load(tmp_path / "pieces", tmp_path / "new")
    found = {file.name for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert found == {"k.so", "triton"}


# -- arithmetic


def answers(rng: random.Random, kept: float = 7, ms: float = 8.5) -> SimpleNamespace:
    """Simulate a stream: a cycle's time varies by 1 %, a chunk comes 0.5 ms late or early.

    kept: tokens of a block, drawn between its two neighbours.
    """
    tokens, moments = [1], [0.3]
    while moments[-1] < 7:
        tokens.append(tokens[-1] + int(kept) + (rng.random() < kept % 1))
        moments.append(moments[-1] + 1e-3 * ms * rng.gauss(1, 0.01))
    came = range(0, len(tokens), 5)
    times = [moments[n] + rng.gauss(0, 0.5e-3) for n in came]
    end = {"spec_verify_ct": came[-1]}
    return SimpleNamespace(tokens=[tokens[n] for n in came], times=times, end=end)


@pytest.mark.parametrize("kept, ms, is_quiet", [(7, 3.5, True), (7, 8.5, True), (6.5, 8.5, False)])
def test_the_spread_of_a_ratio_of_equal_servers(kept, ms, is_quiet):
    """Below 0.3 % where every block is kept alike; drawn lengths are a lottery."""
    rng, found = random.Random(0), []
    for _ in range(400):
        found.append(measure.rates([answers(rng, kept, ms)], 2.0, 2.0 + GPU_SIZES.window))
    speeds = [each["tokens_per_second"] for each in found]
    spread = statistics.stdev(one / other for one, other in zip(speeds[::2], speeds[1::2]))
    print(f"{kept} tokens, {ms} ms: {spread:.2%}")
    assert (spread < 0.003) == is_quiet, spread
    assert statistics.mean(speeds) == pytest.approx(1e3 * kept / ms, rel=0.002)
    assert statistics.mean(each["cycle_ms"] for each in found) == pytest.approx(ms, rel=0.002)


def test_a_request_that_ends_inside_the_window_is_an_error():
    streams = [SimpleNamespace(is_alive=lambda: True, error=""), SimpleNamespace(is_alive=bool, error="why")]
    with pytest.raises(RuntimeError, match="1 of 2 requests ended too early. why"):
        measure.until(streams, lambda stream: False)


def test_a_difference_is_reported_with_the_targets_gap():
    """The fourth answer ends where its context does, and the third too early."""
    expected = [{"ids": [1, 2, 3, 4, 5, 6, 7], "gaps": [0.5, 0.5, 0.125, 0.5, 0.5, 0.5, 0.5]}] * 4
    found = checks.compare([[1, 2, 3, 4, 5, 6, 7], [1, 2, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4, 5]], expected)
    second, third = ({"request": 1, "position": 2, "gap": 0.125}, {"request": 2, "position": 3, "gap": None})
    assert found["differences"] == [second, third]


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


def test_ratios_have_their_bars():
    speeds = {"fa3/qwen3-8b/ours/load-1": 760, "fa3/qwen3-8b/built-in/load-1": 752}
    speeds |= {"fa3/qwen3-0.6b/ours/load-1": 760, "fa3/qwen3-0.6b/built-in/load-1": 752}
    speeds |= {"fa3/qwen3-8b/useless-draft/load-48": 140, "fa3/qwen3-8b/no-speculation/load-48": 150}
    results = {f"speed/{name}": {"tokens_per_second": each, "problems": []} for name, each in speeds.items()}
    records = {name: {"result": result} for name, result in results.items()}
    records["speed/fa3/qwen3-8b/ours/load-48"] = {"result": {"tokens_per_second": 1, "problems": ["wrong"]}}
    records["speed/fa3/qwen3-8b/built-in/load-48"] = {"error": "no server"}
    assert page.ratios(records) == [
        "fa3/qwen3-8b load-1: ours / built-in 1.011, wanted 1.0",
        "fa3/qwen3-0.6b load-1: ours / built-in 1.011, wanted 1.3: MISSED",
        "fa3/qwen3-8b load-48: useless-draft / no-speculation 0.933, wanted 0.95: MISSED",
    ]
