"""The style of the doctor's page: the colours here, the rules in page.css.

Text on any of its colours has a contrast of at least 4.5 (tested).
"""

from pathlib import Path

# Name -> (light, dark). Drafted tokens go from `early` to `late` over the places of a block.
COLOURS = {
    "page": ("#fbfaf7", "#14171a"),
    "sheet": ("#ffffff", "#1c2024"),
    "ink": ("#1b2126", "#e8eaec"),
    "muted": ("#5d666e", "#a0a9b1"),
    "line": ("#dfdcd4", "#343b41"),
    "early": ("#d3efe6", "#14483d"),
    "late": ("#7cabe8", "#3d5a9e"),
    "copy": ("#e6d8f6", "#4a3168"),
    "bonus": ("#ffe3a3", "#5a4104"),
    "wrong": ("#a3201a", "#ff9d94"),
    "fine": ("#17653f", "#7fd6a8"),
}


def style(width: int) -> str:
    """Return the style sheet for blocks of `width` drafted tokens, light and dark."""
    light, dark = (_theme(theme, width) for theme in (0, 1))
    rules = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}\n{rules}"


def mixed(theme: int, share: float) -> str:
    """Mix a colour between `early` and `late`, as #rrggbb."""
    ends = [[int(COLOURS[name][theme][i : i + 2], 16) for i in (1, 3, 5)] for name in ("early", "late")]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def _theme(theme: int, width: int) -> str:
    """Return variables for all colours, and for those of each place in a block."""
    variables = "".join(f"--{name}:{pair[theme]};" for name, pair in COLOURS.items())
    places = (f".p{k + 1}{{--p:{mixed(theme, k / max(width - 1, 1))}}}" for k in range(width))
    return f":root{{{variables}}}{''.join(places)}"
