"""The bundled hybrid target with a vision tower, as a checkpoint of Qwen3.5's class for images.

The text model is unchanged, so its drafts draft for it. The tower is random: a picture changes the answer,
but says nothing. The last tokens of the vocabulary become image tokens.
"""

import base64
import io
import json
import random
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from serving import HYBRID_TARGET
from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
NAMES = ("vision_start", "vision_end", "image", "video")  # of their ids in the config
PATCH, MERGE = 4, 2
PIXELS = PATCH * MERGE  # a token's share of a row
# Of tower outputs, beside embeddings of 0.1.
LOUDNESS = 0.3


def write_vision_target(folder: Path, text: Path = HYBRID_TARGET) -> list[int]:
    """Write the checkpoint; return the ids of `TOKENS`."""
    folder.mkdir(parents=True, exist_ok=True)
    text_config = json.loads((text / "config.json").read_text())
    ids = list(range(text_config["vocab_size"] - len(TOKENS), text_config["vocab_size"]))
    tokenizer = _tokenizer(text, ids)
    sizes = {"shortest_edge": PIXELS**2, "longest_edge": (64 * PIXELS) ** 2}
    shapes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "size": sizes}
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(**shapes), tokenizer, Qwen3VLVideoProcessor(**shapes), tokenizer.chat_template
    )
    processor.save_pretrained(folder)
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": PATCH}
    vision |= {"out_hidden_size": text_config["hidden_size"], "spatial_merge_size": MERGE}
    vision |= {"temporal_patch_size": 2, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [], "initializer_range": 0.2}
    # Three dimensions of text positions are equal, so the sections change nothing in a text.
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text_config["rope_parameters"] |= sections
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config,
        "vision_config": vision | {"model_type": "qwen3_5_vision"},
        **dict(zip((f"{name}_token_id" for name in NAMES), ids)),
        "tie_word_embeddings": text_config["tie_word_embeddings"],
        "dtype": text_config["dtype"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text((text / "generation_config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    torch.manual_seed(3)
    tower = Qwen3_5VisionModel(Qwen3_5Config(vision_config=vision).vision_config)
    tower.merger.linear_fc2.weight.data *= LOUDNESS
    tensors |= {f"model.visual.{name}": tensor for name, tensor in tower.state_dict().items()}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return ids


def _tokenizer(text: Path, ids: list[int]) -> PreTrainedTokenizerFast:
    """Return the text's tokenizer, in which `TOKENS` take the place of the last merges."""
    config = json.loads((text / "tokenizer.json").read_text())
    model = config["model"]
    first = ids[0]
    model["vocab"] = {piece: number for piece, number in model["vocab"].items() if number < first}
    model["vocab"] |= dict(zip(TOKENS, ids, strict=True))
    model["merges"] = model["merges"][: -len(TOKENS)]
    alike = config["added_tokens"][0]
    config["added_tokens"] += [
        alike | {"id": number, "content": token} for token, number in zip(TOKENS, ids, strict=True)
    ]
    settings = json.loads((text / "tokenizer_config.json").read_text())
    kept = {name: settings[name] for name in ("eos_token", "pad_token", "chat_template", "model_max_length")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(config)), **kept)


def random_picture(generator: random.Random, rows: int, columns: int) -> str:
    """Return a picture of rows x columns tokens, as a URL that holds its data."""
    pixels = generator.randbytes(3 * rows * columns * PIXELS**2)
    noise = Image.frombytes("RGB", (columns * PIXELS, rows * PIXELS), pixels)
    data = io.BytesIO()
    noise.save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
