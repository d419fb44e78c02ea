"""The frames that svg and html are exported in: self-contained, nothing is fetched, no script, light and dark.

Rich fills in the names in braces of the svg; what stands between two @ is filled in by us. Fonts are those that
systems have.
"""

from __future__ import annotations

FONTS = "'JetBrains Mono','Cascadia Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"

_RULES = """
@SCOPE@ { font: 14px/1.45 @FONTS@; }
@SCOPE@ h1, @SCOPE@ h2, @SCOPE@ h3 { font: inherit; font-weight: bold; margin: 1.4em 0 .4em; }
@SCOPE@ h1 > span, @SCOPE@ h2 > span, @SCOPE@ h3 > span { font-weight: normal; margin-left: 2ch; }
@SCOPE@ p, @SCOPE@ dl { margin: .4em 0; max-width: 110ch; }
@SCOPE@ dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 2ch; }
@SCOPE@ dd { margin: 0; overflow-wrap: anywhere; }
@SCOPE@ .scroll { overflow-x: auto; margin: .6em 0; }
@SCOPE@ table { border-collapse: collapse; font: inherit; margin: 0; }
@SCOPE@ th, @SCOPE@ td { padding: .1em 2ch .1em 0; text-align: left; vertical-align: top; white-space: nowrap; }
@SCOPE@ .wrap { white-space: normal; min-width: 24ch; }
@SCOPE@ .right { text-align: right; }
@SCOPE@ th { border-bottom: 1px solid; }
@SCOPE@ tfoot td { border-top: 1px solid; font-weight: bold; }
@SCOPE@ th, @SCOPE@ dt, @SCOPE@ .muted { font-weight: normal; opacity: .7; }
@SCOPE@ pre { font: inherit; margin: 0; }
@SCOPE@ .strong, @SCOPE@ .bad { font-weight: bold; }
@SCOPE@ .bad, @SCOPE@ .warn { color: @RED@; }
@SCOPE@ .good, @SCOPE@ .axis-head_dim { color: @GREEN@; }
@SCOPE@ .axis-heads, @SCOPE@ .axis-kv_heads { color: @MAGENTA@; }
@SCOPE@ .axis-query { color: @CYAN@; }
@SCOPE@ .axis-key { color: @BLUE@; }
"""


def _styles(scope: str, **colours: str) -> str:
    rules = _RULES.strip().replace("@SCOPE@", scope).replace("@FONTS@", FONTS)
    for name, colour in colours.items():
        rules = rules.replace(f"@{name}@", colour)
    return rules


LIGHT = {"RED": "#b3261e", "GREEN": "#116329", "MAGENTA": "#8250df", "CYAN": "#0f6b73", "BLUE": "#0958b3"}
DARK = {"RED": "#ff8a80", "GREEN": "#7ec685", "MAGENTA": "#c89bf0", "CYAN": "#62c3cd", "BLUE": "#79b4fa"}
BETWEEN = {"RED": "#d1402f", "GREEN": "#2d8549", "MAGENTA": "#9560d8", "CYAN": "#1f8089", "BLUE": "#2f76cf"}
"""Colours that can be read on white and on black alike, for a page whose ground is not known."""
GROUNDS = (("#ffffff", "#24292f"), ("#161b22", "#d0d7de"))
"""Ground and text, light and dark."""


def _variables(ground: str, text: str, colours: dict[str, str]) -> str:
    return f"--ground: {ground}; --text: {text}; " + " ".join(f"--{n.lower()}: {c};" for n, c in colours.items())


HTML = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@TITLE@</title>
<style>
:root {{ color-scheme: light dark; {_variables(*GROUNDS[0], LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(*GROUNDS[1], DARK)} }} }}
body {{ margin: 2rem; color: var(--text); background: var(--ground); }}
{_styles("body", **{name: f"var(--{name.lower()})" for name in LIGHT})}
</style>
</head>
<body>
@PAGE@
</body>
</html>
"""

CELL = f"""<div class="mha-inspect">
<style>
{_styles(".mha-inspect", **BETWEEN)}
.mha-inspect table, .mha-inspect tr, .mha-inspect th, .mha-inspect td {{ background: none; color: inherit; }}
</style>
@PAGE@
</div>
"""
"""For a page that is not ours, such as a notebook: it has that page's ground and text."""

SVG = f"""<svg class="rich-terminal" viewBox="0 0 {{width}} {{height}}" xmlns="http://www.w3.org/2000/svg">
    <title>@TITLE@</title>
    <style>
    .{{unique_id}}-matrix {{{{
        font-family: {FONTS};
        font-size: {{char_height}}px;
        line-height: {{line_height}}px;
        font-variant-east-asian: full-width;
    }}}}
    .{{unique_id}}-title {{{{ font: bold 18px sans-serif; fill: {GROUNDS[0][1]}; }}}}
    .{{unique_id}}-ground {{{{ fill: {GROUNDS[0][0]}; }}}}
    {{styles}}
    @media (prefers-color-scheme: dark) {{{{
    .{{unique_id}}-title {{{{ fill: {GROUNDS[1][1]}; }}}}
    .{{unique_id}}-ground {{{{ fill: {GROUNDS[1][0]}; }}}}
    @DARK@
    }}}}
    </style>
    <defs>
    <clipPath id="{{unique_id}}-clip-terminal">
      <rect x="0" y="0" width="{{terminal_width}}" height="{{terminal_height}}" />
    </clipPath>
    {{lines}}
    </defs>
    <rect class="{{unique_id}}-ground" width="{{width}}" height="{{height}}" rx="8" />
    <text class="{{unique_id}}-title" x="16" y="27">@TITLE@</text>
    <g transform="translate({{terminal_x}}, {{terminal_y}})" clip-path="url(#{{unique_id}}-clip-terminal)">
    {{backgrounds}}
    <g class="{{unique_id}}-matrix" xml:space="preserve">
    {{matrix}}
    </g>
    </g>
</svg>
"""
"""Light where nothing says otherwise, for what shows an svg and knows no media."""
