"""The doctor's findings as one HTML page, by the template page.html.jinja.

No script, nothing loaded from elsewhere, well-formed XML, light and dark.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sglang_dflash.srt.doctor.findings import Finding
from sglang_dflash.srt.doctor.measure import Measurement
from sglang_dflash.srt.doctor.quantization import COLUMNS, QuantizationCost, table
from sglang_dflash.srt.doctor.readings import blocks
from sglang_dflash.srt.doctor.report import describe_draft, readings
from sglang_dflash.srt.doctor.static_checks import Pair

_NO_XML = re.compile("[^\n\t -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page(
    pair: Pair, found: Sequence[Finding], measured: Measurement | None, cost: QuantizationCost | None = None
) -> str:
    """Return the page; `measured` and `cost` are None if they were not measured."""
    folder = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=folder, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    made.globals |= dict(describe_draft=describe_draft, answers=_answers, readings=readings)
    made.globals |= dict(COLUMNS=COLUMNS, cost_rows=table)
    template = made.get_template("page.html.jinja")
    return _NO_XML.sub("\ufffd", template.render(pair=pair, found=found, measured=measured, cost=cost))


def _answers(measured: Measurement) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each answer: the prompt, and (CSS class, text, remark) of each token after it."""
    found = measured.copies or map(blocks, measured.texts, measured.drafts)
    for text, own_blocks in zip(measured.texts, found, strict=True):
        tokens, start = text.tokens.tolist(), text.prompt_length
        pieces = measured.pieces(tokens, start)
        spans = [("first", pieces[0], "the target's, from the prompt's own forward")]
        for block in own_blocks:
            source, proposal = ("copied", "copy") if block.is_copied else ("drafted", "draft")
            bonus = block.anchor + block.accepted + 1
            for k, piece in enumerate(pieces[block.anchor + 1 - start : bonus - start], 1):
                kind = "a c" if block.is_copied else f"a p{k}"
                spans.append((kind, piece, f"{source} token {k} of its block, kept"))
            if bonus >= len(tokens):
                continue
            before, wrong = tokens[:bonus], block.tokens[block.accepted :]
            kind, remark = "b", "bonus token after a block kept whole"
            if rejected := [measured.pieces([*before, token], bonus)[0] for token in wrong]:
                rest = f", then {_quoted(''.join(rejected[1:]))}" if rejected[1:] else ""
                kind, remark = "b r", f"bonus token; {proposal}, rejected: {_quoted(rejected[0])}{rest}"
            spans.append((kind, pieces[bonus - start], remark))
        yield measured.decode(tokens[:start]), spans


def _quoted(text: str) -> str:
    return "“" + text.replace("\n", "⏎") + "”"
