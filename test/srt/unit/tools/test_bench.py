"""The benchmark: prompt sets, alternating rounds, ratios, the page, and the comparison of answers."""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import bench
import check
import prompt_sets
import pytest
import report
import ties
from bench import Load
from prompt_sets import CHAT_SETS, PromptSet
from serving import ROOT, describe_cpu, free_port

# -- prompt sets


def test_humaneval_is_the_packages_file():
    digest = hashlib.sha256(prompt_sets.HUMANEVAL.read_bytes()).hexdigest()
    assert digest == "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"


@pytest.mark.parametrize("name, count", [("humaneval", 164), ("chat", 40), ("edits", 73)])
def test_a_set_has_chats_that_end_with_a_request(name, count):
    prompts = prompt_sets.load(name).prompts
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) == count
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"].strip() for message in prompt["messages"])


def test_chats_stop_where_the_target_stops_and_text_goes_on():
    for name in CHAT_SETS:
        assert prompt_sets.load(name).sampling(1.0) == {"temperature": 1.0, "max_new_tokens": 256}
    assert prompt_sets.load("heldout", 32).sampling(0) == {
        "temperature": 0,
        "max_new_tokens": 32,
        "ignore_eos": True,
    }


def test_edits_name_what_the_code_has_and_leave_out_its_docstring():
    for prompt in prompt_sets.load("edits").prompts:
        request, _, code = prompt["messages"][0]["content"].partition("\n\n```python\n")
        code = code.removesuffix("\n```")
        compile(code, prompt["id"], "exec")
        assert len(code.split("\n")) >= prompt_sets.LEAST_EDIT_LINES
        assert ">>>" not in code
        for name in request.split("`")[1:2]:
            assert name in code or name == "logging.debug"


def test_rounds_have_prompts_of_their_own_until_the_set_is_used_up():
    chosen = PromptSet("five", tuple({"id": n} for n in range(5)))
    assert [p["id"] for n in range(3) for p in chosen.slice(n, 2)] == [0, 1, 2, 3, 4, 0]


def test_own_prompts(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "a", "text": "x"}\n\n{"id": "b", "messages": []}\n')
    assert [p["id"] for p in prompt_sets.load(f"mine={file}").prompts] == ["a", "b"]
    file.write_text('{"id": "a", "text": "x"}\n{"id": "b", "prompt": "y"}\n')
    with pytest.raises(ValueError, match="line 2"):
        prompt_sets.load(f"mine={file}")
    with pytest.raises(ValueError, match="no such prompt set"):
        prompt_sets.load("mine")


def test_a_shared_run_of_words_is_found():
    ours = [{"id": "o", "messages": [{"role": "user", "content": "Please: one two, THREE four five"}]}]
    theirs = [{"id": "t", "text": "zero one two three\nfour six"}]
    assert prompt_sets.overlaps(ours, theirs, words=4) == [("o", "t", "one two three four")]
    assert prompt_sets.overlaps(ours, theirs, words=5) == []


@pytest.mark.long
def test_no_prompt_is_training_data(tmp_path):
    """Compare with the training prompts that this machine's packages yield."""
    subprocess.run(
        [sys.executable, ROOT / "models" / "training" / "open_prompts.py", tmp_path], check=True, timeout=900
    )
    training = prompt_sets.load(f"training={tmp_path / 'train.jsonl'}").prompts
    assert len(training) > 10_000
    for name in CHAT_SETS:
        assert prompt_sets.overlaps(prompt_sets.load(name).prompts, training) == []


# -- rounds


class FakeServer:
    """Answers with canned outputs, and records which server was sent what."""

    sent: list[tuple[str, list[dict], int]]

    def __init__(self, name: str, answer):
        self.name, self._answer = name, answer

    def flush_cache(self) -> None:
        pass

    def generate_many(self, bodies, concurrency) -> list[dict]:
        self.sent.append((self.name, list(bodies), concurrency))
        return [self._answer(self.name, body) for body in bodies]


def served_by(monkeypatch, answer) -> list:
    """Replace all servers by fake ones; returns what they are sent."""
    FakeServer.sent = []

    @contextlib.contextmanager
    def serve(*arguments, env, python):
        options = [argument for argument in arguments if argument.startswith("--")]
        kind = "whole" if "--no-speculative-adaptive" in options else "adaptive"
        kind += "-copies" * ("--speculative-copy-ahead" in options)
        plain = "none-ours" if "SGLANG_DFLASH_CPU_LAYERS" in env else "none"
        yield FakeServer(kind if "--speculative-algorithm" in options else plain, answer)

    monkeypatch.setattr(bench, "serve", serve)
    return FakeServer.sent


def answer(name: str, body: dict, ids=(7, 8, 9), reason="stop") -> dict:
    meta = {"completion_tokens": len(ids), "finish_reason": {"type": reason}}
    if not name.startswith("none"):
        meta["spec_correct_drafts_histogram"] = [1, 0, 1]
    if body.get("return_logprob"):
        meta["output_top_logprobs"] = [[(-0.1, 1, None), (-2.0, 2, None)] for _ in ids]
    return {"output_ids": list(ids), "text": str(ids), "meta_info": meta}


def own_prompts(tmp_path, count: int = 40) -> str:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"id": f"{n}", "text": f"prompt {n}"}) + "\n" for n in range(count)))
    return f"own={file}"


def started(monkeypatch, tmp_path, *flags: str) -> int:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "version", lambda name: f"{name}'s version")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--target", "t", "--draft", "d", *flags])
    return bench.main()


def test_servers_take_turns_with_the_same_prompts(monkeypatch, tmp_path, capsys):
    sent = served_by(monkeypatch, answer)
    flags = ("--rounds", "2", "--concurrency", "1", "4", "--temperature", "0", "1", "--name", "x.y")
    assert started(monkeypatch, tmp_path, "--prompts", own_prompts(tmp_path), *flags) == 0
    order = ["none", "none-ours", "whole", "adaptive", "whole-copies", "adaptive-copies"]
    assert [name for name, *_ in sent] == order + 6 * order  # the first ones warm up
    runs = sent[len(order) :]
    for first in range(0, len(runs), len(order)):
        assert all(run[1:] == runs[first][1:] for run in runs[first : first + len(order)])
    cells = [
        (len(bodies), at, bodies[0]["sampling_params"]["temperature"])
        for _, bodies, at in runs[:: len(order)]
    ]
    assert cells == [(4, 1, 0)] * 2 + [(8, 4, 0)] * 2 + [(8, 4, 1)] * 2
    assert runs[0][1][0]["text"] == "prompt 0" and runs[len(order)][1][0]["text"] == "prompt 4"
    loads = json.loads((tmp_path / "x.y.json").read_text())["loads"]
    assert len(loads) == len(runs) and {load["round"] for load in loads} == {0, 1}
    page = (tmp_path / "x.y.md").read_text()
    first = report.table([Load(**one) for one in loads if one["round"] == 0])
    assert describe_cpu() in page and f"{first}\n## Accept length" in page
    gains = report.ratio_table([Load(**one) for one in loads])
    assert gains in page and gains in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path / "x.y.json")])
    report.main()
    assert capsys.readouterr().out == page
    assert (tmp_path / "x.y.png").stat().st_size > 1000


def test_copies_are_measured_on_chats_alone(monkeypatch, tmp_path):
    sent = served_by(monkeypatch, answer)
    flags = ("--rounds", "1", "--concurrency", "1", "--temperature", "0")
    assert started(monkeypatch, tmp_path, "--prompts", "heldout", *flags) == 0
    assert {name for name, *_ in sent} == {"none", "none-ours", "whole", "adaptive"}


def load(server: str, seconds: float, number: int = 0, tokens: int = 100, **more) -> Load:
    where = {"prompts": "chat", "temperature": 0.0, "round": number} | more
    return Load(server, where.pop("concurrency", 4), 4, tokens, seconds, **where)


def test_a_ratio_is_of_the_same_round():
    """The machine is twice as slow in the second round, which no ratio may show."""
    loads = [
        load("no speculation", 10, 0),
        load("adaptive", 5, 0),
        load("no speculation", 20, 1),
        load("adaptive", 8, 1),
        load("no speculation", 10, 0, concurrency=16),
        load("no speculation", 10, 2),  # no partner
    ]
    assert report.ratios(loads, ("chat", 0.0, 4), "adaptive", "no speculation") == [2.0, 2.5]
    assert report.formatted([2.0, 2.5]) == "2.25x ±0.25" and report.formatted([2.0]) == "2.00x"
    assert "| chat | 0 | 4 | 10 | 16 (2.25x ±0.25) |" in report.table(loads)
    assert report.ratios(loads, ("chat", 0.0, 16), "adaptive", "no speculation") == []
    assert "| chat | 0 | 16 | 10 | – |" in report.table(loads)
    assert "2.50x" in report.line(loads[3], loads)


def test_gains_are_over_our_layers_and_over_the_fastest_peer():
    """The fastest by its median, though another wins the first round."""
    ours = "no speculation, our layers"
    seconds = {"no speculation": (4, 10), ours: (5, 8), "adaptive": (2.5, 2), "llama.cpp": (5, 5)}
    loads = [load(name, by_round[n], n) for n in (0, 1) for name, by_round in seconds.items()]
    assert "| chat | 0 | 4 | 18 | 16 | 45 (3.00x ±1.00) | 20 (1.30x ±0.30) |" in report.table(loads)
    assert report.ratio_table(loads).splitlines()[2:] == [
        "| chat | 0 | 4 | adaptive | 3.00x ±1.00 | 2.25x ±0.25 | llama.cpp |"
    ]
    alone = [x for x in loads if x.server in ("no speculation", "adaptive")]
    assert "| adaptive | 3.30x ±1.70 | 3.30x ±1.70 | no speculation |" in report.ratio_table(alone)
    assert "| adaptive | – | – | – |" in report.ratio_table([load("adaptive", 1)])
    assert "x" not in report.line(loads[1], loads).split("tokens/s")[1]
    assert report.ratio_table([load(ours, 1)]).count("\n") == 2  # it has no draft


@pytest.mark.parametrize(
    "text, name",
    [
        (
            "model name\t: A 1\nflags\t\t: sse avx2 avx512f\n\n",
            "A 1 (AVX2 yes, AVX-512 yes, AVX512-BF16 no, AMX no)",
        ),
        ("Features\t: fp asimd\n", "of this name"),
        (None, "of this name"),
    ],
)
def test_a_page_names_its_cpu(text, name, tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "of this name")
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert describe_cpu(file) == f"{name}, {os.cpu_count()} CPU cores"


def test_answers_that_the_target_ended_count_apart():
    cut = {
        "completion_tokens": 3,
        "finish_reason": {"type": "length"},
        "spec_correct_drafts_histogram": [0, 2],
    }
    answers = [answer("whole", {}), {"meta_info": cut}, answer("whole", {})]
    found = Load.from_answers("whole blocks", 1, answers, 1.0)
    assert (found.stopped, found.accepted, found.accepted_stopped) == (2, [2, 2, 2], [2, 0, 2])


def test_acceptance_is_of_all_blocks_and_per_position_of_whole_ones():
    loads = [
        load("whole blocks", 1, 0, accepted=[2, 1, 0, 1], accepted_stopped=[1, 0, 1]),
        load("whole blocks", 1, 1, accepted=[0, 1, 1, 2], concurrency=16),
        load("adaptive", 1, 0, accepted=[1, 1]),
        load("no speculation", 1, 0),
        load("whole blocks", 1, 0, accepted=[1], prompts="edits"),
    ]
    rows = report.acceptance_table(loads).splitlines()[2:]
    assert rows == [
        "| chat | 0 | whole blocks | 8 | 2.62 | 2.00 | 0.75 | 0.50 | 0.38 |",
        "| chat | 0 | adaptive | 4 | 1.50 | – | – | – | – |",
        "| edits | 0 | whole blocks | 4 | 1.00 | – | 0.00 | 0.00 | 0.00 |",
    ]


def test_a_step_is_a_cycle_or_a_token():
    """Of one greedy request."""
    alone = {"concurrency": 1}
    loads = [
        load("no speculation", 5, 0, **alone),
        load("whole blocks", 2, 0, **alone, accepted=[10, 0, 30]),
        load("whole blocks", 4, 1, **alone, accepted=[10, 0, 30]),
        load("whole blocks", 9, 0, accepted=[1]),
        load("whole blocks", 9, 0, **alone, accepted=[1], temperature=1.0),
    ]
    assert report.step_table(loads).splitlines()[2:] == [
        "| chat | no speculation | 100 | 50.0 | 1.00 |",
        "| chat | whole blocks | 80 | 75.0 | 2.50 |",
    ]


def test_phases_are_means_over_cycles():
    loads = [
        load("adaptive", 1, 0, cycles=10, phase_ms={"draft": 1.0, "rest": 4.0}),
        load("adaptive", 1, 1, cycles=30, phase_ms={"draft": 2.0, "rest": 0.0}),
        load("adaptive", 1, 1, cycles=30, phase_ms={"draft": 9.0}, temperature=1.0),
    ]
    assert report.phase_table(loads).splitlines()[2:] == [
        "| adaptive | 4 | 0.00 | 1.75 | 0.00 | 0.00 | 0.00 | 1.00 |"
    ]


def test_the_real_pair_is_measured_if_it_is_here(monkeypatch, tmp_path, capsys):
    for name in ("CHAT_TARGET", "CHAT_DRAFT"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(bench, name, folder)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "TINY_PAIRS", ((tmp_path / "t", tmp_path / "d"),))
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    args = bench._parse_arguments()
    (tmp_path / "CHAT_TARGET" / "model.safetensors").touch()
    assert bench._pairs(args) == [("t", ["d"], "bench-t")]
    assert "absent" in capsys.readouterr().out
    (tmp_path / "CHAT_DRAFT" / "model.safetensors").touch()
    assert bench._pairs(args) == [("CHAT_TARGET", ["CHAT_DRAFT"], "bench")]
    assert capsys.readouterr().out == ""


# -- answers compared with plain SGLang's


def reference(ids, gaps, text="x", reason="stop") -> dict:
    top = [[(-0.1, 1, None), (-0.1 - gap, 2, None)] for gap in gaps]
    meta = {"output_top_logprobs": top, "finish_reason": {"type": reason}}
    return {"output_ids": ids, "text": text, "meta_info": meta}


def test_nothing_is_compared_from_the_first_tie_on():
    want = reference([1, 2, 3, 4], [1.0, 1.0, 1e-6, 1.0])
    assert ties.undecided_from(want) == 2 and ties.undecided_from(want, tie=1e-7) is None

    def different(ids, **options) -> int:
        return len(ties.differences([{}], [reference(ids, [])], [want], **options))

    assert different([1, 2, 9, 4]) == different([1, 2, 9]) == 0
    assert different([1, 9, 3, 4]) == different([1]) == different([1, 2, 9, 4], tie=1e-7) == 1


def test_equal_tokens_need_the_same_text_and_finish_reason():
    want = reference([1, 2], [1.0, 1.0])
    assert ties.differences([{}], [want], [want]) == []
    assert ties.differences([{}], [reference([1, 2], [], text="y")], [want])
    assert ties.differences([{}], [reference([1, 2], [], reason="length")], [want])


def test_rounding_is_the_largest_change_before_a_different_token():
    one, other = reference([1, 2, 3], [1.0, 0.5, 0.1]), reference([1, 2, 4], [1.25, 0.5, 9.0])
    assert ties.rounding([one], [other]) == pytest.approx(0.25)
    assert check.tie_margin(0.25) == 1.0 and check.tie_margin(0.0) == ties.FLOAT32_TIE


def test_check_counts_and_fails_on_a_difference(monkeypatch, tmp_path, capsys):
    flags = ("--check", "--prompts", own_prompts(tmp_path, 10), "--servers", "none", "whole")
    sent = served_by(monkeypatch, answer)
    assert started(monkeypatch, tmp_path, *flags) == 0
    assert "own: 10 answers, 10 compared in full, 0 up to a tie; 30 of 30 tokens" in capsys.readouterr().out
    assert [(name, len(bodies)) for name, bodies, _ in sent] == [("none", 10), ("none", 4), ("whole", 10)]

    def wrong_once(name: str, body: dict) -> dict:
        is_wrong = name == "whole" and body["text"] == "prompt 3"
        return answer(name, body, ids=(7, 8, 1) if is_wrong else (7, 8, 9))

    served_by(monkeypatch, wrong_once)
    assert started(monkeypatch, tmp_path, *flags) == 1
    output = capsys.readouterr().out
    assert "1 answers different" in output and "token 2: [1] for [9]" in output


@pytest.mark.parametrize("server", ["none", "whole"])
def test_check_needs_plain_sglang_and_another_server(monkeypatch, tmp_path, server):
    with pytest.raises(SystemExit):
        started(monkeypatch, tmp_path, "--check", "--servers", server)


def test_a_servers_port_is_none_of_outgoing_connections():
    """A server binds its port only when its model is loaded. A connection could have taken it until then."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1 and max(ports) < first
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.pop()))
