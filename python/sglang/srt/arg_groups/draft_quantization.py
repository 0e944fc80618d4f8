"""The flag `--speculative-draft-model-quantization`, beside the draft's file.

A draft has the scheme of its own file. The target's `--quantization`, which SGLang gives to a draft without a
flag of its own, says nothing about it.
"""

from typing import Any

from sglang_dflash.srt.configs.draft_quantization import DraftQuantization
from sglang_dflash.srt.environ import DFlashOptions


def check_draft_quantization(args: Any, quantization: DraftQuantization | None) -> None:
    """Raise ValueError if the flag names another quantization than the file's."""
    if problem := flag_problem(args, quantization):
        raise ValueError(problem)


def flag_problem(args: Any, quantization: DraftQuantization | None) -> str | None:
    """Say how the flag contradicts the file.

    quantization: the file's; None if it is dense. "unquant" fits all: packed layers are dequantized.
    """
    named = args.speculative_draft_model_quantization
    if named is None or not args._speculative_draft_quantization_explicitly_set:
        return None
    flag = f"--speculative-draft-model-quantization {named}"
    if quantization is None:
        return f"{flag} is not served for a draft that is not quantized: leave it out."
    if named not in quantization.names:
        by = quantization.method
        return f"{flag}: the draft is quantized by {by}. Leave the flag out, or give unquant."
    return None


def settle_draft_quantization(args: Any) -> None:
    """Pass the flag on to the processes that load the draft.

    It fits the file (`flag_problem`). "unquant", which SGLang has turned into None, dequantizes all layers.
    """
    DFlashOptions.DRAFT_DEQUANTIZED.clear()
    is_named = args._speculative_draft_quantization_explicitly_set
    if is_named and args.speculative_draft_model_quantization is None:
        DFlashOptions.DRAFT_DEQUANTIZED.set(1)
