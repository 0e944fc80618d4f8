"""P-EAGLE drafts with random weights and options that the bundled one leaves off.

Saved by the `speculators` package's own classes, so names and layout of the optional tensors are its own.
Runs in the library's environment (README.md). Hidden states are drawn, so no target is needed.

    python peagle_variants.py OUTPUT_DIR
"""

import sys
from pathlib import Path

import numpy as np
import torch
from corpus import MASK_ID
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators_golden import peagle_step
from train_speculators_draft import save
from transformers import LlamaConfig, Qwen3Config

VOCAB, DRAFT_TOKENS, WINDOW, TOKENS = 48, 4, 5, 17
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
VARIANTS = {
    # Every token can be drafted, so there is no vocabulary mapping in the checkpoint.
    "llama-fc-norm": {
        "transformer_layer_config": LlamaConfig(**SHAPE),
        "fc_norm": True,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": VOCAB,
    },
    "qwen3-norm-before-fc": {
        "transformer_layer_config": Qwen3Config(
            **SHAPE,
            attention_bias=True,
            rms_norm_eps=1e-5,
            sliding_window=WINDOW,
            use_sliding_window=True,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "norm_before_fc": True,
        "norm_output": True,  # without effect here: no draft step follows another
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "draft_vocab_size": VOCAB // 2,
    },
}


@torch.no_grad()
def new_variant(options: dict) -> PEagleDraftModel:
    """Return a draft in float32 whose weights are all bfloat16 numbers."""
    options["transformer_layer_config"]._attn_implementation = "eager"  # the flex kind wants a GPU
    method = GreedyTokenProposalConfig(speculative_tokens=DRAFT_TOKENS)
    draft = PEagleDraftModel(
        PEagleSpeculatorConfig(
            mask_token_id=MASK_ID,
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                proposal_methods=[method],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **options,
        )
    )
    for name, parameter in draft.named_parameters():
        if parameter.ndim == 1:  # norms near one, biases near zero: none may pass for another or for absent
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if parameter.ndim == 3 else parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.bfloat16().float()
    if draft.use_draft_vocab:
        targets = torch.randperm(VOCAB)[: draft.draft_vocab_size].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, targets, True)
        draft.load_vocab_mappings(t2d, targets - torch.arange(len(targets)))
    return draft


@torch.no_grad()
def main(output_dir: Path) -> None:
    torch.manual_seed(0)
    for name, options in VARIANTS.items():
        folder = output_dir / name
        draft = new_variant(options).eval()
        save(draft, folder, verifier=None)
        tokens = torch.randint(VOCAB, (TOKENS,))
        aux = torch.randn(TOKENS - 1, draft.fc.in_features)
        logits = peagle_step(draft, tokens.tolist(), aux)
        np.savez_compressed(folder / "logits.npz", tokens=tokens, aux=aux, logits=logits)
        print(name, tuple(logits.shape), f"largest logit {logits.abs().max():.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
