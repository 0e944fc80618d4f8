"""Checks of a draft checkpoint's files in the main process, before SGLang reads them.

A fault ends the start with an error that names the checkpoint, the file and the fault.

A draft has its file's quantization, and is dequantized at load unless the flag
`--speculative-draft-model-quantization` is `packed`. The target's `--quantization`, which SGLang gives to a
draft without such a flag, says nothing about it.
"""

import logging
import os
from dataclasses import replace
from typing import Any

from sglang_dflash.srt.configs.checkpoint import (
    INTEGERS,
    Header,
    find_file,
    read_config,
    read_object,
    tensors_of,
)
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import flat_config
from sglang_dflash.srt.configs.draft_tensors import (
    VOCABULARY_MAPS,
    canonical_name,
    examine_headers,
    has_checked_values,
    value_problems,
    vocabulary_problems,
)
from sglang_dflash.srt.configs.fields import DraftConfigError, assumed_values, is_int
from sglang_dflash.srt.configs.quantization import PACKED, DraftQuantization
from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


def check_draft_config(checkpoint: str, revision: str | None = None) -> None:
    """Raise ValueError unless config.json describes a draft of ours."""
    path = find_file(checkpoint, revision)
    if path is None:
        return  # SGLang has other formats, or reports it
    try:
        config = read_object(path)
    except ValueError as error:
        raise DraftConfigError(checkpoint, [str(error)]) from error
    flat_config(config, checkpoint, DFlashOptions.TARGET_LAYERS.get())


def assumed_in_file(args: Any) -> list[str]:
    """Say which values of its layers the draft's config.json lacks."""
    return _assumed(args.speculative_draft_model_path, args.speculative_draft_model_revision)


def _assumed(checkpoint: str, revision: str | None = None) -> list[str]:
    config = read_config(checkpoint, revision)
    if config is None:
        return []
    return assumed_values(flat_config(config, checkpoint, DFlashOptions.TARGET_LAYERS.get()))


def are_files_read(args: Any) -> bool:
    """Return True if the load format reads the checkpoint's files as they are."""
    return (args.speculative_draft_load_format or args.load_format) in ("auto", "safetensors", "pt")


def check_draft_tensors(
    checkpoint: str, hf_config: Any, draft: DFlashDraftConfig, target_tokens: int | None = None
) -> None:
    """Raise DraftConfigError naming each tensor of a local checkpoint that does not fit.

    The loader checks a hub id, whose files need not be here yet. `target_tokens` is the size of the target's
    vocabulary, or None if it is the draft's.
    """
    if not os.path.isdir(os.path.expanduser(checkpoint)):
        return
    problems = size_problems(hf_config)
    if problems:
        raise DraftConfigError(checkpoint, problems)
    headers: dict[str, Header] = {}
    maps: dict[str, Any] = {}
    try:
        for full_name, header, read in tensors_of(checkpoint):
            name = canonical_name(full_name)
            if name in headers:
                other = headers[name].file
                problems.append(f"{header.file}: {full_name} stands for {name}, which is in {other} too")
            if name.endswith(".weight_shape") and header.shape == (2,) and header.dtype in INTEGERS:
                header = replace(header, values=tuple(read().tolist()))
            headers[name] = header
            if name in VOCABULARY_MAPS and header.dtype in (*INTEGERS, "BOOL"):
                maps[name] = read()
            elif has_checked_values(name, header.shape):
                problems += [f"{header.where}{problem}" for problem in value_problems(name, read())]
    except ValueError as error:
        raise DraftConfigError(checkpoint, [*problems, str(error)]) from error
    tokens = draft.vocab_size if target_tokens is None else target_tokens
    problems += vocabulary_problems(draft, tokens, headers, maps.get("d2t"), maps.get("t2d"))
    problems = problems or examine_headers(hf_config, draft, headers, checkpoint).problems
    if problems:
        problems = [*_assumed(checkpoint), *draft.assumed(), *problems]
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


def check_draft_quantization(args: Any, quantization: DraftQuantization | None) -> None:
    """Raise ValueError if the flag names another quantization than the file's."""
    if problem := flag_problem(args, quantization):
        raise ValueError(problem)


def flag_problem(args: Any, quantization: DraftQuantization | None) -> str | None:
    """Say how the flag contradicts the file.

    Args:
        args: the server's; SGLang has turned "unquant", which fits every file, into None.
        quantization: the file's; None if it is dense.
    """
    named = args.speculative_draft_model_quantization
    if named is None or not args._speculative_draft_quantization_explicitly_set:
        return None
    flag = f"--speculative-draft-model-quantization {named}"
    if quantization is None:
        return f"{flag} is not served for a draft that is not quantized: leave it out."
    if named not in (PACKED, *quantization.names):
        return (
            f"{flag}: the draft is quantized by {quantization.method}. Leave the flag out, or give {PACKED}."
        )
    return None


def apply_draft_quantization(args: Any) -> None:
    """Pass a flag that fits the file on to the processes that load the draft."""
    DFlashOptions.DRAFT_PACKED.clear()
    named = args.speculative_draft_model_quantization
    if named is not None and not args._speculative_draft_quantization_explicitly_set:
        logger.info("DFLASH: --quantization %s is the target's; the draft stays as it is saved.", named)
    elif named == PACKED and args.device == "cpu":
        logger.warning("DFLASH dequantizes the draft: a CPU has no kernels for packed layers.")
    elif named == PACKED:
        DFlashOptions.DRAFT_PACKED.set(1)
