"""Launches of a decode step outside its graphs, and its host reads, by source line."""

import contextlib
import linecache
import sys
from collections import Counter
from pathlib import Path

from support.rehearsal import graphs, report
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Neither launches nor reads.
FREE = set(
    "view slice select unsqueeze expand detach as_strided squeeze split split_with_sizes unbind _unsafe_view "
    "alias transpose permute t empty empty_like empty_strided new_empty new_empty_strided _reshape_alias "
    "lift_fresh unfold".split()
)
# Read on the host without an operation, where the tensor lies there already.
_READS = {"tolist", "numpy", "cpu"}
_PACKAGES = "sglang", "sglang_dflash"
_OURS = ("/flashinfer/", *(f"/{package}/{part}/" for package in _PACKAGES for part in ("srt", "kernels")))
_TESTS = str(Path(__file__).parents[2])

_counting: "_Operations | None" = None


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.paused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        with self:  # in inference mode an operation that is made of others comes here whole
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        name = func._schema.name.split("::")[1]
        if name not in FREE:
            self.count(name)
        return func(*args, **kwargs)

    def count(self, name: str) -> None:
        self.seen[f"{name} <- {asking_line()}"] += 1


class _Reads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READS and _counting is not None and not _counting.paused:
            _counting.count(name)
        return func(*args, **(kwargs or {}))


def asking_line() -> str:
    """Return the innermost line of SGLang, FlashInfer or this project on the stack, as text.

    Line numbers would change too often.
    """
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _OURS) and not path.startswith(_TESTS):
            text = linecache.getline(path, frame.f_lineno).strip()
            return f"{Path(path).name} {frame.f_code.co_name}: {text}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def one_operation(name: str):
    """Count everything inside once, under this name."""
    counting = _counting
    if counting is None:
        yield
        return
    if not counting.paused:
        counting.count(name)
    counting.paused += 1
    try:
        yield
    finally:
        counting.paused -= 1


def in_decode_step() -> bool:
    """Return whether a decode step is being launched."""
    return _counting is not None


def watch_decode_steps(worker: type) -> None:
    """Report each decode step's graph replays, and every new set of operations."""
    replay = graphs.GraphBackend.replay
    decode = worker.decode
    known: set[frozenset] = set()

    def counted_replay(self, *args, **kwargs):
        report.order.append(self._role)
        with one_operation(f"replay:{self._role}"):
            return replay(self, *args, **kwargs)

    def watched(self, batch, *args, **kwargs):
        global _counting
        before = dict(graphs.GraphBackend.replays)
        _counting = _Operations()
        try:
            with _Reads(), _counting:
                result = decode(self, batch, *args, **kwargs)
        finally:
            counting, _counting = _counting, None
        replays = {role: count - before[role] for role, count in graphs.GraphBackend.replays.items()}
        report.note("step", bs=len(batch.reqs), replays=replays)
        operations = frozenset(counting.seen.items())
        if operations not in known:
            known.add(operations)
            report.note("operations", bs=len(batch.reqs), counts=counting.seen)
        return result

    graphs.GraphBackend.replay = counted_replay
    worker.decode = watched
