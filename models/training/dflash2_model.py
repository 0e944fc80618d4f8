"""The DFlash2 draft in plain PyTorch, for training and measuring.

A DFlash draft with convolutions along the block and a candidate selector. Tensor names are those of published
checkpoints. Shapes as in `draft_model.py`; K candidates, rank r.
"""

import torch
import torch.nn.functional as F
from draft_model import DFlashDraft, Layer
from torch import nn

SELECTOR_RANK, SELECTOR_TOP_K = 128, 32
CONV_KERNEL_SIZE, CONV_GROUP_SIZE = 2, 16


def dflash2_config(plain: dict) -> dict:
    """Return the config of a DFlash2 draft on the backbone of a plain one."""
    added = {
        "conv_kernel_size": CONV_KERNEL_SIZE,
        "conv_group_size": CONV_GROUP_SIZE,
        "selector_rank": SELECTOR_RANK,
        "selector_top_k": SELECTOR_TOP_K,
    }
    return plain | {"architectures": ["DFlash2DraftModel"], "dflash_config": plain["dflash_config"] | added}


class GroupedConv(nn.Module):
    """A convolution along the block whose kernel depends on the row.

    out[i, c] = sum over taps t of (base[t, c] + delta[i, t, group of c]) * x[i - t, c], zero before the
    block. One projection of a sublayer's input gives the deltas for its input and for its output. Starts as
    the identity.
    """

    def __init__(self, config: dict):
        super().__init__()
        hidden, nested = config["hidden_size"], config["dflash_config"]
        self.taps, self.size = nested["conv_kernel_size"], nested["conv_group_size"]
        base = torch.zeros(2, self.taps, hidden)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * (hidden // self.size), bias=False)

    def deltas(self, x: torch.Tensor) -> torch.Tensor:
        """Return kernel deltas [..., B, 2, taps, H] of x [..., B, H]."""
        return (
            self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.size, dim=-1)
        )

    def forward(self, x: torch.Tensor, deltas: torch.Tensor, side: int) -> torch.Tensor:
        kernel = self.base_kernel[side] + deltas[..., side, :, :]
        out = kernel[..., 0, :] * x
        for tap in range(1, self.taps):
            out = out + kernel[..., tap, :] * F.pad(x[..., :-tap, :], (0, 0, tap, 0))
        return out


class ConvLayer(Layer):
    """A layer with a convolution before and after each of its two halves."""

    def __init__(self, config: dict):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = GroupedConv(config), GroupedConv(config)

    def forward(self, rows, context, positions, context_positions, context_mask):
        def blocks(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (context_mask.shape[1], -1))

        normed = blocks(self.input_layernorm(rows))
        deltas = self.attention_conv.deltas(normed)
        attended = self.self_attn(
            self.attention_conv(normed, deltas, 0).flatten(1, 2),
            context,
            positions,
            context_positions,
            context_mask,
        )
        rows = rows + self.attention_conv(blocks(attended), deltas, 1).flatten(1, 2)
        normed = blocks(self.post_attention_layernorm(rows))
        deltas = self.mlp_conv.deltas(normed)
        return rows + self.mlp_conv(self.mlp(self.mlp_conv(normed, deltas, 0)), deltas, 1).flatten(1, 2)


class Selector(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        rank, vocab = config["dflash_config"]["selector_rank"], config["vocab_size"]
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))  # at first it adds nothing
        self.hidden_projection = nn.Linear(config["hidden_size"], rank, bias=False)

    def forward(self, hidden, predecessors, candidates, unary) -> torch.Tensor:
        """Return scores [..., K] of candidates [..., K] after predecessors [...].

        hidden: [..., H]; unary: [..., K], the base logits of the candidates.
        """
        query = self.predecessor_codebook[predecessors] * self.hidden_projection(hidden)
        return unary + (self.successor_codebook[candidates] @ query[..., None]).squeeze(-1).float()


class DFlash2Draft(DFlashDraft):
    def __init__(self, config: dict):
        super().__init__(config)
        self.layers = nn.ModuleList(ConvLayer(config) for _ in range(config["num_hidden_layers"]))
        self.candidate_selector = Selector(config)

    def candidates(self, hidden: torch.Tensor, embedding: torch.Tensor):
        """Return base logits [..., vocab] of hidden [..., H], and ids [..., K] of the largest."""
        logits = F.linear(hidden.flatten(0, -2), embedding).float().unflatten(0, hidden.shape[:-1])
        return logits, logits.topk(self.config["dflash_config"]["selector_top_k"], dim=-1).indices
