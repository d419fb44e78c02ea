"""The tokens of one side are at other positions where positions enter, e.g. in a rotation."""

from __future__ import annotations

from collections.abc import Sequence

from ..forms.order import in_turn
from ..pair import Difference, Pair, Why
from ..turned import Tokens, tokens_before

_MOST = 256
"""The most tokens that are put at every position."""
_FEWEST = 3
"""With fewer tokens, another position may be chance."""


def position(pair: Pair, difference: Difference) -> Why | None:
    """Return at which positions of the right the tokens have the numbers of the left.

    Each token of the right is put at every position, and the steps up to the stage run again.
    """
    tokens = tokens_before(pair.right, difference.stage)
    if tokens is None or not _FEWEST <= tokens.length <= _MOST:
        return None
    axes = [axis for axis, name in enumerate(difference.names) if name in ("query", "key")]
    if len(axes) != 1:
        return None
    axis = axes[0]
    count = tokens.length
    if difference.left.shape[axis] != count:
        return None
    middle = count // 2
    if _place_of(middle, tokens, axis, difference) is None:
        return None
    places = [_place_of(token, tokens, axis, difference) for token in range(count)]
    return _shifted(places, difference) or _moved(places, difference)


def _place_of(token: int, tokens: Tokens, axis: int, difference: Difference) -> int | None:
    """Return the position of the right at which a token has the numbers of the left, its own if that is one."""
    fits = tokens.positions_of(token, difference.left.select(axis, token), axis, difference.near)
    if token in fits:
        return token
    return fits[0] if fits else None


def _shifted(places: Sequence[int | None], difference: Difference) -> Why | None:
    """Return by how many positions all tokens are elsewhere; the last ones, or the first, may be past the end."""
    shifts = {place - token for token, place in enumerate(places) if place is not None}
    if len(shifts) != 1:
        return None
    shift = shifts.pop()
    last = len(places) - 1
    known = [place for token, place in enumerate(places) if 0 <= token + shift <= last]
    if not shift or len(known) < _FEWEST - 1 or None in known:
        return None
    sign = "+" if shift > 0 else "-"
    elsewhere = f"position p {sign} {abs(shift)}"
    where, stage = difference.where, difference.stage
    sentence = f"Position p {where.left} is {stage} of {elsewhere} {where.right}."
    return _as_why(sentence, difference, fact=str(shift))


def _as_why(sentence: str, difference: Difference, *, fact: str) -> Why:
    return Why("position", f"{sentence} Moved there, the tokens give the same {difference.stage}.", fact=fact)


def _moved(places: Sequence[int | None], difference: Difference) -> Why | None:
    """Return the position of each token, if all have one and some are elsewhere."""
    known = [place for place in places if place is not None]
    if len(known) < len(places) or known == [*range(len(places))]:
        return None
    where, stage = difference.where, difference.stage
    if not any(known):
        sentence = f"All tokens of {stage} {where.left} are as position 0 {where.right}."
        return _as_why(sentence, difference, fact="0")
    shown = in_turn(known)
    sentence = f"The tokens of {stage} {where.left} have the positions {shown} of those {where.right}."
    return _as_why(sentence, difference, fact=shown)
