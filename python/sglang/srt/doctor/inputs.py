"""Inputs of the doctor: a checkpoint's config.json, tokenizer, card, tensors; prompts."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.srt.configs.checkpoint import Header, read_object, read_rows, safetensors_headers
from sglang_dflash.srt.configs.draft_tensors import canonical_name

# Files that describe a checkpoint, without its tensors.
_DESCRIPTIONS = ("*.json", "*.md", "*.jinja")


class BadInput(Exception):
    """Input that cannot be examined; the message is the one line that the user sees."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in `folder`, with the user's `name` for it and its config.json as `config`."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    truncated: list[str] = field(default_factory=list)  # filled with `tensors`

    @classmethod
    def open(cls, path: str, with_tensors: bool) -> "Checkpoint":
        """Open a directory, or download the needed files of a hub id. Raises BadInput."""
        folder = Path(os.path.expanduser(path))
        if folder.is_file():
            raise BadInput(f"{path}: a file, where the directory of a checkpoint is needed")
        if not folder.is_dir():
            folder = _download(path, with_tensors)
        return cls(folder, path, _read_json(folder / "config.json", path))

    @property
    def has_tensors(self) -> bool:
        return any(self.folder.glob("*.safetensors"))

    @cached_property
    def tensors(self) -> dict[str, Header]:
        """Header of every tensor, by our name of it. Raises BadInput."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise BadInput(f"{self.name}: no safetensors file there")
        found: dict[str, Header] = {}
        for file in files:
            try:
                own = {
                    canonical_name(name): header for name, header in safetensors_headers(str(file)).items()
                }
                size = file.stat().st_size
            except OSError as error:
                raise BadInput(f"{file}: {error.strerror or error}") from error
            except ValueError as error:
                raise BadInput(f"{file}: {error}") from error
            self.truncated.extend(name for name, header in own.items() if header.end > size)
            found |= own
        return found

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        """None if there is no tokenizer.json."""
        path = self.folder / "tokenizer.json"
        return Tokenizer(_read_json(path, self.name)) if path.exists() else None

    @cached_property
    def card(self) -> str:
        """README.md, empty if there is none."""
        try:
            return (self.folder / "README.md").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def read(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """Read rows of a tensor, floats as float32. Raises BadInput for an unknown element type."""
        header = self.tensors[name]
        try:
            return read_rows(str(self.folder / header.file), header, rows)
        except ValueError as error:
            raise BadInput(f"{self.folder / header.file}: {name} {error}") from error


class Tokenizer:
    """The single tokens of a tokenizer.json."""

    def __init__(self, data: Mapping[str, Any]):
        vocabulary = (data.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # Unigram: [token, score] pairs in the order of their ids
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        self._names = {i: token for token, i in vocabulary.items()}
        self._special = {entry["id"]: entry["content"] for entry in data.get("added_tokens") or ()}

    def name(self, token_id: int) -> str | None:
        """Return a token's text; None for an id that the tokenizer never produces."""
        return self._special.get(token_id, self._names.get(token_id))

    def is_ordinary(self, token_id: int) -> bool:
        """Return whether the id is a piece of text, neither special nor unused."""
        return token_id in self._names and token_id not in self._special

    def __len__(self) -> int:
        return len(self.get_vocab())

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token, as Hugging Face's tokenizers do."""
        return {name: i for i, name in (self._names | self._special).items()}

    def mask_tokens(self) -> dict[int, str]:
        """Return special tokens with `mask` in their name, by id."""
        return {i: name for i, name in self._special.items() if "mask" in name.lower()}


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


def _read_json(path: Path, checkpoint: str) -> dict[str, Any]:
    try:
        return read_object(str(path))
    except ValueError as error:
        raise BadInput(f"{checkpoint}: {error}") from error


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


# Code to continue, and questions, for which the chat template is used if the target has one.
PROMPTS = read_prompts(Path(__file__).with_name("prompts.jsonl"))
