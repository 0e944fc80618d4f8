"""Muon (K. Jordan, 2024) whose iteration runs in the dtype of this CPU's passes."""

import math

import torch
from pass_dtype import PASS_DTYPE

QUINTIC = 3.4445, -4.7750, 2.0315  # from the same source: a steep slope at zero, about 1 after five steps


def orthogonalize(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return about U @ V.T of a matrix whose singular value decomposition is U, S, V."""
    x = update.to(PASS_DTYPE)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """The rule of `torch.optim.Muon`, which iterates in bfloat16 on every CPU."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                buffer.lerp_(matrix.grad, 1 - momentum)
                update = orthogonalize(matrix.grad.lerp(buffer, momentum))
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-lr * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))
