"""The files of a checkpoint, read without a model: config.json, tensors, mask embedding."""

import json
import operator
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dflash.srt.configs.fields import DraftConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
# Kinds of files, of which SGLang loads the first that is there.
_KINDS = (".safetensors", ".bin", ".pt")
# Files of other things that SGLang leaves out.
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
# Element types by PyTorch's names, in safetensors' words.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

FLOATS = ("BF16", "F16", "F32", "F64")
INTEGERS = ("I64", "I32")


def find_file(checkpoint: str, revision: str | None = None, name: str = "config.json") -> str | None:
    """Return the path of a file in a directory or hub repository, or None."""
    from transformers.utils import cached_file

    if os.path.isfile(checkpoint) or "://" in checkpoint:
        return None
    folder = os.path.expanduser(checkpoint)
    local = os.path.join(folder, name)
    if os.path.isdir(folder):
        return local if os.path.isfile(local) else None
    try:
        return cached_file(checkpoint, name, revision=revision)
    except OSError:
        return None


def read_object(path: str) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError, in one line, for a file without one."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold an object, this is a {type(value).__name__}")
    return value


def read_file(
    checkpoint: str, revision: str | None = None, name: str = "config.json"
) -> dict[str, Any] | None:
    """Read a draft's file of JSON; None without it. Raises DraftConfigError for a bad one."""
    path = find_file(checkpoint, revision, name)
    try:
        return None if path is None else read_object(path)
    except ValueError as error:
        raise DraftConfigError(checkpoint, [str(error)]) from error


def read_config(checkpoint: str | None, revision: str | None) -> dict[str, Any] | None:
    """Read a checkpoint's config.json, or None if it cannot be read, which others report."""
    try:
        return None if checkpoint is None else read_file(checkpoint, revision)
    except DraftConfigError:
        return None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, read from the file when indexed.

    Attributes:
        dtype: element type by safetensors' name.
        values: `values[...]` is the tensor, `values[[1, 3]]` are two of its rows.
        file: the name of the file; empty for a tensor in memory.
    """

    dtype: str
    shape: tuple[int, ...]
    values: Any
    file: str = ""

    @classmethod
    def from_tensor(cls, tensor: "torch.Tensor", file: str = "") -> "StoredTensor":
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(_DTYPES.get(dtype, dtype), tuple(tensor.shape), tensor, file)

    @property
    def where(self) -> str:
        return f"{self.file}: " if self.file else ""


def _read_safetensors(path: str, file: str) -> Iterator[tuple[str, StoredTensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
    for name in opened.keys():
        values = opened.get_slice(name)
        yield name, StoredTensor(values.get_dtype(), tuple(values.get_shape()), values, file)


def _load_pickle(path: str, file: str) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # PyTorch raises nearly anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{file} is no file of PyTorch's tensors: {reason[0]}") from error


def _read_pickle(path: str, file: str) -> Iterator[tuple[str, StoredTensor]]:
    import torch

    state = _load_pickle(path, file)
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file} must hold tensors by name")
    for name, tensor in state.items():
        yield name, StoredTensor.from_tensor(tensor, file)


def weight_files(folder: str) -> list[str]:
    """Return the names of the files that SGLang loads. Raises ValueError if there are none."""
    found = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    for kind in _KINDS:
        names = [name for name in found if name.endswith(kind) and name not in _NO_WEIGHTS]
        if names == ["consolidated.safetensors", "model.safetensors"] and INDEX not in found:
            return names[1:]
        if names:
            return names if kind != _KINDS[0] or INDEX not in found else _files_in_index(folder, names)
    raise ValueError(f"no weights are there: no file *{', *'.join(_KINDS)}")


def _files_in_index(folder: str, names: list[str]) -> list[str]:
    listed = read_object(os.path.join(folder, INDEX)).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{INDEX}: weight_map must map tensors to files")
    files = set(listed.values())
    if missing := sorted(files - set(names)):
        raise ValueError(f"{INDEX} lists {', '.join(missing)}, which is not there")
    return sorted(files)


def tensors_of(checkpoint: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a local checkpoint's tensors. Raises ValueError, in one line, if SGLang cannot."""
    folder = os.path.expanduser(checkpoint)
    for file in weight_files(folder):
        read = _read_safetensors if file.endswith(_KINDS[0]) else _read_pickle
        yield from read(os.path.join(folder, file), file)


def tensor_shapes(checkpoint: str) -> dict[str, tuple[int, ...]] | None:
    """Return shapes by name without `model.`; None if they cannot be read."""
    try:
        return {name.removeprefix("model."): stored.shape for name, stored in tensors_of(checkpoint)}
    except (ValueError, OSError):
        return None


@dataclass(frozen=True, slots=True)
class MaskEmbedding:
    """Embedding [hidden] of a mask token, on the CPU, in the saved dtype."""

    token_id: int
    vector: "torch.Tensor"

    def misfit(self, mask_token_id: int, hidden_size: int) -> str | None:
        """Return why a draft with this mask token and width cannot use it, or None."""
        if self.token_id != mask_token_id:
            return f"{MASK_EMBEDDING_FILE} is of token {self.token_id}, but the mask token is {mask_token_id}"
        if len(self.vector) != hidden_size:
            return f"{MASK_EMBEDDING_FILE} holds {len(self.vector)} numbers, expected {hidden_size}"
        return None


def have_one_mask(first: MaskEmbedding | None, second: MaskEmbedding | None) -> bool:
    """Return whether two drafts' mask embeddings are equal, or both have none."""
    if first is None or second is None:
        return first is second
    return first.token_id == second.token_id and first.vector.equal(second.vector)


def read_mask_embedding(checkpoint: str, revision: str | None = None) -> MaskEmbedding | None:
    """Read `mask_embedding.pt` of a folder or hub id; raise DraftConfigError if unusable."""
    path = find_file(checkpoint, revision, MASK_EMBEDDING_FILE)
    if path is None:
        return None
    try:
        saved = _load_pickle(path, MASK_EMBEDDING_FILE)
        mask = MaskEmbedding(operator.index(saved["mask_token_id"]), saved["embedding"].flatten())
        if not mask.vector.isfinite().all():
            raise ValueError(f"{MASK_EMBEDDING_FILE} holds values that are not finite")
    except ValueError as error:
        raise DraftConfigError(checkpoint, [str(error)]) from error
    except (LookupError, TypeError, AttributeError) as error:
        problem = f"{MASK_EMBEDDING_FILE} does not hold an embedding and its mask_token_id"
        raise DraftConfigError(checkpoint, [problem]) from error
    if saved.get("per_position"):
        problem = f"{MASK_EMBEDDING_FILE} has an embedding per position, which is not supported"
        raise DraftConfigError(checkpoint, [problem])
    return mask
