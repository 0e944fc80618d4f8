"""Count the file hops of a decode cycle, up to the line that decides how many tokens are kept.

    python benchmark/trace_cycle.py            # two servers with the bundled pair on a CPU; a minute

A hop is a pair of files of this package: a function in one calls a function in the other, directly or through
other packages. Each pair counts once per cycle. The trace begins in `DFlashWorker.decode` and ends at the
call of `accept_matching_prefix`. The first server verifies whole blocks. The second has the settings of `make
serve`: adaptive width and copies. Of each server the longest trace after the warm-up is printed.
"""

import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from serving import DRAFT, ROOT, TARGET, WHOLE_BLOCKS, dflash_arguments, serve

import sglang_dflash
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

PACKAGE = str(Path(sglang_dflash.__file__).parent)
OBSERVERS = inspect.getfile(CycleObserver)
LAST_FUNCTION = "accept_matching_prefix"
WARM_UP_CYCLES = 20
NEW_TOKENS = 200
SERVERS = {"whole blocks": [WHOLE_BLOCKS], "make serve": ["--speculative-copy-ahead"]}


class CycleTrace(CycleObserver):
    """Profiles each cycle in the scheduler, and keeps the longest trace in the file that TRACE names."""

    def __init__(self) -> None:
        self._hops: dict[tuple[str, str], None] = {}  # in the order of the calls
        self._num_cycles = self._most = 0

    def on_begun(self, batch: Any) -> None:
        """Begin a trace. The worker calls this first in `decode`."""
        self._hops.clear()
        sys.setprofile(self._follow)

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if frame.f_code.co_filename == OBSERVERS:  # a server without observers calls none
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        assert caller is not None, "decode itself is in the package"
        if caller.f_code.co_filename != frame.f_code.co_filename:
            self._hops[caller.f_code.co_filename, frame.f_code.co_filename] = None
        if frame.f_code.co_name == LAST_FUNCTION:
            sys.setprofile(None)
            self._end()

    def _end(self) -> None:
        self._num_cycles += 1
        if self._num_cycles > WARM_UP_CYCLES and len(self._hops) > self._most:
            self._most = len(self._hops)
            lines = (" -> ".join(os.path.relpath(file, PACKAGE) for file in hop) for hop in self._hops)
            Path(os.environ["TRACE"]).write_text("\n".join(lines) + "\n")


def main() -> None:
    prompt = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    for name, flags in SERVERS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace"
            env = {
                "SGLANG_DFLASH_OBSERVERS": "trace_cycle:CycleTrace",
                "PYTHONPATH": str(ROOT / "benchmark"),
                "TRACE": str(file),
            }
            arguments = ["--model-path", TARGET, "--dtype", "float32", "--max-total-tokens", "8192"]
            with serve(*arguments, *dflash_arguments(DRAFT), *flags, env=env) as server:
                server.generate_many([{"text": prompt, "sampling_params": sampling}] * 2, 2)
            hops = file.read_text().splitlines()
        files = {file for hop in hops for file in hop.split(" -> ")}
        print(f"{name}: {len(hops)} hops in {len(files)} files")
        print("".join(f"  {hop}\n" for hop in hops), end="", flush=True)


if __name__ == "__main__":
    main()
