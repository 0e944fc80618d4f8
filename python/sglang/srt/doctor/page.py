"""The doctor's findings as one HTML page.

No script, nothing loaded from elsewhere, well-formed XML, light and dark.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from sglang_dflash.srt.doctor import quantization
from sglang_dflash.srt.doctor.findings import Finding
from sglang_dflash.srt.doctor.measure import Measurement, Outcome
from sglang_dflash.srt.doctor.quantization import QuantizationCost
from sglang_dflash.srt.doctor.readings import blocks
from sglang_dflash.srt.doctor.report import describe_draft, likelihood
from sglang_dflash.srt.doctor.static_checks import Pair

_BAR, _GAP, _HEIGHT, _LEFT, _TOP = 30, 10, 170, 36, 22
# (CSS class, text, remark) of a token.
Span = tuple[str, str, str]


def page(
    pair: Pair,
    found: Sequence[Finding],
    measured: Measurement | None,
    cost: QuantizationCost | None = None,
) -> str:
    """Return the page; `measured` is None if the draft cannot be loaded.

    cost: of quantization, if it was measured.
    """
    width = len(measured.configured.by_position) if measured else 0
    body = [
        "<header>",
        "<h1>Why is my acceptance low?</h1>",
        f'<p class="who"><b>{_text(pair.target.name)}</b> drafted by <b>{_text(pair.draft.name)}</b></p>',
        f'<p class="muted">{_text(describe_draft(pair))}</p>',
        "</header>",
        _findings(found),
    ]
    if measured is None:
        body.append('<p class="muted">Not measured: the draft cannot be loaded as it is.</p>')
    else:
        body += [
            '<main><section aria-label="Text by where its tokens came from">',
            _legend(width, measured.copies is not None),
            *(_answer(number, *answer) for number, answer in enumerate(_answers(measured), 1)),
            "</section><aside>",
            _summary(measured),
            _chart(measured),
            _readings(measured.outcomes),
            "" if cost is None else _costs(cost),
            "</aside></main>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>Acceptance of {_text(pair.draft.name)}</title><style>{_style(width)}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _style(width: int) -> str:
    """Return page.css with a colour for each place in a block of `width` drafted tokens."""
    places = []
    for k in range(width):
        late = 100 * k / max(width - 1, 1)
        places.append(f".p{k + 1}{{--p:color-mix(in srgb,var(--late) {late:.1f}%,var(--early))}}")
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8") + "\n".join(places)


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="fine">No fault found.</p>'
    rows = (
        f'<li class="{finding.level}"><b>{finding.level}</b> '
        f"<span>{_text(finding.problem)}. <em>{_text(finding.advice)}.</em></span></li>"
        for finding in found
    )
    return f'<ul class="findings" aria-label="Findings">{"".join(rows)}</ul>'


def _legend(width: int, has_copies: bool) -> str:
    steps = "".join(f'<span class="a p{k}">{k}</span>' for k in range(1, width + 1))
    copied = '<span class="a c">copied from the text, and kept</span> ' if has_copies else ""
    return (
        '<p class="legend"><span class="prompt">prompt</span> <span class="first">first token</span> '
        f'<span>kept, by its place in the block</span> <span class="steps">{steps}</span> {copied}'
        '<span class="b r">bonus</span> '
        '<span class="muted">dotted: hover or tab to see what the draft proposed instead</span></p>'
    )


def _answers(measured: Measurement) -> Iterator[tuple[str, list[Span]]]:
    """Yield each answer: the prompt's text, and a span for every token after it."""
    found = measured.copies or map(blocks, measured.texts, measured.drafts)
    for text, own_blocks in zip(measured.texts, found, strict=True):
        tokens, start = text.tokens.tolist(), text.prompt_length
        pieces = measured.pieces(tokens, start)
        spans = [("first", pieces[0], "the target's, from the prompt's own forward")]
        for block in own_blocks:
            source = "copied" if block.is_copied else "drafted"
            for k in range(1, block.accepted + 1):
                kind = "a c" if block.is_copied else f"a p{k}"
                spans.append(
                    (kind, pieces[block.anchor + k - start], f"{source} token {k} of its block, kept")
                )
            bonus = block.anchor + block.accepted + 1
            if bonus >= len(tokens):
                continue
            kind, remark = "b", "bonus token after a block kept whole"
            rejected = [
                measured.pieces([*tokens[:bonus], token], bonus)[0]
                for token in block.tokens[block.accepted :]
            ]
            if rejected:
                proposal = "copy" if block.is_copied else "draft"
                rest = f", then {_quoted(''.join(rejected[1:]))}" if rejected[1:] else ""
                kind, remark = "b r", f"bonus token; {proposal}, rejected: {_quoted(rejected[0])}{rest}"
            spans.append((kind, pieces[bonus - start], remark))
        yield measured.decode(tokens[:start]), spans


def _answer(number: int, prompt: str, spans: Sequence[Span]) -> str:
    tokens = []
    for kind, text, remark in spans:
        more = ' tabindex="0"' if kind == "b r" else ""
        # A line break has no area to colour or to hover, nor has a part of a character: page.css adds a mark.
        if not text or text.isspace() and "\n" in text:
            more += f' data-mark="{"⏎" if text else "·"}"'
        tokens.append(f'<span class="{kind}" data-r="{_text(remark)}"{more}>{_text(text)}</span>')
    prompt = f'<span class="prompt">{_text(prompt)}</span>'
    return f"<article><h2>{number}</h2><pre>{prompt}{''.join(tokens)}</pre></article>"


def _summary(measured: Measurement) -> str:
    expected, copied = measured.expected, measured.with_copies
    card, copies = "its card gives no figure", ""
    if expected:
        card = f"card {expected.accept_length:.2f}, on its own prompts"
    if copied:
        copies = (
            f'<br/><span class="muted">{copied.length:.2f} with copies from the text, '
            f"which {copied.copied:.0%} of the blocks are</span>"
        )
    return (
        f'<p class="figure"><strong>{measured.configured.length:.2f}</strong> accept length<br/>'
        f'<span class="muted">tokens a block, bonus included; {card}</span>{copies}</p>'
    )


def _chart(measured: Measurement) -> str:
    """Draw a bar per position, and the card's figure as a line across it."""
    shares = measured.configured.by_position
    expected = measured.expected.by_position if measured.expected else ()
    width, base = _LEFT + len(shares) * (_BAR + _GAP), _TOP + _HEIGHT
    drawn = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = base - tick * _HEIGHT
        drawn.append(_line("grid", _LEFT, width, y))
        drawn.append(_label("tick", _LEFT - 6, y + 4, f"{tick:.0%}", "end"))
    for k, share in enumerate(shares):
        x, height = _LEFT + _GAP / 2 + k * (_BAR + _GAP), share * _HEIGHT
        mark = expected[k] * _HEIGHT if k < len(expected) else 0
        drawn.append(
            f'<rect class="bar p{k + 1}" x="{x}" y="{base - height:.1f}" width="{_BAR}" '
            f'height="{height:.1f}" rx="3"/>'
        )
        if k < len(expected):
            drawn.append(_line("card", x - 3, x + _BAR + 3, base - mark))
        # Inside the bar if there is room, else above both the bar and the card's line.
        y = base - height + 14 if height > 20 else base - max(height, mark) - 6
        drawn.append(_label("value", x + _BAR / 2, y, f"{share:.2f}"))
        drawn.append(_label("tick", x + _BAR / 2, base + 16, str(k + 1)))
    caption = "Share of blocks that kept the k-th drafted token"
    values = ", ".join(f"{share:.2f}" for share in shares)
    note = '<p class="muted key"><i></i> the figures of the draft’s card</p>' if expected else ""
    return (
        f'<figure><figcaption>{caption}</figcaption><svg role="img" aria-label="{caption}: {values}" '
        f'viewBox="0 0 {width} {base + 22}">{"".join(drawn)}</svg>{note}</figure>'
    )


def _line(kind: str, left: float, right: float, y: float) -> str:
    return f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _label(kind: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _readings(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(outcome.reading.label)}</th><td>{outcome.acceptance.length:.2f}</td>'
        f"<td>{_text(likelihood(outcome))}</td></tr>"
        for outcome in outcomes
    )
    columns = ("read with", "accept length", "likelihood of the target’s tokens")
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        "<table><caption>If the checkpoint meant something else</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _costs(cost: QuantizationCost) -> str:
    cells = [[_text(cell) for cell in row] for row in quantization.table(cost)]
    rows = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
        for first, *others in cells
    )
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in quantization.COLUMNS)
    return (
        "<table><caption>What quantization cost, one layer at a time</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _quoted(text: str) -> str:
    return "“" + text.replace("\n", "⏎") + "”"


def _text(text: str) -> str:
    """Escape a text, without the control characters that XML forbids."""
    allowed = (c if c in "\n\t" or (" " <= c and c not in "\ufffe\uffff") else "\ufffd" for c in text)
    return escape("".join(allowed), quote=True)
