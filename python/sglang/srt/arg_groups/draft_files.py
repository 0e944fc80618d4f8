"""Checks of a draft checkpoint's files in the main process, before SGLang reads them.

A fault ends the start with an error that names the checkpoint, the file and the fault.
"""

import os
from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.config_file import find_config, read_object
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, DraftConfigError
from sglang_dflash.srt.configs.draft_quantization import quantization_of
from sglang_dflash.srt.configs.draft_tensors import (
    canonical_name,
    d2t_problems,
    expected_tensors,
    is_ignored,
    tensor_problems,
)
from sglang_dflash.srt.configs.flat_peagle import flatten_peagle, is_flat_peagle
from sglang_dflash.srt.configs.layer_fields import is_int, layer_problems
from sglang_dflash.srt.configs.packed_tensors import INTEGERS, Header, unpack_headers
from sglang_dflash.srt.configs.peagle_config import check_architectures
from sglang_dflash.srt.configs.speculators_format import is_speculators_config, normalize
from sglang_dflash.srt.environ import DFlashOptions

INDEX = "model.safetensors.index.json"
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


def check_draft_config(checkpoint: str, revision: str | None = None) -> None:
    """Raise ValueError unless config.json describes a draft of ours."""
    path = find_config(checkpoint, revision)
    if path is None:
        return  # SGLang has other formats, or reports it
    try:
        config = read_object(path)
    except ValueError as error:
        raise DraftConfigError(checkpoint, [str(error)]) from error
    if is_speculators_config(config):
        normalize(config, checkpoint)
    elif is_flat_peagle(config, checkpoint):
        flatten_peagle(config, checkpoint, DFlashOptions.TARGET_LAYERS.get())
    else:
        check_architectures(config.get("architectures"), checkpoint)
        problems = layer_problems(config)
        if problems:
            raise DraftConfigError(checkpoint, problems)


def check_draft_tensors(checkpoint: str, hf_config: Any, draft: DFlashDraftConfig) -> None:
    """Raise DraftConfigError naming each tensor of a local checkpoint that does not fit.

    The loader checks the others: a hub id, whose files need not be here yet, and files of another format.
    """
    folder = os.path.expanduser(checkpoint)
    files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    names = [name for name in files if name.endswith(".safetensors")]
    if not names:
        return
    problems = size_problems(hf_config)
    if problems:
        raise DraftConfigError(checkpoint, problems)
    headers: dict[str, Header] = {}
    for name in _loaded_files(folder, names, problems):
        headers |= _headers(os.path.join(folder, name), draft, problems)
    expected, _ = expected_tensors(hf_config, draft)
    found = unpack_headers(quantization_of(hf_config, checkpoint), headers, expected)
    problems = problems or found.problems or tensor_problems(hf_config, draft, found.shapes)
    if problems:
        raise DraftConfigError(checkpoint, problems)


def size_problems(hf_config: Any) -> list[str]:
    """List a layer's sizes that are no positive integers, or do not divide as they must."""
    sizes: dict[str, Any] = {name: getattr(hf_config, name, None) for name in _SIZES}
    head_dim = getattr(hf_config, "head_dim", None)
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    wrong = {name: value for name, value in sizes.items() if not is_int(value) or value < 1}
    if wrong:
        return [f"{name} must be a positive integer, got {value!r}" for name, value in wrong.items()]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % kv_heads:
        return [f"num_attention_heads is {heads}, which num_key_value_heads, {kv_heads}, does not divide"]
    head_dim = head_dim or hf_config.hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        return [f"head_dim is {head_dim}: RoPE turns pairs"]
    return []


def _loaded_files(folder: str, names: list[str], problems: list[str]) -> list[str]:
    """Return the files that SGLang loads: those that the index lists, if there is one."""
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return names[1:] if names == ["consolidated.safetensors", "model.safetensors"] else names
    try:
        listed = read_object(path).get("weight_map")
    except ValueError as error:
        problems.append(str(error))
        return []
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        problems.append(f"{INDEX}: weight_map must map tensors to files")
        return []
    files = set(listed.values())
    problems += [f"{INDEX} lists {file}, which is not there" for file in sorted(files - set(names))]
    return sorted(files & set(names))


def _headers(path: str, draft: DFlashDraftConfig, problems: list[str]) -> Mapping[str, Header]:
    """Return the headers of a file's tensors, without ignored ones, by name without `model.`."""
    from safetensors import SafetensorError, safe_open

    file, headers = os.path.basename(path), {}
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        problems.append(f"{file} is no safetensors file: {error}")
        return {}
    with opened:
        for full_name in opened.keys():
            name, header = canonical_name(full_name), opened.get_slice(full_name)
            is_map = name == "d2t"
            if is_ignored(name):
                continue
            if is_map and header.get_dtype() in INTEGERS:
                found = d2t_problems(opened.get_tensor(full_name), draft)
                problems += [f"{file}: {problem}" for problem in found]
            if name in headers:
                problems.append(f"{file}: {full_name} stands for {name}, which is there twice")
            if not is_map or draft.has_own_vocabulary:
                dtype, shape = header.get_dtype(), tuple(header.get_shape())
                is_shape = name.endswith(".weight_shape") and dtype in INTEGERS and shape == (2,)
                values = tuple(opened.get_tensor(full_name).tolist()) if is_shape else None
                headers[name] = Header(dtype, shape, file, values)
    return headers
