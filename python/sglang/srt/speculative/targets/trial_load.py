"""A trial of loading weights: it raises what the load would raise, and writes nothing.

SGLang checks names and shapes while it copies, so a wrong tensor would leave half an update behind.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _WithoutWrites(TorchDispatchMode):
    """Skips operators that write to a model's tensors, and checks the shapes of copies."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for parameter, argument in zip(func._schema.arguments, args, strict=False):
            if parameter.alias_info is None or not parameter.alias_info.is_write:
                continue
            written = argument if isinstance(argument, list | tuple) else [argument]
            if any(self._is_kept(tensor) for tensor in written):
                if func is torch.ops.aten.copy_.default:
                    args[1].expand(argument.shape)
                return argument if func._schema.returns else None
        return func(*args, **(kwargs or {}))

    def _is_kept(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self._storages


@contextmanager
def without_writes(model: torch.nn.Module) -> Iterator[None]:
    """Keep a model's parameters and buffers as they are while a loader runs.

    Some loaders (DeepSeek's) copy in threads, which a dispatch mode does not reach. They run in this thread.
    """
    loader, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def run_here(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Future:
        if threading.get_ident() != loader:
            return submit(pool, function, *args, **kwargs)
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = run_here  # type: ignore[method-assign, assignment]
    try:
        with _WithoutWrites(model):
            yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
