"""The choice between a Triton kernel and its PyTorch twin."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def with_twin(twin: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function that launches a kernel call the twin where its tensors are not on a GPU.

    The twin takes the same arguments. The launch alone is the function's `__wrapped__`.
    """

    def decorate(launch: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(launch)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            return run.__wrapped__(*args, **kwargs) if tensor.is_cuda else twin(*args, **kwargs)

        return run

    return decorate
