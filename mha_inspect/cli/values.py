"""What users type, turned into values, or into a message that names the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer

from ..errors import SpecError
from ..text import did_you_mean, shown

LARGEST_SIZE = 2**40
"""Far above any tensor that fits anywhere, and small enough to reckon with in no time."""


def whole_number(typed: object) -> int:
    """A whole number.

    Raises `typer.BadParameter` otherwise.
    """
    try:
        return int(str(typed))
    except ValueError:
        raise typer.BadParameter(f"{shown(typed)} is not a whole number: write digits only, as in 512.") from None


def size_number(typed: object) -> int:
    """A whole number that can be the size of something.

    Raises `typer.BadParameter` otherwise.
    """
    number = whole_number(typed)
    if number > LARGEST_SIZE:
        raise typer.BadParameter(f"{shown(typed)} is more than a size can be: sizes go up to 2**40. Try 512.")
    return number


def real_number(typed: object) -> float:
    """A number.

    Raises `typer.BadParameter` otherwise.
    """
    try:
        return float(str(typed))
    except ValueError:
        raise typer.BadParameter(f"{shown(typed)} is not a number: write it as in 0.1.") from None


def one_of(known: Sequence[str]) -> Callable[[object], str]:
    """A parser that takes one of these words and no other.

    The parser raises `typer.BadParameter` with the nearest word.
    """

    def word(typed: object) -> str:
        if str(typed) in known:
            return str(typed)
        raise typer.BadParameter(f"{shown(typed)} is not known: {', '.join(known)}.{did_you_mean(str(typed), known)}")

    return word


def completing(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A completer that offers these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def counts(name: str, typed: str) -> tuple[int, ...]:
    """A comma list of whole numbers: `1,2,4`. An empty text is an empty list.

    Raises `SpecError` that speaks of `name` when a part of it is not a whole number.
    """
    if not typed.strip():
        return ()
    try:
        numbers = tuple(int(part) for part in typed.split(","))
        if max(numbers) <= LARGEST_SIZE:
            return numbers
        raise SpecError(f"{name} {shown(typed)} is more than a size can be: sizes go up to 2**40. Try 8.")
    except ValueError:
        raise SpecError(
            f"{name} {shown(typed)} is not a whole number or a list of them: "
            f"write digits and commas only, as in --{name.replace('_', '-')} 1,2,4."
        ) from None
