"""Running requests of the published hybrid shape, as SGLang sizes its memory, and our start-up line."""

import pytest
from gpu.shapes import QWEN3_8_27B
from state_memory import REPLAY, Server, sizes

from sglang_dflash.srt.speculative.targets.recurrent import StateMemory, cap_message


@pytest.fixture(autouse=True)
def of_a_gpu(monkeypatch):
    """Resolving a CPU server's arguments in this process has set its states' dtype."""
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    QWEN3_8_27B.write(folder)
    return folder


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(Server("H100"), id="H100"),
        pytest.param(Server("H200"), id="H200", marks=pytest.mark.long),
        pytest.param(Server("H100", tp_size=2), id="TP-2", marks=pytest.mark.long),
    ],
)
def test_the_start_up_line_names_what_replay_gives(server, shapes):
    """Both numbers are SGLang's own: sized without the flag and with it."""
    flags = ("--max-running-requests", "128")
    default = sizes(server.with_flags(*flags), shapes)
    replayed = sizes(server.with_flags(*flags, REPLAY), shapes)
    assert default.requests < replayed.requests < 128
    assert default.estimate == replayed.requests


def test_a_hybrid_target_on_one_h100_runs_three_requests(shapes):
    """The published figures of docs/qwen3_5.md: 1.2 GB of copies a request."""
    found = sizes(Server("H100"), shapes)
    assert found.requests == 3 and found.kv_bytes_per_token == 84 * 1024
    assert 8 * found.state_bytes == pytest.approx(1.23e9, rel=0.01)
    assert found.ring_bytes == pytest.approx(25.3e6, rel=0.01)


def test_the_line_says_what_to_type():
    memory = StateMemory(
        state_bytes=154_000_000,
        ring_bytes=25_000_000,
        slots=17,
        slots_per_request=5,
        requested=48,
        block_size=8,
        kv_bytes=9_900_000_000,
        state_share=0.9 / 1.9,
    )
    said = cap_message(memory)
    assert "let 3 requests run at once, not 48" in said and "1232 MB" in said
    assert f"{REPLAY} keeps 25 MB instead of the copies: about 9 requests" in said
