"""Check the docstrings that `ruff` cannot: first lines, noun clauses as openings, glued parameters.

Usage: `python .ci/check_docstrings.py python`. Exit status 1 if a first line is longer than 88 characters, if
2 % of all docstrings or more open with a noun clause ("What ...", "Of ...", "Those ..."), or if a docstring
describes a parameter or an attribute outside Google's sections, or two of them in one item of a section.
"""

import ast
import re
import sys
from pathlib import Path

LONGEST_FIRST_LINE = 88
LARGEST_SHARE = 0.02
NOUN_CLAUSE = re.compile(
    r"(What|Of|Those|The same|Whether|How|Where|As many|That|One that|Which|When|Why|Who|In the place)\b"
)
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
# `name:` or `name, name:` where a line or a sentence begins.
DESCRIBED = re.compile(r"(?:^\s*(?:[-*] )?|[.!?;] )((?:`?\w+`?, )*`?\w+`?):(?= |$)")
ITEM = re.compile(r"^ {4}`?\w+`?:")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> list[tuple[Documented, int, str]]:
    """List what a Python file documents, the line of each docstring, and its text."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Documented)]
    found = [(node, ast.get_docstring(node)) for node in nodes]
    return [(node, node.body[0].lineno, text) for node, text in found if text]


def described_names(node: Documented) -> set[str]:
    """Return the parameters of a function, or the attributes and parameters of a class."""
    if isinstance(node, ast.Module):
        return set()
    if isinstance(node, ast.ClassDef):
        fields = {each.target.id for each in node.body if _is_field(each)}
        makers = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        own = [each for maker in makers for each in ast.walk(maker) if isinstance(each, ast.Attribute)]
        attributes = {each.attr for each in own if getattr(each.value, "id", "") == "self"}
        return fields.union(attributes, *map(described_names, makers))
    arguments = node.args
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg for each in (*several, arguments.vararg, arguments.kwarg) if each is not None}


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def glued_lines(text: str, names: set[str]) -> list[str]:
    """List the lines of a docstring that describe `names` elsewhere than in an item each."""
    found, is_inside = [], False
    for line in text.split("\n"):
        if SECTION.match(line):
            is_inside = True
            continue
        is_inside = is_inside and line[:1] in ("", " ")
        prose = ITEM.sub("", line) if is_inside else line
        if names.intersection(re.findall(r"\w+", ",".join(DESCRIBED.findall(prose)))):
            found.append(line)
    return found


def main(folders: list[str]) -> int:
    """Print each offending line and return the exit status."""
    total, clauses, too_long, glued = 0, [], [], []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            for node, line, text in docstrings(path):
                total += 1
                first = text.split("\n")[0]
                where = f"{path}:{line}: {first}"
                if len(first) > LONGEST_FIRST_LINE:
                    too_long.append(where)
                if NOUN_CLAUSE.match(first):
                    clauses.append(where)
                glued += [
                    f"{path}:{line}: {each.strip()}" for each in glued_lines(text, described_names(node))
                ]
    is_clause_wrong = len(clauses) >= LARGEST_SHARE * total
    for title, offenders in (
        ("first line too long", too_long),
        ("opens with a noun clause", clauses if is_clause_wrong else []),
        ("parameter outside its section, or not alone in its item", glued),
    ):
        for where in offenders:
            print(f"{title}: {where}")
    print(
        f"{total} docstrings, {len(clauses)} open with a noun clause, {len(too_long)} first lines too long, "
        f"{len(glued)} lines glue parameters into prose."
    )
    return int(bool(too_long or glued) or is_clause_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
