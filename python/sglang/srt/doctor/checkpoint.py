"""The files of a checkpoint: config.json, tokenizer, card and safetensors headers."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dflash.srt.configs.config_file import read_object
from sglang_dflash.srt.configs.draft_tensors import canonical_name

# Files that describe a checkpoint, without its tensors.
_DESCRIPTIONS = ("*.json", "*.md", "*.jinja")
# safetensors' element types -> NumPy's; bfloat16, which NumPy lacks, is read as the upper half of a float32.
_NUMPY = {"I64": "<i8", "I32": "<i4", "BOOL": "?", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_MAX_HEADER = 100_000_000  # safetensors' own limit


class BadInput(Exception):
    """Input that cannot be examined; the message is the one line that the user sees."""


@dataclass(frozen=True)
class TensorHeader:
    """One entry of a safetensors file.

    `start` and `end` are bytes from the beginning of the file; a truncated file ends before `end`.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


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

    @cached_property
    def tensors(self) -> dict[str, TensorHeader]:
        """Header of every tensor, by our name of it. Raises BadInput."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise BadInput(f"{self.name}: no safetensors file there")
        found: dict[str, TensorHeader] = {}
        for file in files:
            found |= self._read_headers(file)
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
        if header.dtype not in _NUMPY:
            raise BadInput(f"{header.file}: {name} is {header.dtype}, which cannot be read here")
        mapped = np.memmap(header.file, _NUMPY[header.dtype], "r", header.start, header.shape or (1,))
        values = np.ascontiguousarray(mapped[rows])
        if header.dtype == "BF16":
            return (values.astype("<u4") << 16).view("<f4")
        return values.astype(np.float32) if header.dtype.startswith("F") else values

    def _read_headers(self, file: Path) -> dict[str, TensorHeader]:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if length > min(_MAX_HEADER, size):
                    raise BadInput(f"{file}: not a safetensors file, or cut off inside its header")
                header = json.loads(stream.read(length))
            found = {}
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                tensor = TensorHeader(file, entry["dtype"], tuple(entry["shape"]), start, end)
                found[canonical_name(name)] = tensor
        except OSError as error:
            raise BadInput(f"{file}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{file}: its safetensors header cannot be read ({error})") from error
        self.truncated.extend(name for name, tensor in found.items() if tensor.end > size)
        return found


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
