"""The GPU benchmark without a GPU: its list, its commands, its arithmetic, and what comes back."""

import argparse
import contextlib
import dataclasses
import inspect
import json
import math
import os
import random
import signal
import subprocess
import sys
import tarfile
import time

import pytest
import torch
import transformers
from flashinfer.jit import core, env
from gpu import caches, checks, held, measure, page, parts, run, servers, state, trace
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES, REHEARSAL_SIZES, Round, Session
from gpu.parts import FIRST, Part, Step, list_of_parts
from gpu.servers import (
    BUILT_IN_DFLASH,
    DFLASH,
    MIXED_ADAPTIVE,
    MIXED_WHOLE,
    NO_SPECULATION,
    USELESS,
    ServerSpec,
)
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

GPU = ROOT / "benchmark" / "gpu"
SETTING = {"machine": "a GPU", "versions": {"sglang": "0"}}
STOCK = ServerSpec(NO_SPECULATION, ("--model-path", "x"), {})
EVERY = {part.name: part for part in list_of_parts(GPU_SIZES)}
MOST_BYTES = 8 << 20


# -- the list


def test_a_rehearsal_has_the_same_parts():
    """Every part has figures of its own, and no test marked gpu is left out."""
    figures = [name for part in list_of_parts(GPU_SIZES) for name in part.figures()]
    assert figures == [name for part in list_of_parts(REHEARSAL_SIZES) for name in part.figures()]
    assert len(figures) == len(set(figures)) and "tests/test_kernels/run" in figures
    assert all(part.steps[0] is FIRST for part in EVERY.values() if part.spec)


def test_three_ratios_fit_into_the_nine_minutes_of_the_sheet():
    over = {part.name: end for part, end in parts.schedule(list(EVERY.values()), 9 * 60)}
    alone = f"speed/fa3/qwen3-8b/{BUILT_IN_DFLASH}"
    assert over[alone] <= 3 * 60 and list(over)[:2] == [f"speed/fa3/qwen3-8b/{DFLASH}", alone]
    for name in (f"flashinfer/qwen3-8b/{BUILT_IN_DFLASH}", f"fa3/qwen3-8b/{MIXED_WHOLE}"):
        assert over[f"speed/{name}"] <= 9 * 60
    sheet = (GPU / "README.md").read_text()
    for name in over:
        if name.endswith((BUILT_IN_DFLASH, MIXED_WHOLE)):
            assert f"{int(over[name]) // 60}:{int(over[name]) % 60:02}" in sheet, name
    assert alone in run.table(list(EVERY.values()), 540) and len(sheet.splitlines()) <= 60


def options(part: Part) -> dict[str, str]:
    words = part.spec.arguments
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


def test_servers_differ_only_in_what_is_compared():
    ours, built_in, none, useless = (
        EVERY[f"speed/fa3/qwen3-8b/{name}"].spec
        for name in (DFLASH, BUILT_IN_DFLASH, NO_SPECULATION, USELESS)
    )
    assert ours.arguments == built_in.arguments == useless.arguments[:-1]
    assert ours.arguments[: len(none.arguments)] == none.arguments
    assert ours.environment | {"SGLANG_PLUGINS": "none"} == built_in.environment
    assert ours.environment["SGLANG_SIMULATE_ACC_LEN"] == "6.5"
    assert none.environment == useless.environment == {"SGLANG_PLUGINS": "dflash"}
    whole, adaptive = (EVERY[f"speed/fa3/qwen3-8b/{name}"].spec for name in (MIXED_WHOLE, MIXED_ADAPTIVE))
    assert (*whole.arguments, "--speculative-adaptive") == adaptive.arguments
    assert whole.environment == adaptive.environment and "8.2,4.2,1.8,1.05" in whole.environment.values()
    default = EVERY["smoke/default-flags"]
    assert not any(default.spec.environment.values()) and default.spec.is_ours
    assert len(options(default)) == 3


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
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    hf_config = read_config(config, tmp_path / "draft")
    tensors = read_draft_config(hf_config, "draft").required_tensors(hf_config)
    parameters = sum(torch.empty(shape, device="meta").numel() for shape in tensors.values())
    assert parameters / 1e9 == pytest.approx(1.92, abs=0.01)
    small = shrunk(QWEN3_8_27B)
    assert small.target_config == QWEN3_8_27B.target_config and type(small.target) is type(QWEN3_8_27B.target)


# -- going on


class Counting:
    """A step that counts its calls, and fails while told to."""

    def __init__(self, fails: bool = False):
        self.calls, self.fails = 0, fails

    def __call__(self, session):
        self.calls += 1
        if self.fails:
            raise RuntimeError("no /opt/some/where/lib.so, see https://example.org/a/b")
        return {"problems": []}


@pytest.fixture
def started(monkeypatch, tmp_path) -> list:
    """Replace servers by processes; return those started. None is held."""
    found = []

    @contextlib.contextmanager
    def running(spec, limit, begun):
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        found.append(process)
        limit.guard(process)
        try:
            yield argparse.Namespace(process=process)
        finally:
            process.kill()
            process.wait()

    monkeypatch.setattr(run, "running", running)
    monkeypatch.setattr(held, "FOLDER", tmp_path / "held")
    return found


def part_of(works: dict, name: str = "part", seconds: float = 0.1, **more) -> Part:
    return Part(name, tuple(Step(step, seconds, work) for step, work in works.items()), STOCK, 1.0, **more)


def go_on(every: list[Part], path, seconds: float | None = None, **more) -> tuple[int, dict]:
    """Call the program once; return its status and records."""
    status = run.go_on(every, state.Figures(path, SETTING, **more), TimeLimit(seconds), GPU_SIZES)
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
    assert go_on([part_of(works)], tmp_path)[1] == records and len(started) == 2


def test_what_fails_keeps_nothing_else_from_trying(tmp_path, started, capsys):
    def die(session):
        session.server.process.kill()
        session.server.process.wait()
        raise ConnectionError("refused")

    absent = dataclasses.replace(STOCK, arguments=("--model-path", "models/nobody"))
    every = [
        part_of({"a": Counting(), "b": die, "c": Counting()}),
        dataclasses.replace(part_of({"a": Counting()}, "absent"), spec=absent),
        part_of({"a": Counting()}, "long", 10_000),
        part_of({"a": Counting()}, "other"),
    ]
    status, records = go_on(every, tmp_path / "figures", seconds=300, bring=tmp_path / "back")
    assert status == run.PARTS_ARE_LEFT and list(records)[-1] == "other/a"
    failed = {name: record["error"] for name, record in records.items() if "error" in record}
    assert (
        list(failed) == ["part/b", "part/c", "absent/a"] and "models/nobody: not here" in failed["absent/a"]
    )
    brought = (tmp_path / "back" / "page.md").read_text()
    assert "- `part/b`: ConnectionError: refused" in brought and "- not all figures yet: `long`" in brought
    other = {**SETTING, "machine": "another"}
    assert state.Figures(tmp_path / "figures", other).records == {}
    assert "figures of other machines" in capsys.readouterr().out
    assert state.Figures(tmp_path / "figures", SETTING).records == records


def hang(session):
    session.server.process.wait()  # as the main thread waits for threads that wait for a server


def test_a_part_that_hangs_is_stopped_but_for_a_machines_first(tmp_path, started, monkeypatch):
    monkeypatch.setattr(run, "MOST_OF_ESTIMATE", 1)
    slow = lambda session: time.sleep(1.3) or {"problems": []}  # noqa: E731
    every = [part_of({"slow": slow}, "first"), part_of({"hangs": hang}), part_of({"a": Counting()}, "other")]
    status, records = go_on(every, tmp_path)
    assert status == run.FAILED and "times its estimate" in records["part/hangs"]["error"]
    assert "result" in records["other/a"] and "result" in records["first/slow"]
    assert started[1].returncode == -signal.SIGKILL
    status, records = go_on([part_of({"quick": Counting(), "hangs": hang})], tmp_path / "limit", seconds=2)
    assert status == run.PARTS_ARE_LEFT and list(records) == ["part/quick"]


ENDLESS = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from gpu import run, state
from gpu.limit import TimeLimit
from gpu.measure import GPU_SIZES
from gpu.parts import Part, Step
def step(session):
    time.sleep(0.03)
    return {{"problems": [], "padding": "x" * 1000}}
every = [Part(f"part-{{n}}", tuple(Step(f"s{{m}}", 0.1, step) for m in range(3))) for n in range(500)]
figures = state.Figures(Path({state!r}), {setting!r}, Path({back!r}))
run.go_on(every, figures, TimeLimit(None), GPU_SIZES)
"""


def test_what_a_killed_run_brought_is_whole(tmp_path):
    """Killed at a random moment, the archive opens and has every figure until then."""
    names = {"state": str(tmp_path / "state"), "back": str(tmp_path / "back"), "setting": SETTING}
    script = ENDLESS.format(path=[str(GPU.parent)], **names)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for _ in range(random.SystemRandom().randrange(4, 12)):
        process.stdout.readline()
    time.sleep(random.SystemRandom().random() / 10)
    process.kill()
    process.wait()
    back = tmp_path / "back"
    files = [file for file in back.rglob("*") if file.is_file()]
    assert len(files) + caches.MOST_PIECES + 1 <= 8  # with bare.json and caches
    assert all(file.stat().st_size <= 16 << 20 and file.parent == back for file in files)
    with tarfile.open(back / "figures.tar.xz") as archive:
        brought = {name for name in archive.getnames() if name.endswith(".json")}
    figures = {
        path.relative_to(folder).as_posix()
        for folder in (tmp_path / "state").iterdir()
        for path in folder.rglob("*.json")
    }
    assert len(figures) >= 3 and len(figures - brought) <= 1  # the last one may have been on its way
    assert "# DFLASH on a GPU" in (back / "page.md").read_text()


# -- what travels


def test_the_checkout_travels_without_its_models(tmp_path):
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in tracked.stdout.split("\0") if name and not name.startswith("models/")]
    if tracked.returncode == 0:  # else an sdist
        assert sum(file.stat().st_size for file in files if file.exists()) < MOST_BYTES
    script = tmp_path / "benchmark" / "gpu" / "travel.sh"
    script.parent.mkdir(parents=True)
    script.write_bytes((GPU / "travel.sh").read_bytes())
    (tmp_path / ".gitignore").write_text(".gpu/\n")
    for name in ("a", "b", "training"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(name)

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.stdout + done.stderr

    def travel(*words: str) -> str:
        return call("bash", str(script), *words)

    call("git", "init", "-q")
    call("git", "add", ".")
    before = call("git", "ls-files", "-s"), call("git", "status", "--short")
    assert travel("out") == travel("out") == "" and not (tmp_path / "models").exists()
    assert call("git", "status", "--short").count("D models/") == 3
    assert travel("bring", "a") == "" and [each.name for each in (tmp_path / "models").iterdir()] == ["a"]
    assert "no model c" in travel("bring", "c")
    assert travel("back") == travel("back") == ""
    assert (call("git", "ls-files", "-s"), call("git", "status", "--short")) == before
    assert not (tmp_path / ".gpu" / "models").exists()


def test_the_commands_of_the_sheet_are_shell():
    scripts = sorted((GPU / "sheet").glob("*.sh"))
    sheet = (GPU / "README.md").read_text()
    assert len(scripts) == 6
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert script.name in sheet or script.name == "common.sh"


def test_restored_kernels_of_flashinfer_are_loaded_without_a_build(tmp_path, monkeypatch):
    """A stand-in library takes the way of a kernel: to an archive, to another home, into `data/aot`."""
    home, back, package = tmp_path / "home", tmp_path / "back", tmp_path / "flashinfer"
    library = home / ".cache/flashinfer/0.0/90a/cached_ops/stand_in/stand_in.so"
    library.parent.mkdir(parents=True)
    assert caches.PIECE_BYTES <= 16 << 20
    monkeypatch.setattr(caches, "PIECE_BYTES", 1000)
    library.write_bytes(random.Random(0).randbytes(2000))
    assert caches.save(back, home) == 3
    found = argparse.Namespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(caches.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", package / "data" / "aot")
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", home / ".cache/flashinfer/0.0/90a/cached_ops")
    loaded, ninja = [], []
    monkeypatch.setattr(core.JitSpecNvcc, "load", lambda spec, path=None: loaded.append(path) or spec)
    monkeypatch.setattr(core.JitSpecNvcc, "write_ninja", lambda spec: None)
    monkeypatch.setattr(core, "run_ninja", lambda *arguments, **options: ninja.append(arguments))
    spec = core.JitSpecNvcc("stand_in", *[[]] * 5)
    spec.build_and_load()
    assert ninja and loaded == [None]  # restored to its cache alone, ninja is asked
    assert caches.load(back, tmp_path / "other") == 1
    placed = package / "data" / "aot" / "stand_in" / "stand_in.so"
    assert placed.read_bytes() == library.read_bytes()
    spec.build_and_load()
    assert len(ninja) == 1 and loaded == [None, placed]
    monkeypatch.setattr(caches, "MOST_PIECES", 2)
    with pytest.raises(ValueError, match="more than 2 pieces"):
        caches.save(back, home)


IMPORTS, INITS = "imported", "on the GPU"
SCHEDULER = f"""
class Scheduler:
    def init_model_worker(self):
        print({INITS!r}, flush=True)
print({IMPORTS!r}, flush=True)
"""


def test_a_held_server_waits_before_it_touches_the_gpu(tmp_path, monkeypatch):
    """The next call of the program finds it, releases it, and ends it."""
    package = tmp_path / "sglang" / "srt" / "managers"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "scheduler.py").write_text(SCHEDULER)
    launch = "from sglang.srt.managers.scheduler import Scheduler; Scheduler().init_model_worker(); input()"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(held, "FOLDER", tmp_path / "held")
    monkeypatch.setattr(held, "LAUNCHER", ("-c", launch))
    held.hold(STOCK)
    record = json.loads((tmp_path / "held" / "server.json").read_text())
    log = tmp_path / "held" / f"{record['port']}.log"
    wait_until(lambda: IMPORTS in log.read_text())
    held.hold(STOCK)
    assert json.loads((tmp_path / "held" / "server.json").read_text()) == record and held.is_held(STOCK)
    other = dataclasses.replace(STOCK, arguments=("--model-path", "y"))
    assert held.take(other) is None and INITS not in log.read_text()
    server = held.take(STOCK)
    wait_until(lambda: INITS in log.read_text() or server.process.poll() is not None)
    assert not held.is_held(STOCK) and server.url.endswith(str(record["port"])) and server.log_path == log
    os.killpg(server.process.pid, signal.SIGKILL)
    assert server.process.wait(10) == server.process.poll() == 1
    held.hold(STOCK)
    pid = json.loads((tmp_path / "held" / "server.json").read_text())["pid"]
    held.drop()
    wait_until(lambda: held.Adopted(pid).poll() is not None)
    assert not held.is_held(STOCK) and held.take(STOCK) is None
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    note = held.running(left.pid)
    note.__enter__()  # as a killed call leaves it
    held.end_unfinished()
    held.end_unfinished()
    assert left.wait(10) == -signal.SIGKILL


def wait_until(is_true) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- figures


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


def test_a_small_server_gets_every_kind_of_request_and_a_shape_a_greedy_one(tmp_path):
    server, spec = Answering(), EVERY["smoke/own-lengths-hybrid"].spec
    assert measure.first_requests(session(server, spec, tmp_path)) == {"seconds": 20.0, "problems": []}
    *alone, together = server.asked
    assert len(alone) == len(together) == len(measure.KINDS) == 7
    server.refused = {"finish_reason": {"type": "stop", "matched": "NaN happened"}}
    [problem] = measure.first_requests(session(server, spec, tmp_path))["problems"]
    assert "with a grammar" in problem and "NaN happened" in problem
    server = Answering()
    shape = EVERY[f"speed/fa3/qwen3-8b/{DFLASH}"].spec
    [problem] = measure.first_requests(session(server, shape, tmp_path, says=("graphs are captured",)))[
        "problems"
    ]
    assert "does not say 'graphs are captured'" in problem and server.asked == [[measure.GREEDY]] * 2


def test_a_load_is_prefill_then_short_and_long_answers(tmp_path):
    server, spec = Answering(), EVERY[f"speed/fa3/qwen3-8b/{DFLASH}"].spec
    found = measure.measure_load(session(server, spec, tmp_path), requests=4)
    asked = [(len(each), each[0]["max_new_tokens"]) for each in server.asked]
    assert asked == [(4, 1), (4, 448), (4, 64), (4, 448), (4, 64), (4, 448)] and server.flushed == 1
    assert found["problems"] == [] and found["tokens_per_block"] == pytest.approx(6.4, abs=0.1)
    server.per_block = 3.0
    [problem] = measure.measure_load(session(server, spec, tmp_path), requests=1)["problems"]
    assert problem.startswith("3.0") and "simulates 6.5" in problem
    with pytest.raises(RuntimeError, match="3 of 4 requests ran at once"):
        measure.measure_load(session(Answering(most=3), spec, tmp_path), requests=4)


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


class Steady(measure.Stream):
    """A stream without a server: `rate` tokens a second in chunks, until `most`."""

    def __init__(self, rate: float, most: int = 10**6):
        self.rate, self.most = rate, most
        super().__init__("http://here", {"sampling_params": {}})

    def run(self):
        begun = time.monotonic()
        for chunk in range(1, 10**6):
            if chunk * 32 > self.most or getattr(self, "is_over", False):
                return
            time.sleep(max(0.0, begun + chunk * 32 / self.rate - time.monotonic()))
            self.seen.append((begun + chunk * 32 / self.rate, chunk * 32))


def test_a_mixed_load_is_what_grows_in_its_window(tmp_path, monkeypatch):
    sizes = dataclasses.replace(GPU_SIZES, settle=0.1, window=0.3)
    spec, rates = EVERY[f"speed/fa3/qwen3-8b/{MIXED_WHOLE}"].spec, [3200.0, 700.0, 300.0]
    streams = []
    monkeypatch.setattr(
        measure, "Stream", lambda url, prompt: streams.append(Steady(rates[len(streams)])) or streams[-1]
    )
    server = Answering()
    server.url, server.post = "", lambda path, body: [setattr(stream, "is_over", True) for stream in streams]
    found = measure.measure_mixed(session(server, spec, tmp_path, sizes), requests=3)
    assert found["tokens_per_second"] == pytest.approx(sum(rates)) and found["widths"] == {"width": 1}
    streams.clear()
    monkeypatch.setattr(
        measure, "Stream", lambda url, prompt: streams.append(Steady(900.0, 64)) or streams[-1]
    )
    with pytest.raises(RuntimeError, match="of 3 requests ended inside the window"):
        measure.measure_mixed(session(server, spec, tmp_path, sizes), requests=3)


def test_an_error_carries_the_end_of_the_servers_log(tmp_path, monkeypatch):
    monkeypatch.setattr(held, "FOLDER", tmp_path)
    server = Answering()
    server.said, server.process = "illegal memory access", argparse.Namespace(pid=1)
    monkeypatch.setattr(measure, "serve", lambda *arguments, **options: contextlib.nullcontext(server))
    with (
        pytest.raises(RuntimeError, match="(?s)ConnectionRefusedError.*illegal memory access"),
        measure.running(STOCK, TimeLimit(None), len),
    ):
        raise ConnectionRefusedError("no answer")
    ours = EVERY["smoke/own-lengths-hybrid"].spec
    with (
        pytest.raises(RuntimeError, match="not a server of ours"),
        measure.running(ours, TimeLimit(None), len),
    ):
        pass
    assert not list(tmp_path.iterdir())  # nothing is left to end


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
    spec, asked = EVERY["smoke/peagle"].spec, checks.requests()
    recorded = json.loads(checks.ANSWERS.read_text())
    assert {part.steps[1].run.keywords["target"] for name, part in EVERY.items() if "smoke" in name} == {
        *recorded
    }
    assert all(len(answers) == len(asked) for answers in recorded.values())
    info = {"completion_tokens": 5, "spec_verify_ct": 2, **END}
    answers = [{"output_ids": want["ids"], "meta_info": info} for want in recorded["tiny-qwen3-code"]]
    server = Answering()
    server.generate_many = lambda requests, _: answers
    known = session(server, spec, tmp_path)
    assert checks.check_answers(known, "tiny-qwen3-code", least=1.9)["problems"] == []
    [problem] = checks.check_answers(known, "tiny-qwen3-code", least=2.1)["problems"]
    assert problem == "accept length 2.00, on a CPU more than 2.1"
    answers[3] = {"output_ids": [7] * 9, "meta_info": info}
    [problem] = checks.check_answers(known, "tiny-qwen3-code", least=1.9)["problems"]
    assert "1 answers differ where the target is near no tie" in problem


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


def test_page_and_ratios():
    def load(tokens_per_second: float) -> dict:
        return {"tokens_per_second": tokens_per_second, "cycle_ms": 8.5, "prefill_ms": 30.0, "problems": []}

    differs = {"requests": 11, "differences": [{"request": 1, "position": 2, "gap": 0.0625}], "problems": []}
    prefix = "speed/fa3/qwen3-8b"
    results = {
        f"{prefix}/{DFLASH}/load-1": load(760),
        f"{prefix}/{BUILT_IN_DFLASH}/load-1": load(752),
        f"{prefix}/{USELESS}/load-1": load(140),
        f"{prefix}/{NO_SPECULATION}/load-1": load(150),
        f"{prefix}/{DFLASH}/load-48": load(5000),
        "smoke/dflash2-sampled/answers": {**differs, "accept_length": 3.5, "sigmas": 1.25},
        f"{prefix}/{DFLASH}/profile-1": {
            "requests": 1,
            **trace.summarize(synthetic_trace(6), "step[VERIFY bs=4]"),
        },
        "tests/test_kernels/run": {"passed": 3, "skipped": 0, "problems": []},
    }
    records = {
        name: {"date": "2026-11-25", "source": "abc", "command": "python -m x", "result": result}
        for name, result in results.items()
    }
    lines = page.ratios(records)
    assert f"qwen3-8b fa3 at 1: {DFLASH} / {BUILT_IN_DFLASH} 1.011" in lines
    assert f"qwen3-8b fa3 at 1: {USELESS} / {NO_SPECULATION} 0.933, MISSED 0.97" in lines
    assert not [line for line in lines if "48" in line]
    setting = {**SETTING, "machine": "NVIDIA H200, 139 GiB"}
    text = page.markdown(setting, records, [*records, "tests/test_x/run"])
    assert "2026-11-25; NVIDIA H200, 139 GiB; sglang 0; plugin source abc." in text
    assert "- not all figures yet: `tests/test_x`" in text and "python -m x" in text
    assert all(f"- {line}" in text for line in lines)
    assert "| dflash2-sampled | 11 | 1 | 0 | 0.0625 | 3.50 | 1.2 |" in text
    assert "waiting for the host 150 MISSED" in text and "| `gemm` | 1.0 | 400.0 |" in text
    assert "| test_kernels | 3 | 0 | 0 |" in text
