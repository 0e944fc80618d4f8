"""The doctor's findings as text."""

from typing import TYPE_CHECKING

from sglang_dflash.srt.configs.dflash2_config import DFlash2DraftConfig
from sglang_dflash.srt.configs.peagle_config import PEagleDraftConfig
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.doctor.static_checks import Pair

if TYPE_CHECKING:  # measure.py needs torch and transformers' models, the static checks do not
    from sglang_dflash.srt.doctor.measure import Measurement, Outcome

_KINDS = {PEagleDraftConfig: "P-EAGLE", DFlash2DraftConfig: "DFlash2"}


def heading(pair: Pair) -> str:
    """Who is examined, in two lines."""
    text = pair.text_config
    kind = "/".join(pair.target.config.get("architectures") or ("of unknown architecture",))
    target = (
        f"{kind}, {text.num_hidden_layers} layers, hidden size {text.hidden_size}, {text.vocab_size} tokens"
    )
    return f"target  {pair.target.name}: {target}\ndraft   {pair.draft.name}: {describe_draft(pair)}"


def describe_draft(pair: Pair) -> str:
    draft = pair.draft_config
    if draft is None:
        return "its config cannot be read"
    kind = _KINDS.get(type(draft), "DFlash")
    made_by = "speculators" if is_speculators_config(pair.draft.config) else "z-lab"
    tokenizer = pair.target.tokenizer
    mask = tokenizer.name(draft.mask_token_id) if tokenizer else None
    vocabulary = f", {draft.draft_vocab_size} of them drafted" if draft.has_own_vocabulary else ""
    return (
        f"{kind} ({made_by} format), {draft.num_hidden_layers} layers, {draft.speculative_tokens} tokens a block, reads the outputs "
        f"of layers {', '.join(map(str, draft.target_layer_ids))} (0-based), mask token {draft.mask_token_id} "
        f"({mask or 'not in the tokenizer'}), vocabulary {draft.vocab_size}{vocabulary}"
    )


def figures(measured: "Measurement") -> str:
    """What was measured, as two small tables."""
    configured, expected = measured.configured, measured.expected
    tokens = sum(len(text.tokens) - text.prompt_length for text in measured.texts)
    lines = [
        f"Measured on {len(measured.texts)} prompts, {tokens} tokens, greedy, on {measured.device}; accept length "
        f"{configured.accept_length:.2f} tokens a block, bonus token included"
        + (f" (its card says {expected.accept_length:.2f}, on the card's prompts)" if expected else "")
        + ".",
        "",
        "drafted token     " + "".join(f"{k:>7}" for k in range(1, len(configured.by_position) + 1)),
        "share kept        " + "".join(f"{share:>7.2f}" for share in configured.by_position),
    ]
    if measured.copies:
        length, share = measured.with_copies
        lines.insert(
            1, f"With copies from the text: accept length {length:.2f}; {share:.0%} of the blocks are copied."
        )
    if expected and expected.by_position:
        lines.append("by its card       " + "".join(f"{share:>7.2f}" for share in expected.by_position))
    lines += [
        "",
        f"{'if read with':<28}accept length   likelihood of the target's tokens ({measured.observations} positions)",
    ]
    for outcome in measured.outcomes:
        lines.append(f"{outcome.reading.label:<28}{outcome.accept_length:>13.2f}   {likelihood(outcome)}")
    lines += [
        f"{reading.label:<28}            -   names a state that the target does not hand out"
        for reading in measured.left_out
    ]
    return "\n".join(lines)


def likelihood(outcome: "Outcome") -> str:
    """How a reading compares with the checkpoint as configured."""
    found = outcome.evidence
    if found is None:
        return "(the measure)"
    if abs(found.t) < 2:
        return f"the same within noise ({found.gain:+.3f} nats a token, {abs(found.t):.1f} standard errors): cannot be told apart"
    return f"{'better' if found.gain > 0 else 'worse'} by {abs(found.gain):.3f} nats a token ({abs(found.t):.1f} standard errors)"
