"""The ledger of what we reach for inside SGLang and FlashInfer, compared with our own source."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from sglang_diff.reaches import REACHES, Reach
from sglang_diff.source_tree import SourceTree
from support.releases import NEEDED_HERE, REACHES_HERE, needed_by

import sglang_dflash
from sglang_dflash.srt import reaches
from sglang_dflash.srt.plugins import compatibility
from sglang_dflash.srt.plugins.patches import all_patches
from sglang_dflash.srt.reaches import NEEDED, ON_CPU, ROWS, WAIT, missing_name

PACKAGE = Path(sglang_dflash.__file__).parent
# Attributes of Python's and PyTorch's objects, of the libraries beside SGLang, and of NamedTuples.
FOREIGN = {"__name__", "_StoreTrueAction", "_name_or_path", "_asdict", "_fields", "_replace"}
FOREIGN |= {"architectures", "data", "disabled", "excepthook", "globals", "handlers", "propagate"}
FOREIGN |= {"generation_config", "intermediate_size", "max_sequence_length"}
# Attributes of ours on functions and on objects of SGLang.
ADDED = {
    "draft_quantization",
    "draft_runner",
}
ADDED |= {"wrapper", "rows_of_slots", "slots_of_rows"}

Use = tuple[str, str, str]  # our file, kind, name


def relative(path: Path) -> str:
    """Return a file's path as the ledger has it."""
    return str(path.relative_to(PACKAGE)).removeprefix("srt/").removeprefix("speculative/")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(trees: dict[str, ast.Module]) -> set[str]:
    """List the names of our functions, classes, fields and attributes."""
    names = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= set(members(node))
    return names


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield what a class defines: methods, fields, and attributes of `self`."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    yield from own_stores(node)


def own_stores(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            if ast.unparse(each.value) in ("self", "cls"):
                yield each.attr


def overrides(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each member of a class of ours that a base in SGLang has too."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    source = SourceTree.installed()
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        stores = set(own_stores(node))
        for base in map(ast.unparse, node.bases):
            first, *others = base.split(".")
            if first in imported:
                path = ".".join([imported[first], *others])
                for name in set(members(node)):
                    if not name.startswith("__") and source.find_attribute(path, name):
                        yield "write" if name in stores else "override", name


def attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the kind and name of each attribute that may be reached for."""
    in_classes = {
        each for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith("torch"):
            is_own = node in in_classes and ast.unparse(node.value) in ("self", "cls")
            if isinstance(node.ctx, ast.Store) and not is_own:
                yield "write", node.attr
            elif is_private(node.attr):
                yield "read", node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield "read", name.value


@functools.cache
def uses() -> frozenset[Use]:
    """List what our source reaches for. A name that we define too counts only if the ledger has it."""
    paths = [path for path in PACKAGE.rglob("*.py") if "stand_in" not in path.parts]
    trees = {relative(path): ast.parse(path.read_text()) for path in paths}
    listed = {name for reach in REACHES for name in reach.names}
    known = FOREIGN | ADDED | (defined_names(trees) - listed)
    known |= {patch.name for patch in all_patches()}
    found: set[Use] = set()
    for where, tree in trees.items():
        found |= {(where, kind, name) for kind, name in attributes(tree) if name not in known}
        found |= {(where, kind, name) for kind, name in overrides(tree)}
    # Who writes a name may read it.
    written = {(where, name) for where, kind, name in found if kind != "read"}
    return frozenset(use for use in found if use[1] != "read" or (use[0], use[2]) not in written)


@pytest.fixture(autouse=True)
def ledger_of_this_release(monkeypatch):
    monkeypatch.setattr(reaches, "NEEDED", NEEDED_HERE)
    missing_name.cache_clear()


def listed(ledger: Iterable[Reach]) -> set[Use]:
    return {(reach.where, reach.kind, name) for reach in ledger for name in reach.names}


def test_the_ledger_lists_what_our_source_reaches_for():
    assert not uses() - listed(REACHES), "add these to tools/sglang_diff/reaches.txt"


def test_our_source_uses_all_that_is_listed():
    assert not listed(REACHES_HERE) - uses(), "remove these from tools/sglang_diff/reaches.txt"


def test_a_server_looks_up_what_the_ledger_writes_and_overrides():
    def sets(needed):
        return {feature: {owner: {*names} for owner, names in of.items()} for feature, of in needed.items()}

    assert sets(NEEDED) == sets(needed_by(REACHES))


def test_this_sglang_has_what_we_write_and_override():
    assert [missing_name(feature) for feature in (None, ROWS, WAIT, ON_CPU)] == [None] * 4


GONE = REACHES[0]._replace(kind="write", names=("no_such_flag",), why="a test")
NOWHERE = GONE._replace(owner=f"{GONE.owner}NoSuchClass")


@pytest.fixture(params=[(GONE, "has no no_such_flag, which we write"), (NOWHERE, "NoSuchClass")])
def gone(request, monkeypatch):
    """Return a function that adds a missing name to the ledger for a feature, and words of its reason."""
    reach, words = request.param

    def add(feature: str | None) -> str:
        monkeypatch.setattr(reaches, "NEEDED", needed_by((*REACHES_HERE, reach._replace(feature=feature))))
        return words

    missing_name.cache_clear()
    yield add
    missing_name.cache_clear()


def test_without_a_required_name_the_built_in_serves(gone, monkeypatch):
    words = gone(None)
    monkeypatch.setattr(compatibility, "installed_version", lambda: "0.5.99")
    compatibility.why_off.cache_clear()
    try:
        assert words in compatibility.why_off()
    finally:
        compatibility.why_off.cache_clear()


def test_without_a_name_of_its_feature_a_scheduler_ends(gone):
    words = gone(WAIT)
    assert missing_name(None) is None
    with pytest.raises(SystemExit, match=f"{WAIT}: .*{words}"):
        reaches.require(WAIT)
