"""Check the docstrings that `ruff` cannot: length of the first line, and noun clauses as openings.

Usage: `python .ci/check_docstrings.py python`. Exit status 1 if a first line is longer than 88 characters, or
if 2 % of all docstrings or more open with a noun clause ("What ...", "Of ...", "Those ...").
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


def docstrings(path: Path) -> list[tuple[int, str]]:
    """List the docstrings of a Python file with the lines on which they begin."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    found = [(node, ast.get_docstring(node)) for node in nodes]
    return [(node.body[0].lineno, text) for node, text in found if text]


def main(folders: list[str]) -> int:
    """Print each offending line and return the exit status."""
    total, clauses, too_long = 0, [], []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            for line, text in docstrings(path):
                total += 1
                first = text.split("\n")[0]
                where = f"{path}:{line}: {first}"
                if len(first) > LONGEST_FIRST_LINE:
                    too_long.append(where)
                if NOUN_CLAUSE.match(first):
                    clauses.append(where)
    is_wrong = bool(too_long) or len(clauses) >= LARGEST_SHARE * total
    for title, offenders in (("first line too long", too_long), ("opens with a noun clause", clauses)):
        for where in offenders if is_wrong else ():
            print(f"{title}: {where}")
    print(
        f"{total} docstrings, {len(clauses)} open with a noun clause, {len(too_long)} first lines too long."
    )
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
