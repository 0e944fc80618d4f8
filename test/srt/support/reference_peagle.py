"""A P-EAGLE draft in plain PyTorch and float64, for the tests: no batching, no SGLang.

A step runs over the whole text, or over a block behind the text's keys and values. Written from the paper
(arXiv 2602.01469) and from what the speculators library's model does, not from ours.
"""

import torch
from support.reference_dflash import ReferenceDFlash


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

    def sees(self, layer, query, key, anchor):
        """Return whether positions `query` attend to positions `key`."""
        if self.config["layer_types"][layer] == "full_attention":
            return key <= query
        return (query - self.config["sliding_window"] < key) & (key <= query)

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
        hidden, _ = self._forward(tokens[1:] + [self.mask_token_id] * (drafted - 1), states)
        return self._logits(hidden[real - 1 :])

    def text_kv(self, tokens: list[int], aux_hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values of a whole text: two tensors [n - 1, kv_heads, head_dim].

        The layers are causal, so that every block in the text has a beginning of these as its context.
        """
        return self._forward(tokens[1:], aux_hidden[: len(tokens) - 1].double())[1]

    def step_after(
        self, tokens: list[int], aux_hidden: torch.Tensor, drafted: int, text_kv: list
    ) -> torch.Tensor:
        """Return what `step` does, from the `text_kv` of a text that begins with `tokens`."""
        real = len(tokens) - 1
        mask = self.weights["mask_hidden"][0]
        states = torch.cat((aux_hidden[real - 1 : real].double(), mask.expand(drafted - 1, -1)))
        before = [(keys[: real - 1], values[: real - 1]) for keys, values in text_kv]
        hidden, _ = self._forward(tokens[-1:] + [self.mask_token_id] * (drafted - 1), states, before)
        return self._logits(hidden)

    def _forward(self, tokens: list[int], states: torch.Tensor, before: list | None = None):
        """Return the hidden states and each layer's keys and values of rows behind those of `before`."""
        nothing = torch.empty(0, self.num_kv_heads, self.head_dim, dtype=torch.float64)
        before = before or [(nothing, nothing)] * self.num_layers
        positions = len(before[0][0]) + torch.arange(len(tokens))
        embeddings = self.weights["embed_tokens.weight"][torch.tensor(tokens)]
        hidden = self._linear("fc", states)
        found = []
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", hidden if layer else embeddings)
            if layer == 0:
                fused = self._norm(f"{name}.hidden_norm", hidden)
                hidden = fused if self.norm_before_residual else hidden
                normed = torch.cat((normed, fused), dim=-1)
            found.append(self._keys_values(layer, normed, positions))
            hidden = self._run_layer(layer, hidden, normed, before[layer])
        return hidden, found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm("norm", hidden) @ self.weights["lm_head.weight"].T
