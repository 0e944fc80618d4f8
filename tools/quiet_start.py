"""Run a server, and show of a start on a CPU what says something to its user.

    python tools/quiet_start.py -m sglang.launch_server ARGUMENTS

Left out, before the server is ready: lines of SGLang about kernels of other devices, models that cannot be
imported, and its own steps. If the start fails, they are shown after all. At the end three lines say where
the server is. `make serve` alone uses this.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator

ON_CPU = "serving on the CPU with PyTorch stand-ins"
READY = "The server is fired up and ready to roll!"
ADDRESS = re.compile(r"Uvicorn running on (https?)://(\S+):(\d+)")
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
# Each belongs to one message of SGLang.
LEFT_OUT = re.compile(
    # another way to start; sources of warnings
    r"UserWarning: 'python -m sglang.launch_server' is still supported|^  Example: sglang serve --model-path"
    r"|^  warnings\.warn\("
    # other devices
    r"|UserWarning: Only CUDA, .* support (AWQ|GGUF)|UserWarning: Triton is not supported on current platform"
    r"|CPU device enabled, using torch native backend|Cannot detect CUDA architecture"
    r"|[Cc]uda graph is disabled because|Disable prefill CUDA graph because"
    r"|init_cpu_threads_env and shared memory based AllReduce is disabled|Fail to set RLIMIT_NOFILE"
    # models of other requests
    r"|Ignore import error when loading sglang\.srt\.models\."
    # steps; all arguments are at /server_info
    r"|\] server_args=\{|Init parallel (begin|ends)|init_threads_binding|Memory baseline taken"
    r"|Memory pool end|Load weight begin|Multi-thread loading shards"
    r"|Overriding draft attention backend to torch_native|Init Unified Radix Cache"
    r"|Tree cache initialized|Engine startup timings"
    r"|INFO:     (Started server process|Waiting for application startup|Application startup complete)"
    # the request that SGLang warms up with
    r'|"(GET /model_info|POST /generate|POST /freeze_gc) HTTP|\] Prefill batch, #new-seq: 1,'
)
QUESTION = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'


def shown(lines: Iterable[str], left_out: list[str]) -> Iterator[str]:
    """Return the lines to show, and three more once the server is ready.

    Args:
        lines: a server's output, each with its end.
        left_out: takes the lines that are not shown. It is emptied when the server is ready.
    """
    is_on_cpu, url = False, "http://127.0.0.1:30000"
    lines = iter(lines)
    for line in lines:
        is_on_cpu |= ON_CPU in line
        if match := ADDRESS.search(line):
            scheme, host, port = match.groups()
            url = f"{scheme}://{EVERYWHERE.get(host, host)}:{port}"
        if is_on_cpu and (line.isspace() or LEFT_OUT.search(line)):
            left_out.append(line)
            continue
        yield line
        if READY in line:
            left_out.clear()
            yield f"The server is at {url}. Ask it:\n"
            yield f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{QUESTION}'\n"
            yield f"Tokens a cycle, after the first 40 cycles: avg_spec_accept_length at {url}/server_info\n"
            break
    yield from lines


def main() -> int:
    """Return the server's exit status."""
    server = subprocess.Popen(
        [sys.executable, *sys.argv[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal interrupts the server too
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    assert server.stdout is not None
    left_out: list[str] = []
    for line in shown(server.stdout, left_out):
        print(line, end="", flush=True)
    status = server.wait()
    if status and left_out:
        print("The start failed. Lines that were left out:", *left_out, sep="\n", end="", flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
