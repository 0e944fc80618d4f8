"""Commands and code in the README, the pages under docs/ and the examples."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from published_drafts import CASES
from serving import DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "dev").glob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "benchmark" / "README.md",
]
# Bundled models stand for published ones, and the CPU's attention backend for a GPU's.
STANDS_FOR: dict[str, Path | str] = {"TARGET": TARGET, "DRAFT": DRAFT}
STANDS_FOR["out/checkpoint_best"] = SPECULATORS_DRAFT
STANDS_FOR |= dict.fromkeys(("fa3", "flashinfer", "triton"), "torch_native")
for case in (case for case in CASES if "page" in case):
    is_alone = case["base"] == "library"
    STANDS_FOR |= {case["target"]: TARGET, case["page"]: SPECULATORS_DRAFT if is_alone else DRAFT}
SCRIPTS = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh"))
URL = "http://127.0.0.1:30000"
MODEL_FLAGS = ("--model-path", "--speculative-draft-model-path")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_PROGRAMS = ("python", "make", "curl", "pip", "bash", "sglang", "speculators")


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        where: The page or script, for messages.
        text: The command as written, its lines joined.
    """

    where: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def flags(self) -> list[str]:
        return [flag for word in self.words if (flag := word.strip("[]").partition("=")[0]).startswith("--")]

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of every fenced block of a page."""
    return _BLOCK.findall(page.read_text())


def spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    return [" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", page.read_text()))]


def _lines(block: str) -> list[str]:
    joined = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    return [
        " ".join(line.split()) if "'" not in line else line
        for line in joined
        if line and not line.startswith("#")
    ]


def commands() -> Iterator[Command]:
    """Yield every documented command.

    Pages: lines of bash blocks, and inline code that starts with a program and has an argument. Examples: the
    indented commands of the docstring or first comment.
    """
    for page in PAGES:
        where = page.relative_to(ROOT).as_posix()
        for language, block in blocks(page):
            if language == "bash":
                yield from (Command(where, line) for line in _lines(block))
        for span in spans(page):
            if span.split()[0] in _PROGRAMS and " " in span:
                yield Command(where, span)
    for script in SCRIPTS:
        text = script.read_text()
        if script.suffix == ".py":
            head = ast.get_docstring(ast.parse(text), clean=False) or ""
        else:
            head = "\n".join(line.lstrip("#") for line in text.splitlines() if line.startswith("#"))
        for found in re.finditer(rf"(?:^| {{2}}) +((?:{'|'.join(_PROGRAMS)}) .+)$", head, re.MULTILINE):
            yield Command(script.relative_to(ROOT).as_posix(), found.group(1))


def is_server(command: Command) -> bool:
    """Return whether a command line starts an SGLang server."""
    return command.words[:3] == ["python", "-m", "sglang.launch_server"] or command.words[:2] == [
        "sglang",
        "serve",
    ]


def server_arguments(command: Command) -> list[str]:
    """Return a server command's flags, with the bundled models for placeholders and published ones."""
    words = command.words[3 if command.words[0] == "python" else 2 :]
    checkpoint = PEAGLE_DRAFT if {"PEAGLE", "EAGLE3"} & {*words} else SPECULATORS_DRAFT
    models = [words[i + 1] for i, word in enumerate(words) if word in MODEL_FLAGS]
    known = {"CHECKPOINT": checkpoint, **STANDS_FOR}
    unknown = [name for name in models if name not in known and not (ROOT / name).is_dir()]
    assert not unknown, f"{command}: {unknown} are not bundled, nor in the list of docs/drafts.md"
    return [str(known.get(word, word)) for word in words]


def defined_flags(script: Path) -> set[str]:
    """Return the flags that a Python file gives to argparse."""
    # `parser.add_argument(...)`, or `add(...)` where a script names the method so.
    return {
        arg.value
        for call in ast.walk(ast.parse(script.read_text()))
        if isinstance(call, ast.Call)
        and (getattr(call.func, "attr", None) == "add_argument" or getattr(call.func, "id", None) == "add")
        for arg in call.args
        if isinstance(arg, ast.Constant) and str(arg.value).startswith("--")
    }
