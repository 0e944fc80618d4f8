"""Speculative decoding without caches: what each block of a bundled pair accepts, in plain PyTorch."""

import torch
from support.reference_dflash import ReferenceDFlash
from support.reference_dflash2 import ReferenceDFlash2
from support.reference_peagle import ReferencePEagle


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
    chain = ChainProposals(draft, hidden_states, text) if isinstance(draft, ReferencePEagle) else None
    kept = []
    while committed < len(text) - 1:
        tokens = text[: committed + 1]
        drafted = chain.after(tokens) if chain else propose_block(model, draft, hidden_states, tokens)
        right = 0
        for token, want in zip(drafted, text[committed + 1 :]):
            if token != want:
                break
            right += 1
        kept.append(right)
        committed += right + 1
    return kept


def propose_block(model, draft: ReferenceDFlash, hidden_states, tokens: list[int]) -> list[int]:
    """Return what a DFlash or DFlash2 draft proposes after `tokens`, the last of which has no KV yet."""
    settings = draft.config["dflash_config"]
    committed, anchor = len(tokens) - 1, tokens[-1]
    aux = torch.cat([hidden_states[layer + 1][0] for layer in settings["target_layer_ids"]], dim=-1)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight.detach()
    block = torch.tensor([anchor, *[settings["mask_token_id"]] * (draft.config["block_size"] - 1)])
    hidden = draft.block_hidden(embedding[block].detach(), draft.context_kv(aux[:committed]))
    if isinstance(draft, ReferenceDFlash2):
        return draft.greedy_path(hidden[1:], head, anchor)
    return (hidden[1:] @ head.double().T).argmax(-1).tolist()


class ChainProposals:
    """What a P-EAGLE draft proposes after each beginning of a text, the last token of which has no KV yet."""

    def __init__(self, draft: ReferencePEagle, hidden_states, text: list[int]):
        self._draft = draft
        self._aux = torch.cat([hidden_states[layer][0] for layer in draft.aux_layers], dim=-1)
        self._text_kv = draft.text_kv(text, self._aux)

    def after(self, tokens: list[int]) -> list[int]:
        draft = self._draft
        found = draft.step_after(tokens, self._aux, draft.num_drafted, self._text_kv).argmax(-1)
        return (found + draft.weights["d2t"].long()[found]).tolist()
