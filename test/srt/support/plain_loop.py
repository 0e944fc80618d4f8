"""Speculative decoding without caches: what each block of a bundled pair accepts, in plain PyTorch."""

from collections.abc import Callable
from itertools import takewhile

import torch
from support.reference_dflash import ReferenceDFlash
from support.reference_peagle import ReferencePEagle

Propose = Callable[[list[int]], list[int]]


def plain_loop(model, draft: ReferenceDFlash, hidden_states, text: list[int], committed: int) -> list[int]:
    """Count the accepted drafted tokens of each block.

    Args:
        model: The target, as Hugging Face's model.
        draft: The reference draft.
        hidden_states: The target's states over `text`, one [1, n, hidden] tensor for the embedding and each
            layer.
        text: The prompt and the target's greedy answer to it.
        committed: Leading tokens of `text` that have KV.
    """
    if isinstance(draft, ReferencePEagle):
        propose = proposals_of_chains(draft, hidden_states, text)
    else:
        propose = proposals_of_blocks(model, draft, hidden_states)
    kept = []
    while committed < len(text) - 1:
        pairs = zip(propose(text[: committed + 1]), text[committed + 1 :])
        right = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        kept.append(right)
        committed += right + 1
    return kept


def proposals_of_blocks(model, draft: ReferenceDFlash, hidden_states) -> Propose:
    """Return what a DFlash or DFlash2 draft proposes after tokens, the last of which has no KV yet."""
    settings = draft.config["dflash_config"]
    aux = torch.cat([hidden_states[layer + 1][0] for layer in settings["target_layer_ids"]], dim=-1)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight.detach()
    masks = [settings["mask_token_id"]] * (draft.config["block_size"] - 1)

    def propose(tokens: list[int]) -> list[int]:
        embeddings = embedding[torch.tensor([tokens[-1], *masks])].detach()
        hidden = draft.block_hidden(embeddings, draft.context_kv(aux[: len(tokens) - 1]))
        return draft.greedy_path(hidden[1:], head, tokens[-1])

    return propose


def proposals_of_chains(draft: ReferencePEagle, hidden_states, text: list[int]) -> Propose:
    """Return what a P-EAGLE draft proposes after each beginning of a text."""
    aux = torch.cat([hidden_states[layer][0] for layer in draft.aux_layers], dim=-1)
    text_kv = draft.text_kv(text, aux)

    def propose(tokens: list[int]) -> list[int]:
        found = draft.step_after(tokens, aux, draft.num_drafted, text_kv).argmax(-1)
        return (found + draft.weights["d2t"].long()[found]).tolist()

    return propose
