"""The tensors in a local checkpoint's files, read without a model."""

import functools
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_dflash.srt.configs.config_file import read_object

INDEX = "model.safetensors.index.json"
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

INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor's element type by safetensors' name, its shape, and the file that holds it.

    `values` are the entries of `weight_shape`, if they were read.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    values: tuple[int, ...] | None = None

    @property
    def where(self) -> str:
        return f"{self.file}: " if self.file else ""


# A tensor's name in its file, its header, and a function that reads it, until the next one is taken.
Stored = tuple[str, Header, Callable[[], Any]]


def header_of(tensor: Any, file: str = "") -> Header:
    """Return the header that a tensor of PyTorch would have in a file."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Header(_DTYPES.get(dtype, dtype), tuple(tensor.shape), file)


def weight_files(folder: str) -> list[str]:
    """Return the names of the files that SGLang loads. Raises ValueError if there are none."""
    found = sorted(os.listdir(folder))
    for kind in _KINDS:
        names = [name for name in found if name.endswith(kind) and name not in _NO_WEIGHTS]
        if names == ["consolidated.safetensors", "model.safetensors"] and INDEX not in found:
            return names[1:]
        if names:
            return names if kind != _KINDS[0] or INDEX not in found else _indexed(folder, names)
    raise ValueError(f"no weights are there: no file *{', *'.join(_KINDS)}")


def _indexed(folder: str, names: list[str]) -> list[str]:
    listed = read_object(os.path.join(folder, INDEX)).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{INDEX}: weight_map must map tensors to files")
    files = set(listed.values())
    if missing := sorted(files - set(names)):
        raise ValueError(f"{INDEX} lists {', '.join(missing)}, which is not there")
    return sorted(files)


def stored_tensors(path: str) -> Iterator[Stored]:
    """Yield the tensors of a file. Raises ValueError, in one line, if it has none."""
    file = os.path.basename(path)
    if file.endswith(_KINDS[0]):
        yield from _safetensors(path, file)
    else:
        yield from _pickled(path, file)


def _safetensors(path: str, file: str) -> Iterator[Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
    with opened:
        for name in opened.keys():
            tensor = opened.get_slice(name)
            header = Header(tensor.get_dtype(), tuple(tensor.get_shape()), file)
            yield name, header, functools.partial(opened.get_tensor, name)


def _pickled(path: str, file: str) -> Iterator[Stored]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # PyTorch raises nearly anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{file} is no file of PyTorch's tensors: {reason[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file} must hold tensors by name")
    for name, tensor in state.items():
        yield name, header_of(tensor, file), functools.partial(state.__getitem__, name)


def tensor_shapes(checkpoint: str) -> dict[str, tuple[int, ...]] | None:
    """Return shapes by name without `model.`, or None.

    `check_draft_tensors` reports why they cannot be read.
    """
    folder, found = os.path.expanduser(checkpoint), {}
    try:
        for file in weight_files(folder):
            for name, header, _ in stored_tensors(os.path.join(folder, file)):
                found[name.removeprefix("model.")] = header.shape
    except (ValueError, OSError):
        return None
    return found
