"""Let the trainer of `speculators`, which requires an accelerator, run on a CPU.

Python imports this file at its start with PYTHONPATH=examples/own_traffic/cpu.
"""

import torch

torch.accelerator.current_accelerator = lambda check_available=False: (
    None if check_available else torch.device("cpu")
)
torch.accelerator.is_available, torch.accelerator.synchronize = lambda: False, lambda device=None: None
for kind in (torch.Tensor, torch.nn.Module):  # the trainer moves everything to device 0
    kind.to = lambda self, *a, to=kind.to, **k: to(
        self, *(["cpu", *a[1:]] if a and type(a[0]) is int else a), **k
    )
