"""The bundled drafts reach the acceptance of benchmark/expected_acceptance.json.

The harness itself measures it.
"""

import contextlib
import json
import subprocess
import sys

import pytest
from acceptance import EXPECTED, Acceptance, shortfall
from serving import ROOT, serve
from support.servers import ENVIRONMENT, UNCOUNTED, warm_start

PROFILES = json.loads(EXPECTED.read_text())
BUNDLED = [name for name, profile in PROFILES.items() if profile["server_args"][-1].startswith("models/")]


def test_the_arithmetic():
    measured = Acceptance(drafted_per_step=3, kept=[2, 1, 0, 1])
    assert measured.drafts == 4 and measured.accepted_tokens == 4
    assert measured.accept_length == 2.0 and measured.rate == pytest.approx(1 / 3)
    assert measured.by_position == [0.5, 0.25, 0.25]
    assert shortfall("set", measured, {"accept_length": 2.05, "floor": 0.95}) is None
    assert "2.000 is below 2.090" in shortfall("set", measured, {"accept_length": 2.2, "floor": 0.95})


@pytest.mark.server
@pytest.mark.parametrize(
    "profile",
    # Every cycle of the others is compared elsewhere: test_lossless_hybrid.py, test_speculators_parity.py.
    [pytest.param(name, marks=() if name == "tiny-dflash" else pytest.mark.long) for name in BUNDLED],
)
def test_a_bundled_draft(profile, servers):
    """Measure a draft; the harness starts the first one's server by itself."""
    servers.close()
    if profile == BUNDLED[0]:
        check(profile)
        return
    arguments = [*PROFILES[profile]["server_args"], "--max-running-requests", "96"]
    if not (ROOT / arguments[1]).exists():
        pytest.skip(f"no {arguments[1]}: `make model` fetches it")
    with contextlib.chdir(ROOT), serve(*arguments, env=ENVIRONMENT | UNCOUNTED, start=warm_start()) as server:
        check(profile, "--url", server.url)


def check(profile: str, *more: str) -> None:
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
