"""A JSON schema, an EBNF grammar, and greedy requests."""

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


def greedy(prompt: str, max_new_tokens: int, **sampling) -> dict:
    return {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
    }
