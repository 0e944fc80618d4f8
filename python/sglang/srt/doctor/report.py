"""The doctor's findings as text, as JSON, and as one HTML page.

The page, by the template page.html.jinja, has no script, loads nothing from elsewhere, and is well-formed
XML, light and dark.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sglang_dflash.srt.configs.draft_formats import checkpoint_problems, is_flat_dspark
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.doctor.interpretations import blocks
from sglang_dflash.srt.doctor.measure import Measurement
from sglang_dflash.srt.doctor.pair import FAULT, Checkpoint, Finding, Pair

_NO_XML = re.compile("[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def heading(pair: Pair, found: Sequence[Finding]) -> str:
    """Describe the target, the draft and who serves them, in three lines."""
    text = pair.text_config
    kind = "/".join(pair.target.config.get("architectures") or ("of unknown architecture",))
    size = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, {text.vocab_size} tokens"
    draft = describe_draft(pair)
    lines = f"target  {pair.target.name}: {kind}, {size}", f"draft   {pair.draft.name}: {draft}"
    return "\n".join((*lines, f"served by {implementation(pair.draft, found)}"))


def implementation(draft: Checkpoint, faults: Sequence[Finding]) -> str:
    """Name the implementation that serves a draft with these faults, and why it is not ours."""
    found = checkpoint_problems(draft.config, str(draft.folder))
    if not found and any(fault.is_fatal for fault in faults):
        return "no implementation: a fault ends the start"
    if not found:
        return "sglang-dflash, if no flag or device says otherwise"
    reasons = "; ".join(finding.what for finding in found)
    if not all(finding.builtin_supports for finding in found):
        return f"no implementation: {reasons}"
    lost = "".join(f"; {finding.drawback}" for finding in found if finding.drawback)
    return f"SGLang's built-in DFLASH, on a GPU alone, because {reasons}{lost}"


def describe_draft(pair: Pair) -> str:
    if not pair.is_parsed:
        return "its config cannot be read"
    draft, mask_token_id = pair.config, pair.config.mask_token_id
    made_by = "z-lab"
    if is_speculators_config(pair.draft.config):
        made_by = "speculators"
    elif is_flat_dspark(pair.draft.config):
        made_by = "DeepSpec"
    mask = pair.target.tokenizer and pair.target.tokenizer.convert_ids_to_tokens(mask_token_id)
    vocabulary = f", {draft.draft_vocab_size} of them drafted" if draft.has_own_vocabulary else ""
    return (
        f"{draft.kind} ({made_by} format), {draft.num_hidden_layers} layers, "
        f"{draft.speculative_tokens} tokens a block, "
        f"reads the outputs of layers {', '.join(map(str, draft.target_layer_ids))} (0-based), "
        f"mask token {mask_token_id} ({mask or 'not in the tokenizer'}), "
        f"vocabulary {draft.vocab_size}{vocabulary}"
    )


def figures(measured: Measurement) -> str:
    """Format what was measured, as two small tables."""
    configured = measured.configured
    lines = [
        f"Measured on {len(measured.texts)} prompts, {measured.num_tokens} tokens, greedy, "
        f"on {measured.device}; accept length {configured.length:.2f} tokens a block, "
        "bonus token included.",
        "",
        "drafted token     " + "".join(f"{k:>7}" for k in range(1, len(configured.by_position) + 1)),
        "share kept        " + "".join(f"{share:>7.2f}" for share in configured.by_position),
        "",
        f"{'if read with':<28}accept length   likelihood of the target's tokens "
        f"({measured.observations} positions)",
    ]
    lines += [f"{label:<28}{length:>13}   {words}" for label, length, words in interpretations(measured)]
    return "\n".join(lines)


def interpretations(measured: Measurement) -> list[tuple[str, str, str]]:
    """Return rows of text: what the checkpoint was read with, accept length, likelihood."""
    configured, *others = [
        (outcome.interpretation.label, f"{outcome.acceptance.length:.2f}", str(outcome.evidence))
        for outcome in measured.outcomes
    ]
    return [(*configured[:2], "(the reference)"), *others]


def as_json(pair: Pair, found: Sequence[Finding], measured: Measurement | None = None) -> dict[str, Any]:
    """Return the whole report as JSON's types; what was not measured is None."""
    report: dict[str, Any] = {
        "target": pair.target.name,
        "draft": pair.draft.name,
        "draft_config": describe_draft(pair),
        "served_by": implementation(pair.draft, found),
        "num_faults": sum(finding.level == FAULT for finding in found),
        "findings": [asdict(finding) for finding in found],
        "measured": None,
    }
    if measured is not None:
        report["measured"] = {
            "device": measured.device,
            "num_prompts": len(measured.texts),
            "num_tokens": measured.num_tokens,
            "num_observations": measured.observations,
            "readings": [
                {
                    "read_with": outcome.interpretation.label,
                    **asdict(outcome.acceptance),
                    **asdict(outcome.evidence),
                }
                for outcome in measured.outcomes
            ],
        }
    return report


def page(pair: Pair, found: Sequence[Finding], measured: Measurement | None) -> str:
    """Return the page; `measured` is None if nothing was measured."""
    folder = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=folder, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    made.globals |= dict(describe_draft=describe_draft, answers=_answers, interpretations=interpretations)
    template = made.get_template("page.html.jinja")
    return _NO_XML.sub("\ufffd", template.render(pair=pair, found=found, measured=measured))


def _answers(measured: Measurement) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each answer: the prompt, and (CSS class, text, remark) of each token after it."""
    for text, drafts in zip(measured.texts, measured.drafts, strict=True):
        tokens, start = text.tokens.tolist(), text.prompt_length
        pieces = measured.pieces(tokens, start)
        spans = [("first", pieces[0], "the target's, from the prompt's own forward")]
        for block in blocks(text, drafts):
            bonus = block.anchor + block.accepted + 1
            for k, piece in enumerate(pieces[block.anchor + 1 - start : bonus - start], 1):
                spans.append((f"a p{k}", piece, f"drafted token {k} of its block, kept"))
            if bonus >= len(tokens):
                continue
            before, wrong = tokens[:bonus], block.tokens[block.accepted :]
            kind, remark = "b", "bonus token after a block kept whole"
            if rejected := [measured.pieces([*before, token], bonus)[0] for token in wrong]:
                rest = f", then {_quote(''.join(rejected[1:]))}" if rejected[1:] else ""
                kind, remark = "b r", f"bonus token; draft, rejected: {_quote(rejected[0])}{rest}"
            spans.append((kind, pieces[bonus - start], remark))
        yield measured.decode(tokens[:start]), spans


def _quote(text: str) -> str:
    return "“" + text.replace("\n", "⏎") + "”"
