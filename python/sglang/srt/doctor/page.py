"""What the doctor found, as one HTML page: no script, nothing loaded from elsewhere, well-formed XML, light
and dark."""

from collections.abc import Iterator, Sequence
from html import escape

from sglang_dflash.srt.doctor.findings import Finding
from sglang_dflash.srt.doctor.measure import Measurement, Outcome
from sglang_dflash.srt.doctor.page_style import STYLE, position_rules
from sglang_dflash.srt.doctor.readings import blocks
from sglang_dflash.srt.doctor.report import describe_draft, likelihood
from sglang_dflash.srt.doctor.static_checks import Pair

_BAR, _GAP, _HEIGHT, _LEFT, _TOP = 30, 10, 170, 36, 22


def page(pair: Pair, found: Sequence[Finding], measured: Measurement | None) -> str:
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
            *(_answer(number, *pieces) for number, pieces in enumerate(_pieces(measured), 1)),
            "</section><aside>",
            _summary(measured),
            _chart(measured),
            _readings(measured.outcomes),
            "</aside></main>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>'
        f"<title>Acceptance of {_text(pair.draft.name)}</title><style>{STYLE}{position_rules(width)}</style></head>\n"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _findings(found: Sequence[Finding]) -> str:
    if not found:
        return '<p class="fine">No fault found.</p>'
    rows = (
        f'<li class="{finding.level}"><b>{finding.level}</b> <span>{_text(finding.what)}. '
        f"<em>{_text(finding.what_to_do)}.</em></span></li>"
        for finding in found
    )
    return f'<ul class="findings" aria-label="Findings">{"".join(rows)}</ul>'


def _legend(width: int, has_copies: bool) -> str:
    steps = "".join(f'<span class="a p{k}">{k}</span>' for k in range(1, width + 1))
    copied = '<span class="a c">copied from the text, and kept</span> ' if has_copies else ""
    return (
        f'<p class="legend"><span class="prompt">prompt</span> <span class="first">first token</span> '
        f'<span>kept, by its place in the block</span> <span class="steps">{steps}</span> {copied}<span class="b r">bonus</span> '
        f'<span class="muted">dotted: hover or tab to see what the draft said instead</span></p>'
    )


def _pieces(measured: Measurement) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Per answer: the prompt's text, and (class, text, remark) of every token after it."""
    for number, (text, drafts) in enumerate(zip(measured.texts, measured.drafts, strict=True)):
        tokens, start = text.tokens.tolist(), text.prompt_length
        pieces = measured.pieces(tokens, start)
        spans = [("first", pieces[0], "the target's, from the prompt's own forward")]
        cycles = (
            measured.copies[number]
            if measured.copies
            else [(*block, False) for block in blocks(text, drafts)]
        )
        for anchor, block, kept, is_copied in cycles:
            kind, source = ("c", "copied") if is_copied else ("p", "drafted")
            for k in range(1, kept + 1):
                place = kind if is_copied else f"{kind}{k}"
                spans.append(
                    (f"a {place}", pieces[anchor + k - start], f"{source} token {k} of its block, kept")
                )
            if anchor + kept + 1 < len(tokens):
                refused = [
                    measured.pieces(tokens[: anchor + 1 + kept] + [token], anchor + 1 + kept)[0]
                    for token in block[kept:]
                ]
                remark, kind = "bonus token after a block kept whole", "b"
                if refused:
                    rest = f", then {_quoted(''.join(refused[1:]))}" if refused[1:] else ""
                    remark, kind = (
                        f"bonus token; {'copy' if is_copied else 'draft'}, rejected: {_quoted(refused[0])}{rest}",
                        "b r",
                    )
                spans.append((kind, pieces[anchor + kept + 1 - start], remark))
        yield measured.pieces(tokens[:start], 0, joined=True)[0], spans


def _answer(number: int, prompt: str, spans: Sequence[tuple[str, str, str]]) -> str:
    tokens = "".join(
        f'<span class="{kind}" data-r="{_text(remark)}"{_TABBED if kind == "b r" else ""}>{_text(text)}</span>'
        for kind, text, remark in spans
    )
    return (
        f'<article><h2>{number}</h2><pre><span class="prompt">{_text(prompt)}</span>{tokens}</pre></article>'
    )


_TABBED = ' tabindex="0"'


def _summary(measured: Measurement) -> str:
    expected = measured.expected
    card = (
        f"card {expected.accept_length:.2f}, on its own prompts" if expected else "its card gives no figure"
    )
    copies = ""
    if measured.copies:
        length, share = measured.with_copies
        copies = f'<br/><span class="muted">{length:.2f} with copies from the text, which {share:.0%} of the blocks are</span>'
    return (
        f'<p class="figure"><strong>{measured.configured.accept_length:.2f}</strong> accept length<br/>'
        f'<span class="muted">tokens a block, bonus included; {card}</span>{copies}</p>'
    )


def _chart(measured: Measurement) -> str:
    shares, expected = (
        measured.configured.by_position,
        measured.expected.by_position if measured.expected else (),
    )
    width, base = _LEFT + len(shares) * (_BAR + _GAP), _TOP + _HEIGHT
    drawn = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = base - tick * _HEIGHT
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.0%}</text>'
        )
    for k, share in enumerate(shares):
        x, high = _LEFT + _GAP / 2 + k * (_BAR + _GAP), share * _HEIGHT
        drawn.append(
            f'<rect class="bar p{k + 1}" x="{x}" y="{base - high:.1f}" width="{_BAR}" height="{high:.1f}" rx="3"/>'
        )
        if k < len(expected):
            y = base - expected[k] * _HEIGHT
            drawn.append(f'<line class="card" x1="{x - 3}" x2="{x + _BAR + 3}" y1="{y:.1f}" y2="{y:.1f}"/>')
        # Inside its bar, where there is room: above it stands the card's mark.
        mark = expected[k] * _HEIGHT if k < len(expected) else 0
        y = base - high + 14 if high > 20 else base - max(high, mark) - 6
        drawn.append(
            f'<text class="value" x="{x + _BAR / 2}" y="{y:.1f}" text-anchor="middle">{share:.2f}</text>'
        )
        drawn.append(
            f'<text class="tick" x="{x + _BAR / 2}" y="{base + 16}" text-anchor="middle">{k + 1}</text>'
        )
    label = "Share of blocks that kept the k-th drafted token: " + ", ".join(
        f"{share:.2f}" for share in shares
    )
    note = '<p class="muted key"><i></i> what the draft’s card says</p>' if expected else ""
    return (
        f'<figure><figcaption>Share of blocks that kept the k-th drafted token</figcaption><svg role="img" aria-label="{label}" '
        f'viewBox="0 0 {width} {base + 22}">{"".join(drawn)}</svg>{note}</figure>'
    )


def _readings(outcomes: Sequence[Outcome]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(outcome.reading.label)}</th><td>{outcome.accept_length:.2f}</td>'
        f"<td>{_text(likelihood(outcome))}</td></tr>"
        for outcome in outcomes
    )
    return (
        "<table><caption>If the checkpoint meant something else</caption><thead><tr><th scope='col'>read with</th>"
        f"<th scope='col'>accept length</th><th scope='col'>likelihood of the target’s tokens</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _quoted(text: str) -> str:
    shown = text.replace("\n", "⏎")
    return f"“{shown}”"


def _text(text: str) -> str:
    """Escaped, without the control characters that XML forbids."""
    return escape(
        "".join(c if c in "\n\t" or (" " <= c and c not in "\ufffe\uffff") else "\ufffd" for c in text),
        quote=True,
    )
