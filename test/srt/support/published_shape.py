"""Parameters of Qwen3.8-27B and its DFlash2 draft on one tensor-parallel rank, on the meta device."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from shapes import QWEN3_8_27B
from support.engine import start

# As published; without its features of inner layers.
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": QWEN3_8_27B.target.hidden_size,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
TOKENS = {"image_token_id": 248056, "video_token_id": 248057}
TOKENS |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054}


def write(folder: Path) -> None:
    """Write the pair's config.json files, the target's with its vision tower."""
    QWEN3_8_27B.write(folder)
    path = folder / "target" / "config.json"
    text = json.loads(path.read_text())
    text.pop("architectures")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", **TOKENS}
    whole |= {"text_config": text, "vision_config": VISION, "tie_word_embeddings": False, "dtype": "bfloat16"}
    path.write_text(json.dumps(whole))


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Build both models, as rank `rank` of `world_size`, and save shapes by parameter name."""
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.models.qwen3_5 import Qwen3_5ForConditionalGeneration
    from sglang.srt.utils.hf_transformers_utils import get_config

    from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel

    # SGLang creates it for every group of more than one rank; it needs CUDA.
    pynccl.PyNcclCommunicator = lambda **_: SimpleNamespace(disabled=True)
    start(rank, world_size, torch.distributed.FileStore(f"{folder}/store-{world_size}", world_size))
    configs = [get_config(f"{folder}/{name}", trust_remote_code=False) for name in ("target", "draft")]
    text = configs[0].text_config  # SGLang pads these on a CPU, if ranks do not divide them
    text.linear_num_key_heads_cpu = text.linear_num_key_heads
    text.linear_num_value_heads_cpu = text.linear_num_value_heads
    torch.set_default_dtype(torch.bfloat16)
    found = {}
    with torch.device("meta"):
        for model in (Qwen3_5ForConditionalGeneration(configs[0]), DFlash2DraftModel(configs[1])):
            found[type(model).__name__] = {name: list(p.shape) for name, p in model.named_parameters()}
    Path(f"{folder}/{rank}-of-{world_size}.json").write_text(json.dumps(found))
