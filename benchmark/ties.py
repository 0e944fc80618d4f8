"""Comparison of answers with the target's own, up to its near ties.

In float32, the same logit computed in batches of another shape differs in its last bits. Where the target's
best two tokens are closer than that, its greedy answer depends on the order of additions, and nothing behind
that position can be compared. The position is known from plain SGLang's log probabilities alone, before any
other server answers.
"""

import math
from collections.abc import Sequence

# In float32, one logit of the bundled tiny target, computed in two batch shapes, differs by about 1e-6, and
# the gap of two by twice that.
FLOAT32_TIE = 1e-5


def near_tie(reference_answer: dict, position: int) -> float:
    """Return the log probability gap of the target's best two tokens at an output position."""
    top = reference_answer["meta_info"]["output_top_logprobs"][position] or []
    values = [value for value, *_ in top if value is not None]
    return values[0] - values[1] if len(values) > 1 else math.inf


def undecided_from(reference_answer: dict, tie: float = FLOAT32_TIE) -> int | None:
    """Return the first position at which float32 cannot separate the best two tokens.

    From there on the target has no single answer: it depends on the order of additions. The position is
    known before any tested server answers.
    """
    count = len(reference_answer["meta_info"]["output_top_logprobs"])
    return next((i for i in range(count) if near_tie(reference_answer, i) < tie), None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first differing entry, or None if both are equal."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(
    requests: Sequence[dict], answers: Sequence[dict], expected: Sequence[dict], tie: float = FLOAT32_TIE
) -> list[dict]:
    """Return every request whose output ids, text or finish reason is not the reference's.

    Output after an undecided position is not compared.
    """
    found = []
    for request, got, want in zip(requests, answers, expected, strict=True):
        position = first_difference(got["output_ids"], want["output_ids"])
        reasons = [answer["meta_info"]["finish_reason"] for answer in (got, want)]
        if position is None and got["text"] == want["text"] and reasons[0] == reasons[1]:
            continue
        undecided = undecided_from(want, tie)
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


def rounding(answers: Sequence[dict], others: Sequence[dict]) -> float:
    """Return the largest change of a gap between two servings of the same requests by the same server.

    Positions are compared up to the first different token.
    """
    changes = [0.0]
    for answer, other in zip(answers, others, strict=True):
        different = first_difference(answer["output_ids"], other["output_ids"])
        count = len(answer["output_ids"]) if different is None else different
        gaps = ((near_tie(answer, i), near_tie(other, i)) for i in range(count))
        changes += [abs(a - b) for a, b in gaps if math.isfinite(a) and math.isfinite(b)]
    return max(changes)
