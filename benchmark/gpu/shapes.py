"""Shapes of real models without weights, as config.json files.

`--load-format dummy` then fills the weights with noise. With simulated acceptance (SGLANG_SIMULATE_ACC_LEN)
speed does not depend on their values, and no checkpoint has to reach the machine.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A dense decoder, in the names of its config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class Pair:
    """A target and its DFlash draft.

    block_size counts the anchor. target_layer_ids are 0-based outputs.
    """

    name: str
    target: Model
    draft: Model
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    target_config: dict
    rope_theta: float

    def write(self, folder: Path) -> None:
        """Write both config.json files, to `folder`/target and `folder`/draft."""
        common = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}
        common |= {"dtype": "bfloat16", "rope_theta": self.rope_theta, "rms_norm_eps": 1e-6}
        draft = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.target.num_hidden_layers,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layer_ids},
            "layer_types": ["full_attention"] * self.draft.num_hidden_layers,
            "max_position_embeddings": self.target_config["max_position_embeddings"],
        }
        for name, config in (
            ("target", common | asdict(self.target) | self.target_config),
            ("draft", common | asdict(self.draft) | draft),
        ):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config, indent=1))


# Qwen/Qwen3-8B and z-lab/Qwen3-8B-DFlash-b16.
QWEN3_8B = Pair(
    name="qwen3-8b",
    target=Model(36, 4096, 12288, 32, 8, 128, 151936),
    draft=Model(5, 4096, 12288, 32, 8, 128, 151936),
    block_size=16,
    target_layer_ids=(1, 9, 17, 25, 33),
    mask_token_id=151669,
    target_config={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40960,
    },
    rope_theta=1e6,
)

# meta-llama/Llama-3.1-8B with a draft of the same kind: its depth and block, the target's widths.
LLAMA_3_1_8B = Pair(
    name="llama-3.1-8b",
    target=Model(32, 4096, 14336, 32, 8, 128, 128256),
    draft=Model(5, 4096, 14336, 32, 8, 128, 128256),
    block_size=16,
    target_layer_ids=(1, 8, 15, 22, 29),
    mask_token_id=128002,
    target_config={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    rope_theta=5e5,
)

PAIRS = (QWEN3_8B, LLAMA_3_1_8B)
