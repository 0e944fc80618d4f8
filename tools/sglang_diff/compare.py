"""Compares our patches with an SGLang that need not be installed.

For each patch: whether its target is there, takes the expected parameters, and still has the body that our
replacement was written against. For each name that our files import from SGLang: whether it is there, and
takes the same parameters as before. For each attribute that we reach for (`reaches.py`): whether its class
has it, and whether a function of this name has the same parameters and body as before.
"""

import ast
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sglang_dflash
from sglang_dflash.srt.patching import Patch, release_numbers
from sglang_dflash.srt.plugins.entry_points import CPU_STEPS, STEPS
from sglang_dflash.srt.plugins.patches import all_patches
from sglang_diff.reaches import REACHES, Reach
from sglang_diff.source_tree import PACKAGE, Found, SourceTree, fingerprint, parameters

RECORDED = Path(__file__).with_name("fingerprints.json")
OURS = Path(sglang_dflash.__file__).parent

SAME, CHANGED, OTHER_PARAMETERS, GONE, UNKNOWN = "same", "changed", "parameters", "gone", "no record"


class Row(NamedTuple):
    """The state of one target, reach, imported name or step.

    Attributes:
        label: The target, `owner.name` of a reach, `module:name`, or a step's name.
        state: One of the states above.
        detail: For the reader, may be empty.
        where: File and line in SGLang.
        patch: A patch or a reach. None for an imported name and a step.
    """

    label: str
    state: str
    detail: str
    where: str
    patch: Patch | Reach | None

    @property
    def is_fatal(self) -> bool:
        """Return whether DFLASH cannot be served: a required name is gone, or a patch does not fit."""
        if self.patch is not None and self.patch.feature is not None:
            return False
        return self.state == GONE or self.state == OTHER_PARAMETERS and isinstance(self.patch, Patch)


@functools.cache
def records() -> dict[str, dict[str, Any]]:
    """Return what is recorded of each supported version.

    Each has `bodies` (fingerprints by dotted path) and `imports` (parameters by label).
    """
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def supported_versions() -> list[str]:
    """List the recorded versions, oldest first."""
    return sorted(records(), key=release_numbers)


def baseline_for(version: str) -> str:
    """Return the supported version to compare with: itself, else the newest that is not newer."""
    older = [one for one in supported_versions() if release_numbers(one) <= release_numbers(version)]
    return older[-1] if older else supported_versions()[0]


def compare(tree: SourceTree, baseline: str) -> list[Row]:
    """Compare all that we depend on with a tree.

    baseline: the supported version whose bodies and parameters are expected.
    """
    recorded = records()[baseline]
    rows = [_compare_name(tree, *name, recorded) for name in names_in(tree)]
    return rows + [_compare_step(tree, step) for step in (*STEPS, *CPU_STEPS)]


def record(tree: SourceTree) -> dict[str, dict[str, str]]:
    """Return what `fingerprints.json` is to hold of a version. It must fit the patches."""
    bodies: dict[str, str] = {}
    imports: dict[str, str] = {}
    for label, found, patch in names_in(tree):
        names, body = _facts(tree, found, patch)
        if body is not None:
            bodies[label] = body
        if names is not None:
            imports[label] = ", ".join(names)
    return {"bodies": dict(sorted(bodies.items())), "imports": dict(sorted(imports.items()))}


def names_in(tree: SourceTree) -> Iterator[tuple[str, Found | None, Patch | Reach | None]]:
    """Yield targets of patches, attributes of the ledger and imported names, as a row has them."""
    for patch in patches_for(tree):
        yield patch.target, tree.find(patch.target), patch
    for reach in reaches_of(tree.version):
        for name in reach.names:
            yield f"{reach.owner}.{name}", tree.find_attribute(reach.owner, name), reach
    for label in imported_names():
        yield label, tree.find(label.replace(":", ".").rstrip(".")), None


def patches_for(tree: SourceTree) -> list[Patch]:
    """List the patches that this SGLang needs to itself; one target is PyTorch's."""
    table = [patch for patch in all_patches() if patch.is_needed_on(tree.version)]
    return [patch for patch in table if patch.target.startswith(f"{PACKAGE}.")]


def reaches_of(version: str) -> list[Reach]:
    """List the rows of the ledger whose names this SGLang is to have."""
    return [reach for reach in REACHES if release_numbers(version) >= release_numbers(reach.since)]


@functools.cache
def imported_names() -> tuple[str, ...]:
    """List all names that our files import from SGLang as `module:name`, a module as `module:`.

    Those with a substitute are left out (compat.py).
    """
    names = set()
    for path in sorted(OURS.rglob("*.py")):
        for statement in _imports(ast.parse(path.read_text(encoding="utf-8")).body):
            if isinstance(statement, ast.Import):
                names |= {f"{alias.name}:" for alias in statement.names}
            elif not statement.level:
                names |= {f"{statement.module}:{alias.name}" for alias in statement.names}
    return tuple(sorted(name for name in names if name.startswith((f"{PACKAGE}.", f"{PACKAGE}:"))))


def _imports(body: Sequence[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a body, at any depth, that no handler of ImportError covers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try) and any(
            handler.type is not None and "ImportError" in ast.unparse(handler.type)
            for handler in node.handlers
        ):
            yield from _imports([*node.handlers, *node.orelse, *node.finalbody])
        elif not isinstance(node, ast.expr):
            yield from _imports(list(ast.iter_child_nodes(node)))


def _compare_name(
    tree: SourceTree, label: str, found: Found | None, patch: Patch | Reach | None, recorded: dict[str, Any]
) -> Row:
    if found is None:
        return Row(label, GONE, _use(patch), "", patch)
    place = _place(tree, found)
    if isinstance(patch, Patch) and patch.signature is not None:
        takes = parameters(tree, found) or []
        if not patch.accepts(takes):
            detail = f"takes ({', '.join(takes)}), expected {patch.signature}"
            return Row(label, OTHER_PARAMETERS, detail, place, patch)
    names, body = _facts(tree, found, patch)
    before, known = recorded["imports"].get(label), recorded["bodies"].get(label)
    if names is not None and before is not None and (detail := _differences(names, before)):
        return Row(label, OTHER_PARAMETERS, detail, place, patch)
    if known is None:
        return Row(label, UNKNOWN if isinstance(patch, Patch) else SAME, "", place, patch)
    is_same = body == known or (body is None and isinstance(patch, Reach))
    return Row(label, SAME if is_same else CHANGED, "", place, patch)


def _facts(
    tree: SourceTree, found: Found | None, patch: Patch | Reach | None
) -> tuple[list[str] | None, str | None]:
    """Return the parameters and the fingerprint that are recorded of a name; None: what is not compared.

    A patch has the parameters that it expects. Of an imported name the body is SGLang's own affair.
    """
    if found is None:
        return None, None
    if patch is None:
        return _passed(tree, found), None
    if isinstance(patch, Reach):
        names = parameters(tree, found)
        return names, None if names is None else fingerprint(found.node)
    is_body = isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return None, fingerprint(found.node) if is_body else None


def _use(patch: Patch | Reach | None) -> str:
    """Say what a name is for."""
    if isinstance(patch, Patch):
        return f"SGLang has no {patch.target} to change"
    return "our files import it" if patch is None else f"{patch.where} has to {patch.kind} it: {patch.why}"


def _differences(names: list[str], before: str) -> str:
    """Say how parameters differ from recorded ones. Empty: they do not."""
    if ", ".join(names) == before:
        return ""
    old = before.split(", ")
    differences = [f"+{one}" for one in names if one not in old]
    differences += [f"-{one}" for one in old if one not in names]
    return ", ".join(differences) or "in another order"


def _passed(tree: SourceTree, found: Found) -> list[str] | None:
    """List the parameters of a function, or of a constructor that is written out."""
    if isinstance(found.node, ast.ClassDef):
        init = tree.find(f"{found.path}.__init__")
        return None if init is None or init.names[:-1] != found.names else parameters(tree, init)
    return parameters(tree, found)


def _compare_step(tree: SourceTree, step: str) -> Row:
    """Return whether plugins may wrap a step of the argument pipeline."""
    steps = tree.find(f"{PACKAGE}.srt.arg_groups.resolution_hooks._OVERRIDABLE_HOOKS")
    nodes = [] if steps is None or steps.node is None else ast.walk(steps.node)
    if any(isinstance(node, ast.Constant) and node.value == step for node in nodes):
        return Row(step, SAME, "", "", None)
    return Row(step, GONE, "plugins may not wrap this step", "", None)


def _place(tree: SourceTree, found: Found) -> str:
    line = getattr(found.node, "lineno", 1)
    return f"{tree.file_of(found.module) or found.module}:{line}"
