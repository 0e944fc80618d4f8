"""The launch lists by kind of launch.

`python test/srt/support/rehearsal/launch_table.py` prints the table of benchmark/results/launches.md.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

LISTS = Path(__file__).parent / "launch_lists"
_OUR_FILES = {path.name for path in (Path(__file__).parents[4] / "python").rglob("*.py")}
# What a greedy step may launch outside its graphs beside SGLang's own: its graphs' inputs and its attention's
# metadata.
MOST_LAUNCHES = 8

_METADATA_FILES = (
    "flashinfer_backend.py",
    "flashinfer_plans.py",
    "metadata.py",
    "kv_index_translator.py",
    "prefill.py",
    "page.py",
)
_METADATA_FUNCTIONS = ("generate_attn_arg_prefill", "pack_blocks")
# An operation on host tensors has one in its line.
_ON_HOST = re.compile(r"host|_cpu|\bint\(")


def kind_of(operation: str) -> str:
    """Return the kind: graph, input, host, metadata or launch.

    An input is copied into a graph's buffers; metadata is attention's.
    """
    name, _, line = operation.partition(" <- ")
    if name.startswith("replay:"):
        return "graph"
    if line.startswith(("cuda_graph_buffer_registry.py", "decode_cuda_graph_runner.py")):
        return "input"
    if _ON_HOST.search(line) and name != "flashinfer:plan":
        return "host"
    if line.startswith(_METADATA_FILES) or any(function in line for function in _METADATA_FUNCTIONS):
        return "metadata"
    return "launch"


def summary(operations: Mapping[str, int]) -> list[str]:
    """Return a launch list: a line for each name, with its count, whose line calls it, and its kind."""
    counts: Counter[str] = Counter()
    for operation, count in operations.items():
        counts[shown(operation)] += count
    return sorted(f"{count} {operation}" for operation, count in counts.items())


def shown(operation: str) -> str:
    """Return what the lists show of an operation: they outlast a change of the calling line."""
    name, _, line = operation.partition(" <- ")
    whose = "ours" if line.partition(" ")[0] in _OUR_FILES else "SGLang's"
    return f"{whose} {kind_of(operation)} {name}"


def counts_of(path: Path) -> Counter[str]:
    """Count a list's operations by kind."""
    counts: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        times, _, kind, _ = line.split(" ", 3)
        counts[kind] += int(times)
    return counts


def table() -> str:
    rows = ["| configuration | launches | attention metadata | host operations |", "|---|---:|---:|---:|"]
    for path in (
        *sorted(LISTS.glob("*.txt")),
        *sorted(LISTS.glob("*/*.txt")),
    ):  # ours, and the built-in worker's
        counts = counts_of(path)
        name = path.relative_to(LISTS).with_suffix("").as_posix()
        rows.append(f"| {name} | {counts['launch']} | {counts['metadata']} | {counts['host']} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
