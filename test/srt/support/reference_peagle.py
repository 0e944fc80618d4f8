"""A P-EAGLE draft in plain PyTorch and float64, for the tests: no cache, no batching.

Every step runs over the whole text. Written from the paper (arXiv 2602.01469) and from what the speculators
library's model does, not from ours.
"""

import torch
from support.reference_dflash import ReferenceDFlash
from torch.nn.functional import silu


class ReferencePEagle(ReferenceDFlash):
    """One draft with Qwen3 layers; `config` is the speculators config.json."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor]):
        layers = config["transformer_layer_config"]
        super().__init__(layers | layers["rope_parameters"], weights)
        self.mask_token_id = config["mask_token_id"]
        self.norm_before_residual = config["norm_before_residual"]
        self.aux_layers: list[int] = config["eagle_aux_hidden_state_layer_ids"]  # whose inputs it reads
        [method] = config["speculators_config"]["proposal_methods"]
        self.num_drafted: int = method["speculative_tokens"]

    def sees(self, layer: int, query: int, key: int, anchor: int) -> bool:
        if self.config["layer_types"][layer] == "full_attention":
            return key <= query
        return query - self.config["sliding_window"] < key <= query

    def step(
        self, tokens: list[int], aux_hidden: torch.Tensor, drafted: int, unknown: set[int] = frozenset()
    ) -> torch.Tensor:
        """Return draft logits [drafted, draft vocab] after `tokens`.

        aux_hidden: [n, num_aux * hidden], of every token but the last. unknown: positions without known
        states, at which the learned ones stand in.
        """
        real = len(tokens) - 1
        mask = self.weights["mask_hidden"][0]
        states = torch.cat((aux_hidden[:real].double(), mask.expand(drafted - 1, -1)))
        states[list(unknown)] = mask
        rows = torch.tensor(tokens[1:] + [self.mask_token_id] * (drafted - 1))
        positions = torch.arange(len(rows))
        embeddings = self.weights["embed_tokens.weight"][rows]
        hidden = self._linear("fc", states)
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", hidden if layer else embeddings)
            if layer == 0:
                fused = self._norm(f"{name}.hidden_norm", hidden)
                hidden = fused if self.norm_before_residual else hidden
                normed = torch.cat((normed, fused), dim=-1)
            query = self._linear(f"{name}.self_attn.q_proj", normed).view(-1, self.num_heads, self.head_dim)
            query = self._rotate(self._norm(f"{name}.self_attn.q_norm", query), positions)
            attended = self._attend(layer, query, *self._keys_values(layer, normed, positions), anchor=0)
            hidden = hidden + self._linear(f"{name}.self_attn.o_proj", attended)
            normed = self._norm(f"{name}.post_attention_layernorm", hidden)
            gated = silu(self._linear(f"{name}.mlp.gate_proj", normed)) * self._linear(
                f"{name}.mlp.up_proj", normed
            )
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gated)
        return self._norm("norm", hidden[real - 1 :]) @ self.weights["lm_head.weight"].T
