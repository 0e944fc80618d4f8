"""The look of the doctor's page. Text on any of its colours has a contrast of at least 4.5 (tested)."""

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


def mixed(theme: int, share: float) -> str:
    """A colour between `early` and `late`, as #rrggbb."""
    ends = [[int(COLOURS[name][theme][i : i + 2], 16) for i in (1, 3, 5)] for name in ("early", "late")]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def position_rules(width: int) -> str:
    """Rules for the tokens and bars of each place in a block, in both themes."""
    themes = []
    for theme in (0, 1):
        shares = [k / max(width - 1, 1) for k in range(width)]
        themes.append("".join(f".p{k + 1}{{--p:{mixed(theme, share)}}}" for k, share in enumerate(shares)))
    return f"{themes[0]}@media (prefers-color-scheme:dark){{{themes[1]}}}"


def _variables(theme: int) -> str:
    return "".join(f"--{name}:{pair[theme]};" for name, pair in COLOURS.items())


STYLE = (
    f":root{{color-scheme:light dark;{_variables(0)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;overflow-x:clip;max-width:1240px;padding:36px 28px 60px;background:var(--page);color:var(--ink);
 font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:27px;line-height:1.2;letter-spacing:-.015em;margin:0 0 6px}
p{margin:0 0 6px}
.muted{color:var(--muted);font-size:13px}
.findings{list-style:none;margin:20px 0 0;padding:0;display:grid;gap:8px}
.findings li{display:flex;gap:12px;background:var(--sheet);border:1px solid var(--line);border-left:4px solid var(--muted);
 border-radius:8px;padding:10px 14px}
.findings b{flex:none;width:42px;color:var(--muted)}
.findings .fault{border-left-color:var(--wrong)}
.findings .fault b{color:var(--wrong)}
.fine{color:var(--fine);font-weight:600;margin-top:18px}
main{display:grid;grid-template-columns:minmax(0,1fr) 390px;gap:28px;margin-top:24px;align-items:start}
aside{position:sticky;top:24px;display:grid;gap:20px;background:var(--sheet);border:1px solid var(--line);border-radius:12px;
 padding:20px}
@media (max-width:980px){main{grid-template-columns:minmax(0,1fr)}aside{position:static;order:-1}}
.legend{display:flex;flex-wrap:wrap;align-items:center;gap:8px 12px;margin-bottom:14px;font-size:13px}
.legend .steps span{padding:2px 7px}
.legend .b{padding:1px 3px}
article{display:flex;background:var(--sheet);border:1px solid var(--line);border-radius:12px;margin-bottom:12px}
article h2{flex:none;width:38px;margin:0;padding:15px 0;text-align:center;font-size:12px;font-weight:600;color:var(--muted)}
pre{flex:1;min-width:0;margin:0;padding:14px 18px 16px 0;white-space:pre-wrap;overflow-wrap:anywhere;
 font:13px/1.75 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.prompt{color:var(--muted)}
.first{border-bottom:2px solid var(--muted)}
.a{background:var(--p);border-radius:3px;padding:1px 0}
.c{--p:var(--copy)}
.b{background:var(--bonus);border-radius:3px;padding:1px 0}
.r{text-decoration:underline dotted var(--ink) 1.5px;text-underline-offset:3px}
pre span[data-r]{position:relative;box-shadow:inset 1px 0 0 var(--sheet)}
pre span[data-r]:hover,pre span[data-r]:focus{outline:2px solid var(--ink);outline-offset:0;z-index:2}
pre span[data-r]:hover::after,pre span[data-r]:focus::after{content:attr(data-r);position:absolute;left:0;top:calc(100% + 5px);
 z-index:3;width:max-content;max-width:320px;padding:6px 10px;border-radius:7px;background:var(--ink);color:var(--page);
 font:12px/1.45 system-ui,sans-serif;white-space:pre-wrap;box-shadow:0 4px 16px rgb(0 0 0/.25);pointer-events:none}
.figure{margin:0;line-height:1.4}
.figure strong{font-size:40px;line-height:1;letter-spacing:-.03em;font-variant-numeric:tabular-nums;margin-right:4px}
figure{margin:0}
figcaption,caption{font-size:13px;font-weight:600;text-align:left;margin-bottom:8px}
svg{display:block;width:100%;height:auto;font:11px system-ui,sans-serif}
.grid{stroke:var(--line)}
.tick{fill:var(--muted)}
.value{fill:var(--ink);font-weight:600}
.bar{fill:var(--p);stroke:var(--ink);stroke-opacity:.28}
.card{stroke:var(--wrong);stroke-width:2}
.key i{display:inline-block;width:18px;border-top:2px solid var(--wrong);vertical-align:middle;margin-right:4px}
table{border-collapse:collapse;width:100%;font-size:12.5px;line-height:1.4;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:6px 8px 6px 0;border-top:1px solid var(--line);font-weight:400}
thead th{border:0;color:var(--muted);font-size:12px;padding-top:0}
tbody tr:first-child th{font-weight:600}
"""
)
