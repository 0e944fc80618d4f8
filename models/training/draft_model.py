"""The DFlash draft (arXiv 2602.06036) in plain PyTorch, for training and as a reference.

Tensor names are those of z-lab's checkpoints. There is no embedding and no LM
head here: both are borrowed from the target and stay frozen.

Shapes: R rows (sequences), S context positions, N blocks per row, B block
size, H hidden size, A aux layers.
"""

import torch
import torch.nn.functional as F
from corpus import MASK_ID
from kinds import kind_of
from torch import nn

BLOCK_SIZE = 8


def draft_config(target_config: dict, num_layers: int) -> dict:
    """Return the flat Qwen3 fields and the DFlash ones."""
    shared = (
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "hidden_act max_position_embeddings rms_norm_eps rope_theta attention_bias attention_dropout "
        "initializer_range eos_token_id pad_token_id"
    ).split()
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(kind_of(target_config).target_layer_ids),
        },
        "num_target_layers": target_config["num_hidden_layers"],
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "max_window_layers": num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        **{name: target_config[name] for name in shared},
    }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The norm itself in float32, as Qwen3 does it, then back to the input's dtype.
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Apply RoPE with rotated halves (NeoX style) to x [R, heads, T, D] at positions [R, T]."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * inverse
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.theta = config["rope_theta"]
        hidden = config["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, config["rms_norm_eps"])

    def _heads(self, x: torch.Tensor, count: int) -> torch.Tensor:
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)  # [R, count, T, D]

    def _keys_values(self, x: torch.Tensor, positions: torch.Tensor):
        keys = rotate(self.k_norm(self._heads(self.k_proj(x), self.kv_heads)), positions, self.theta)
        return keys, self._heads(self.v_proj(x), self.kv_heads)

    def forward(self, rows, context, positions, context_positions, context_mask):
        """Let block rows attend to the context before their anchor and to their whole block.

        rows [R, N * B, H], context [R, S, H], positions [R, N * B],
        context_positions [R, S], context_mask [R, N, S] bool (True = visible).
        The softmax spans two parts with one normaliser: the context, shared by
        all blocks of a row, and the own block. Same result as one big
        block-diagonal mask, at S + B keys per query instead of S + N * B.
        """
        num_rows, num_blocks, _ = context_mask.shape
        groups = self.heads // self.kv_heads
        queries = rotate(self.q_norm(self._heads(self.q_proj(rows), self.heads)), positions, self.theta)
        queries = queries.unflatten(1, (self.kv_heads, groups)) * self.head_dim**-0.5
        context_keys, context_values = self._keys_values(context, context_positions)
        block_keys, block_values = self._keys_values(rows, positions)

        def to_blocks(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-2, (num_blocks, -1))

        # [R, kv, groups, N, B, S] and [R, kv, groups, N, B, B]
        context_scores = to_blocks(
            (queries.flatten(2, 3) @ context_keys.transpose(-1, -2)).unflatten(2, (groups, -1))
        )
        context_scores = context_scores.masked_fill(~context_mask[:, None, None, :, None, :], float("-inf"))
        block_scores = to_blocks(queries) @ to_blocks(block_keys)[:, :, None].transpose(-1, -2)
        weights = torch.cat((context_scores, block_scores), dim=-1).softmax(-1)
        context_weights, block_weights = weights.split((context.shape[1], block_scores.shape[-1]), -1)
        out = (context_weights.flatten(2, 4) @ context_values).unflatten(2, (groups, -1))
        out = out + (block_weights @ to_blocks(block_values)[:, :, None]).flatten(3, 4)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = MLP(config)

    def forward(self, rows, context, positions, context_positions, context_mask):
        # The context enters without input_layernorm, the same for every layer.
        rows = rows + self.self_attn(
            self.input_layernorm(rows), context, positions, context_positions, context_mask
        )
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlashDraft(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        hidden = config["hidden_size"]
        aux_width = hidden * len(config["dflash_config"]["target_layer_ids"])
        self.fc = nn.Linear(aux_width, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, config["rms_norm_eps"])

    def forward(
        self, block_embeds: torch.Tensor, aux_hidden: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Denoise every block in one pass.

        block_embeds [R, N, B, H]: target embedding of the anchor token, then masks;
        aux_hidden [R, S, A * H]: outputs of the target layers, position s in slot s;
        anchors [R, N] int64 in 1..S. Returns hidden [R, N, B, H] after `norm`;
        slot k >= 1 predicts the token AT position anchor + k, slot 0 is unused.
        """
        num_rows, num_blocks, block_size, _ = block_embeds.shape
        context = self.hidden_norm(self.fc(aux_hidden))
        context_positions = torch.arange(context.shape[1]).expand(num_rows, -1)
        context_mask = context_positions[:, None, :] < anchors[:, :, None]
        positions = (anchors[:, :, None] + torch.arange(block_size)).flatten(1)
        rows = block_embeds.flatten(1, 2)
        for layer in self.layers:
            rows = layer(rows, context, positions, context_positions, context_mask)
        return self.norm(rows).unflatten(1, (num_blocks, block_size))


def block_token_ids(anchor_tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return [..., B] for anchor_tokens [...] int64: the anchor, then masks."""
    ids = torch.full((*anchor_tokens.shape, block_size), MASK_ID)
    ids[..., 0] = anchor_tokens
    return ids


def aux_from_hidden_states(hidden_states, layer_ids: list[int]) -> torch.Tensor:
    """Join transformers' hidden states (0 is the embedding) to [R, S, A * H]."""
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)


def initialize(draft: nn.Module) -> None:
    """Give a draft fresh weights, with which every layer at first adds nothing to its input."""
    for name, parameter in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
