"""Other interpretations of a checkpoint: layer ids, mask token, RoPE, selector and more.

Acceptance does not distinguish neighbouring layers of a target: it moves by a few percent, in either
direction. The likelihood that the draft gives to the target's tokens does, over the same positions, if there
are enough of them.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

import torch

from sglang_dflash.srt.doctor.plain_drafts import PlainDFlash2, PlainDraft

# A draft that has seen little of a text is over-confident there. Any blur of the input then looks like an
# improvement. So each interpretation is compared at the temperature that suits it best.
TEMPERATURES = (0.8, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
_ANCHORS_AT_ONCE = 32
_CLUSTER = 24  # neighbouring positions are correlated; this many count as one observation


@dataclass(frozen=True)
class Transcript:
    """A prompt and the target's continuation.

    `states` are [T, hidden] per layer boundary: entry 0 the embedding, entry i the output of layer i - 1;
    None if unknown.
    """

    prompt_length: int
    tokens: torch.Tensor  # [T] int64, the prompt's first
    choices: torch.Tensor  # [T] int64, the target's greedy choice after each token
    states: Sequence[torch.Tensor | None]

    def has_states(self, boundaries: Sequence[int]) -> bool:
        return all(0 <= i < len(self.states) and self.states[i] is not None for i in boundaries)

    def concatenate_states(self, boundaries: Sequence[int]) -> torch.Tensor:
        """Return [T, num_boundaries * hidden], the states of these boundaries side by side."""
        return torch.cat([cast(torch.Tensor, self.states[i]) for i in boundaries], dim=-1)


@dataclass(frozen=True)
class Interpretation:
    """One way to read the checkpoint.

    `problem` and `advice` describe the fault if this interpretation is the right one. `shift` is added to the
    layer ids, and `changes` are attributes that the plain draft gets.
    """

    label: str
    problem: str = ""
    advice: str = ""
    shift: int = 0
    reversed_states: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    def boundaries(self, layer_ids: Sequence[int]) -> list[int]:
        """Return indices into a text's states, in the order of their concatenation."""
        found = [layer_id + 1 + self.shift for layer_id in layer_ids]
        return found[::-1] if self.reversed_states else found


AS_CONFIGURED = Interpretation("as configured")


def other_interpretations(draft: PlainDraft, mask_tokens: dict[int, str]) -> list[Interpretation]:
    """List other interpretations of a checkpoint, given the target's mask tokens by id."""
    found = []

    def add(label: str, fits_better: str, advice: str, **changes: Any) -> None:
        found.append(Interpretation(label, f"the draft fits better {fits_better}", advice, changes=changes))

    counted = "z-lab counts layer outputs, the speculators library inputs"
    for shift, direction, verb in ((-1, "lower", "Subtract one from"), (1, "higher", "Add one to")):
        advice = f"{verb} each layer id in config.json ({counted})"
        problem = f"the draft fits better with every target layer id one {direction}"
        found.append(Interpretation(f"layer ids one {direction}", problem, advice, shift=shift))
    if len(draft.draft.target_layer_ids) > 1:
        advice = "Reverse the column blocks of fc.weight: SGLang passes the lowest layer first"
        problem = "the draft fits better with the target's layers in reversed order"
        found.append(Interpretation("target layers reversed", problem, advice, reversed_states=True))
    for token_id, name in mask_tokens.items():
        if token_id != draft.mask_token_id and "mask_embedding" not in draft.weights:
            better, advice = f"with {name} ({token_id}) as its mask token", f"Set mask_token_id to {token_id}"
            add(f"mask token {name}", better, advice, mask_token_id=token_id)
    # The other laws of a target whose module scales embeddings. Without one both are the table's.
    for name, scale in (("as in the table", 1.0), ("scaled as the target's", draft.target_scale)):
        if draft.target_scale != 1.0 and scale != draft.embedding_scale:
            advice = f"Set dflash_config.input_embedding_scale to {scale:g}"
            add(f"embeddings {name}", f"with embeddings {name}", advice, embedding_scale=scale)
    for share in set(draft.ropes) - {draft.rotary_share}:
        advice = "Remove partial_rotary_factor from config.json: it is the target's"
        if share < 1:
            advice = f"Set partial_rotary_factor to {share:g} at the top level, for SGLang's built-in DFLASH"
        rotated = f"{share:g} of each head rotated"
        add(rotated, f"with {rotated} than with {draft.rotary_share:g}", advice, rotary_share=share)
    if isinstance(draft, PlainDFlash2):
        damage = "damaged, in another layout or another draft's"
        advice = f"The tensors candidate_selector.* are {damage}: fetch the draft again"
        add("selector left out", "without its selector", advice, has_selector=False)
    return found


@dataclass(frozen=True)
class TranscriptDrafts:
    """Drafts of one text by one interpretation, at every anchor from the prompt's end on.

    `nll` are the nats that the draft gives to the target's token there. They are NaN beyond the text, and if
    the draft's vocabulary lacks the token.
    """

    first: int  # position of the first anchor
    tokens: torch.Tensor  # [N, K] int64, target ids
    nll: torch.Tensor  # [temperatures, N, K]


@torch.no_grad()
def draft_everywhere(draft: PlainDraft, text: Transcript, interpretation: Interpretation) -> TranscriptDrafts:
    """Draft at every anchor of a text, from the end of its prompt on."""
    device, end = text.tokens.device, len(text.tokens)
    aux_hidden = text.concatenate_states(interpretation.boundaries(draft.draft.target_layer_ids))
    target_ids = draft.target_ids
    draft_ids = torch.full((draft.draft.vocab_size,), -1, device=device)
    draft_ids[target_ids] = torch.arange(len(target_ids), device=device)
    first = max(text.prompt_length, 1)
    draft = copy.copy(draft)  # shares its weights
    for name, value in interpretation.changes.items():
        setattr(draft, name, value)
    tokens, nll = [], []
    for anchors in torch.arange(first, end - 1, device=device).split(_ANCHORS_AT_ONCE):
        drafted = draft.draft_blocks(text.tokens, aux_hidden, anchors)
        tokens.append(drafted.tokens)
        logits = drafted.logits
        positions = anchors[:, None] + 1 + torch.arange(logits.shape[1], device=device)
        wanted = text.tokens[positions.clamp(max=end - 1)]
        # The target's choice after the anchor, and the text after it if it continues with that choice.
        continues = wanted[:, :1] == text.choices[anchors, None]
        wanted[:, 0] = text.choices[anchors]
        ids = draft_ids[wanted]
        known = (positions < end) & (ids >= 0) & (continues | (positions == anchors[:, None] + 1))
        chosen = logits.gather(-1, ids.clamp(min=0)[..., None])[..., 0]
        by_temperature = [torch.logsumexp(logits / t, dim=-1) - chosen / t for t in TEMPERATURES]
        nll.append(torch.stack(by_temperature).where(known, math.nan))
    return TranscriptDrafts(first, torch.cat(tokens), torch.cat(nll, dim=1))


@dataclass(frozen=True)
class LikelihoodGain:
    """Likelihood of the target's tokens by another interpretation, compared with the config."""

    gain: float  # nats per token, positive if the other interpretation is better
    t: float  # gain over its standard error, by clusters of neighbouring positions

    def __str__(self) -> str:
        doubt = ": cannot be told apart" if abs(self.t) < 2 else ""
        return f"{self.gain:+.3f} nats a token ({abs(self.t):.1f} standard errors){doubt}"


def compare(configured: Sequence[TranscriptDrafts], other: Sequence[TranscriptDrafts]) -> LikelihoodGain:
    """Compare the drafts of the same texts by two interpretations."""
    temperatures = [_best_temperature(drafts) for drafts in (configured, other)]
    clusters = []
    for ours, theirs in zip(configured, other, strict=True):
        difference = ours.nll[temperatures[0]] - theirs.nll[temperatures[1]]
        # The first drafted token depends most on what the draft reads; the k-th counts 1/k.
        weights = 1 / torch.arange(1, difference.shape[1] + 1, device=difference.device)
        weights = weights.expand_as(difference).masked_fill(difference.isnan(), 0)
        weighted = difference.nan_to_num() * weights
        clusters += [
            w.sum() / n.sum() for w, n in zip(weighted.split(_CLUSTER), weights.split(_CLUSTER), strict=True)
        ]
    gains = torch.stack(clusters)
    gains = gains[~gains.isnan()]
    if len(gains) < 2:
        return LikelihoodGain(0.0, 0.0)
    error = (gains.std() / math.sqrt(len(gains))).item()
    return LikelihoodGain(gains.mean().item(), gains.mean().item() / max(error, 1e-9))


def _best_temperature(drafts: Sequence[TranscriptDrafts]) -> int:
    return int(torch.cat([d.nll.flatten(1) for d in drafts], dim=1).nanmean(dim=1).argmin())


@dataclass(frozen=True)
class VerifiedBlock:
    """A verified block: position of its anchor, proposed tokens, number of accepted ones."""

    anchor: int
    tokens: list[int]
    accepted: int


def blocks(text: Transcript, drafts: TranscriptDrafts) -> list[VerifiedBlock]:
    """Return the blocks of greedy speculative decoding over a text.

    Greedy output is the target's own text whatever is drafted, so the loop walks over drafts made everywhere.
    """
    tokens, drafted = text.tokens.tolist(), drafts.tokens.tolist()
    found, anchor = [], drafts.first
    while anchor < len(tokens) - 1:
        block = drafted[anchor - drafts.first]
        kept = takewhile(lambda pair: pair[0] == pair[1], zip(block, tokens[anchor + 1 :], strict=False))
        found.append(VerifiedBlock(anchor, block, accepted=len(list(kept))))
        anchor += found[-1].accepted + 1
    return found
