"""The GPU sheet without a GPU: its commands, the order of its parts, and its arithmetic."""

import argparse
import dataclasses
import math
import random
import statistics
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import serving
from gpu import checks, measure, page, run, servers, state
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
    names = ("ours", "built-in", "no-speculation", "mixed-whole-blocks", "mixed-adaptive")
    ours, built_in, none, whole, adaptive = (EVERY[f"speed/fa3/qwen3-8b/{name}"].spec for name in names)
    assert ours.arguments == built_in.arguments and set(none.arguments) < set(ours.arguments)
    assert ours.environment | {"SGLANG_PLUGINS": "none"} == built_in.environment
    assert (*whole.arguments, "--speculative-adaptive") == adaptive.arguments
    assert whole.environment == adaptive.environment


def test_our_worker_is_known_by_its_line_in_the_log():
    product = "".join(file.read_text() for file in (ROOT / "python").rglob("*.py"))
    assert f'"{measure.OUR_WORKER}%s: ' in product


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


def test_a_later_call_tries_what_is_missing_then_what_failed(tmp_path):
    assert call(tmp_path, {"a": True, "fails": False}) == ["a", "fails", "fails"]
    assert call(tmp_path, {"a": True, "fails": False, "b": True}) == ["b", "fails", "fails"]
    assert call(tmp_path, {"a": True, "fails": True, "b": True}, "mended") == ["fails"]
    archive = tmp_path / "out" / "figures.tar.xz"
    same = state.Figures(tmp_path / "same", SETTING, tmp_path)
    same.adopt(archive)
    assert set(same.records) == {"a/step", "fails/step", "b/step"}
    other = state.Figures(tmp_path / "other", SETTING | {"machine": "another GPU"}, tmp_path)
    with pytest.raises(ValueError, match="is of a GPU with sglang 0; this is another GPU with sglang 0"):
        other.adopt(archive)


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
    rng = random.Random(0)
    found = [
        measure.rates([answers(rng, kept, ms)], 2.0, 2.0 + GPU_SIZES.window)["tokens_per_second"]
        for _ in range(200)
    ]
    spread = statistics.stdev(one / other for one, other in zip(found[::2], found[1::2]))
    assert (spread < 0.003) == is_quiet, spread
    assert statistics.mean(found) == pytest.approx(1e3 * kept / ms, rel=0.002)


def test_a_difference_is_reported_with_the_targets_gap():
    """The fourth answer ends where its context does, and the third too early."""
    expected = [{"ids": [1, 2, 3, 4, 5, 6, 7], "gaps": [0.5, 0.5, 0.125, 0.5, 0.5, 0.5, 0.5]}] * 4
    found = checks.compare([[1, 2, 3, 4, 5, 6, 7], [1, 2, 7, 8, 9], [1, 2, 3], [1, 2, 3, 4, 5]], expected)
    assert found["differences"] == [
        {"request": 1, "position": 2, "gap": 0.125},
        {"request": 2, "position": 3, "gap": None},
    ]


@pytest.mark.parametrize("drawn, is_right", [((0.5, 0.2, 0.15, 0.1, 0.05), True), ([1] * 5, False)])
def test_sampled_answers_are_held_against_the_targets_distribution(drawn, is_right):
    generator, logs = random.Random(0), [math.log(share) for share in (0.5, 0.2, 0.15, 0.1, 0.05)]
    tops = [(log, token, None) for token, log in enumerate(logs)][:4]  # the server names no others

    def answer() -> dict:
        said = generator.choices(range(5), drawn, k=checks.SAMPLED_TOKENS)
        rows = [(logs[token], token, None) for token in said]
        return {"meta_info": {"output_token_logprobs": rows, "output_top_logprobs": [tops] * len(rows)}}

    server = SimpleNamespace(generate_many=lambda requests, _: [answer() for _ in requests])
    sigmas = checks.sampled_sigmas(SimpleNamespace(server=server))
    assert (abs(sigmas) < checks.MOST_SIGMAS) == is_right, sigmas


def test_ratios_have_their_bars():
    speeds = {"fa3/qwen3-8b/ours/load-1": 760, "fa3/qwen3-8b/built-in/load-1": 752}
    speeds |= {"fa3/qwen3-8b/useless-draft/load-48": 140, "fa3/qwen3-8b/no-speculation/load-48": 150}
    results = {f"speed/{name}": {"tokens_per_second": each, "problems": []} for name, each in speeds.items()}
    records = {name: {"result": result} for name, result in results.items()}
    records["speed/fa3/qwen3-8b/ours/load-48"] = {"result": {"tokens_per_second": 1, "problems": ["wrong"]}}
    assert page.ratios(records) == [
        "fa3/qwen3-8b load-1: ours / built-in 1.011, wanted 1.0",
        "fa3/qwen3-8b load-48: useless-draft / no-speculation 0.933, wanted 0.95: MISSED",
    ]
