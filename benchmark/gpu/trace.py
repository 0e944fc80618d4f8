"""One decoding cycle in a torch profiler trace: GPU time, gaps, launches."""

import bisect
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_CALLS = {"cuda_runtime", "cuda_driver"}
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
STEP = "step["  # SGLang names each forward: step[VERIFY bs=4], step[DRAFT bs=4], step[DECODE bs=4]
SHOWN_GAPS, SHOWN_KERNELS = 5, 60
# Templates that every kernel of a library is launched through: only their arguments tell one from another.
WRAPPERS = re.compile(
    r"cutlass::(device_kernel|Kernel2?)$|enable_sm\w*$|(vectorized_|unrolled_|index_)?elementwise_kernel\w*$"
    r"|reduce_kernel$|gpu_kernel_impl\w*$"
)
PLAIN_TYPES = {
    "int",
    "bool",
    "float",
    "double",
    "char",
    "long",
    "unsigned",
    "void",
    "const",
    "short",
    "true",
    "false",
}


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill on the GPU; times in microseconds.

    launch: id of the host call that caused it, shared by all kernels of a CUDA graph.
    forward: the trace's event of the forward in which the host made that call.
    """

    name: str
    start: float
    end: float
    launch: int | None
    forward: dict | None


def summarize(trace: dict, step: str) -> dict:
    """Summarise cycles, each between the GPU's starts on two forwards named `step`.

    trace: the decoded JSON of torch.profiler's export_chrome_trace. Returns, in us and per cycle:
      cycles: their number.
      wall_us, busy_us: medians of a cycle's length and of the GPU's busy time.
      graph_idle_us, host_gap_us: medians of the idle time between kernels of one launch (a CUDA graph), and
        between launches, when the GPU waits for the host.
      kernels: of the GPU, copies and fills included. launches, waits: host calls, by name.
      forward_us: GPU time by the forward that launched it; "between": launched by no forward.
      gaps: the longest gaps between launches: the GPU's work before and after, count, duration.
      kernel_table: forward, name, count, duration of the SHOWN_KERNELS that take longest.
    Raises ValueError if the trace does not hold two such forwards.
    """
    events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e["ts"])
    calls = [e for e in events if e.get("cat") in HOST_CALLS]
    forwards = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    work = _gpu_work(events, calls, forwards)
    first = {}  # when a forward begins on the host -> on the GPU
    for item in work:
        if item.forward is not None and item.forward["name"] == step:
            first.setdefault(item.forward["ts"], item.start)
    if len(first) < 2:
        found = dict(Counter(e["name"] for e in forwards))
        raise ValueError(f"no two {step!r} with GPU work in the trace, but {found}")

    count = len(first) - 1
    walls, in_graph, between = [], [], []
    gaps, kernels, by_forward = defaultdict(list), defaultdict(list), Counter()
    starts = [item.start for item in work]
    for begin, end in pairwise(sorted(first.values())):
        inside = work[bisect.bisect_left(starts, begin) : bisect.bisect_left(starts, end)]
        idle = {True: 0.0, False: 0.0}  # by: within one launch
        latest = inside[0]  # the started item that ends last
        for item in [*inside[1:], Work(f"the next {step}", end, end, None, None)]:
            gap = item.start - latest.end
            if gap > 0:
                same_launch = item.launch is not None and item.launch == latest.launch
                idle[same_launch] += gap
                if not same_launch:
                    gaps[_short(latest.name), _short(item.name)].append(gap)
            latest = max(latest, item, key=lambda w: w.end)
        for item in inside:
            forward = item.forward["name"] if item.forward else "between"
            by_forward[forward] += item.end - item.start
            kernels[forward, _short(item.name)].append(item.end - item.start)
        walls.append(end - begin)
        in_graph.append(idle[True])
        between.append(idle[False])
    made = Counter(_short(e["name"]) for e in calls if min(first) <= e["ts"] < max(first))
    return {
        "cycles": count,
        "wall_us": statistics.median(walls),
        "busy_us": statistics.median(w - g - b for w, g, b in zip(walls, in_graph, between, strict=True)),
        "graph_idle_us": statistics.median(in_graph),
        "host_gap_us": statistics.median(between),
        "kernels": sum(map(len, kernels.values())) / count,
        "launches": {name: n / count for name, n in sorted(made.items()) if name.startswith(LAUNCHES)},
        "waits": {name: n / count for name, n in sorted(made.items()) if _waits(name)},
        "forward_us": {name: time / count for name, time in sorted(by_forward.items())},
        "gaps": [
            {"before": before, "after": after, "times": len(each) / count, "us": sum(each) / count}
            for (before, after), each in _longest(gaps, SHOWN_GAPS)
        ],
        "kernel_table": [
            {"forward": forward, "name": name, "times": len(each) / count, "us": sum(each) / count}
            for (forward, name), each in _longest(kernels, SHOWN_KERNELS)
        ],
    }


def _gpu_work(events: Sequence[dict], calls: Sequence[dict], forwards: Sequence[dict]) -> list[Work]:
    called_at = {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e.get("args", {})}
    work = []
    for event in events:
        if event.get("cat") in GPU_WORK:
            launch = event.get("args", {}).get("correlation")
            forward = _forward_at(forwards, called_at[launch]) if launch in called_at else None
            work.append(Work(event["name"], event["ts"], event["ts"] + event["dur"], launch, forward))
    return work


def _forward_at(forwards: Sequence[dict], ts: float) -> dict | None:
    """Find the forward that the host was in at `ts`; forwards do not nest."""
    index = bisect.bisect_right(forwards, ts, key=lambda e: e["ts"]) - 1
    return forwards[index] if index >= 0 and ts < forwards[index]["ts"] + forwards[index]["dur"] else None


def _waits(call: str) -> bool:
    return "Synchronize" in call or call == "cudaMemcpy"


def _longest(groups: dict, shown: int) -> list[tuple]:
    return sorted(groups.items(), key=lambda item: -sum(item[1]))[:shown]


def forwards(trace: dict) -> dict[str, int]:
    """Count a trace's forwards on the host, by name."""
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    return dict(Counter(name for name in names if name.startswith(STEP)))


def _short(name: str) -> str:
    """Return a kernel's name without template arguments and parameters.

    A wrapper's name is followed by the first name in its arguments that is none.
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    base = re.split(r"[<(]", name, maxsplit=1)[0].strip()
    if WRAPPERS.search(base):
        inner = re.findall(r"[A-Za-z_][\w:]*", name[len(base) :])
        told = [found for found in inner if found not in PLAIN_TYPES and not WRAPPERS.search(found)]
        base += f"<{told[0]}>" if told else ""
    return base if len(base) <= 120 else base[:117] + "..."
