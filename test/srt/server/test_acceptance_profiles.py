"""The bundled drafts reach the acceptance of benchmark/expected_acceptance.json.

The harness itself measures it.
"""

import contextlib
import json
import subprocess
import sys

import acceptance
import pytest
import transformers
from acceptance import EXPECTED, Acceptance, shortfall
from serving import ROOT, WHOLE_BLOCKS, serve
from support.servers import ENVIRONMENT, UNCOUNTED, warm_start

PROFILES = json.loads(EXPECTED.read_text())
BUNDLED = [name for name, profile in PROFILES.items() if profile["server_args"][-1].startswith("models/")]


def test_the_arithmetic():
    measured = Acceptance(drafted_per_step=3, kept=[2, 1, 0, 1])
    assert measured.drafts == 4 and measured.accepted_tokens == 4
    assert measured.accept_length == 2.0 and measured.rate == pytest.approx(1 / 3)
    assert measured.by_position == [0.5, 0.25, 0.25]
    assert shortfall("set", 2.0, {"accept_length": 2.05, "floor": 0.95}) is None
    assert "2.000 is below 2.090" in shortfall("set", 2.0, {"accept_length": 2.2, "floor": 0.95})


class MadeUp:
    """A server with made-up answers, each the histogram of its blocks. None: without speculation."""

    def __init__(self, *histograms: list[int] | None):
        self.answers, self.bodies, self.concurrencies = list(histograms), [], []

    def get(self, path):
        return {"internal_states": [{}]}

    def generate_many(self, bodies, concurrency):
        self.bodies += bodies
        self.concurrencies.append(concurrency)
        infos = []
        for histogram in (self.answers.pop(0) for _ in bodies):
            blocks = sum(histogram or [])
            counts = {"spec_verify_ct": blocks, "spec_num_proposed_drafts": 15 * blocks}
            infos.append({} if histogram is None else counts | {"spec_correct_drafts_histogram": histogram})
        return [{"meta_info": info} for info in infos]


@pytest.mark.parametrize("histograms", [[None, None], [[]], [[0, 0]], []])
def test_answers_without_drafts(histograms):
    measured = acceptance.measure(MadeUp(*histograms), [{}] * len(histograms))
    assert (measured.accept_length, measured.rate, measured.by_position) == (1.0, 0, [])
    assert "accept length 1.000" in acceptance.report("set", measured)
    one_token = Acceptance(drafted_per_step=0, kept=[3])  # nothing is drafted for a request's last token
    assert (one_token.accept_length, one_token.rate, one_token.by_position) == (1.0, 0, [])


def test_some_answers_without_drafts():
    measured = acceptance.measure(MadeUp(None, [0, 1, 0, 1], [2]), [{}] * 3)
    assert measured.accept_length == 2.0 and measured.drafted_per_step == 15
    assert measured.by_prompt == (1.0, 3.0, 1.0)


class Tokenizer:
    """A tokenizer that notes what its chat template was told."""

    def __init__(self):
        self.told = []

    def apply_chat_template(self, messages, **options):
        self.told.append(options)
        return {"input_ids": [1, 2, 3]}


PUBLISHED = "qwen3-8b-dflash"
# Histograms of answers of 100 blocks or of one, with lengths 8, 4.12 and 4.
LONG, SHORT = [0] * 7 + [100], [0] * 3 + [88, 12]
ONE_LONG, ONE_SHORT = [0] * 7 + [1], [0] * 3 + [1]


def gate(monkeypatch, tmp_path, server: MadeUp, sets: dict[str, int], profile: str = PUBLISHED) -> int:
    """Run the gate on sets of so many prompts each; return its exit status."""
    files = []
    for name, count in sets.items():
        (tmp_path / name).write_text('{"messages": [{"role": "user", "content": "?"}]}\n' * count)
        files.append(f"{name}={tmp_path / name}")
    monkeypatch.setattr(acceptance, "Server", lambda *_: server)
    arguments = ["--profile", profile, "--url", "http://unused", *(["--prompts", *files] if files else [])]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments])
    monkeypatch.chdir(ROOT)
    return acceptance.main()


@pytest.fixture
def tokenizer(monkeypatch) -> Tokenizer:
    made, names = Tokenizer(), []
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: names.append(name) or made
    )
    yield made
    assert set(names) <= {"Qwen/Qwen3-8B"}, "not the target's tokenizer"


def test_the_published_pair_and_its_floors():
    profile = PROFILES[PUBLISHED]
    assert profile["server_args"][1::2][::2] == ["Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"]
    floors = {
        name: expected["accept_length"] * expected["floor"] for name, expected in profile["sets"].items()
    }
    assert floors == pytest.approx(
        {
            "gsm8k": 6.54 * 0.975 * 0.95,
            "humaneval-published": 6.5 * 0.975 * 0.95,
            "mt-bench": 4.24 * 0.975 * 0.95,
        }
    )
    assert round(floors["gsm8k"], 2) == 6.06


@pytest.mark.parametrize("answers, status", [((ONE_LONG, SHORT), 0), ((LONG, ONE_SHORT), 1)])
def test_published_lengths_are_means_over_prompts(answers, status, monkeypatch, tmp_path, tokenizer):
    """One request at a time, by the target's own template, without thinking.

    Over blocks the first answers would fall below the floor of 6.058, and the second ones reach it.
    """
    sets = dict.fromkeys(PROFILES[PUBLISHED]["sets"], 2)
    server = MadeUp(*answers, *[LONG, LONG] * 2)
    assert gate(monkeypatch, tmp_path, server, sets) == status
    assert server.concurrencies == [1] * 3
    assert all(options["enable_thinking"] is False for options in tokenizer.told)
    assert all(options["add_generation_prompt"] for options in tokenizer.told) and len(tokenizer.told) == 6
    assert {tuple(body["input_ids"]) for body in server.bodies} == {(1, 2, 3)}
    assert {tuple(body["sampling_params"].items()) for body in server.bodies} == {
        (("temperature", 0), ("max_new_tokens", 2048))
    }


@pytest.mark.parametrize(
    "counts, status",
    [((2, 2, 2), 0), ((), 2), ((2,), 2), ((2, 2), 2), ((2, 2, 0), 2), ((0, 0, 0), 2)],
)
def test_a_set_that_was_not_measured_is_no_success(counts, status, monkeypatch, tmp_path, tokenizer, capsys):
    names = [*PROFILES[PUBLISHED]["sets"]]
    sets = dict(zip(names, counts, strict=False))
    server = MadeUp(*[LONG] * sum(counts))
    assert gate(monkeypatch, tmp_path, server, sets) == status
    skipped = [name for name in names if not sets.get(name)]
    assert all(f"{name}: skipped" in capsys.readouterr().err for name in skipped[:1])
    assert len(server.bodies) == sum(counts)


def test_a_short_set_beside_a_skipped_one_is_named(monkeypatch, tmp_path, tokenizer, capsys):
    assert gate(monkeypatch, tmp_path, MadeUp(SHORT, SHORT), {"gsm8k": 2}) == 1
    assert "gsm8k: accept length 4.120 is below 6.058" in capsys.readouterr().err


def test_prompts_of_no_set_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        gate(monkeypatch, tmp_path, MadeUp(), {"gsm9k": 2})
    assert ended.value.code == 2 and "has no set gsm9k" in capsys.readouterr().err


def test_our_own_lengths_are_over_all_blocks(monkeypatch, tmp_path):
    """A profile that is not published, on the prompts that it brings."""
    expected = PROFILES["tiny-dflash"]["sets"]["heldout"]
    prompts = len(acceptance.load("heldout").prompts)
    server = MadeUp([0] * 5 + [10**6], *[[1]] * (prompts - 1))
    assert gate(monkeypatch, tmp_path, server, {}, "tiny-dflash") == 0
    assert server.concurrencies == [96] and expected["accept_length"] < 5


# test_dflash.py has a part of the prompts; test_lossless_hybrid.py compares every cycle of the hybrid pair.
@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("profile", BUNDLED)
def test_a_bundled_draft(profile, servers):
    """Measure a draft; the harness starts the first one's server by itself."""
    servers.close()
    if profile == BUNDLED[0]:
        assert_profile(profile)
        return
    arguments = [*PROFILES[profile]["server_args"], WHOLE_BLOCKS, "--max-running-requests", "96"]
    if not (ROOT / arguments[1]).exists():
        pytest.skip(f"no {arguments[1]}: `make model` fetches it")
    with contextlib.chdir(ROOT), serve(*arguments, env=ENVIRONMENT | UNCOUNTED, start=warm_start()) as server:
        assert_profile(profile, "--url", server.url)


def assert_profile(profile: str, *more: str) -> None:
    command = [sys.executable, "benchmark/acceptance.py", "--profile", profile, *more]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_bundled_draft_has_a_profile():
    configs = {
        path.parent.name: json.loads(path.read_text()) for path in (ROOT / "models").glob("*/config.json")
    }
    drafts = {name for name, config in configs.items() if "DraftModel" in config["architectures"][0]}
    assert len(drafts) < len(configs)
    profiles = [PROFILES[name] for name in BUNDLED]
    assert drafts == {profile["server_args"][-1].rpartition("/")[2] for profile in profiles}
