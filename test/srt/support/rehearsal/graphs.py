"""A CUDA graph for CPU tensors.

Capture records every operation with the memory it reads and writes; replay runs them again. As in a real
graph, addresses, Python numbers and control flow are frozen. Memory from before the capture is kept by
address alone: if its owner released it, the replay fails instead of reading what is there now. Memory from
within the capture belongs to the graph. Real graphs share one pool, where a graph may have its results in the
memory of another one's. So each replay first overwrites, with NaN, the memory of this graph and of every
other: nothing of an earlier replay can be read.

A kernel (`kernel`) is one operation, which reads at each replay what its arguments hold.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.rehearsal import report
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operations that read a value on the host, or whose result's shape depends on one.
HOST_READS = "_local_scalar_dense item nonzero masked_select is_nonzero equal _unique2 unique_dim".split()
_recording: "Recorder | None" = None
_captured: list["Recorder"] = []  # all graphs, which share their memory
_written: list["Recorder"] = []  # graphs of the last replay, whose memory holds what it left


def _has_mask(args: Any) -> bool:
    """Return whether a boolean mask is an index: its values then decide the result's size."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)
        for leaf in tree_leaves(args[1:2])
    )


class CaptureError(RuntimeError):
    """An operation that is not possible while a stream is capturing."""


class StaleRead(RuntimeError):
    """A read by a graph of memory that was released since its capture."""


class Recorder(TorchDispatchMode):
    """A graph being captured.

    nodes: what to run, in order. own: storages made during the capture, by address.
    """

    def __init__(self):
        super().__init__()
        self.nodes: list[tuple[str, Callable[[], None]]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.foreign: dict[int, tuple[StorageWeakRef, str]] = {}
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in HOST_READS or name.startswith("index") and _has_mask(args):
            raise CaptureError(f"operation not permitted when stream is capturing: {func}")
        frozen_args, frozen_kwargs = self._freeze(name, (args, kwargs))
        out = func(*args, **kwargs)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self.nodes.append((name, lambda: func(*frozen_args, **frozen_kwargs)))
            return out
        results = func._schema.returns
        if results and all(r.alias_info is not None for r in results):
            return out  # a view
        made = self._adopt(out)
        if name.startswith(("empty", "new_empty")):
            return out

        def again():
            new = [
                leaf
                for leaf in tree_leaves(func(*frozen_args, **frozen_kwargs))
                if isinstance(leaf, torch.Tensor)
            ]
            for old, value in zip(made, new, strict=True):
                old.copy_(value)

        self.nodes.append((name, again))
        return out

    def run_kernel(self, name: str, body: Callable, args: tuple, kwargs: dict) -> Any:
        frozen_args, frozen_kwargs = self._freeze(name, (args, kwargs))
        self.paused = True
        try:
            out = body(*args, **kwargs)
        finally:
            self.paused = False
        # Results in memory that was an argument need no copy.
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t.untyped_storage().data_ptr() not in self.foreign | self.own for t in made]
        self._adopt([t for t, is_fresh in zip(made, fresh, strict=True) if is_fresh])

        def again():
            new = [t for t in tree_leaves(body(*frozen_args, **frozen_kwargs)) if isinstance(t, torch.Tensor)]
            for old, value, is_fresh in zip(made, new, fresh, strict=True):
                if is_fresh:
                    old.copy_(value)

        self.nodes.append((name, again))
        return out

    def forget(self) -> None:
        """Overwrite the graph's own memory."""
        for storage in self.own.values():
            storage.fill_(0xFF)

    def run(self, role: str, shape_key: Any = "") -> None:
        """Run the operations again."""
        for owner, reader in self.foreign.values():
            if owner.expired():
                raise StaleRead(
                    f"{role} {shape_key}: {reader} reads memory that was not kept since the capture"
                )
        for _, run in self.nodes:
            run()

    def _adopt(self, out: Any) -> list[torch.Tensor]:
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            self.own[storage.data_ptr()] = storage
        return made

    def _freeze(self, name: str, arguments: Any) -> Any:
        """Return a kernel launch's arguments: addresses of what is not the graph's own."""

        def freeze(value):
            if not isinstance(value, torch.Tensor) or not value.numel():
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() in self.own:
                return value
            self.foreign.setdefault(storage.data_ptr(), (StorageWeakRef(storage), name))
            raw = torch._C._construct_storage_from_data_pointer(
                storage.data_ptr(), value.device, storage.nbytes()
            )
            return torch.empty(0, dtype=value.dtype).set_(
                raw, value.storage_offset(), value.size(), value.stride()
            )

        return tree_map(freeze, arguments)


def forget_all(graphs: Sequence[Recorder]) -> None:
    """Overwrite the memory of all graphs before these are replayed together."""
    for graph in {id(graph): graph for graph in (*_written, *graphs)}.values():
        graph.forget()
    _written[:] = graphs


def begin(recorder: Recorder) -> None:
    """Record operations from here on."""
    global _recording
    _recording = recorder
    recorder.__enter__()


def end(recorder: Recorder) -> None:
    """Record no further operations."""
    global _recording
    recorder.__exit__(None, None, None)
    _recording = None
    _captured.append(recorder)


def is_in_pool(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in the memory of graphs."""
    address = tensor.untyped_storage().data_ptr()
    return any(address in graph.own for graph in _captured)


def kernel(name: str, body: Callable) -> Callable:
    """Wrap `body` as one operation of a graph that is being captured; otherwise just run it."""

    def launch(*args, **kwargs):
        if _recording is None or _recording.paused:
            return body(*args, **kwargs)
        return _recording.run_kernel(name, body, args, kwargs)

    return launch


class GraphBackend:
    """Replacement for SGLang's FullCudaGraphBackend."""

    replays = {"target": 0, "draft": 0}

    def __init__(self, runner):
        self._role = "draft" if runner.model_runner.is_draft_worker else "target"
        self._graphs: dict[Any, Recorder] = {}
        self._outputs: dict[Any, Any] = {}

    @contextlib.contextmanager
    def capture_session(self, stream):
        yield

    @contextlib.contextmanager
    def replay_session(self):
        yield

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None) -> None:
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        recorder = Recorder()
        begin(recorder)
        try:
            self._outputs[shape_key] = forward_fn()
        finally:
            end(recorder)
        self._graphs[shape_key] = recorder
        operations = Counter(name for name, _ in recorder.nodes)
        report.note("capture", role=self._role, shape=str(shape_key), operations=operations)

    def can_run(self, forward_batch, shape_key) -> bool:
        return shape_key in self._graphs

    def replay(self, shape_key, static_forward_batch, **kwargs) -> Any:
        graph = self._graphs[shape_key]
        forget_all([graph])
        graph.run(self._role, shape_key)
        self.replays[self._role] += 1
        return self._outputs[shape_key]

    def cleanup(self) -> None:
        self._graphs.clear()
        self._outputs.clear()
