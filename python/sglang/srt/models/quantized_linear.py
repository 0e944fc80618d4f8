"""Quantized drafts, as SGLang loads them: dense, because their files are dequantized here."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.configs.quantization import ATTRIBUTE
from sglang_dflash.srt.patching import WORKER, patches


@patches(
    "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
    at=WORKER,
    signature="(self)",
    feature="quantized drafts",
    upstream="https://github.com/sgl-project/sglang/issues/39087",
)
def parse_quant_config(original: Callable[[Any], Any], config: Any) -> Any:
    """Call a draft that we dequantize dense, as SGLang lacks kernels for some."""
    return None if hasattr(config.hf_config, ATTRIBUTE) else original(config)
