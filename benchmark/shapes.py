"""Shapes of real models without weights, as config.json files.

`--load-format dummy` then fills the weights with noise. With simulated acceptance (SGLANG_SIMULATE_ACC_LEN)
speed does not depend on their values, and no checkpoint has to reach the machine.
"""

import json
from dataclasses import asdict, dataclass, field, replace
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
class HybridModel(Model):
    """A decoder whose layers are GatedDeltaNet, but every `full_attention_interval`-th."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int

    @property
    def layer_types(self) -> list[str]:
        numbers = range(1, self.num_hidden_layers + 1)
        return ["linear_attention" if n % self.full_attention_interval else "full_attention" for n in numbers]


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
    draft_config: dict = field(default_factory=dict)
    dflash_config: dict = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write both config.json files, to `folder`/target and `folder`/draft."""
        common = {"attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}
        common |= {"dtype": "bfloat16", "rope_theta": self.rope_theta, "rms_norm_eps": 1e-6}
        dflash = {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layer_ids}
        draft = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.target.num_hidden_layers,
            "dflash_config": dflash | self.dflash_config,
            "layer_types": ["full_attention"] * self.draft.num_hidden_layers,
            "max_position_embeddings": self.target_config["max_position_embeddings"],
        }
        target = common | asdict(self.target) | self.target_config
        if isinstance(self.target, HybridModel):
            target["layer_types"] = self.target.layer_types
        drafts = common | asdict(self.draft) | draft | self.draft_config
        for name, config in (("target", target), ("draft", drafts)):
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

# Qwen/Qwen3-4B with z-lab/Qwen3-4B-DFlash-b16, and Qwen/Qwen3-0.6B with a draft of that kind. A GPU is done
# with their cycles sooner than the host.
QWEN3_4B = replace(
    QWEN3_8B,
    name="qwen3-4b",
    target=Model(36, 2560, 9728, 32, 8, 128, 151936),
    draft=Model(5, 2560, 9728, 32, 8, 128, 151936),
)
QWEN3_06B = replace(
    QWEN3_8B,
    name="qwen3-0.6b",
    target=Model(28, 1024, 3072, 16, 8, 128, 151936),
    draft=Model(5, 1024, 3072, 16, 8, 128, 151936),
    target_layer_ids=(1, 7, 13, 19, 25),
)

# Qwen/Qwen3.8-27B, text only, and z-lab/Qwen3.8-27B-DFlash2: for tests and estimates without a GPU.
QWEN3_8_27B = Pair(
    name="qwen3.8-27b",
    target=HybridModel(64, 5120, 17408, 24, 4, 256, 248320, 16, 48, 128, 128, 4, 4),
    draft=Model(5, 5120, 17408, 32, 8, 128, 248320),
    block_size=8,
    target_layer_ids=(5, 19, 33, 47, 61),
    mask_token_id=248070,
    target_config={
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "max_position_embeddings": 262144,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    rope_theta=1e7,
    draft_config={
        "architectures": ["DFlash2DraftModel"],
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "is_causal": False,
    },
    dflash_config={"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
)
