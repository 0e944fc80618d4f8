"""Check that calls with more than four arguments name all but the first.

Usage: `python .ci/check_keywords.py python`. Six tensors in a row can change places unseen. A tuple that is
unpacked into a class, into a kernel or beside other arguments hides the same, so it is refused too; a
function may hand on its own `*args`. Prints each call. Exit status 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MOST = 4
# Callees whose arguments have no names: shapes, log messages, and functions that take any number of values.
SHAPES = {"expand", "new_zeros", "permute", "reshape", "view"}
LOGS = {"error", "info", "log", "warning"}
VARIADIC = {"gcd", "notify", "set_threshold", "zip"}
# FlashInfer's compiled plan, and a kernel of SGLang whose parameters have other names on a CPU.
FOREIGN = {"causal_conv1d_update", "plan"}
UNNAMED = SHAPES | LOGS | VARIADIC | FOREIGN


def find_calls(node: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[ast.Call]:
    """Yield the calls below a node that hide what an argument is.

    `own` are the names of the `*args` of the functions around the node.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.vararg:
        own |= {node.args.vararg.arg}
    if isinstance(node, ast.Call) and is_unclear(node, own):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from find_calls(child, own)


def is_unclear(call: ast.Call, own: frozenset[str]) -> bool:
    """Return whether a call has too many arguments by position, or a tuple in their place."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in UNNAMED:
        return False
    starred = [argument.value for argument in call.args if isinstance(argument, ast.Starred)]
    tuples = [value for value in starred if is_tuple(value, own)]
    is_class_or_kernel = name[:1].isupper() or isinstance(call.func, ast.Subscript)
    num_arguments = len(call.args) + len(call.keywords)
    if tuples:
        return is_class_or_kernel or num_arguments > 1
    return num_arguments > MOST and len(call.args) > 1


def is_tuple(value: ast.expr, own: frozenset[str]) -> bool:
    """Return whether an unpacked value is a variable or a part of one, and not a function's `*args`."""
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return isinstance(value, ast.Name) and value.id not in own


def main() -> int:
    found = 0
    for path in sorted(Path(sys.argv[1]).rglob("*.py")):
        for call in find_calls(ast.parse(path.read_text())):
            print(f"{path}:{call.lineno}: name the arguments: {ast.unparse(call)[:80]}")
            found += 1
    print(f"{found} calls with unnamed arguments.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
