"""What of the operands of a call meets, and how well: a letter for each size that has to be equal, as in an einsum.

q @ k.mT        "...ij" and "...jk": the features of q meet the rows of k.mT, and what stands before meets too
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from .facts import BROADCASTS, LOGICAL, Dims, Facts, Operand
from .reached import ATTENTION, LAYERS, PRODUCTS, SDPA

_TERMS: dict[str, dict[str, str]] = {
    "linear": {"input": "...i", "weight": "oi"},
    SDPA: {"query": "...qd", "key": "...kd", "value": "...ke", "attn_mask": "...qk"},
    ATTENTION: {"query": "bqe", "key": "bkf", "value": "bkg", "key_padding_mask": "bk"},
    "Transformer": {"src": "bse", "tgt": "bte"},
    "layer_norm": {"input": "...i", "weight": "i"},
    "rms_norm": {"input": "...i", "weight": "i"},
}
"""The letters of each argument of a call."""
_SAME = {"kv_heads": "heads", "group": "heads"}
"""Names that may meet."""
_EITHER = ({"sequence", "query"}, {"sequence", "key"})
"""A sequence whose side is unknown may meet either."""
Place = tuple[Operand, int]
"""An operand and one of its dimensions."""


@dataclass(frozen=True, eq=False)
class Clash:
    """Two dimensions that meet and differ in size: of queries, weights or an input first."""

    left: Operand
    left_place: int
    right: Operand
    right_place: int
    letter: str

    @property
    def sizes(self) -> tuple[int, int]:
        """The size of the left dimension and that of the right one."""
        return self.left.shape[self.left_place], self.right.shape[self.right_place]

    @property
    def name(self) -> str:
        """What both dimensions are: `batch`, `heads`, `key`, `head_dim`; empty if that is unknown or differs."""
        left = _names(self.left.dims[self.left_place])
        right = _names(self.right.dims[self.right_place])
        if left | right in _EITHER:
            return "key"
        return next(iter(left)) if left == right and len(left) == 1 else ""

    @property
    def text(self) -> str:
        """`q has batch 2 and k has batch 5`."""
        left = f"{self.left.name} has {self.left.axis(self.left_place)}"
        return f"{left} and {self.right.name} has {self.right.axis(self.right_place)}"


def called(name: str) -> str:
    """Return the name under which an axis may meet another: `heads` for `kv_heads` and `heads_1`."""
    name = name.rstrip("_0123456789")
    return _SAME.get(name, name)


def meetings(facts: Facts, ranks: Mapping[Operand, int] | None = None) -> dict[str, list[Place]]:
    """Return the dimensions that meet, by letter; `ranks` are those of operands that were edited."""
    places: dict[str, list[Place]] = defaultdict(list)
    for operand, term in _terms(facts):
        rank = len(operand.shape) if ranks is None else ranks[operand]
        for place, letter in enumerate(_letters(term, rank)):
            places[letter].append((operand, place))
    return places


def _letters(term: str, rank: int) -> list[str]:
    """Return the letter of each dimension; those of `...` are counted from its end. Empty if the term is longer."""
    rest = term.removeprefix("...")
    before = rank - len(rest)
    if before < 0 or (before and rest == term):
        return []
    return [*(f"-{place}" for place in range(before, 0, -1)), *rest]


def _terms(facts: Facts) -> Iterator[tuple[Operand, str]]:
    """Yield each operand with its letters."""
    base = facts.base
    if base == "einsum":
        equation = facts.call.args[0] if facts.call.args else ""
        terms = equation.partition("->")[0].replace(" ", "").split(",") if isinstance(equation, str) else []
        if len(terms) == len(facts.operands):
            yield from zip(facts.operands, terms, strict=True)
    elif facts.pair is not None and base in PRODUCTS:
        yield from zip(facts.pair, ("...ij", "...jk"), strict=True)
    elif base in BROADCASTS or base in LOGICAL:
        for operand in facts.operands:
            yield operand, "..."
    else:
        yield from _of_arguments(facts, _TERMS.get(base, {}))


def _of_arguments(facts: Facts, terms: Mapping[str, str]) -> Iterator[tuple[Operand, str]]:
    for operand in facts.operands:
        term = terms.get(operand.role)
        if term is None:
            continue
        if len(term) == 3 and not facts.call.batch_first:
            term = f"{term[1]}{term[0]}{term[2]}"
        yield operand, term


def clashes(facts: Facts) -> Iterator[Clash]:
    """Yield the dimensions that meet and differ in size, where neither is one; those that a product sums over first."""
    found = meetings(facts)
    for letter in sorted(found, key=lambda letter: letter.startswith("-")):
        for (left, left_place), (right, right_place) in combinations(found[letter], 2):
            sizes = {left.shape[left_place], right.shape[right_place]}
            if len(sizes) < 2 or (1 in sizes and letter.startswith("-")):
                continue
            yield Clash(left, left_place, right, right_place, letter)


def conflicts(facts: Facts, edited: Mapping[Operand, Dims]) -> int:
    """Return how many axes meet an axis of another name, with the names of some operands edited."""
    if facts.base in LAYERS:
        return 0  # one tensor may be queries and keys
    dims = {operand: edited.get(operand, operand.dims) for operand in facts.operands}
    ranks = {operand: len(names) for operand, names in dims.items()}
    count = 0
    for letter, places in meetings(facts, ranks).items():
        for (left, left_place), (right, right_place) in combinations(places, 2):
            count += _differ(dims[left][left_place], dims[right][right_place])
        if letter in "ik" and facts.pair is not None and facts.factors:
            # Rows and columns of scores, and of what is weighed, are neither heads nor a batch.
            count += sum(_names(dims[operand][place]) in ({"heads"}, {"batch"}) for operand, place in places)
    return count


def _differ(left: list[str], right: list[str]) -> bool:
    """Return whether two dimensions have names, and none in common."""
    first, second = _names(left), _names(right)
    if first | second in _EITHER:
        return False
    return bool(first) and bool(second) and first.isdisjoint(second)


def _names(dim: list[str]) -> set[str]:
    """Return the names of a dimension, under which it may meet others; none of its sizes."""
    return {called(name) for name in dim if not name.isdigit()}
