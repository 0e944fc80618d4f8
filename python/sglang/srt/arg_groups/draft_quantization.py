"""The flag `--speculative-draft-model-quantization`, beside the draft's file.

A draft has its file's scheme, and is dequantized at load unless the flag is `packed`. The target's
`--quantization`, which SGLang gives to a draft without such a flag, says nothing about it.
"""

import logging
from typing import Any

from sglang_dflash.srt.configs.draft_quantization import DraftQuantization
from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

PACKED = "packed"  # a value of the flag that only ours has


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


def settle_draft_quantization(args: Any) -> None:
    """Pass a flag that fits the file on to the processes that load the draft."""
    DFlashOptions.DRAFT_PACKED.clear()
    named = args.speculative_draft_model_quantization
    if named is not None and not args._speculative_draft_quantization_explicitly_set:
        logger.info("DFLASH: --quantization %s is the target's; the draft stays as it is saved.", named)
    elif named == PACKED and args.device == "cpu":
        logger.warning("DFLASH dequantizes the draft: a CPU has no kernels for packed layers.")
    elif named == PACKED:
        DFlashOptions.DRAFT_PACKED.set(1)
