"""Declared dependencies: what our files import stands in pyproject.toml, and asks for nothing beyond what
SGLang brings."""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from serving import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = canonicalize_name(PROJECT["name"])
# The training library's pins and SGLang's exclude each other: these run in an environment of their own.
SPECULATORS_ONLY = {
    f"benchmark/tiny/{name}.py"
    for name in ("speculators_golden", "peagle_variants", "train_speculators_draft")
}
# folder -> the extras that its files may count on, beside the dependencies
FOLDERS = {"python": (), "benchmark": ("bench",), "test": ("test",), "examples": ("test",)}


def imported(source: str) -> set[str]:
    """Top-level names of every absolute import of a file, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@cache
def providers() -> dict[str, set[str]]:
    """Top-level module -> the distributions it comes from."""
    return {
        module: {canonicalize_name(name) for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }


def own_modules(folder: str) -> set[str]:
    """What a file there may import of this repository by its bare name: benchmark/ and test/ are on the
    path."""
    if folder not in ("benchmark", "test"):
        return set()
    files = [path for name in {"benchmark", folder} for path in (ROOT / name).rglob("*.py")]
    folders = [
        path for name in ("benchmark", "test/srt") for path in (ROOT / name).iterdir() if path.is_dir()
    ]
    return {path.stem for path in files} | {path.name for path in folders}


def undeclared(source: str, folder: str, declared: set[str]) -> set[str]:
    """Modules a file of `folder` imports that come with none of the `declared` distributions."""
    names = imported(source) - set(sys.stdlib_module_names) - own_modules(folder)
    return {name for name in names if not providers().get(name, {name}) & (declared | {OURS})}


def declared(extras: tuple[str, ...] = ()) -> list[Requirement]:
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    return [Requirement(line) for line in lines]


def names_of(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_is_declared(folder):
    known = names_of(declared(FOLDERS[folder]))
    files = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    assert files
    wrong = {}
    for path in files:
        relative = path.relative_to(ROOT).as_posix()
        found = undeclared(path.read_text(), folder, known)
        wrong[relative] = found - ({"speculators"} if relative in SPECULATORS_ONLY else set())
    wrong = {path: sorted(found) for path, found in wrong.items() if found}
    extras = " or ".join(FOLDERS[folder]) or "none"
    assert not wrong, f"imported, but not in pyproject.toml (dependencies, or extra {extras}): {wrong}"


def test_an_undeclared_import_is_seen():
    """The control: of a module that is installed, of one that is not, and of one inside a function."""
    source = (
        "import requests\nimport torch.nn\ndef f():\n    from nowhere.at_all import x\n    from . import y\n"
    )
    assert undeclared(source, "python", {"torch"}) == {"requests", "nowhere"}
    assert "serving" in undeclared("import serving", "python", set())
    assert not undeclared("import serving", "test", set())


@pytest.mark.parametrize("folder", ["python", "benchmark"])
def test_every_declaration_is_used(folder):
    used = set().union(*(imported(path.read_text()) for path in (ROOT / folder).rglob("*.py")))
    distributions = set().union(*(providers().get(name, set()) for name in used))
    extras = FOLDERS[folder]
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]] or PROJECT[
        "dependencies"
    ]
    idle = names_of([Requirement(line) for line in lines]) - distributions
    assert not idle, f"declared for {folder}, but nothing there imports it: {sorted(idle)}"


def requirements_of(name: str) -> Iterator[Requirement]:
    """What an installed distribution requires here, without its extras; nothing for one that is not
    installed."""
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


@cache
def brought_by_sglang() -> dict[str, set[str]]:
    """distribution -> the bounds that SGLang, or whatever it brings, puts on it"""
    bounds: dict[str, set[str]] = {}
    todo, seen = ["sglang"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for requirement in requirements_of(name):
            required = canonicalize_name(requirement.name)
            bounds.setdefault(required, set()).add(str(requirement.specifier))
            todo.append(required)
    return bounds


def test_dependencies_come_with_sglang_and_are_bound_as_there():
    """Installing the plugin beside SGLang pulls in nothing, and cannot move a version SGLang chose."""
    direct = {canonicalize_name(r.name): str(r.specifier) for r in requirements_of("sglang")}
    (sglang, *others) = declared()
    assert sglang.name == "sglang" and len(others) >= 4
    # What is named in an extra and comes with SGLang, too; pytest, hypothesis and matplotlib are the extras'
    # own.
    bound = others + [
        r for r in declared(("test", "bench"))[len(others) + 1 :] if r.name in brought_by_sglang()
    ]
    for requirement in bound:
        name, bounds = canonicalize_name(requirement.name), str(requirement.specifier)
        assert name in brought_by_sglang(), f"{name} does not come with SGLang"
        if name in direct:
            assert bounds == direct[name], f"{name}: {bounds!r}, but SGLang says {direct[name]!r}"
        else:
            assert bounds in brought_by_sglang()[name], (
                f"{name}: {bounds!r}, not one of {brought_by_sglang()[name]}"
            )
    extra = names_of(declared(("test", "bench"))) - set(brought_by_sglang()) - {"sglang"}
    assert extra == {"pytest", "pytest-xdist", "hypothesis", "matplotlib", "nixl"}, (
        "a package beyond SGLang's: say here that it is meant"
    )


def test_the_licence_is_declared_and_its_text_is_there():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License ::")]
    text = (ROOT / "LICENSE").read_text()
    assert (
        "Apache License" in text
        and "Version 2.0, January 2004" in text
        and "END OF TERMS AND CONDITIONS" in text
    )


def test_model_cards_say_what_the_script_writes_about_licences():
    """Regenerated cards agree with the ones that are here; and each names both licences."""
    tree = ast.parse((ROOT / "benchmark/tiny/model_cards.py").read_text())
    (note,) = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "LICENCE_NOTE"
    ]
    assert "Apache-2.0" in note and "PSF-2.0" in note
    cards = sorted((ROOT / "models").glob("*/README.md"))
    assert len(cards) == len([path for path in (ROOT / "models").iterdir() if path.is_dir()])
    for card in cards:
        assert note.strip() in card.read_text(), card
