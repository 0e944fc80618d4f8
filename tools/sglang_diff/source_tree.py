"""SGLang's source as text: an installed package, an unpacked wheel or a wheel file.

Nothing of it is imported, so any version can be read beside the installed one.
"""

import ast
import functools
import hashlib
import importlib.util
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "sglang"
_MOST_REEXPORTS = 12
parse_module: Callable[[bytes], ast.Module] = ast.parse

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class NotSGLang(Exception):
    """A path that holds no SGLang."""


class Found(NamedTuple):
    """A definition, and the module and the names under which it stands.

    node: None for a module, and for a name from another package.
    """

    module: str
    names: tuple[str, ...]
    node: ast.AST | None

    @property
    def path(self) -> str:
        """The dotted path of the definition itself."""
        return ".".join((self.module, *self.names))


class SourceTree:
    """The modules of one SGLang.

    Args:
        version: its version, or "unknown".
        root: the folder that the package is in, or a wheel.
    """

    def __init__(self, version: str, root: Path | zipfile.Path):
        self.version = version
        self._root = root
        self._read = functools.cache(self._read_file)
        self.parse = functools.cache(self._parse)
        self.files: set[str] = set()  # paths of the modules that have been found

    @classmethod
    def open(cls, path: Path) -> "SourceTree":
        """Open a wheel file, or a folder that holds the package. Raises NotSGLang."""
        try:
            root = path if path.is_dir() else zipfile.Path(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise NotSGLang(f"{path}: no folder and no wheel ({error})") from error
        if not (root / PACKAGE / "srt").is_dir():
            raise NotSGLang(f"{path}: no {PACKAGE}/srt in it")
        names = [re.fullmatch(rf"{PACKAGE}-(.*)\.dist-info", entry.name) for entry in root.iterdir()]
        versions = [name[1] for name in names if name]
        return cls(versions[0] if len(versions) == 1 else "unknown", root)

    @classmethod
    def installed(cls) -> "SourceTree":
        """Return the SGLang of this environment. Raises NotSGLang."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise NotSGLang("SGLang is not installed here")
        return cls.open(Path(next(iter(spec.submodule_search_locations))).parent)

    def _read_file(self, name: str) -> bytes | None:
        path = self._root / name
        return path.read_bytes() if path.is_file() else None

    def file_of(self, module: str) -> str | None:
        """Return the path of a module's file."""
        stem = module.replace(".", "/")
        names = (f"{stem}.py", f"{stem}/__init__.py")
        return next((name for name in names if self._read(name) is not None), None)

    def find(self, path: str) -> Found | None:
        """Return what a dotted path names, or None. Names that a module imports are followed."""
        parts = path.split(".")
        for split in range(len(parts), 0, -1):
            module = ".".join(parts[:split])
            if self.file_of(module) is not None:
                return self._find_in(module, tuple(parts[split:]), _MOST_REEXPORTS)
        return None

    def _parse(self, module: str) -> ast.Module:
        file = self.file_of(module)
        content = self._read(file) if file else None
        if file is None or content is None:
            raise LookupError(module)
        self.files.add(file)
        try:
            return parse_module(content)
        except SyntaxError as error:
            raise NotSGLang(f"{file} cannot be parsed: {error}") from error

    def _find_in(self, module: str, names: tuple[str, ...], depth: int) -> Found | None:
        if not names:
            self.files.add(self.file_of(module) or "")
            return Found(module, (), None)
        if depth == 0 or self.file_of(module) is None:
            return None
        body, stars = self.parse(module).body, []
        node = _defined(body, names[0])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return self._find_below(Found(module, names[:1], node), names[1:], depth)
        for statement in _statements(body):
            if isinstance(statement, ast.ImportFrom):
                source = self._absolute(module, statement)
                for alias in statement.names:
                    if alias.name == "*":
                        stars.append(source)
                    elif (alias.asname or alias.name) == names[0]:
                        if not source.startswith(PACKAGE):
                            return Found(source, (alias.name, *names[1:]), None)
                        if self.file_of(f"{source}.{alias.name}"):
                            return self._find_in(f"{source}.{alias.name}", names[1:], depth - 1)
                        return self._find_in(source, (alias.name, *names[1:]), depth - 1)
        if node is not None:
            return self._find_below(Found(module, names[:1], node), names[1:], depth)
        for source in stars:
            if self.file_of(source) and (found := self._find_in(source, names, depth - 1)):
                return found
        return None

    def find_attribute(self, owner: str, name: str) -> Found | None:
        """Return where a class or its bases, or a module's functions, define or assign an attribute."""
        found = self.find(f"{owner}.{name}")
        if found is None and self.file_of(owner) and (node := _assigned(self.parse(owner), "", name)):
            return Found(owner, (name,), node)
        return found

    def _find_below(self, holder: Found, names: tuple[str, ...], depth: int) -> Found | None:
        if not names:
            return holder
        if isinstance(holder.node, ast.Assign) and isinstance(holder.node.value, ast.Call):
            # An instance: its class has the name.
            path = tuple(ast.unparse(holder.node.value.func).split("."))
            return self._find_in(holder.module, (*path, *names), depth - 1)
        if not isinstance(holder.node, ast.ClassDef):
            return None
        node = _defined(holder.node.body, names[0]) or _assigned(holder.node, "self", names[0])
        if node is not None:
            return self._find_below(Found(holder.module, (*holder.names, names[0]), node), names[1:], depth)
        for base in holder.node.bases:
            path = tuple(ast.unparse(base).split("."))
            found = self._find_in(holder.module, (*path, *names), depth - 1)
            if found and found.node is not None:  # a base of another package is not searched
                return found
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        is_package = (self.file_of(module) or "").endswith("__init__.py")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join((*parts, *([statement.module] if statement.module else ())))


def parameters(tree: SourceTree, found: Found) -> list[str] | None:
    """List the parameters of a function or of a constructor. None: it has none to read."""
    if isinstance(found.node, ast.ClassDef):
        return _constructor(tree, found)
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = found.node.args
    names = [a.arg for a in arguments.posonlyargs + arguments.args]
    names += [a.arg for a in (arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if a is not None]
    is_bound = any(ast.unparse(decorator) == "classmethod" for decorator in found.node.decorator_list)
    return names[1:] if is_bound else names


def fingerprint(node: ast.AST) -> str:
    """Return a hash of what a definition does.

    Comments, docstrings, annotations and line breaks are left out.
    """
    return hashlib.sha256(repr(_essence(node)).encode()).hexdigest()[:12]


def _constructor(tree: SourceTree, found: Found) -> list[str] | None:
    assert isinstance(found.node, ast.ClassDef)
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in found.node.decorator_list)
    init = tree.find(f"{found.path}.__init__")
    is_own = init is not None and init.names[:-1] == found.names
    if init is not None and init.node is not None and (is_own or not is_dataclass):
        return (parameters(tree, init) or [])[1:]
    names: list[str] = []  # a dataclass: its bases' fields and its own
    for base in found.node.bases:
        parent = tree.find(f"{found.module}.{ast.unparse(base)}")
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            names += _constructor(tree, parent) or []
    for statement in found.node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
    return names


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a body's statements, and those of its conditions and exception handlers."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _defined(body: list[ast.stmt], name: str) -> Definition | None:
    """Return the last `def` or `class` of a name, else its last assignment."""
    defined: Definition | None = None
    assigned: Definition | None = None
    for statement in _statements(body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined = statement if statement.name == name else defined
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(node, ast.Name) and node.id == name for node in targets):
                assigned = statement
    return defined or assigned


def _assigned(holder: ast.AST, owner: str, name: str) -> ast.AST | None:
    """Return an assignment to an attribute of `owner`; "": of any object."""
    for node in ast.walk(holder):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            if owner in ("", ast.unparse(node.value)):
                return node
    return None


_ANNOTATIONS = ("annotation", "returns", "type_comment", "type_params", "kind")


def _essence(value: object) -> object:
    if isinstance(value, list):
        return tuple(map(_essence, value))
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = []
    for name, part in ast.iter_fields(value):
        # Python versions differ in fields that are empty.
        if name in _ANNOTATIONS or part is None and not isinstance(value, ast.Constant) or part == []:
            continue
        if name == "body" and isinstance(part, list) and _is_docstring(part[0]):
            part = part[1:]
        fields.append((name, _essence(part)))
    return (type(value).__name__, *fields)


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
