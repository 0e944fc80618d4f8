"""Fork server: starts SGLang servers in seconds, from a process that has SGLang imported.

A server is three processes, and nearly all of its start is each of them importing SGLang. A *fork server*, a
process that has imported SGLang and done nothing else, forks them instead. The fork then runs what a fresh
interpreter would run: SGLang's main program with its own arguments and environment, or the pickled
`multiprocessing` process that a server spawns. A fork server loads no plugin and reads no setting, so a fork
is in the state of a fresh process after its imports.

SGLang's processes watch their parents, so a fork has to be its client's child. The fork server forks a
process that forks the requested one and ends. The orphan goes to its nearest ancestor that adopts orphans
(`PR_SET_CHILD_SUBREAPER`), which is the client. A server's main process has a separate fork server, forked
from the first one.

Settings that SGLang reads at import, such as the number of OpenMP threads, are the fork server's. A test that
sets another one starts its server cold (`serving.serve`).
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import context, forkserver, popen_fork, popen_forkserver, process, reduction, spawn
from pathlib import Path
from typing import BinaryIO

PR_SET_CHILD_SUBREAPER = 36
MAX_FDS = 64

# Imports of a server's three processes for the bundled models. This package's modules are left out: each
# process loads the plugin itself, as in a cold start.
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.models.registry",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.speculative.base_spec_worker",
    "sglang.srt.speculative.draft_worker_common",
    "sglang.srt.utils.hf_transformers_utils",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen3.configuration_qwen3",
    "xgrammar",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a child that another process forked."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process to end, and reap what is left of its process group."""
        code = self._wait(0)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)
        return code

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """A client's end of a fork server."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    @classmethod
    def start(cls, environment: dict[str, str], modules: Sequence[str] = MODULES) -> "ForkServer":
        """Start a process that imports `modules` and waits; it ends with this one."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *modules]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **environment})
        return cls(ours)

    def run_main(self, argv: Sequence[str], environment: dict[str, str], log: BinaryIO) -> ForkedProcess:
        """Run `python ARGV` (-m MODULE ... or -c CODE) in a separate session, output to `log`."""
        job = "main", (list(argv), {**os.environ, **environment}, os.getcwd())
        return ForkedProcess(self.fork(pickle.dumps(job), [log.fileno()]))

    def fork(self, job: bytes, fds: Sequence[int]) -> int:
        """Return the process id of a new child that runs `job` and holds copies of `fds`."""
        with self._lock:
            self._connection.sendall(struct.pack("!Q", len(job)))
            socket.send_fds(self._connection, [b"f"], fds)
            self._connection.sendall(job)
            [pid] = struct.unpack("!q", _read(self._connection, 8))
        if pid < 0:
            raise RuntimeError("the fork server could not fork")
        return pid


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _serve(connection: socket.socket) -> None:
    """Fork once per request, until the client closes the connection."""
    while True:
        try:
            [size] = struct.unpack("!Q", _read(connection, 8))
            _, fds, *_ = socket.recv_fds(connection, 1, MAX_FDS)
            job = _read(connection, size)
        except (EOFError, ConnectionError):
            os._exit(0)
        pid_reader, pid_writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            pid = os.fork()
            if pid == 0:
                for fd in (pid_reader, pid_writer):
                    os.close(fd)
                while os.getppid() == middle:  # SGLang would take its end for the parent's death
                    time.sleep(0.001)
                _end(functools.partial(_run, connection, *pickle.loads(job), fds))
            os.write(pid_writer, struct.pack("!q", pid))
            os._exit(0)
        os.close(pid_writer)
        os.waitpid(middle, 0)  # from here on the client is the child's parent
        answer = os.read(pid_reader, 8)
        for fd in (pid_reader, *fds):
            os.close(fd)
        connection.sendall(answer or struct.pack("!q", -1))


def _end(run) -> None:
    """End this process with `run`'s exit code.

    The interpreter is not torn down: with PyTorch imported, that takes seconds.
    """
    code = 1
    try:
        code = run() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _run(connection: socket.socket, kind: str, arguments: tuple, fds: list[int]) -> int | None:
    if kind == "spawned":
        connection.close()
        return _run_spawned(*arguments, fds)
    return _run_main(connection, *arguments, fds)


def _enter(environment: dict[str, str]) -> None:
    """Set this process's environment, and apply the server patch it names."""
    os.environ.update(environment)
    if "SERVER_PATCH" in environment:
        patches = Path(__file__).parent / "server_patches" / "sitecustomize.py"
        runpy.run_path(str(patches), run_name="server_patches")


def _run_main(connection: socket.socket, argv: list, environment: dict, folder: str, fds: list[int]) -> None:
    os.setsid()
    [log] = fds
    os.dup2(log, 1), os.dup2(log, 2)
    os.close(log)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:  # the new process's own fork server
        connection.close(), ours.close()
        _serve(theirs)
    connection.close(), theirs.close()
    os.chdir(folder)
    _enter(environment)
    _SpawnedPopen.server = ForkServer(ours)
    context.SpawnProcess._Popen = staticmethod(_SpawnedPopen)
    flag, program, *_ = argv
    sys.argv = argv[1:]
    sys.path.insert(0, folder)
    if flag == "-c":
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(program, run_name="__main__")
    # A returned main waits for its children, as an interpreter does at its end.
    for child in process.active_children():
        child.join()


class _SpawnedPopen(popen_fork.Popen):
    """`multiprocessing`'s spawn start method, through the fork server."""

    method = "spawn"
    DupFd = popen_forkserver.Popen.DupFd
    server: ForkServer

    def __init__(self, process_obj):
        self._fds: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process_obj) -> None:
        preparation = spawn.get_preparation_data(process_obj._name)
        # The main module is SGLang's, which the fork has imported, or this file.
        preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        job = "spawned", (data.getvalue(), dict(os.environ))
        self.pid = self.server.fork(pickle.dumps(job), self._fds)
        self.sentinel = os.pidfd_open(self.pid)


def _run_spawned(data: bytes, environment: dict, fds: list[int]) -> int:
    """Run the child's side of `multiprocessing.spawn`."""
    _enter(environment)
    forkserver._forkserver._inherited_fds = fds
    stream = io.BytesIO(data)
    process.current_process()._inheriting = True
    try:
        spawn.prepare(pickle.load(stream))
        process_obj = pickle.load(stream)
    finally:
        del process.current_process()._inheriting
    return process_obj._bootstrap()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when this process ends
    sys.path.remove(str(Path(__file__).parent))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection of every fork copies all of it
    _serve(connection)


if __name__ == "__main__":
    main()
