"""The fork server that starts the tests' servers (support/warm_start.py).

Here it has no SGLang in it.
"""

import json
import os
import tempfile
from collections.abc import Iterator

import pytest
from support.warm_start import ForkedProcess, ForkServer

# A main program that spawns one process, which answers over a connection: a file descriptor passed on.
SPAWN = """
import json, multiprocessing, os
context = multiprocessing.get_context("spawn")
ours, theirs = context.Pipe()
code = "import multiprocessing as mp, os; found = os.getpid(), os.getppid(), os.environ['COLOUR']; "
code += "connection.send((*found, mp.parent_process().pid))"
child = context.Process(target=exec, args=(code, {"connection": theirs}))
os.environ["COLOUR"] = "green"
child.start()
print(json.dumps([os.getpid(), child.pid, *ours.recv()]))
child.join()
raise SystemExit(child.exitcode)
"""


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return ForkServer.start({"SHAPE": "round"}, modules=["colorsys"])


@pytest.fixture
def log() -> Iterator:
    with tempfile.NamedTemporaryFile("w+b") as file:
        yield file


def output(process: ForkedProcess, log) -> str:
    """Wait for the process; return what it wrote."""
    process.wait()
    log.seek(0)
    return log.read().decode()


def test_a_fork_is_a_fresh_process_of_this_one(server, log, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = "os.getpid(), os.getppid(), os.getsid(0), os.getcwd(), sys.argv[1:], 'colorsys' in sys.modules"
    code = f"import json, os, sys; print(json.dumps([{found}, os.environ['SHAPE'], os.environ['COLOUR']]))"
    process = server.run_main(["-c", code, "--flag", "7"], {"COLOUR": "red"}, log)
    pid = process.pid
    want = [pid, os.getpid(), pid, str(tmp_path), ["--flag", "7"], True, "round", "red"]
    assert json.loads(output(process, log)) == want and process.returncode == 0
    assert "COLOUR" not in os.environ


@pytest.mark.parametrize(
    "code, status, text",
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no such flag')", 1, "no such flag\n"),
        ("{}['missing']", 1, "KeyError: 'missing'\n"),
    ],
)
def test_exit_codes(code, status, text, server, log):
    process = server.run_main(["-c", code], {}, log)
    written = output(process, log)
    assert (written.endswith(text) if text else written == "") and process.returncode == status


def test_a_spawned_process_is_forked_too(server, log):
    """It has the right parent, the environment of that moment, and its connection."""
    process = server.run_main(["-c", SPAWN], {"COLOUR": "red"}, log)
    written = output(process, log)
    assert process.returncode == 0, written
    parent, child, *answer = json.loads(written)
    assert parent == process.pid and answer == [child, parent, "green", parent]
