"""Rows of the target's answers as tokens, and shards of them with the target's hidden states.

Shapes: N tokens of a row, A captured layers, D head size, H hidden size.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from pass_dtype import PASS_DTYPE
from safetensors.torch import load_file


def spread_layers(num_layers: int, count: int = 5) -> list[int]:
    """Return evenly spread layers whose outputs a draft reads.

    From layer 1 to the third from the end, as published DFlash drafts do.
    """
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


class PackedLinear:
    """A bias-free linear layer in `PASS_DTYPE`. A bfloat16 weight is packed for oneDNN."""

    def __init__(self, *weights: torch.Tensor):
        self.weight = torch.cat(weights).to(PASS_DTYPE).contiguous()
        self.is_packed = PASS_DTYPE == torch.bfloat16
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


class Llama:
    """A Llama target that reads a row at a time. length: the most tokens of a row."""

    def __init__(self, directory: Path, length: int):
        config = json.loads((directory / "config.json").read_text())
        weights = load_file(str(directory / "model.safetensors"))
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.eps = config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.embedding = weights["model.embed_tokens.weight"].to(PASS_DTYPE)
        self.norm = weights["model.norm.weight"].to(PASS_DTYPE)
        num_layers = config["num_hidden_layers"]
        self.layers = [self._layer(weights, number) for number in range(num_layers)]
        self.captured = spread_layers(num_layers)
        inverse = theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(length).float()[:, None] * torch.cat((inverse, inverse))
        self.cos, self.sin = angles.cos().to(PASS_DTYPE), angles.sin().to(PASS_DTYPE)

    @staticmethod
    def _layer(weights: dict, number: int) -> tuple:
        """Return the norms and packed projections of one layer, in the order of their use."""

        def get(name: str) -> torch.Tensor:
            return weights[f"model.layers.{number}.{name}.weight"].to(PASS_DTYPE)

        return (
            get("input_layernorm"),
            PackedLinear(*(get(f"self_attn.{x}_proj") for x in "qkv")),
            PackedLinear(get("self_attn.o_proj")),
            get("post_attention_layernorm"),
            PackedLinear(get("mlp.gate_proj"), get("mlp.up_proj")),
            PackedLinear(get("mlp.down_proj")),
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * F.rms_norm(x.float(), (self.hidden,), eps=self.eps).to(PASS_DTYPE)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [N, heads, D]."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[: len(x), None] + turned * self.sin[: len(x), None]

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [N, A * H + H] of tokens [N]: outputs of the captured layers, and of the final norm."""
        x = F.embedding(tokens, self.embedding)
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        kept = []
        for number, (norm1, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            heads = qkv(self._norm(x, norm1)).unflatten(-1, (-1, self.head_dim))
            query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            parts = [part.transpose(0, 1)[None] for part in (self._rotate(query), self._rotate(key), value)]
            attended = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)[0]
            x = x + out(attended.transpose(0, 1).reshape(len(tokens), -1))
            gate, up = gate_up(self._norm(x, norm2)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
            if number in self.captured:
                kept.append(x)
        return torch.cat((*kept, self._norm(x, self.norm)), dim=-1).to(torch.bfloat16)


LEAST_WRITTEN = 8  # tokens of a row that a draft is trained on


@dataclass
class Row:
    """One conversation: its tokens, and which of them the target wrote."""

    name: str
    kind: str
    temperature: float
    tokens: list[int]
    written: list[bool] = field(default_factory=list)


def shard_paths(directory: Path) -> list[Path]:
    """List the shards of a folder, without the trainer's files of best tokens."""
    return sorted(path for path in directory.glob("*.pt") if not path.name.endswith(".argmax.pt"))


class Shards:
    """Rows with states, written in files of about `size` written tokens."""

    def __init__(self, directory: Path, prefix: str, size: int):
        self.directory, self.prefix, self.size = directory, prefix, size
        directory.mkdir(parents=True, exist_ok=True)
        summaries = [json.loads(path.read_text()) for path in directory.glob("*.json")]
        self.done = {name for summary in summaries for name in summary["names"]}
        self.rows, self.states, self.count = [], [], 0

    def add(self, row: Row, states: torch.Tensor) -> None:
        self.rows.append(row)
        self.states.append(states)
        self.count += sum(row.written)
        if self.count >= self.size:
            self.write()

    def write(self) -> None:
        if not self.rows:
            return
        number = len(list(self.directory.glob(f"{self.prefix}-*.json")))
        path = self.directory / f"{self.prefix}-{number:04d}.pt"
        torch.save(
            {
                "lengths": torch.tensor([len(r.tokens) for r in self.rows]),
                "temperatures": torch.tensor([r.temperature for r in self.rows]),
                "tokens": torch.cat([torch.tensor(r.tokens, dtype=torch.int32) for r in self.rows]),
                "written": torch.cat([torch.tensor(r.written) for r in self.rows]),
                "states": torch.cat(self.states),
            },
            path.with_suffix(".partial"),
        )
        path.with_suffix(".partial").rename(path)
        path.with_suffix(".json").write_text(json.dumps({"names": [r.name for r in self.rows]}))
        self.rows, self.states, self.count = [], [], 0
