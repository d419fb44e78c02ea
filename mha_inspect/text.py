"""Text as people read it: hostile names made harmless, near misses, plurals, numbers, shapes and sizes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import groupby
from math import isfinite, isnan, sqrt

TYPED = 60
"""Characters of a user's own text that a message repeats."""
MESSAGE = 400
"""Characters of somebody else's message that are passed on."""

_BEYOND_ASCII = re.compile(r"[^\n -~]")
_MOST_MARKS = 4
"""Combining marks on one character that a script may need; a pile of more runs over the lines around it."""


def printable(text: object, longest: int | None = None) -> str:
    """Return the text on one line, with everything that is not printable written as an escape that can be read.

    Control bytes, bidi and zero-width marks, line separators, lone surrogates, private and unassigned characters are
    escaped, and so are piles of combining marks. Doing it twice is doing it once. Markup needs no care here: no
    renderer interprets any. A text of more than `longest` characters loses its middle.
    """
    text = str(text)
    if not (text.isascii() and text.isprintable()):
        marks, escaped = 0, []
        for character in text:
            marks = marks + 1 if unicodedata.combining(character) else 0
            escaped.append(character if character.isprintable() and marks <= _MOST_MARKS else _escape(character))
        text = "".join(escaped)
    return text if longest is None else shortened(text, longest)


def _escape(character: str) -> str:
    """Return `\\x1b`, `\\u202e`, `\\U000e0001`: visible, and inert in a terminal."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown(text: object, longest: int = TYPED) -> str:
    """Return somebody else's text as a message repeats it: printable, and not too much of it."""
    return printable(text, longest)


def printable_lines(text: str) -> str:
    """Return the text as `printable` does, for one that may have several lines: line feeds stay."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable_json(text: str) -> str:
    """Return the same JSON document, with everything that a terminal would act on written as the escapes of JSON.

    A reader of the JSON gets the very characters that were in the name. Line feeds between values stay.
    """
    import json

    return _BEYOND_ASCII.sub(lambda match: match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1], text)


def shortened(text: str, longest: int) -> str:
    """Return the text with its middle left out where it is longer than that: names differ at either end."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def cells(text: str) -> int:
    """Return the columns that the text takes in a terminal: two for wide characters, none for combining ones."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    return 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitting(text: str, room: int) -> int:
    """Return how many characters of the text fit into so many columns."""
    used = 0
    for number, character in enumerate(text):
        used += _cells_of(character)
        if used > room:
            return number
    return len(text)


def did_you_mean(typed: str, known: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the nearest of the known words, or an empty string where none is near.

    Near is a slip of the fingers, or some of the words of a name, or more: `heads` for `num_heads`, `--embed` for
    `--embed-dim`, `--batch-size` for `--batch`.
    """
    by_folded = {_folded(word): word for word in known}
    folded = _folded(typed[:MESSAGE])
    begun = sorted((word for word in by_folded if word.startswith(f"{folded}_")), key=len)[:1]
    begun = begun or sorted((word for word in by_folded if folded.startswith(f"{word}_")), key=len)[-1:]
    near = begun or get_close_matches(folded, by_folded, n=1, cutoff=0.7)
    if not near and len(folded) > 2:
        near = [word for word in by_folded if _is_part(folded, word)][:1]
    return f" Did you mean {shown(by_folded[near[0]], MESSAGE)}?" if near else ""


def _is_part(typed: str, word: str) -> bool:
    """Return whether a text is some of the words of a name in order, or short for it: `num_layer`, `fp16`."""
    digits = [re.sub(r"\D", "", text) for text in (typed, word)]
    short = typed[0] == word[:1] and len(typed) < len(word) and digits[0] == digits[1] != ""
    words = iter(re.split(r"[_.]", word))
    return short or all(any(whole.startswith(part) for whole in words) for part in re.split(r"[_.]", typed))


def _folded(word: str) -> str:
    return word.strip("-").replace("-", "_").casefold()


def a_kind(value: object) -> str:
    """Return the type of a value with its article: `a list`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def plural(number: int, noun: str) -> str:
    """Return `1 head`, `8 heads`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`; empty for none."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def first_few(words: Sequence[str], most: int) -> str:
    """Return `a, b and 5 more`; all of them where they are no more than that."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def count(number: int) -> str:
    """Return `1,050,624`."""
    return f"{number:,}"


def shape(sizes: tuple[int, ...]) -> str:
    """Return `[2, 12, 256]`."""
    return f"[{', '.join(map(str, sizes))}]"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    """Return the number in the largest unit that leaves at least 1: `1.1 KiB`; `12 B` in the smallest."""
    power = 0
    # Rounded before it is compared, so that 1023.99 KiB reads 1.0 MiB.
    while round(number / step**power, 1) >= step and power + 1 < len(units):
        power += 1
    scaled = number / step**power
    return f"{scaled:,.{1 if power and scaled < 99.95 else 0}f} {units[power]}"


def byte_size(nbytes: int) -> str:
    """Return `24.0 KiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def flops(number: int) -> str:
    """Return `6.3 MFLOP`; empty for none."""
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")) if number else ""


def _special(number: float) -> str | None:
    if isfinite(number):
        return "0" if number == 0 else None
    return "NaN" if isnan(number) else "inf" if number > 0 else "-inf"


def small(number: float) -> str:
    """Return a difference: `1.2e-07`, `0.314`."""
    return _special(number) or (f"{number:.1e}" if abs(number) < 1e-3 else f"{number:.3g}")


def statistic(number: float) -> str:
    """Return a mean, std, min or max: four digits after the point, and powers of ten where those would say nothing."""
    return _special(number) or (f"{number:.4f}" if 1e-3 <= abs(number) < 1e5 else f"{number:.3e}")


def times(number: float) -> str:
    """Return a multiple of a rounding error in two digits, since the rest differs between processors: `1,300,000`."""
    return _special(number) or (f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.1f}")


def multiple(number: float | None) -> str:
    """Return a multiple as a sentence has it; None, where there is nothing to be a multiple of, is infinitely many."""
    if number is None or number == float("inf"):
        return "infinitely many"
    return times(number) if number < 1e15 else f"{number:.2g}".replace("e+", "e")


def percent(share: float) -> str:
    """Return `74.9 %` for 0.749, and one digit of a share so small that this would say none: `0.02 %`."""
    return f"{100 * share:.1f} %" if share == 0 or abs(share) >= 5e-4 else f"{100 * share:.1g} %"


def scale(factor: float, head_dim: int) -> str:
    """Return `0.0625 = 1/√256` where it is that; else the number, and what the root of head_dim would give."""
    if not isfinite(factor):
        return "no single number"
    if factor == 1 != head_dim:
        return "1 (not scaled)"
    times = factor * sqrt(head_dim)
    # What was applied may be a product of two rounded square roots, as in torch's math path.
    if abs(times - 1) < 1e-6:
        return f"{factor:.6g} = 1/√{head_dim}"
    return f"{factor:.6g} = {times:.3g} × 1/√{head_dim}" if isfinite(times) and times > 0 else f"{factor:.6g}"


def span(bounds: tuple[int, int]) -> str:
    """Return `0–255` for Python's bounds (0, 256): both ends included, as prose has it."""
    start, stop = bounds
    return f"{start}–{stop - 1}" if stop - start > 1 else str(start) if stop > start else "none"


def spans(indices: Iterable[int]) -> str:
    """Return `0–3, 7` for 0, 1, 2, 3, 7."""
    neighbours = groupby(enumerate(sorted(set(indices))), lambda place: place[1] - place[0])
    runs = ([index for _, index in run] for _, run in neighbours)
    return ", ".join(span((run[0], run[-1] + 1)) for run in runs)


def message_of(error: BaseException) -> str:
    """Return the message of an error that anybody may have raised, also where its own `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:  # whatever the code of others may raise
        return f"(no message: {type(error).__name__}.__str__ raises {type(broken).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class where it has none."""
    return next(iter(message_of(error).splitlines()), "") or type(error).__name__
