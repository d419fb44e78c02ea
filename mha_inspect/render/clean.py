"""Names that come from modules, tensors and files are hostile until they went through here."""

from __future__ import annotations

import re
import unicodedata

_BEYOND_ASCII = re.compile(r"[^\n -~]")


def _escape(character: str) -> str:
    """`\\x1b`, `\\u202e`, `\\U000e0001`: visible, and inert in a terminal."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str) -> str:
    """The text on one line, with everything that is not printable written as an escape that can be read.

    Control bytes, bidi and zero-width marks, line separators, lone surrogates, private and unassigned characters go.
    Cleaning twice is cleaning once. Markup needs no care here: no renderer interprets any.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def clean_lines(text: str) -> str:
    """Like `clean`, for text that may have several lines: line feeds stay."""
    return "\n".join(clean(line) for line in text.split("\n"))


def clean_json(text: str) -> str:
    """The same JSON document, with everything that a terminal would act on written as the escapes of JSON.

    A reader of the JSON gets the very characters that were in the name. Line feeds between values stay.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        if character.isprintable():
            return character
        units = character.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))

    return _BEYOND_ASCII.sub(escape, text)


def cells(text: str) -> int:
    """Columns that the text takes in a terminal: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
