"""Check that no modules of the package import each other in a circle.

Usage: `python .ci/check_circles.py python/sglang [--late] [--rooms srt/speculative]`. Imports at module level
count, except those under `if TYPE_CHECKING`. With `--late`, imports inside functions count too. With
`--rooms`, the modules of each folder or file directly below the named folder count as one, and only imports
between them are looked at. Prints each circle. Exit status 1 if there is one.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = "sglang_dflash"

Graph = dict[str, set[str]]


def imported_names(body: Sequence[ast.AST], late: bool) -> Iterator[str]:
    """Yield the dotted names that statements import, those inside functions only if `late`."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_names(node.orelse, late)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_names(list(ast.iter_child_nodes(node)), late)


def read_graph(root: Path, late: bool) -> Graph:
    """Return the modules below a folder, each with those that it imports."""
    paths = {
        ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts)): path
        for path in root.rglob("*.py")
    }
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph: Graph = {}
    for module, path in paths.items():
        graph[module] = set()
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")).body, late):
            while name and name not in paths:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def join_rooms(graph: Graph, folder: str) -> Graph:
    """Return the graph of what is directly below a folder, such as `srt/speculative`."""
    depth = len(folder.split("/")) + 2
    prefix = f"{PACKAGE}.{folder.replace('/', '.')}."
    rooms: Graph = {}
    for module, imports in graph.items():
        if module.startswith(prefix):
            room = ".".join(module.split(".")[:depth])
            inner = {".".join(name.split(".")[:depth]) for name in imports if name.startswith(prefix)}
            rooms[room] = rooms.get(room, set()) | inner - {room}
    return rooms


def find_circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of several nodes (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            start = stack.index(node)
            if len(stack) > start + 1:
                circles.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return circles


def main() -> int:
    """Print the circles and return the exit status."""
    parser = argparse.ArgumentParser(description="Find circles of imports.")
    parser.add_argument("root", type=Path, help="the folder of the package")
    parser.add_argument("--late", action="store_true", help="count imports inside functions too")
    parser.add_argument("--rooms", metavar="FOLDER", help="look at the folders and files directly below it")
    args = parser.parse_args()
    graph = read_graph(args.root, args.late)
    if args.rooms is not None:
        graph = join_rooms(graph, args.rooms)
    circles = find_circles(graph)
    for circle in circles:
        print(f"circle of imports: {', '.join(circle)}")
    print(f"{len(graph)} {'modules' if args.rooms is None else 'rooms'}, {len(circles)} circles.")
    return int(bool(circles))


if __name__ == "__main__":
    sys.exit(main())
