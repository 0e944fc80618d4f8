"""DFlash2 drafts of odd shapes with random weights, built by us and by the reference."""

import torch
from serving import DFLASH2_DRAFT
from support.draft_cases import BASE, NOT_CAUSAL, WINDOWED, Case, random_weights
from support.reference_dflash2 import ReferenceDFlash2

from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.speculative.drafters.dflash import DFlash2Drafter

OPTIONS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
VARIANTS = {
    "as published": {},
    "not causal in a window": WINDOWED | NOT_CAUSAL,
    "causal in a window": WINDOWED,
    "one channel a group": {"conv_group_size": 1},
    "one group": {"conv_group_size": 48},
    "one tap": {"conv_kernel_size": 1},
    "three taps": {"conv_kernel_size": 3},
    "more taps than rows": {"conv_kernel_size": 7},
    "no convolutions": {"conv_kernel_size": 0, "conv_group_size": 0},
    "one candidate": {"selector_top_k": 1},
    "all candidates": {"selector_top_k": 61},
    "wide codebooks": {"selector_rank": 100},
    "drafting from the anchor": {"sample_from_anchor": True},
    "candidates among the first tokens": {"selector_vocab_size": 20},
    "block of 16": {"block_size": 16},
    "capped logits": {"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}
NESTED = {
    *OPTIONS,
    "selector_vocab_size",
    "sample_from_anchor",
    "output_multiplier",
    "final_logit_softcapping",
}


def dflash2_config(changes: dict) -> dict:
    """Return BASE as a DFlash2 draft's config, with changes to it or to its `dflash_config`."""
    nested = (
        BASE["dflash_config"] | OPTIONS | {name: value for name, value in changes.items() if name in NESTED}
    )
    top = {name: value for name, value in changes.items() if name not in NESTED}
    return {**BASE, **top, "architectures": ["DFlash2DraftModel"], "dflash_config": nested}


def random_dflash2_weights(config: dict, num_aux: int) -> dict[str, torch.Tensor]:
    """Return weights with convolutions away from the identity and strong transitions.

    Transitions weigh as much as the base logits.
    """
    options, hidden = config["dflash_config"], config["hidden_size"]
    weights, generator = random_weights(config, num_aux), torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    taps = options["conv_kernel_size"]
    for layer in range(config["num_hidden_layers"] if taps else 0):
        for name in ("attention_conv", "mlp_conv"):
            base = 0.3 * normal(2, taps, hidden)
            base[:, 0] += 1
            weights[f"layers.{layer}.{name}.base_kernel"] = base
            rows = 2 * taps * hidden // options["conv_group_size"]
            weights[f"layers.{layer}.{name}.kernel_projection.weight"] = (
                0.2 * normal(rows, hidden) * hidden**-0.5
            )
    rank = options["selector_rank"]
    for side in ("predecessor", "successor"):
        weights[f"candidate_selector.{side}_codebook"] = normal(config["vocab_size"], rank)
    weights["candidate_selector.hidden_projection.weight"] = normal(rank, hidden) * (rank * hidden) ** -0.5
    return weights


class DFlash2Case(Case):
    model_class, reference_class, checkpoint = DFlash2DraftModel, ReferenceDFlash2, DFLASH2_DRAFT
    drafter_class = DFlash2Drafter

    @classmethod
    def variant(cls, name: str, tmp_path) -> "DFlash2Case":
        config = dflash2_config(VARIANTS[name])
        num_aux = len(config["dflash_config"]["target_layer_ids"])
        return cls(config, random_dflash2_weights(config, num_aux), num_aux, tmp_path)

    def reference_hidden(self, tokens: torch.Tensor, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the rows that draft, float64; tokens [B]."""
        return self.block_hidden(tokens, aux_hidden)[self.model.draft.num_idle_rows :]
