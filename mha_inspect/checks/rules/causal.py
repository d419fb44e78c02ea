"""Check the order of attention: each position sees itself and its past, and no future position."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from ...compare.replay import LostError
from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.canonical import content_of
from ...reports.check import Finding
from ...text import listed
from ..causal_masks import against_causal
from ..evidence import Evidence
from ..factors import SIDES, Factor
from ..lab import NotPossibleError, UndeclaredError
from ..muted import is_muted
from ..registry import rule
from ..seen_keys import SeenKeys

_CAUSAL_CLASS = re.compile("^causal|(?<!Non)(?<!Not)(?<!Anti)Causal")
"""The name of a class that should be causal."""
_CAUSAL_FLAGS = ("is_causal", "causal")
"""Arguments and attributes that say whether attention is causal."""


@rule(
    after=("softmax", "masking"), confirm="--causal", by_position=True, of_outputs="no output depends on a later token"
)
def causal(evidence: Evidence) -> Iterator[Finding]:
    """Each position sees itself and its past, and no future position.

    `--causal` declares a causal mask. Each position must give weight to itself and to its whole past,
    and to no later position. A later token is also changed, and no output before it may change. A model
    that sees the next token copies it: the loss falls close to 0 in training, and generation fails.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --causal
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)
            scores = (q @ k.mT / 8**0.5).masked_fill(future, float("-inf"))
            weights = scores.softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)
    +        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    ```
    """
    if evidence.intent.causal is False:
        return
    if any(sight.queries < sight.keys for sight in evidence.sights):
        evidence.require_passed("heads")  # a token of the projections shows which key is a query's own
    finding = _of_undeclared(evidence) if evidence.intent.causal is None else _of_declared(evidence)
    if finding is not None:
        yield finding


def _of_undeclared(evidence: Evidence) -> Finding | None:
    """Return the first sign that a module of unknown order should be causal; raise `UndeclaredError` without one."""
    for suspicion in (_not_as_called, _almost_causal, _in_other_order, _beside_attention):
        finding = suspicion(evidence)
        if finding is not None:
            return finding
    raise UndeclaredError("--causal")


def _of_declared(evidence: Evidence) -> Finding | None:
    """Return the fault of the first mask that is not causal; else of an output that depends on the future."""
    is_shown = any(sight.shows_order for sight in evidence.sights)
    if not is_shown and (evidence.once or not evidence.follows or evidence.source.length < 2):
        raise NotPossibleError("the output and the scores do not show who sees whom")
    for sight in _sights_in_order(evidence):
        if sight.queries == 1 and sight.sees_future:  # or the slots of a ring, in which older tokens come later
            raise NotPossibleError("one query alone does not show whether the keys after its own are later tokens")
        finding = against_causal(sight, evidence.intent.window)
        if finding is None or _keeps_order_of_outputs(evidence, sight):
            continue
        return _of_exchanged_sides(evidence, sight) or finding
    return _by_outputs(evidence)


def _of_exchanged_sides(evidence: Evidence, sight: SeenKeys) -> Finding | None:
    """Return a finding if the keys are of the tokens that the output follows, and the queries of others."""
    names = set(evidence.source.names)
    queries = sight.origins_of_queries
    if not evidence.follows or not queries or queries & names or not sight.origins & names:
        return None
    of_queries, of_keys = listed(sorted(queries)), listed(sorted(sight.origins & names))
    return sight.finding(
        "causal",
        f"The queries are made of {of_queries} and the keys of {of_keys}: the output at a position is made of all of "
        f"{of_keys}.",
        f"The output has an entry for each token of {of_keys}.",
        f"Exchange them: the queries are of {of_keys}, the keys and values of {of_queries}.",
    )


def _sights_in_order(evidence: Evidence) -> Sequence[SeenKeys]:
    """Return the attentions that a declared order is about: those over the sequence that the output follows.

    An encoder sees its whole source, and so does the attention of a decoder to it. If the output follows none of the
    sequences, e.g. the pooled ones of two towers, the order is declared of one: of the one that is causal throughout.
    All attentions if none is, or no attention is over the sequence that the output follows.
    """
    if len(evidence.sources) < 2:
        return evidence.sights
    if not evidence.follows:
        return _causal_sequence(evidence) or evidence.sights
    names = evidence.source.names
    return [sight for sight in evidence.sights if sight.origins.intersection(names)] or evidence.sights


def _causal_sequence(evidence: Evidence) -> Sequence[SeenKeys]:
    """Return the attentions over the first of several sequences that are all causal; empty without one."""
    for source in evidence.sources:
        sights = [sight for sight in evidence.sights if sight.origins.intersection(source.names)]
        if sights and all(against_causal(sight, evidence.intent.window) is None for sight in sights):
            return sights
    return ()


def _keeps_order_of_outputs(evidence: Evidence, sight: SeenKeys) -> bool:
    """Return whether the outputs are in order although an attention sees later tokens.

    Learned tokens before the sequence, and an image before a text, may see each other. What is seen too early may also
    be multiplied by 0 afterwards; a gate that is 0 before training proves nothing.
    """
    return sight.sees_future and _is_causal_by_outputs(evidence) and not is_muted(evidence)


# -- outputs that depend on the future --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EarlyChange:
    """A token that changes outputs before it."""

    token: int
    positions: list[int]
    """The positions that change."""
    size: float
    """How much the last of them changes."""

    @property
    def proof(self) -> str:
        """The change in words."""
        return (
            f"Changing token {self.token} changes the output at position {self.positions[-1]} by {self.size:.3g}, and "
            f"at {len(self.positions) - 1} more before it."
        )


def _by_outputs(evidence: Evidence) -> Finding | None:
    """Return a finding if a future token changes an output although its weight is zero."""
    change = _first_early_change(evidence) if evidence.follows else None
    if change is None:
        return None
    evidence.require_passed("heads")
    ordered = _other_order(evidence)
    if ordered is not None:
        return ordered
    if not any(sight.is_causal for sight in evidence.sights):
        return _from_the_future(change.proof)
    moved = _moved_tokens(evidence)
    if moved is not None:
        return moved
    if _are_in_order(evidence):
        return _beside_weights(change.proof)
    return _beside_weights_or_in_other_order(change.proof)


def _first_early_change(evidence: Evidence) -> _EarlyChange | None:
    """Return the first token that changes outputs of real tokens before it."""
    for token, changed in evidence.reach.items():
        is_changed = changed[0, :token] > 0
        if evidence.padded is not None:
            is_changed &= ~evidence.padded[0, :token]  # padding may see anything
        is_changed &= ~_sees_no_key(evidence)[:token].to(is_changed.device)
        positions = is_changed.nonzero().flatten().tolist()
        if positions:
            return _EarlyChange(token, positions, float(changed[0, positions[-1]]))
    return None


def _sees_no_key(evidence: Evidence) -> Tensor:
    """Return `position`: True where every key is masked out for a query of the first batch item.

    A mask of a finite number then gives all keys the same weight: the output has no meaning.
    """
    length = evidence.source.length
    blind = torch.zeros(length, dtype=torch.bool)
    for sight in evidence.sights:
        if sight.queries == length:
            blind |= ~sight.seen[0].any(-1)
    return blind


def _from_the_future(proof: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token.",
        proof,
        fix="Check the mask, the order of the keys, and norms, convolutions and means over the positions.",
    )


def _beside_weights(proof: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token that has no attention weight: another operation mixes positions.",
        proof,
        fix="Check norms, convolutions and means over the positions.",
    )


def _beside_weights_or_in_other_order(proof: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token that has no attention weight.",
        proof,
        fix="Check the order of the keys, and norms, convolutions and means over the positions.",
    )


# -- queries, keys and values in different orders ---------------------------------------------------------------------


def _other_order(evidence: Evidence) -> Finding | None:
    """Return a finding if queries, keys and values of a causal attention are the same tokens in different orders."""
    for sight, rows in _rows_of_last_tokens(evidence):
        if rows is None or _is_one_row(rows):
            continue
        places = listed([f"{side} {row}" for side, row in rows.items()])
        return sight.finding(
            "causal",
            "Queries, keys and values are in different orders: the causal mask does not hide the future tokens.",
            f"The last token is {places}.",
            "Put queries, keys and values in the order of the tokens before the mask.",
        )
    return None


def _are_in_order(evidence: Evidence) -> bool:
    """Return whether queries, keys and values are known to be in one order in every causal attention."""
    return all(rows is not None and _is_one_row(rows) for _, rows in _rows_of_last_tokens(evidence))


def _moved_tokens(evidence: Evidence) -> Finding | None:
    """Return a finding if the first causal attention has the last token of the input in another row than the last."""
    length = evidence.source.length
    for sight in evidence.sights:
        if not sight.is_causal or sight.queries != length:
            continue
        row = _row_of_last_token(evidence, sight)
        if row is None or row == length - 1:
            return None
        return sight.finding(
            "causal",
            "The causal mask is applied to tokens in another order, e.g. rolled or flipped ones.",
            f"The last token is query {row} of {length}, so what the mask takes for later tokens are others.",
            "Put the tokens in their order before the mask, and move what is put back after it.",
        )
    return None


def _row_of_last_token(evidence: Evidence, sight: SeenKeys) -> int | None:
    """Return the only query that changes with the last token of item 0; None if several do, or it is unknown."""
    other = evidence.with_arguments(evidence.source.others(evidence.source.length - 1))
    contents = []
    for run in (evidence.run, other.run):
        for attention, names in run.attentions[:1]:
            contents.append(content_of(run, attention, names, "q_heads"))
    if evidence.run.attentions[0][0] is not sight.attention or len(contents) < 2:
        return None
    before, after = contents
    if before is None or after is None or before.shape != after.shape:
        return None
    rows: list[int] = (before != after)[0].any(-1).any(0).nonzero().flatten().tolist()
    return rows[0] if len(rows) == 1 else None


def _is_one_row(rows: dict[str, int]) -> bool:
    """Return whether the query, the key and the value of a token are in rows of one number."""
    return len(set(rows.values())) == 1


def _rows_of_last_tokens(evidence: Evidence) -> Iterator[tuple[SeenKeys, dict[str, int] | None]]:
    """Yield for each causal attention which query, key and value its last token is; None if it is unknown."""
    sights = {id(sight.attention): sight for sight in evidence.sights if sight.is_causal}
    for attention, names, _ in evidence.kinds:
        sight = sights.get(id(attention))
        if sight is not None:
            yield sight, _rows_of_last_token(evidence, attention, names)


def _rows_of_last_token(evidence: Evidence, attention: Attention, names: AxisNames) -> dict[str, int] | None:
    """Return which query, key and value the last token is in self-attention; None if it is several, or unknown."""
    queries, keys = names.lengths
    if queries != keys or len({attention.stages.get(side) for side in SIDES}) != 1:
        return None
    rows: dict[str, int] = {}
    for side in SIDES:
        try:
            factor = Factor(evidence, attention, names, side, from_first=True)
            last = factor.token(prod(factor.tokens) - 1)
            changed = factor.rows_of(last)
        except LostError:
            return None
        # With a single key head, the queries of all heads are rows of one product.
        if len(changed) != 1 or factor.target.shape[factor.rows] != keys:
            return None
        rows[side] = changed.pop()
    return rows


# -- signs of a module that should be causal --------------------------------------------------------------------------


def _not_as_called(evidence: Evidence) -> Finding | None:
    """Return the first attention that is not causal although its class, argument or flag says so."""
    parts = dict(evidence.subject.module.named_modules(remove_duplicate=False))
    causal_classes = {type(parts[sight.module]) for sight in evidence.sights if sight.is_causal}
    by_argument = [f"{name} is True" for name in _CAUSAL_FLAGS if evidence.values.get(name) is True]
    for sight in evidence.sights:
        part = parts[sight.module]
        # Another module of the class is causal: there it is meant to be.
        is_off = any(vars(part).get(name) is False for name in _CAUSAL_FLAGS)
        is_named = _is_called_causal(part) and type(part) not in causal_classes and not is_off
        by_name = [type(part).__name__] if is_named else []
        reasons = [*by_name, *by_argument, *_flags_of(part)]
        if not reasons:
            continue
        finding = against_causal(sight, evidence.intent.window or sight.width)
        if finding is None or _is_causal_by_outputs(evidence):
            continue
        # An attribute may be for another kernel, and a class may be called BlockCausal.
        is_sure = bool(by_argument) or (is_named and _lacks_its_mask(sight))
        proof = f"{finding.evidence} A causal mask is expected: {reasons[0]}."
        return replace(finding, evidence=proof, sure=finding.sure and is_sure)
    return None


def _lacks_its_mask(sight: SeenKeys) -> bool:
    """Return whether all heads see all keys, or their mask is a causal one but for one mistake."""
    return not sight.heads_differ and (sight.open or bool(sight.almost_causal))


def _is_called_causal(part: nn.Module) -> bool:
    return _CAUSAL_CLASS.search(type(part).__name__) is not None


def _flags_of(part: nn.Module) -> list[str]:
    """Return the attributes of a module that say it is causal: `Attention.causal is True`."""
    called = type(part).__name__
    return [f"{called}.{name} is True" for name in reversed(_CAUSAL_FLAGS) if vars(part).get(name) is True]


def _is_causal_by_outputs(evidence: Evidence) -> bool:
    """Return whether tokens were changed, and outputs after them changed and none before them did.

    So it is where keys are made of earlier tokens.
    """
    if not evidence.follows or not evidence.reach:
        return False
    changes = [(changed[0] > 0).nonzero().flatten() - token for token, changed in evidence.reach.items()]
    distances = torch.cat(changes)
    return bool((distances > 0).any()) and not bool((distances < 0).any())


def _almost_causal(evidence: Evidence) -> Finding | None:
    """Return the first attention that is causal but for its mask: off by a diagonal, turned, or on another axis."""
    for sight in _with_own_pattern(evidence.sights):
        if not sight.almost_causal and not sight.over_heads:
            continue
        finding = against_causal(sight, sight.width)
        if finding is None:
            continue
        if sight.over_heads or (sight.is_top_left and sight.queries > 1):
            return finding
        window = f"like a causal window of {sight.width}" if sight.width and sight.width > 1 else "causal"
        return replace(finding, sentence=f"The mask looks {window}, {sight.almost_causal}.", sure=False)
    return None


def _with_own_pattern(sights: Iterable[SeenKeys]) -> list[SeenKeys]:
    """Return the first of all that have one pattern in common, in order: attentions of equal code do."""
    first: dict[int, SeenKeys] = {}
    for sight in sights:
        first.setdefault(id(sight.by_head), sight)
    return list(first.values())


def _in_other_order(evidence: Evidence) -> Finding | None:
    """Return an attention that would be causal if its queries and keys were in one order."""
    finding = _other_order(evidence)
    return None if finding is None else replace(finding, sure=False)


def _beside_attention(evidence: Evidence) -> Finding | None:
    """Return an output that depends on a future token although every attention is causal."""
    if not evidence.sights or len(evidence.sights) < len(evidence.run.attentions):
        return None
    if not all(sight.is_causal for sight in evidence.sights):
        return None
    with suppress(NotPossibleError):
        finding = _by_outputs(evidence)
        return None if finding is None else replace(finding, sure=False)
    return None
