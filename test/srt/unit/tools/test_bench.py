"""The benchmark: shared words, alternating rounds, ratios, comparison of answers, and floors."""

import contextlib
import io
import json
import subprocess
import sys
import time
import urllib.request

import acceptance
import bench
import check
import plot_acceptance
import prompt_sets
import pytest
import quantization_cost
import report
import serving
import ties
from acceptance import Acceptance, shortfall
from bench import Load
from pack_rollouts import packed_rows
from prompt_sets import CHAT_SETS
from safetensors.torch import load_file
from serving import DRAFT, ROOT, answer_many
from tokenizers import Tokenizer

TOKENIZER = ROOT / "models" / "smollm2-135m-instruct" / "tokenizer.json"
ANSWERS = sorted((ROOT / "models" / "training" / "prompts").glob("smollm2-*.npz"))


def test_a_shared_run_of_words_is_found():
    ours = [{"id": "o", "messages": [{"role": "user", "content": "Please: one two, THREE four five"}]}]
    theirs = [{"id": "t", "text": "zero one two three\nfour six"}]
    assert prompt_sets.overlaps(ours, theirs, words=4) == [("o", "t", "one two three four")]
    assert prompt_sets.overlaps(ours, theirs, words=5) == []


@pytest.mark.long
@pytest.mark.skipif(not TOKENIZER.exists(), reason="the model is not there: make model")
def test_no_prompt_is_training_data():
    """Of the bundled draft for SmolLM2: what its answers were asked for."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    rows = [row for file in ANSWERS for row in packed_rows(file)]
    asked = [[token for token, is_answer in zip(row.tokens, row.written) if not is_answer] for row in rows]
    texts = tokenizer.decode_batch(asked)
    training = [{"id": row.name, "text": text} for row, text in zip(rows, texts)]
    assert len(training) > 10_000
    for name in CHAT_SETS:
        assert prompt_sets.overlaps(prompt_sets.load(name).prompts, training) == []


class FakeServer:
    """Answers "7 8 9", or "7 8 1" to `wrong`, and records which server was sent what."""

    sent: list[tuple[str, list[dict], int]]

    def __init__(self, name: str, wrong: str | None):
        self.name, self.wrong = name, wrong

    def flush_cache(self) -> None:
        pass

    def generate_many(self, bodies, concurrency, due=()) -> list[dict]:
        self.sent.append((self.name, list(bodies), concurrency, list(due)))
        answers = [self.answer(body) for body in bodies]
        return [{**answer, "seconds": 1.5} for answer in answers] if due else answers

    def answer(self, body: dict) -> dict:
        ids = [7, 8, 1] if self.name == "whole" and body["text"] == self.wrong else [7, 8, 9]
        meta = {"completion_tokens": 3, "finish_reason": {"type": "stop"}}
        if not self.name.startswith("none"):
            meta["spec_correct_drafts_histogram"] = [1, 0, 1]
        if body.get("return_logprob"):
            meta["output_top_logprobs"] = [[(-0.1, 1, None), (-2.0, 2, None)]] * 3
        return {"output_ids": ids, "text": str(ids), "meta_info": meta}


def run(monkeypatch, tmp_path, *flags: str, wrong: str | None = None) -> int:
    """Run the benchmark on 40 prompts with fake servers; return its exit status."""
    FakeServer.sent = []

    @contextlib.contextmanager
    def serve(*arguments, env, python):
        if "--speculative-algorithm" not in arguments:
            name = "none-ours" if "SGLANG_DFLASH_CPU_LAYERS" in env else "none"
        else:
            name = "whole" if "--no-speculative-adaptive" in arguments else "adaptive"
            name += "-copies" * ("--speculative-copy-ahead" in arguments)
            name = "useless" if "a useless d" in arguments else name
        yield FakeServer(name, wrong)

    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"id": f"{n}", "text": f"prompt {n}"}) + "\n" for n in range(40)))
    monkeypatch.setattr(bench, "serve", serve)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "write_useless_draft", lambda draft, folder: f"a useless {draft}")
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    pair = ["--target", "t", "--draft", "d", "--prompts", f"own={file}"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *pair, *flags])
    return bench.main()


def test_servers_take_turns_with_the_same_prompts(monkeypatch, tmp_path, capsys):
    flags = ("--rounds", "2", "--concurrency", "1", "4", "--temperature", "0", "1", "--name", "x.y")
    assert run(monkeypatch, tmp_path, *flags) == 0
    order = ["none", "none-ours", "whole", "adaptive", "useless", "whole-copies", "adaptive-copies"]
    assert [name for name, *_ in FakeServer.sent] == order + 6 * order  # the first ones warm up
    runs = FakeServer.sent[len(order) :]
    for first in range(0, len(runs), len(order)):
        assert all(run[1:] == runs[first][1:] for run in runs[first : first + len(order)])
    assert runs[0][1][0]["text"] == "prompt 0" and runs[len(order)][1][0]["text"] == "prompt 4"
    loads = [Load(**one) for one in json.loads((tmp_path / "x.y.json").read_text())["loads"]]
    assert len(loads) == len(runs) and report.ratio_table(loads) in (tmp_path / "x.y.md").read_text()


def test_answers_of_unlike_length_arrive_when_they_are_due(monkeypatch, tmp_path, capsys):
    flags = ("--servers", "none", "whole", "--rounds", "2", "--temperature", "0", "--name", "x")
    assert run(monkeypatch, tmp_path, *flags, "--concurrency", "16", "--arrivals", "4") == 0
    [*_, first, _, second, _] = FakeServer.sent
    limits = [body["sampling_params"]["max_new_tokens"] for body in first[1]]
    assert 64 <= min(limits) < 100 and 220 < max(limits) <= 256
    for _, bodies, _, due in (first, second):
        assert due == sorted(due) and due[0] == 0 and 10 < due[len(bodies) - 1] < 25
    assert first[3] != second[3]
    page = (tmp_path / "x.md").read_text()
    assert "| own | 0 | 16 | 1.50 | 1.50 |" in page and "4 a second" in page
    assert run(monkeypatch, tmp_path, *flags) == 0
    assert not FakeServer.sent[-1][3] and "due" not in (tmp_path / "x.md").read_text()


def test_no_request_begins_before_it_is_due():
    begun = []

    def answer(request: dict) -> dict:
        begun.append((request["n"], time.perf_counter()))
        return {}

    start = time.perf_counter()
    answers = answer_many(answer, [{"n": n} for n in range(3)], 2, due=[0, 0.05, 0.1])
    assert [n for n, _ in begun] == [0, 1, 2] and begun[2][1] - start >= 0.1
    assert all(0 <= found["seconds"] for found in answers)


def test_check_counts_and_fails_on_a_difference(monkeypatch, tmp_path, capsys):
    flags = ("--check", "--servers", "none", "whole")
    assert run(monkeypatch, tmp_path, *flags) == 0
    assert "own: 40 answers, 40 compared in full, 0 up to a tie; 120 of 120 tokens" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, *flags, wrong="prompt 3") == 1
    output = capsys.readouterr().out
    assert "1 answers different" in output and "token 2: [1] for [9]" in output


def test_a_useless_draft_has_the_shapes_of_the_draft(tmp_path):
    copy = bench.write_useless_draft(DRAFT, tmp_path / "copy")
    real, random = (load_file(folder / "model.safetensors") for folder in (DRAFT, copy))
    assert (copy / "config.json").read_text() == (DRAFT / "config.json").read_text()
    assert {name: x.shape for name, x in real.items()} == {name: x.shape for name, x in random.items()}
    assert not any(x.equal(random[name]) for name, x in real.items())


def load(server: str, seconds: float, number: int = 0, **more) -> Load:
    where = {"prompts": "chat", "temperature": 0.0, "round": number} | more
    return Load(server, where.pop("concurrency", 4), 4, 100, seconds, **where)


def test_a_ratio_is_of_the_same_round():
    """The machine is twice as slow in the second round, which no ratio may show."""
    seconds = {"no speculation": (10, 20, 10), "adaptive": (5, 8)}  # the third round has no partner
    loads = [load(name, each, n) for name, rounds in seconds.items() for n, each in enumerate(rounds)]
    loads.append(load("no speculation", 10, 0, concurrency=16))
    assert report.ratios(loads, ("chat", 0.0, 4), "adaptive", "no speculation") == [2.0, 2.5]
    assert "| chat | 0 | 4 | 10 | 16 (2.25x ±0.25) |" in report.table(loads)
    assert "| chat | 0 | 16 | 10 | – |" in report.table(loads)


def test_gains_are_over_our_layers_and_over_the_fastest_peer():
    """The fastest by its median, though another wins the first round."""
    ours = "no speculation, our layers"
    seconds = {"no speculation": (4, 10), ours: (5, 8), "adaptive": (2.5, 2), "llama.cpp": (5, 5)}
    loads = [load(name, by_round[n], n) for n in (0, 1) for name, by_round in seconds.items()]
    assert report.ratio_table(loads).splitlines()[2:] == [
        "| chat | 0 | 4 | adaptive | 3.00x ±1.00 | 2.25x ±0.25 | llama.cpp |"
    ]


def test_acceptance_is_of_all_blocks_and_per_position_of_whole_ones():
    loads = [
        load("whole blocks", 1, 0, accepted=[2, 1, 0, 1], accepted_stopped=[1, 0, 1]),
        load("whole blocks", 1, 1, accepted=[0, 1, 1, 2], concurrency=16),
        load("adaptive", 1, 0, accepted=[1, 1]),
        load("no speculation", 1, 0),
    ]
    assert report.acceptance_table(loads).splitlines()[2:] == [
        "| chat | 0 | whole blocks | 8 | 2.62 | 2.00 | 0.75 | 0.50 | 0.38 |",
        "| chat | 0 | adaptive | 4 | 1.50 | – | – | – | – |",
    ]


def reference(ids, gaps=(), text="x", reason="stop") -> dict:
    top = [[(-0.1, 1, None), (-0.1 - gap, 2, None)] for gap in gaps]
    meta = {"output_top_logprobs": top, "finish_reason": {"type": reason}}
    return {"output_ids": ids, "text": text, "meta_info": meta}


WANTED = reference([1, 2, 3, 4], [1.0, 1.0, 1e-6, 1.0])


@pytest.mark.parametrize(
    "answer, is_different",
    [
        (reference([1, 2, 9, 4]), False),
        (reference([1, 2, 9]), False),
        (reference([1, 9, 3, 4]), True),
        (reference([1]), True),
        (reference([1, 2, 3, 4]), False),
        (reference([1, 2, 3, 4], text="y"), True),
        (reference([1, 2, 3, 4], reason="length"), True),
    ],
)
def test_nothing_is_compared_from_the_first_tie_on(answer, is_different):
    """Equal tokens need the same text and finish reason."""
    assert bool(ties.differences([{}], [answer], [WANTED])) == is_different


def test_rounding_is_the_largest_change_before_a_different_token():
    one, other = reference([1, 2, 3], [1.0, 0.5, 0.1]), reference([1, 2, 4], [1.25, 0.5, 9.0])
    assert ties.rounding([one], [other]) == pytest.approx(0.25)
    assert check.tie_margin(0.25) == 1.0 and check.tie_margin(0.0) == ties.FLOAT32_TIE


@pytest.mark.parametrize(
    "program, words, said",
    [
        (acceptance, "--profile nowhere", "argument --profile"),
        (acceptance, "--prompts heldout", "argument --prompts"),
        (acceptance, "--prompts heldout=/nowhere", "acceptance: [Errno 2]"),
        (acceptance, "--url http://127.0.0.1:1", "refused>: http://127.0.0.1:1"),
        (acceptance, "", "acceptance: the server ended with exit code 1"),
        (bench, "--check --prompts nowhere", "bench: nowhere: no such prompt set"),
        (bench, "--check --prompts mine=/nowhere", "bench: [Errno 2]"),
        (bench, "--check --target t --draft d --servers none whole --prompts heldout", "bench: the server"),
        (plot_acceptance, "--url http://127.0.0.1:1", "plot_acceptance: http://127.0.0.1:1: "),
        (quantization_cost, "/nowhere /nowhere /nowhere", "quantization_cost: /nowhere: no such directory"),
    ],
)
def test_what_cannot_be_measured_is_no_verdict(program, words, said, monkeypatch, capsys):
    """Status 1 is one: of a draft below its floor, of answers that differ, of a draft quantized wrongly."""
    server = subprocess.Popen(["false"], start_new_session=True)
    monkeypatch.setattr(serving, "start_cold", lambda *_, **__: server)
    monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *words.split()])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        sys.exit(program.main())
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and "Traceback" not in error


def test_a_bug_is_no_verdict_either(capsys):
    assert serving.verdict_or_2(lambda: 1 // 0)() == 2 and "ZeroDivisionError" in capsys.readouterr().err


IDLE = 'sglang:spec_drafts_total 4\nsglang:spec_accepted_tokens_per_position_total{position="1"} 0\n'


@pytest.mark.parametrize(
    "page, is_installed, status, said",
    [
        (IDLE, True, 0, "rate 0.000, 4 drafts"),
        (IDLE, False, 2, "plot_acceptance: import of matplotlib"),
        ("", True, 2, "plot_acceptance: http://127.0.0.1:30000: no drafted blocks"),
    ],
)
def test_a_plot_of_little(page, is_installed, status, said, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(page.encode()))
    monkeypatch.setattr(sys, "argv", ["plot_acceptance.py", "--output", str(tmp_path / "plot.png")])
    if not is_installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_acceptance.main() == status and said in "".join(capsys.readouterr())
    assert (tmp_path / "plot.png").exists() == (status == 0)


def test_an_accept_length_and_its_floor():
    measured = Acceptance(drafted_per_step=3, kept=[2, 1, 0, 1])
    assert measured.drafts == 4 and measured.accepted_tokens == 4
    assert measured.accept_length == 2.0 and measured.rate == pytest.approx(1 / 3)
    assert measured.by_position == [0.5, 0.25, 0.25]
    one_token = Acceptance(drafted_per_step=0, kept=[3])  # nothing is drafted for a request's last token
    assert (one_token.accept_length, one_token.rate, one_token.by_position) == (1.0, 0, [])
    assert shortfall("set", 2.0, {"accept_length": 2.05, "floor": 0.95}) is None
    assert "2.000 is below 2.090" in shortfall("set", 2.0, {"accept_length": 2.2, "floor": 0.95})
