"""Prompts of `doctor --measure`: a file's, or built-in ones.

The built-in ones are code to continue, and questions, for which the target's chat template is used if it has
one.
"""

import json
from pathlib import Path
from typing import Any

from sglang_dflash.srt.doctor.checkpoint import BadInput

_CODE = (
    '"""Read and write simple configuration files."""\n\nimport os\nimport re\n\n\nclass Parser:\n'
    "    def __init__(self, path):\n        self.path = path\n",
    'def fibonacci(n):\n    """Return the first n Fibonacci numbers as a list."""\n',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def setUp(self):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument(",
)
_QUESTIONS = (
    "Write a Python function that returns the last item of a list.",
    "Explain in three sentences why the sky is blue.",
    "Write a function that counts the words in a text file.",
    "A train leaves at nine and travels 120 km at 80 km/h. When does it arrive? Show your steps.",
    "List five ways to speed up a slow Python program.",
)
PROMPTS: tuple[dict[str, Any], ...] = (
    *({"text": text} for text in _CODE),
    *({"messages": [{"role": "user", "content": question}]} for question in _QUESTIONS),
)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, each with `text` or with chat `messages`. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(prompt, dict) or not (
            isinstance(prompt.get("text"), str) or isinstance(prompt.get("messages"), list)
        ):
            raise BadInput(f'{path}:{number}: a prompt is an object with "text", or with "messages"')
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: no prompts in it")
    return prompts
