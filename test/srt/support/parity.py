"""Comparison of a server's answers with the target's own: tokens, text and finish reasons."""

import json
import math
from collections.abc import Sequence

# In float32, one logit computed in two batch shapes differs by about 1e-6, and the gap of two by twice that.
FLOAT32_TIE = 1e-5


def near_tie(reference_answer: dict, position: int) -> float:
    """Return the log probability gap of the target's best two tokens at an output position."""
    top = reference_answer["meta_info"]["output_top_logprobs"][position] or []
    values = [value for value, *_ in top if value is not None]
    return values[0] - values[1] if len(values) > 1 else math.inf


def undecided_from(reference_answer: dict) -> int | None:
    """Return the first position at which float32 cannot separate the best two tokens.

    From there on the target has no single answer: it depends on the order of additions. The position is
    known before any tested server answers.
    """
    count = len(reference_answer["meta_info"]["output_top_logprobs"])
    return next((i for i in range(count) if near_tie(reference_answer, i) < FLOAT32_TIE), None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first differing entry, or None if both are equal."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(requests: Sequence[dict], answers: Sequence[dict], expected: Sequence[dict]) -> list[dict]:
    """Return every request whose output ids, text or finish reason is not the reference's.

    Output after an undecided position is not compared.
    """
    found = []
    for request, got, want in zip(requests, answers, expected, strict=True):
        position = first_difference(got["output_ids"], want["output_ids"])
        reasons = [answer["meta_info"]["finish_reason"] for answer in (got, want)]
        if position is None and got["text"] == want["text"] and reasons[0] == reasons[1]:
            continue
        undecided = undecided_from(want)
        if position is not None and undecided is not None and position >= undecided:
            continue
        inside = position is not None and position < len(want["output_ids"])
        found.append(
            {
                "position": position,
                "gap": near_tie(want, position) if inside else None,
                "request": request,
                "got": (got["output_ids"], got["text"], reasons[0]),
                "want": (want["output_ids"], want["text"], reasons[1]),
            }
        )
    return found


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
