"""Prompts of `doctor --measure`: those of a file, or of prompts.jsonl.

The latter are code to continue, and questions, for which the chat template is used if the target has
one.
"""

import json
from pathlib import Path
from typing import Any

from sglang_dflash.srt.doctor.checkpoint import BadInput


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


PROMPTS = read_prompts(Path(__file__).with_name("prompts.jsonl"))
