"""A DFlash draft in plain PyTorch, for the tests: no cache, no batching, no SGLang.

It serves one request at a time. Written from the paper (arXiv 2602.06036, section 3) and from what z-lab's
own model does, not from ours. It computes in float64, so that a comparison shows the rounding of the
float32 code under test.
"""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import linear, silu


class ReferenceDFlash:
    """One draft; `config` is the checkpoint's config.json, `weights` its tensors by name."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor]):
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads

    def context_kv(self, aux_hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values of a context: two tensors [n, kv_heads, head_dim].

        aux_hidden: [n, num_aux * hidden], row p for position p. A layer's input norm is for the block only.
        """
        context = self._norm("hidden_norm", self._linear("fc", aux_hidden.double()))
        positions = torch.arange(context.shape[0])
        return [self._keys_values(layer, context, positions) for layer in range(self.num_layers)]

    def block_hidden(
        self, embeddings: torch.Tensor, context: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Return the final hidden states [B, hidden] of the block that follows the context.

        embeddings: [B, hidden], the anchor's and the mask token's, from the target's table.
        """
        hidden = embeddings.double()
        for layer in range(self.num_layers):
            normed = self._norm(f"layers.{layer}.input_layernorm", hidden)
            hidden = self._run_layer(layer, hidden, normed, context[layer])
        return self._norm("norm", hidden)

    def greedy_path(self, hidden: torch.Tensor, head: torch.Tensor, anchor: int) -> list[int]:
        """Return the drafted tokens. hidden: [slots that draft, hidden]; head: [vocab, hidden]."""
        return (hidden @ head.double().T).argmax(-1).tolist()

    def sees(self, layer: int, query: torch.Tensor, key: torch.Tensor, anchor: int) -> torch.Tensor:
        """Return whether block slots at positions `query` attend to positions `key`.

        A full layer sees everything, unless the config says `is_causal: true` or `causal: true`. In a
        sliding layer of window W (the query counts) the window reaches back from the query; such a layer is
        causal unless the config says `is_causal: false`, and then sees as far ahead. Drafts of the
        speculators library (`window_from_anchor`) see W tokens before the anchor instead, from every slot.
        """
        config = self.config
        if (config.get("layer_types") or ["full_attention"] * self.num_layers)[layer] == "full_attention":
            causal = config.get("is_causal", config["dflash_config"].get("causal"))
            return (key <= query) | (not causal)
        if config["dflash_config"].get("window_from_anchor"):
            last = key if config.get("is_causal") is False else query
            return (anchor - config["sliding_window"] <= key) & (key <= last)
        if config.get("is_causal") is False or config["dflash_config"].get("is_causal") is False:
            return abs(key - query) < config["sliding_window"]
        return (query - config["sliding_window"] < key) & (key <= query)

    def _run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return a layer's output for the rows behind the keys and values `before`."""
        name = f"layers.{layer}"
        first = len(before[0])
        positions = first + torch.arange(len(hidden))

        def attention(x: torch.Tensor) -> torch.Tensor:
            query = self._linear(f"{name}.self_attn.q_proj", x).view(-1, self.num_heads, self.head_dim)
            query = self._rotate(self._norm(f"{name}.self_attn.q_norm", query), positions)
            sides = zip(before, self._keys_values(layer, x, positions))
            attended = self._attend(layer, query, *map(torch.cat, sides), first)
            return self._linear(f"{name}.self_attn.o_proj", attended)

        def mlp(x: torch.Tensor) -> torch.Tensor:
            gate, up = (self._linear(f"{name}.mlp.{part}_proj", x) for part in ("gate", "up"))
            return self._linear(f"{name}.mlp.down_proj", silu(gate) * up)

        hidden = hidden + self._wrapped(f"{name}.attention_conv", normed, attention)
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        return hidden + self._wrapped(f"{name}.mlp_conv", normed, mlp)

    def _wrapped(
        self, name: str, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Run a sublayer; DFlash2 has a convolution of this name around it."""
        return sublayer(x)

    def _attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, anchor: int
    ) -> torch.Tensor:
        """Attend from rows at positions from `anchor`, a few at a time: a text has thousands."""
        keys, values = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (keys, values))
        parts = []
        for rows in torch.arange(len(query)).split(256):
            seen = self.sees(layer, anchor + rows[:, None], torch.arange(len(keys)), anchor)
            scores = torch.einsum("qhd,khd->hqk", query[rows], keys) / math.sqrt(self.head_dim)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(parts).flatten(1)

    def _keys_values(
        self, layer: int, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"layers.{layer}.self_attn"
        keys = self._linear(f"{name}.k_proj", states).view(-1, self.num_kv_heads, self.head_dim)
        values = self._linear(f"{name}.v_proj", states).view(-1, self.num_kv_heads, self.head_dim)
        return self._rotate(self._norm(f"{name}.k_norm", keys), positions), values

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [n, heads, head_dim]: dimension i turns with dimension i + head_dim / 2."""
        frequencies, magnitude = rope_frequencies(self.config, self.head_dim)
        angles = (positions[:, None].double() * frequencies)[:, None]
        turn = torch.polar(torch.full_like(angles, magnitude), angles)
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)


def rope_frequencies(config: dict, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return radians per position of each pair [head_dim / 2], and the factor on q and k.

    Plain RoPE, or YaRN (arXiv 2309.00071): pairs that turn often enough within the original length keep
    their speed, slow ones are slowed by `factor`, those between blend linearly.
    """
    theta, pairs = config["rope_theta"], head_dim // 2
    frequencies = theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return frequencies, 1.0
    if scaling["rope_type"] != "yarn":
        raise NotImplementedError(scaling["rope_type"])
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (2 * math.pi * times)) / math.log(theta)

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), head_dim - 1)
    slowed = ((torch.arange(pairs, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    blended = frequencies * (1 - slowed) + frequencies / scaling["factor"] * slowed
    return blended, 0.1 * math.log(scaling["factor"]) + 1.0
