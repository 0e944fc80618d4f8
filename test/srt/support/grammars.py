"""A JSON schema, an EBNF grammar, and greedy requests."""

import json
import re

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,12}$"},
        "kind": {"enum": ["function", "class"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}

EBNF = """root ::= "def " name "(" (name (", " name)*)? "):\\n    return " expression
name ::= [a-z] [a-z0-9_]?
expression ::= name | name " + " expression | "(" expression ")"
"""

# The same language, except that brackets need not match.
EBNF_SHAPE = r"def [a-z][a-z0-9_]?\(([a-z][a-z0-9_]?(, [a-z][a-z0-9_]?)*)?\):\n    return [a-z0-9_ +()]+"

CODE = r"(def|class) [a-z_]{3,12}\(\):\n    return [0-9]{1,6}"


def assert_schema(text: str) -> None:
    """Assert that a text is an object of `SCHEMA`."""
    parsed = json.loads(text)
    assert set(parsed) == {"name", "kind", "lines"} and parsed["kind"] in ("function", "class"), text
    assert re.fullmatch("[a-z]{1,12}", parsed["name"]) and 0 <= parsed["lines"] <= 999, text
