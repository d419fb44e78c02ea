"""Format text for people: escape hostile names, suggest near matches, write plurals, numbers, shapes and sizes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import floor, isfinite, isnan, log10, sqrt

TYPED = 60
"""Maximum number of characters of the user's text in a message."""
MESSAGE = 400
"""Maximum number of characters of another program's message."""

_MOST_MARKS = 4
"""Maximum number of combining marks on one character in any script; more would overlap the neighbouring lines."""


def printable(text: object, longest: int | None = None) -> str:
    """Return the text on one line, with every character that is not printable as a readable escape.

    Control characters, bidi and zero-width marks, line separators, lone surrogates, private and unassigned characters,
    and more than four combining marks on a character are escaped. Escaping twice changes nothing. Markup is kept,
    because no renderer interprets it. A text of more than `longest` characters loses its middle.
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
    """Return an escape that is visible and harmless in a terminal: `\\x1b`, `\\u202e`, `\\U000e0001`."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def shown(text: object, longest: int = TYPED) -> str:
    """Return the user's text for a message: printable and shortened."""
    return printable(text, longest)


def quoted(text: object) -> str:
    """Return the user's text as a word of a command that is to be run: whole, and quoted where a shell needs it."""
    import shlex  # help is shown without it

    return shlex.quote(printable(text))


def shortened(text: str, longest: int) -> str:
    """Return the text, with `…` for its middle if it is longer than `longest`: names differ at their ends."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def cells(text: str) -> int:
    """Return the columns of a text in a terminal: two for a wide character, none for a combining mark."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fitting(text: str, room: int) -> int:
    """Return how many characters of the text fit into `room` columns."""
    used = 0
    for number, character in enumerate(text):
        used += _cells_of(character)
        if used > room:
            return number
    return len(text)


def did_you_mean(typed: str, words: Iterable[str]) -> str:
    """Return ` Did you mean X?` for the nearest of these words; empty if no word is near.

    Near words differ by a typing error or by missing or additional words: `heads` for `num_heads`, `--embed` for
    `--embed-dim`, `--batch-size` for `--batch`.
    """
    by_folded = {_folded(word): word for word in words}
    near = _nearest(_folded(typed[:MESSAGE]), list(by_folded))
    if near is None:
        return ""
    return f" Did you mean {shown(by_folded[near], MESSAGE)}?"


def _nearest(typed: str, words: Sequence[str]) -> str | None:
    """Return the word that a text most likely stands for; None if no word is near."""
    longer = [word for word in words if word.startswith(f"{typed}_")]
    if longer:
        return min(longer, key=len)
    shorter = [word for word in words if typed.startswith(f"{word}_")]
    if shorter:
        # The last of the longest, as the order of words is from the usual to the special.
        return sorted(shorter, key=len)[-1]
    similar = get_close_matches(typed, words, n=1, cutoff=0.7)
    if similar:
        return similar[0]
    if len(typed) > 2:
        for word in words:
            if _is_part(typed, word):
                return word
    return None


def _is_part(typed: str, word: str) -> bool:
    """Return whether a text is some words of a name in order, or its abbreviation: `num_layer`, `fp16`."""
    return _is_abbreviation(typed, word) or _has_in_order(re.split(r"[_.]", word), re.split(r"[_.]", typed))


def _is_abbreviation(typed: str, word: str) -> bool:
    """Return whether a text is shorter, begins alike and has the same digits, e.g. `fp16` for `float16`."""
    digits = re.sub(r"\D", "", typed)
    if not digits or digits != re.sub(r"\D", "", word):
        return False
    return typed[0] == word[:1] and len(typed) < len(word)


def _has_in_order(words: Sequence[str], begun: Sequence[str]) -> bool:
    """Return whether each of these beginnings is that of a word after the word of the one before."""
    place = 0
    for part in begun:
        while place < len(words) and not words[place].startswith(part):
            place += 1
        if place == len(words):
            return False
        place += 1
    return True


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
    """Return `a, b and c`; empty for no words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def first_few(words: Sequence[str], most: int) -> str:
    """Return `a, b and 5 more`; all words if there are at most `most`."""
    first = ", ".join(words[:most])
    if len(words) <= most:
        return first
    return f"{first} and {len(words) - most} more"


def shape(sizes: tuple[int, ...]) -> str:
    """Return `[2, 12, 256]`."""
    return f"[{', '.join(map(str, sizes))}]"


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    """Return the number in the largest unit in which it is at least 1: `1.1 KiB`, or `12 B` in the smallest."""
    power = 0
    # Round before comparing, so that 1023.99 KiB becomes 1.0 MiB.
    while round(number / step**power, 1) >= step and power + 1 < len(units):
        power += 1
    scaled = number / step**power
    decimals = 1 if power and scaled < 99.95 else 0
    return f"{scaled:,.{decimals}f} {units[power]}"


def byte_size(nbytes: int) -> str:
    """Return `24.0 KiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def flops(number: int) -> str:
    """Return `6.3 MFLOP`; empty for 0."""
    return _scaled(number, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")) if number else ""


def _special(number: float) -> str | None:
    """Return the word for zero, NaN or an infinity; None for any other number."""
    if isnan(number):
        return "NaN"
    if not isfinite(number):
        return "inf" if number > 0 else "-inf"
    return "0" if number == 0 else None


_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def small(number: float) -> str:
    """Return a difference: `1.2e-07`, `0.314`."""
    special = _special(number)
    if special is not None:
        return special
    return f"{number:.1e}" if abs(number) < 1e-3 else f"{number:.3g}"


def statistic(number: float) -> str:
    """Return a mean, std, min or max with four decimals, or in powers of ten if very large or small."""
    special = _special(number)
    if special is not None:
        return special
    return f"{number:.4f}" if 1e-3 <= abs(number) < 1e5 else f"{number:.3e}"


def times(number: float) -> str:
    """Return a ratio in two digits: `1.3`, `1,300`."""
    special = _special(number)
    if special is not None:
        return special
    if number < 10:
        return f"{number:.1f}"
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}"


def multiple(number: float | None) -> str:
    """Return a multiple of a rounding error for a sentence: `about 10⁶`; None, for an error of 0: `infinitely many`."""
    if number is None or number == float("inf"):
        return "infinitely many"
    size = magnitude(number)
    return f"about {size}" if number >= 10 else size


def magnitude(number: float) -> str:
    """Return a multiple of a rounding error: `10⁶` for 2,500,000, which is 1,400,000 on another processor.

    From 10 on only the order of magnitude is the same on every machine; below, a digit decides a verdict: `0.7`.
    """
    special = _special(number)
    if special is not None:
        return special
    if number < 10:
        return f"{number:.1f}"
    exponent = floor(log10(number))
    if exponent == 1:
        return "10"
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def percent(share: float) -> str:
    """Return `74.9 %` for 0.749; a share below 0.05 % has one significant digit: `0.02 %`."""
    is_tiny = 0 < abs(share) < 5e-4
    return f"{100 * share:.1g} %" if is_tiny else f"{100 * share:.1f} %"


def scale(factor: float, head_dim: int) -> str:
    """Return `0.0625 = 1/√256` for the usual scale; else the number as a multiple of 1/√head_dim, if possible."""
    if not isfinite(factor):
        return "no single number"
    if factor == 1 != head_dim:
        return "1 (not scaled)"
    times = factor * sqrt(head_dim)
    # The factor may be a product of two rounded square roots, as in torch's math path.
    if abs(times - 1) < 1e-6:
        return f"{factor:.6g} = 1/√{head_dim}"
    if not isfinite(times) or times <= 0:
        return f"{factor:.6g}"
    return f"{factor:.6g} = {times:.3g} × 1/√{head_dim}"


def span(bounds: tuple[int, int]) -> str:
    """Return `0–255` for Python's bounds (0, 256), with both ends included; `none` for an empty range."""
    start, stop = bounds
    if stop <= start:
        return "none"
    if stop == start + 1:
        return str(start)
    return f"{start}–{stop - 1}"


def spans(indices: Iterable[int]) -> str:
    """Return `0–3, 7` for 0, 1, 2, 3, 7."""
    runs: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return ", ".join(map(span, runs))


def message_of(error: BaseException) -> str:
    """Return the message of any error, even if its own `__str__` raises."""
    try:
        return str(error)
    except Exception as broken:  # user code may raise anything
        return f"(no message: {type(error).__name__}.__str__ raises {type(broken).__name__})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class name if the message is empty."""
    return next(iter(message_of(error).splitlines()), "") or type(error).__name__
