"""The keys and values of the call are not those of its tokens: some are missing, in another order, or exchanged."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...record.arguments import tensors_in
from ...text import plural
from ..pair import Difference, Why
from .operands import tried
from .pair import NO_TOKEN, CallPair, ranges, rows_of, shape_without

_APPEND_FIX = "Join the new keys and values to the cached ones, in order: torch.cat((past, new), dim=2)."
_OWN_FIX = "Join the new keys and values to the cached ones before the scores: torch.cat((past, new), dim=2)."


def future(pair: CallPair) -> Why | None:
    """Return whether the one call attends to tokens after the call's."""
    later = pair.seen.left[..., pair.stop :].any(0).nonzero().tolist()
    if not later:
        return None
    query, key = later[0]
    return Why(
        "call",
        f"In one call, position {pair.start + query} attends to the future position {pair.stop + key}, which is "
        "missing in this call.",
    )


def other_sequence(pair: CallPair) -> Why | None:
    """Return whether keys or values differ that are not of the call's tokens."""
    for side, both in (("keys", pair.keys), ("values", pair.values)):
        if both is not None and not both.is_none:
            return Why("call", f"The {side} of the other sequence differ from those of one call.")
    return None


def slots(pair: CallPair) -> Why | None:
    """Return whether the value of a token is in another row than its key, or keys and values are exchanged."""
    keys, values = pair.keys, pair.values
    if keys is None or values is None:
        return None
    if _are_exchanged(pair, keys, values):
        return Why(
            "call",
            "The cached values are the keys of the earlier calls.",
            fix="Return keys and values in the order in which the next call reads them.",
        )
    if not _are_unlike(keys.left) or not _are_unlike(values.left):
        return None
    of_keys = rows_of(keys, pair.expected_tokens(keys))
    have_tokens = (of_keys >= 0) & (pair.tokens >= 0)
    apart = (have_tokens & (of_keys != pair.tokens)).nonzero().flatten().tolist()
    if not apart:
        return None
    row = apart[0]
    return Why(
        "call",
        f"Key {row} of this call is that of token {int(of_keys[row])}, and value {row} that of token "
        f"{int(pair.tokens[row])}.",
        fix="Join keys and values in the same order.",
    )


def _are_unlike(heads: Tensor) -> bool:
    """Return whether no two tokens of `batch heads key feature` have the same numbers."""
    rows = heads.movedim(2, 0).flatten(1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def _are_exchanged(pair: CallPair, keys: Difference, values: Difference) -> bool:
    """Return whether cached values are the keys of their tokens, and none of them is its own value."""
    if keys.left.shape != values.left.shape or keys.right.shape != values.right.shape:
        return False
    expected = pair.expected_tokens(keys)
    is_cached = (expected >= 0) & (expected < pair.start)
    crossed = replace(keys, right=values.right)
    has_key = rows_of(crossed, expected) == expected
    has_value = pair.tokens == expected
    some_have_keys = bool(has_key[is_cached].any())
    return some_have_keys and not bool(has_value[is_cached].any())


def missing(pair: CallPair) -> Why | None:
    """Return whether a token that the one call attends to has no value in the call, or another value."""
    absent = _missing_tokens(pair)
    if not absent:
        return None
    rows = len(pair.tokens)
    new = [token for token in absent if token >= pair.start]
    if rows <= pair.length and not new:
        return Why(
            "call",
            f"This call has {plural(rows, 'key')} for {plural(pair.length, 'token')}: the keys of the "
            f"{plural(pair.start, 'earlier token')} are missing.",
            fix=_APPEND_FIX,
        )
    if len(new) == len(absent) and _reads_tokens_alone(pair):
        return Why("call", _without_own(pair, new), fix=_OWN_FIX)
    if new:
        differs = f"The value of the new position {new[0]} differs from that of one call."
        return Why("call", f"{differs}{tried(pair, 'v_heads')}")
    if bool((pair.tokens >= 0).all()):
        return _lost_position(pair, absent[0])
    differ = f"The cached values of positions {ranges(absent)} differ from those of one call."
    return Why("call", f"{differ}{tried(pair, 'v_heads')}")


def _missing_tokens(pair: CallPair) -> list[int]:
    """Return the tokens that the one call attends to, and whose values are in no row of the call."""
    attended = pair.seen.left.any(0).any(0)[: pair.stop].nonzero().flatten().tolist()
    kept = set(pair.tokens.tolist())
    return [token for token in attended if token not in kept]


def _lost_position(pair: CallPair, token: int) -> Why:
    """Return that the cache has dropped a token which a query of the one call attends to."""
    query = pair.start + int(pair.seen.left.any(0)[:, token].nonzero()[0])
    return Why(
        "call",
        f"The cache has lost position {token}: this call has {plural(len(pair.tokens), 'key')}, of positions "
        f"{ranges(pair.tokens)}, and in one call position {query} attends to position {token}.",
    )


def _reads_tokens_alone(pair: CallPair) -> bool:
    """Return whether the keys and the values of this call are rows of tokens, each its own."""
    if pair.keys is None or not len(pair.tokens):
        return False
    has_repeated = len(set(pair.tokens.tolist())) < len(pair.tokens)
    if has_repeated or bool(pair.tokens.lt(0).any()):
        return False
    return torch.equal(rows_of(pair.keys, pair.tokens), pair.tokens)


def _without_own(pair: CallPair, new: list[int]) -> str:
    """Return that new tokens have no key in this call, and whether their keys are in the cache that it returns."""
    new_keys = f"the key of position {new[0]} itself is"
    if len(new) > 1:
        new_keys = f"the keys of positions {ranges(new)} themselves are"
    where = "missing"
    for _, returned in tensors_in(pair.continued.call.returned):
        if _has_values_of(pair, returned, new):
            where = "only in the cache that the call returns"
    keys = plural(len(pair.tokens), "key")
    return f"Position {new[0]} attends to {keys}, of positions {ranges(pair.tokens)}; {new_keys} {where}."


def _has_values_of(pair: CallPair, returned: Tensor, new: list[int]) -> bool:
    """Return whether a returned tensor, `batch kv_heads row feature`, has the values of these tokens as rows."""
    if pair.values is None or returned.dim() != 4:
        return False
    whole = pair.values.left
    if shape_without(2, returned) != shape_without(2, whole):
        return False
    any_token = torch.full((returned.shape[2],), NO_TOKEN)
    tokens = rows_of(replace(pair.values, right=returned.to(whole)), any_token)
    return set(new) <= set(tokens.tolist())
