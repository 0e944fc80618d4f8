"""What `make serve` shows of a start. server/test_documented_commands.py counts the lines of a real one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import quiet_start
from serving import ROOT

ON_CPU = f"sglang-dflash: no CUDA driver on this machine; {quiet_start.ON_CPU} for sgl_kernel."
IMPORT = "[2026-01-01 00:00:00] Ignore import error when loading sglang.srt.models.grok: no kernel"
START = [
    ON_CPU,
    "/x/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported, but ...",
    "  Example: sglang serve --model-path <model> [options]",
    "  warnings.warn(",
    "",
    IMPORT,
    "[2026-01-01 00:00:00] DFLASH: num_draft_tokens=8 counts the anchor",
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in <module>',
    "ValueError: an error of a request",
    "[2026-01-01 00:00:00] INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
    '[2026-01-01 00:00:00] INFO:     127.0.0.1:59864 - "POST /generate HTTP/1.1" 200 OK',
    f"[2026-01-01 00:00:00] {quiet_start.READY}",
    '[2026-01-01 00:00:01] INFO:     127.0.0.1:59864 - "POST /generate HTTP/1.1" 200 OK',
]
SHOWN = (0, 6, 7, 8, 9, 10, 12)
READY = START.index(f"[2026-01-01 00:00:00] {quiet_start.READY}") + 1


def lines_of(start: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines that are shown, and those that wait for a failure."""
    left_out: list[str] = []
    shown = list(quiet_start.shown([f"{line}\n" for line in start], left_out))
    return [line.removesuffix("\n") for line in shown], left_out


def test_a_start_on_a_cpu_has_what_concerns_its_user_and_errors():
    shown, left_out = lines_of(START)
    ours, rest = shown[len(SHOWN) : len(SHOWN) + 3], shown[len(SHOWN) + 3 :]
    assert shown[: len(SHOWN)] == [START[n] for n in SHOWN]
    assert "http://127.0.0.1:8000" in ours[0] and ours[2].endswith("http://127.0.0.1:8000/server_info")
    assert ours[1].startswith("curl http://127.0.0.1:8000/v1/chat/completions -H ")
    assert rest == START[READY:] and not left_out, "a server that is ready shows everything"


def test_elsewhere_nothing_is_left_out():
    shown, _ = lines_of(START[1:])
    assert [line for line in shown if line in START] == START[1:]


def run(program: str) -> subprocess.Popen:
    script = Path(quiet_start.__file__)
    return subprocess.Popen(
        [sys.executable, script, "-u", "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize("status", [0, 3])
def test_a_start_that_fails_shows_what_was_left_out(status):
    done = run(f"print({ON_CPU!r}); print({IMPORT!r}); raise SystemExit({status})")
    output, _ = done.communicate(timeout=60)
    assert done.returncode == status
    assert output.splitlines()[0] == ON_CPU and (IMPORT in output) == (status != 0)


def test_a_server_is_ended_with_it():
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('ended'), sys.exit(0)))\n"
        "print('begun'); time.sleep(60)"
    )
    server = run(program)
    assert server.stdout.readline() == "begun\n"
    server.send_signal(signal.SIGTERM)
    output, _ = server.communicate(timeout=30)
    assert (output, server.returncode) == ("ended\n", 0)
