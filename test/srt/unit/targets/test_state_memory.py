"""Running requests of the published hybrid shape, as SGLang sizes its memory, and our start-up line."""

from types import SimpleNamespace

import pytest
from shapes import QWEN3_8_27B
from state_memory import REPLAY, Server, sizes

from sglang_dflash.srt.speculative.targets import recurrent


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
def test_replay_lets_more_requests_run(server, shapes):
    """What the start-up line advises, by SGLang's own sizing: without the flag and with it."""
    flags = ("--max-running-requests", "128")
    default = sizes(server.with_flags(*flags), shapes)
    replayed = sizes(server.with_flags(*flags, REPLAY), shapes)
    assert default.requests < replayed.requests < 128


def test_a_hybrid_target_on_one_h100_runs_three_requests(shapes):
    """The published figures of docs/qwen3_5.md: 1.2 GB of copies a request."""
    found = sizes(Server("H100"), shapes)
    assert found.requests == 3 and found.kv_bytes_per_token == 84 * 1024
    assert 8 * found.state_bytes == pytest.approx(1.23e9, rel=0.01)
    assert found.ring_bytes == pytest.approx(25.3e6, rel=0.01)


@pytest.mark.parametrize(("requested", "is_said"), [(48, True), (3, False)])
def test_the_line_says_what_limits_the_requests(requested, is_said, monkeypatch, caplog):
    """17 slots are three requests of five states each."""
    states = SimpleNamespace(mamba_cache_per_req=154_000_000)
    configurator = SimpleNamespace(hybrid_gdn_config=1, attn_dp_size=1, _calculate_mamba_ratio=lambda: 5)
    runner = SimpleNamespace(kv_cache_configurator=configurator, model_config=None)
    schedule = SimpleNamespace(max_running_requests=requested, max_mamba_cache_size=17)
    settings = {
        "mambaish_config": lambda _: SimpleNamespace(mamba2_cache_params=states),
        "get_schedule": lambda: schedule,
        "get_server_args": lambda: SimpleNamespace(max_mamba_cache_size=None),
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null"),
        "get_exec": lambda: SimpleNamespace(mamba=SimpleNamespace(enable_linear_replayssm_spec=False)),
    }
    for name, value in settings.items():
        monkeypatch.setattr(recurrent, name, value)
    recurrent.log_if_states_cap_batch(runner, block_size=8)
    words = "let 3 requests run at once, not 48. A request holds 5 states of 154 MB", REPLAY
    assert [word in caplog.text for word in words] == [is_said] * 2
