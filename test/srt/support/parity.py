"""Comparison of a server's answers with the target's own: tokens, text and finish reasons."""

import json
from collections.abc import Sequence

from ties import FLOAT32_TIE, differences, first_difference, near_tie, undecided_from

__all__ = ("FLOAT32_TIE", "assert_same", "differences", "first_difference", "near_tie", "undecided_from")


def assert_same(requests: Sequence[dict], answers: Sequence[dict], expected: Sequence[dict]) -> None:
    """Assert that no token, character or finish reason differs from the target's own."""
    found = differences(requests, answers, expected)
    lines = [
        f"first difference at position {d['position']}, the target's best two tokens are {d['gap']} apart\n"
        f"    request {json.dumps(d['request'])[:600]}\n    got     {d['got']}\n    wanted  {d['want']}"
        for d in found
    ]
    assert not found, f"{len(found)} of {len(requests)} answers are not the target's:\n" + "\n".join(
        lines[:5]
    )
