"""Other readings of a checkpoint: what would be drafted if its layer ids, or the order of its layers, meant
something else.

Acceptance cannot tell neighbouring layers of a target apart: it moves by a few percent, in either direction.
The likelihood that the draft gives to what the target says can, over the same positions, if there are enough
of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dflash.srt.configs.peagle_config import PEagleDraftConfig
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft

# A draft that has seen little of a text is over-confident on it, and any blur of its input then looks like an
# improvement. So each reading is compared at the temperature that suits it best.
TEMPERATURES = (0.8, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
_ANCHORS_AT_ONCE = 32
_CLUSTER = 24  # neighbouring positions say much the same; this many count as one observation


@dataclass(frozen=True)
class Text:
    """A prompt and what the target went on to say.

    tokens: [T] int64, of which the first `prompt_length` are the prompt's. best: [T] int64, the target's
    choice after each. states: per layer boundary [T, hidden], entry i the output of layer i - 1, entry 0 the
    embedding; None what is not known."""

    prompt_length: int
    tokens: torch.Tensor
    best: torch.Tensor
    states: Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Reading:
    """shift: added to the layer ids. what, what_to_do: of the fault, if this reading turns out to be the
    right one."""

    label: str
    what: str = ""
    what_to_do: str = ""
    shift: int = 0
    reversed_states: bool = False
    layer_order: tuple[int, ...] | None = None
    mask_token_id: int | None = None

    def boundaries(self, layer_ids: Sequence[int]) -> list[int]:
        """Indices into a text's states, in the order in which they are concatenated."""
        found = [layer_id + 1 + self.shift for layer_id in layer_ids]
        return found[::-1] if self.reversed_states else found

    def is_possible(self, layer_ids: Sequence[int], states: Sequence[torch.Tensor | None]) -> bool:
        return all(0 <= i < len(states) and states[i] is not None for i in self.boundaries(layer_ids))


AS_CONFIGURED = Reading("as configured")


def other_readings(draft: PlainDraft, mask_tokens: dict[int, str]) -> list[Reading]:
    """mask_tokens: what else the target's tokenizer calls a mask, by id."""
    ids, depth = list(draft.draft.target_layer_ids), draft.draft.num_hidden_layers
    found = [
        Reading(
            f"layer ids one {'lower' if shift < 0 else 'higher'}",
            f"the draft fits better with every target layer id one {'lower' if shift < 0 else 'higher'}",
            f"{'Subtract one from' if shift < 0 else 'Add one to'} each layer id in config.json (z-lab counts layer outputs, the "
            "speculators library inputs)",
            shift=shift,
        )
        for shift in (-1, 1)
    ]
    if len(ids) > 1:
        found.append(
            Reading(
                "target layers reversed",
                "the draft fits better with the target's layers in reversed order",
                "Reverse the column blocks of fc.weight: SGLang hands over the lowest layer first",
                reversed_states=True,
            )
        )
    first = (
        1 if isinstance(draft.draft, PEagleDraftConfig) else 0
    )  # P-EAGLE's first layer has a shape of its own
    order = (*range(first), *range(depth - 1, first - 1, -1))
    if order != tuple(range(depth)):
        found.append(
            Reading(
                "draft layers reversed",
                "the draft fits better with its own layers in reversed order",
                "Rename layers.* of the checkpoint, which were saved last to first",
                layer_order=order,
            )
        )
    for token_id, name in mask_tokens.items():
        if token_id != draft.mask_token_id:
            found.append(
                Reading(
                    f"mask token {name}",
                    f"the draft fits better with {name} ({token_id}) as its mask token",
                    f"Set mask_token_id to {token_id}",
                    mask_token_id=token_id,
                )
            )
    return found


@dataclass(frozen=True)
class Drafts:
    """What a reading drafts in one text, at every anchor from the prompt's end on.

    tokens: [N, K] int64, target ids. nll: [temperatures, N, K], nats that the draft gives to what the target
    says there; NaN beyond the text, and where the draft's vocabulary lacks the token."""

    first: int
    tokens: torch.Tensor
    nll: torch.Tensor


@torch.no_grad()
def draft_everywhere(draft: PlainDraft, text: Text, reading: Reading) -> Drafts:
    device, end = text.tokens.device, len(text.tokens)
    aux_hidden = torch.cat([text.states[i] for i in reading.boundaries(draft.draft.target_layer_ids)], dim=-1)
    target_ids = draft.target_ids
    draft_ids = torch.full((draft.draft.vocab_size,), -1, device=device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=device)
    first = max(text.prompt_length, 1)
    configured = draft.mask_token_id, draft.layer_order
    draft.mask_token_id = configured[0] if reading.mask_token_id is None else reading.mask_token_id
    draft.layer_order = reading.layer_order or configured[1]
    tokens, nll = [], []
    try:
        for anchors in torch.arange(first, end - 1, device=device).split(_ANCHORS_AT_ONCE):
            logits = draft.logits(text.tokens, aux_hidden, anchors).float()
            tokens.append(target_ids[logits.argmax(dim=-1)])
            where = anchors[:, None] + 1 + torch.arange(logits.shape[1], device=device)
            # What the target says after the anchor, and, where that is what the text goes on with, the text.
            said = text.tokens[where.clamp(max=end - 1)]
            said[:, 0] = text.best[anchors]
            follows = (text.tokens[(anchors + 1).clamp(max=end - 1)] == text.best[anchors])[:, None]
            wanted = draft_ids[said]
            known = (where < end) & (wanted >= 0) & (follows | (where == anchors[:, None] + 1))
            picked = logits.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
            nll.append(
                torch.stack(
                    [
                        (torch.logsumexp(logits / t, dim=-1) - picked / t).where(known, math.nan)
                        for t in TEMPERATURES
                    ]
                )
            )
    finally:
        draft.mask_token_id, draft.layer_order = configured
    return Drafts(first, torch.cat(tokens), torch.cat(nll, dim=1))


@dataclass(frozen=True)
class Evidence:
    """How much better another reading explains what the target says. gain: nats a token, positive where it is
    better. t: gain over its standard error, by clusters of neighbouring positions."""

    gain: float
    t: float


def evidence(configured: Sequence[Drafts], other: Sequence[Drafts]) -> Evidence:
    """Drafts of the same texts by two readings."""
    at = [_best_temperature(drafts) for drafts in (configured, other)]
    clusters = []
    for ours, theirs in zip(configured, other, strict=True):
        difference = ours.nll[at[0]] - theirs.nll[at[1]]
        # The first drafted token knows most about what it read; the k-th counts 1/k.
        weights = 1 / torch.arange(1, difference.shape[1] + 1, device=difference.device)
        weights = weights.expand_as(difference).masked_fill(difference.isnan(), 0)
        weighted = difference.nan_to_num() * weights
        clusters += [
            w.sum() / n.sum() for w, n in zip(weighted.split(_CLUSTER), weights.split(_CLUSTER), strict=True)
        ]
    gains = torch.stack(clusters)
    gains = gains[~gains.isnan()]
    if len(gains) < 2:
        return Evidence(0.0, 0.0)
    error = (gains.std() / math.sqrt(len(gains))).item()
    return Evidence(gains.mean().item(), gains.mean().item() / max(error, 1e-9))


def _best_temperature(drafts: Sequence[Drafts]) -> int:
    return int(torch.cat([d.nll.flatten(1) for d in drafts], dim=1).nanmean(dim=1).argmin())


def blocks(text: Text, drafts: Drafts) -> list[tuple[int, list[int], int]]:
    """The blocks of greedy speculative decoding over a text: (anchor, drafted tokens, how many of them were
    kept).

    Greedy output is the target's own text whatever is drafted, so the loop is a walk over drafts made at
    every position."""
    tokens, drafted = text.tokens.tolist(), drafts.tokens.tolist()
    found, anchor = [], drafts.first
    while anchor < len(tokens) - 1:
        block = drafted[anchor - drafts.first]
        kept = kept_of(tokens, anchor, block)
        found.append((anchor, block, kept))
        anchor += kept + 1
    return found


def kept_of(tokens: list[int], anchor: int, block: list[int]) -> int:
    """How many of a block's tokens the text goes on with."""
    kept = 0
    while kept < len(block) and anchor + 1 + kept < len(tokens) and block[kept] == tokens[anchor + 1 + kept]:
        kept += 1
    return kept
