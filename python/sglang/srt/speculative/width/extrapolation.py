"""Costs of loads that start-up had no time to measure."""

import numpy as np
from scipy.optimize import nnls


def extrapolate(seconds: np.ndarray, loads: list[int], slots: np.ndarray) -> np.ndarray:
    """Append seconds of loads that were not measured.

    A forward takes a + b n + c r seconds for n requests of r rows in all. The two largest loads measured give
    a, b and c, none of which is negative. One load cannot tell b from a: b is then 0.

    Args:
        seconds: of the first loads. [M, W]
        loads: numbers of requests, ascending. [L]
        slots: rows of each request. [W]

    Returns:
        Seconds of all loads. [L, W]
    """
    if len(seconds) == len(loads):
        return seconds
    terms = np.array([[(1, n, n * rows) for rows in slots] for n in loads], dtype=float)
    terms[:, :, 1] *= len(seconds) > 1
    largest = slice(max(len(seconds) - 2, 0), len(seconds))
    known = seconds[largest].reshape(-1, 1)
    factors, _ = nnls(terms[largest].reshape(-1, 3) / known, np.ones(len(known)))
    return np.concatenate((seconds, terms[len(seconds) :] @ factors))
