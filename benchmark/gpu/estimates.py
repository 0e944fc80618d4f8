"""Estimated GPU time of the parts, from the run of 2026-11-23 on an H100.

Measured figures are from benchmark/results/2026-11-23-h100.json. Reported times of a cycle have been cleared
of prefill, which was estimated. A figure marked "est" was not measured.
"""

from gpu.servers import ADAPTIVE_DFLASH, BUILT_IN_DFLASH, DFLASH, NO_SPECULATION

# Servers took 84 to 105 s to start, with ten sizes of graphs and a warm-up request; est with five and none.
START_S = 75
ADAPTIVE_START_S = 90  # est; it captures more graphs, and measures them
BUNDLED_START_S = 45  # est; a tiny model
LARGE_START_S = 100  # est; 54 GB of dummy weights
COMPILED_START_S = 140  # est; torch.compile
STOP_S = 3
PREFILL_S = 0.0285  # est; 1024 tokens of an 8B target
# Milliseconds of a decode cycle, by requests.
CYCLE_MS = {
    NO_SPECULATION: {1: 6.85, 4: 7.3, 16: 8.0, 48: 10.2},
    BUILT_IN_DFLASH: {1: 10.9, 4: 11.2, 16: 15.2, 48: 30.1},
    DFLASH: {1: 10.8, 4: 11.4, 16: 14.4, 48: 29.1},
    ADAPTIVE_DFLASH: {1: 9.2, 4: 9.7, 16: 11.1, 48: 15.0},
}
TOKENS_PER_CYCLE = {NO_SPECULATION: 1.0, BUILT_IN_DFLASH: 6.5, DFLASH: 6.5, ADAPTIVE_DFLASH: 1.0}
KV_BYTES, READ_BYTES_PER_S = 147_456, 2.2e12  # a token's in Qwen3-8B; as the plain step read its weights
LARGE = 54 / 16.4  # the bytes of the 27B target's weights over those of the 8B target
PROFILE_S = 9  # est; 30 steps, their trace written and read
TEXTS_S = 25  # est; the bundled pair's held-out texts
HANDSHAKE_S = 0.5  # of a load: cache flushed, counters read
# Before plan A: a machine started, packs transferred and unpacked, a smoke test (est).
PREPARATION_S = 210

# Seconds of checks, two at a time.
CHECKS = {
    "tests/test_kernels": 94,
    "tests/test_penalty_kernels": 51,
    "tests/test_rejection_kernel": 13,
    "tests/test_selector_walk": 61,
    "rehearsed/fa3-dflash": 109,
    "rehearsed/fa3-peagle": 109,
    "rehearsed/probabilistic": 110,
    "rehearsed/window": 111,
    "rehearsed/hybrid": 269,  # with the target's answers, as flashinfer-dflash's 255 on a fresh machine
}
CHECK_S = 110  # est; of a check that never ran


def cycle_s(variant: str, requests: int, context: int) -> float:
    """Estimate a cycle. Beyond the largest measured load it grows with the requests."""
    measured = CYCLE_MS[variant]
    at_most = [load for load in measured if load >= requests]
    nearest = min(at_most) if at_most else max(measured)
    ms = measured[nearest] * max(1.0, requests / nearest)
    return ms / 1e3 + requests * max(0, context - 1024) * KV_BYTES / READ_BYTES_PER_S


def load_s(
    variant: str, requests: int, context: int, new_tokens: tuple[int, int], repeats: int, scale: float = 1.0
) -> float:
    """Estimate `measure.measure_load`: prefill, a warm-up with the short answers, then the repeats."""
    prefill = requests * PREFILL_S * context / 1024 * (1 + context / 32_768)  # attention grows quadratically
    short, long = new_tokens
    cycles = (short + repeats * (short + long)) / TOKENS_PER_CYCLE[variant]
    return HANDSHAKE_S + scale * (prefill + cycles * cycle_s(variant, requests, context))


def check_s(name: str) -> int:
    return CHECKS.get(name, CHECK_S)
