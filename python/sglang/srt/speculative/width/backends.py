"""Rows of the verify forward for a backend that takes any rows, as ours on a CPU does."""

from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.width.row_graphs import PreparedLayout


def captured_sizes(runner: Any) -> list[int]:
    """Return the batch sizes of the runner's CUDA graphs, ascending, if any."""
    return sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or [])


class AnyRows:
    """A backend without graphs, which takes any rows of each request.

    `has_layouts` says whether the target's layers read SGLang's layout of the rows.
    """

    def __init__(self, has_layouts: bool = False):
        self._has_layouts = has_layouts

    def follow(self, lengths: np.ndarray, needs_rectangle: bool = False) -> tuple[int, VerifyRows]:
        """Return the width and rows of a cycle that verifies `lengths` drafted tokens, [n].

        With `needs_rectangle`, all requests verify as many as the one that verifies most.
        """
        width = int(lengths.max()) + 1
        if needs_rectangle:
            lengths = np.full_like(lengths, width - 1)
        layout = None
        if self._has_layouts and not (lengths == width - 1).all():
            counts = (lengths + 1).tolist()
            layout = PreparedLayout.of(counts, sum(counts), "cpu")
        return width, VerifyRows(len(lengths), width, lengths, layout=layout)
