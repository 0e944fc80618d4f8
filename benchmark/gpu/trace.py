"""Decoding cycles in a torch profiler trace: GPU time, gaps, host calls."""

from collections import Counter, defaultdict
from collections.abc import Sequence

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CALLS = {"cuda_runtime", "cuda_driver"}
SHOWN_GAPS, SHOWN_KERNELS, SHOWN_CALLS = 5, 60, 8


def summarize(trace: dict, step: str) -> dict:
    """Average the cycles between the first and the last forward named `step`.

    trace: the decoded JSON of torch.profiler's export_chrome_trace. SGLang names each forward, such as
    step[VERIFY bs=4]. Returns, in us and per cycle:
      cycles: their number. wall_us, busy_us: a cycle's length and the GPU's busy time.
      graph_idle_us, host_gap_us: idle time between kernels of one launch (a CUDA graph), and between
        launches, when the GPU waits for the host.
      gaps: the longest gaps between launches, {"name": the GPU's work before and after, "times", "us"}.
      kernels: the GPU's work that takes longest, likewise. calls: the host's most frequent calls.
    Raises ValueError if the trace does not hold two such forwards with GPU work.
    """
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e["ts"])
    begins = [e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"] == step]
    work = [e for e in events if e.get("cat") in GPU_WORK]
    # From the GPU's first work after one forward's begin to that after another's: whole cycles.
    bounds = [next((e["ts"] for e in work if e["ts"] >= begin), None) for begin in (begins[:1] + begins[-1:])]
    if len(begins) < 2 or None in bounds or bounds[0] == bounds[1]:
        found = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        raise ValueError(f"no two {step!r} with GPU work in the trace, but {dict(found)}")

    count, (first, last) = len(begins) - 1, bounds
    inside = [e for e in work if first <= e["ts"] < last]
    kernels, gaps, in_graphs = defaultdict(list), defaultdict(list), 0.0
    latest = inside[0]  # the started item that ends last
    for item in [*inside[1:], {"name": "the next cycle", "ts": last, "dur": 0.0}]:
        gap = item["ts"] - latest["ts"] - latest["dur"]
        if gap > 0 and _launch(item) is not None and _launch(item) == _launch(latest):
            in_graphs += gap
        elif gap > 0:
            gaps[f"{_short(latest)} → {_short(item)}"].append(gap)
        latest = max(latest, item, key=lambda e: e["ts"] + e["dur"])
    for item in inside:
        kernels[_short(item)].append(item["dur"])
    waited = sum(map(sum, gaps.values()))
    called = Counter(e["name"] for e in events if e.get("cat") in HOST_CALLS and first <= e["ts"] < last)
    return {
        "cycles": count,
        "wall_us": (last - first) / count,
        "busy_us": (last - first - in_graphs - waited) / count,
        "graph_idle_us": in_graphs / count,
        "host_gap_us": waited / count,
        "gaps": _longest(gaps, count, SHOWN_GAPS),
        "kernels": _longest(kernels, count, SHOWN_KERNELS),
        "calls": {name: times / count for name, times in called.most_common(SHOWN_CALLS)},
    }


def _longest(groups: dict[str, list[float]], cycles: int, shown: int) -> Sequence[dict]:
    found = sorted(groups.items(), key=lambda item: -sum(item[1]))[:shown]
    return [{"name": name, "times": len(each) / cycles, "us": sum(each) / cycles} for name, each in found]


def _launch(event: dict) -> int | None:
    """Return the id of the host call that caused the work, shared by all kernels of a CUDA graph."""
    return event.get("args", {}).get("correlation")


def _short(event: dict) -> str:
    name = event["name"].removeprefix("void ")
    return name if len(name) <= 100 else name[:97] + "..."
