"""Inputs of the doctor: a checkpoint's config.json, tokenizer, tensors; prompts."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_dflash.srt.configs.checkpoint import Stored, read_object, tensors_of
from sglang_dflash.srt.configs.draft_tensors import canonical_name

# Files that describe a checkpoint, without its tensors.
_DESCRIPTIONS = ("*.json", "*.jinja")


class BadInput(Exception):
    """Input that cannot be examined; the message is the one line that the user sees."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in `folder`, with the user's `name` for it and its config.json as `config`."""

    folder: Path
    name: str
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str, with_tensors: bool) -> "Checkpoint":
        """Open a directory, or download the needed files of a hub id. Raises BadInput."""
        folder = Path(os.path.expanduser(path))
        if folder.is_file():
            raise BadInput(f"{path}: a file, where the directory of a checkpoint is needed")
        if not folder.is_dir():
            folder = _download(path, with_tensors)
        try:
            return cls(folder, path, read_object(str(folder / "config.json")))
        except ValueError as error:
            raise BadInput(f"{path}: {error}") from error

    @property
    def has_tensors(self) -> bool:
        return any(self.folder.glob("*.safetensors"))

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor, by our name of it. Raises BadInput."""
        if not self.has_tensors:
            raise BadInput(f"{self.name}: no safetensors file there")
        try:
            return {canonical_name(name): stored for name, stored in tensors_of(str(self.folder))}
        except ValueError as error:
            raise BadInput(f"{self.name}: {error}") from error

    @cached_property
    def tokenizer(self) -> Any:
        """The tokens of tokenizer.json, without rules of a model. None if there is no such file."""
        from transformers import PreTrainedTokenizerFast

        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the reader raises nothing narrower
            raise BadInput(f"{self.name}: tokenizer.json cannot be read: {error}") from error


def mask_tokens(tokenizer: Any) -> dict[int, str]:
    """Return special tokens with `mask` in their name, by id. `tokenizer` may be None."""
    special = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return {i: str(token) for i, token in special.items() if "mask" in str(token).lower()}


def _download(name: str, with_tensors: bool) -> Path:
    """Fetch a hub id's files, from the cache if they are there."""
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") != 1:
        raise BadInput(f"{name}: no such directory")
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTIONS, *(["*.safetensors"] if with_tensors else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # bases of all that the hub's client raises
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name}: no such directory, and not from the hub: {reason}") from error


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, each with `text` or with chat `messages`. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: {error}") from error
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


# Code to continue, and questions, for which the chat template is used if the target has one.
PROMPTS = read_prompts(Path(__file__).with_name("prompts.jsonl"))
