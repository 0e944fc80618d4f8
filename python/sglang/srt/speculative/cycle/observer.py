"""Public view of a cycle, for tests, benchmarks and profilers.

SGLANG_DFLASH_OBSERVERS names observers as `module:Class`, separated by commas. The scheduler's process
imports the modules and makes one object of each class. `worker.observers` takes more of them."""

import pkgutil
from typing import TYPE_CHECKING, Any

from sglang_dflash.srt.environ import DFlashOptions

if TYPE_CHECKING:
    import torch

    from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
    from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
    from sglang_dflash.srt.speculative.cycle.prompts import Prompts


class CycleObserver:
    """Called by the worker at each stage of a step. A subclass overrides the stages it needs.

    `batch` is the scheduler's, with its requests in `batch.reqs`. Tensors are valid during the call only: the
    next forward may overwrite them.

    Example:
        A file `kept_tokens.py` on the Python path. With `SGLANG_DFLASH_OBSERVERS=kept_tokens:KeptTokens` the
        scheduler prints a line per request and cycle. On a GPU `tolist` waits for the cycle::

            from sglang_dflash.srt.speculative.cycle.observer import CycleObserver


            class KeptTokens(CycleObserver):
                def on_accepted(self, batch, cycle, accepted):
                    kept, verified = accepted.accept_len.tolist(), cycle.layout.num_draft_tokens
                    for req, num_kept, num_verified in zip(batch.reqs, kept, verified, strict=True):
                        print(f"{req.rid}: {num_kept} of {num_verified} drafted tokens accepted")
    """

    def on_prefilled(self, batch: Any, prompts: "Prompts", aux_hidden: "torch.Tensor") -> None:
        """Note a prefill, with the target's captured states [n, num_aux * hidden]."""

    def on_begun(self, batch: Any) -> None:
        """Note that a decode step begins."""

    def on_length_chosen(self, batch: Any, verify_len: int) -> None:
        """Note how many slots of each block the step verifies, the anchor included."""

    def on_drafted(self, batch: Any, cycle: "Cycle", block: "DraftBlock") -> None:
        """Note a drafted block.

        If nothing is drawn, `block.tokens` after column 0 may be overwritten.
        """

    def on_verified(self, batch: Any, block: "DraftBlock", logits: "torch.Tensor") -> None:
        """Note the target's logits [T, vocab], which may be overwritten.

        Penalties and grammars are applied afterwards. The T rows are those of `cycle.layout`, as `on_drafted`
        got it: requests may verify different numbers of slots.
        """

    def on_accepted(self, batch: Any, cycle: "Cycle", accepted: "AcceptedBlocks") -> None:
        """Note which tokens are output."""

    def on_committed(
        self, batch: Any, cycle: "Cycle", aux_hidden: "torch.Tensor | None", accepted: "AcceptedBlocks"
    ) -> None:
        """Note the end of a step.

        Args:
            batch: the scheduler's.
            cycle: the step's blocks.
            aux_hidden: [T, num_aux * hidden], states of `cycle.layout`. None: the CUDA graph absorbed them.
            accepted: the step's output.
        """


def observers_from_environment() -> list[CycleObserver]:
    """Make the observers that the environment names."""
    return [pkgutil.resolve_name(name)() for name in DFlashOptions.OBSERVERS.get()]
