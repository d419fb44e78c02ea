"""The frames that svg and html are exported in: self-contained, nothing is fetched, no script.

Rich fills in the names in braces. Its own templates refer to web fonts; these name fonts that systems have.
"""

from __future__ import annotations

FONTS = "'JetBrains Mono','Cascadia Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"

HTML = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="UTF-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mha-inspect</title>
<style>
{stylesheet}
body {{
    color: {foreground};
    background-color: {background};
    margin: 2rem;
}}
pre {{
    font: 14px/1.45 @FONTS@;
    overflow-x: auto;
}}
code {{
    font: inherit;
}}
</style>
</head>
<body>
<pre><code>{code}</code></pre>
</body>
</html>
""".replace("@FONTS@", FONTS)

CELL = """<pre style="font: 14px/1.45 @FONTS@; color: {foreground}; background-color: {background}; padding: 1em; \
overflow-x: auto"><code style="font: inherit; color: inherit; background: none; padding: 0">{code}</code></pre>
""".replace("@FONTS@", FONTS)
"""For a page that is not ours, such as a notebook: nothing in it reaches what stands beside it."""

SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
    <style>
    .{unique_id}-matrix {{
        font-family: @FONTS@;
        font-size: {char_height}px;
        line-height: {line_height}px;
        font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{
        font-size: 18px;
        font-weight: bold;
        font-family: sans-serif;
    }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix" xml:space="preserve">
    {matrix}
    </g>
    </g>
</svg>
""".replace("@FONTS@", FONTS)
