"""Memory of the published Qwen3.8-27B draft's shape, packed and dequantized, on the meta device."""

import torch
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from serving import ROOT
from support.engine import start
from support.packed_drafts import IGNORED
from support.packed_kernels import use_stand_ins
from transformers import Qwen3Config

from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel

DOCS = ROOT / "docs" / "quantized-drafts.md"
LAYERS, KV_HEADS, HEAD_DIM, HIDDEN = 5, 8, 128, 5120
SHAPE = dict(
    architectures=["DFlash2DraftModel"],
    hidden_size=HIDDEN,
    intermediate_size=17408,
    num_hidden_layers=LAYERS,
    layer_types=["sliding_attention"] * LAYERS,
    sliding_window=2048,
    use_sliding_window=True,
    num_attention_heads=32,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=248320,
    rope_theta=1e7,
    max_position_embeddings=4096,  # only the table of RoPE is as long
    num_target_layers=64,
    block_size=8,
    is_causal=False,
    tie_word_embeddings=False,
    dflash_config={
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
)
# Name in the table of the docs -> the library's preset, and its format.
SCHEMES = {
    "unquantized": None,
    "W8A16": ("W8A16", "pack-quantized"),
    "FP8": ("FP8_DYNAMIC", "float-quantized"),
    "NVFP4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "W4A16": ("W4A16", "pack-quantized"),
}
TARGET_KV_PER_TOKEN = 16 * 4 * 256 * 2 * 2  # full layers, KV heads, width, K and V, bytes
DRAFT_KV_PER_TOKEN = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2


def quantization(preset: str, form: str) -> dict:
    group = preset_name_to_scheme(preset, ["Linear"]).model_dump(mode="json")
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(IGNORED),
    }


def weight_bytes(scheme: tuple[str, str] | None) -> int:
    """Return the bytes of a draft's parameters, and of the stacked K and V rows of its context."""
    config = Qwen3Config(**SHAPE)
    config.draft_quantization = quantization(*scheme) if scheme else None
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = DFlash2DraftModel(config)
    finally:
        torch.set_default_dtype(before)
    layers = model.packed_layers.layers.values() if scheme else ()
    assert all(layer.kernel is not None for layer in layers) and len(layers) == (21 if scheme else 0)
    stack = LAYERS * 2 * KV_HEADS * HEAD_DIM * HIDDEN * 2
    return stack + sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def test_the_table_of_the_docs(monkeypatch):
    """GB of weights, and thousands of tokens of KV that the freed memory holds."""
    start()
    use_stand_ins(monkeypatch, (8, 9))
    assert (TARGET_KV_PER_TOKEN, DRAFT_KV_PER_TOKEN) == (64 * 1024, 20 * 1024)
    text = DOCS.read_text()
    sizes = {name: weight_bytes(scheme) for name, scheme in SCHEMES.items()}
    for name, size in sizes.items():
        tokens = (sizes["unquantized"] - size) // (TARGET_KV_PER_TOKEN + DRAFT_KV_PER_TOKEN) // 1000
        gained = f"{tokens}k" if tokens else "–"
        assert f"| {name} | {size / 1e9:.2f} GB | {gained} |" in text, sizes
