"""Name the dimensions of an attention's tensors, from evidence, as einops patterns.

The evidence is `dimensions`: which parts of which tensors are the same axis. The product of the scores says which axes
are query, key and head_dim; what the query's projection takes in says which are batch; the other axes of that product
are the heads. An axis that this leaves open is named when one name and one axis are left; otherwise it stays a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .attention import Found
from .dimensions import Atom, Dim, Dimensions, resolve
from .ops import Tensor
from .stages import CANONICAL_AXES

Group = tuple[str, Dim]
"""A name and the atoms that it stands for, in row-major order."""


_OWN_WIDTH = {"key": "kdim", "value": "vdim"}
"""What a width other than the query's is called."""


class AxisNames:
    """The names of the axes of one attention."""

    def __init__(self, found: Found, dimensions: Dimensions) -> None:
        self._dimensions = dimensions
        self._found = found
        product = dimensions.of(found.score_product.output)
        rows, columns = product[-2:]
        query, key = (columns, rows) if found.key_first else (rows, columns)
        left, right = found.score_product.inputs[-2:]
        key_operand = dimensions.of(left if found.key_first else right)
        source_keys = key_operand[-2] if found.key_first else key_operand[-1]
        self._head_dim = dimensions.of(left)[-1]
        self._batch, self._heads = self._batch_and_heads(product[0] if len(product) == 3 else ())
        shared: list[Group] = [("batch", self._batch), *self._head_groups(), ("head_dim", self._head_dim)]
        self._query_side: list[Group] = [*shared, ("query", query), ("key", key)]
        self._sides: dict[str, list[Group]] = {
            letter: [*shared, ("key", source_keys), ("key", key)] if letter != "q" else self._query_side
            for letter in "qkv"
        }
        self._stages = {stage: self._of_stage(stage) for stage in sorted(found.stages, key=_from_heads_outward)}

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return prod(atom.size for atom in self._heads)

    @property
    def num_kv_heads(self) -> int:
        """Number of heads that keys and values were projected to, before they were repeated."""
        return prod(atom.size for atom in self._kv_heads())

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return prod(atom.size for atom in self._head_dim)

    def of_stage(self, stage: str) -> str:
        """The axes of a stage, as this implementation lays it out."""
        return self._stages[stage]

    def of(self, tensor: Tensor) -> str:
        """The axes of any other tensor of this attention, such as the weights that it returns."""
        return self._write(tensor, self._query_side, ())

    def _of_stage(self, stage: str) -> str:
        """Name a stage, and remember what the naming taught about its side."""
        expected = _expected(stage)
        width = next((prod(a.size for a in resolve(atoms)) for name, atoms in self._query_side if name == "embed"), 0)
        if stage in _OWN_WIDTH and self._found.stages[stage].shape[-1] != width:
            expected[-1] = _OWN_WIDTH[stage]
        return self._write(self._found.stages[stage], self._sides[_side(stage)], expected)

    def _batch_and_heads(self, folded: Dim) -> tuple[Dim, Dim]:
        """Which of the axes that the product of scores runs over are batch, and which are heads."""
        stages = self._found.stages
        if "query" in stages:
            outside = {atom for dim in self._dimensions.of(stages["query"]) for atom in dim}
            batch = tuple(atom for atom in folded if atom in outside)
        else:
            dims = self._dimensions.of(stages["q_heads"])
            apart = len(dims) > 3 or (len(dims) == 3 and len(folded) > 1)
            batch = (
                tuple(atom for atom in folded if atom in (dims[0] if len(dims) > 3 else folded[:-1])) if apart else ()
            )
            if len(dims) == 3 and not apart:
                batch = folded
        # An axis of size one that is not batch has no name of its own: a single head leaves no trace in a shape.
        return batch, tuple(atom for atom in folded if atom not in batch and atom.size > 1)

    def _kv_heads(self) -> Dim:
        stages = self._found.stages
        if "k_proj" not in stages:
            return self._heads
        atoms = {atom for dim in self._dimensions.of(stages["k_proj"]) for atom in dim}
        return tuple(atom for atom in self._heads if atom in atoms)

    def _head_groups(self) -> list[Group]:
        shared = self._kv_heads()
        if not self._heads or shared == self._heads:
            return [("heads", self._heads)]
        group = tuple(atom for atom in self._heads if atom not in shared)
        return [("heads", self._heads), ("kv_heads", shared), ("group", group)]

    def _write(self, tensor: Tensor, groups: list[Group], expected: Sequence[str]) -> str:
        dims = [_name(dim, groups) for dim in self._dimensions.of(tensor)]
        self._name_the_last(dims, groups, ["batch"], only_ones=True)
        self._name_the_last(dims, groups, expected)
        return " ".join(_pattern(dim) for dim in dims)

    def _name_the_last(
        self, dims: list[list[str | Atom]], groups: list[Group], expected: Sequence[str], *, only_ones: bool = False
    ) -> None:
        """Where one expected name and one axis are left, they belong together; remember it for the other stages."""
        missing = [name for name in expected if all(name != token for dim in dims for token in dim)]
        left = [
            (place, run)
            for place, dim in enumerate(dims)
            for run in _runs(dim)
            if not only_ones or (len(dim) == 1 and _size(dim, run) == 1)
        ]
        if len(missing) != 1 or len(left) != 1:
            return
        place, (start, stop) = left[0]
        name = missing[0]
        if name == "head_dim" and _size(dims[place], left[0][1]) != self.head_dim:
            return
        atoms = tuple(token for token in dims[place][start:stop] if isinstance(token, Atom))
        dims[place][start:stop] = [name]
        if prod(atom.size for atom in atoms) > 1:
            groups.append((name, atoms))


def _side(stage: str) -> str:
    """Which of query, key and value a stage belongs to; what comes after the scores belongs to the query."""
    return stage[0] if stage in ("key", "value") or stage[1] == "_" else "q"


def _from_heads_outward(stage: str) -> int:
    """An order in which each stage is named after those that teach about it."""
    order = ("q_heads", "k_heads", "v_heads", "q_proj", "k_proj", "v_proj", "query", "key", "value")
    return order.index(stage) if stage in order else len(order)


def _expected(stage: str) -> list[str]:
    """The names that a stage's canonical axes have; batch and heads are there by evidence or not at all."""
    names = CANONICAL_AXES[stage].replace("(", " ").replace(")", " ").split()
    return [name for name in names if name not in ("heads", "kv_heads", "batch")]


def _size(dim: Sequence[str | Atom], run: tuple[int, int]) -> int:
    return prod(token.size for token in dim[run[0] : run[1]] if isinstance(token, Atom))


def _name(dim: Dim, groups: Sequence[Group]) -> list[str | Atom]:
    """A dimension as names, and atoms where there is none."""
    atoms = list(resolve(dim))
    tokens: list[str | Atom] = []
    while atoms:
        for name, group in groups:
            known = resolve(group)
            if known and tuple(atoms[: len(known)]) == known:
                tokens.append(name)
                del atoms[: len(known)]
                break
        else:
            tokens.append(atoms.pop(0))
    return tokens


def _runs(dim: list[str | Atom]) -> list[tuple[int, int]]:
    """Where atoms without a name stand side by side; those of size one tell nothing beside others."""
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(dim):
        if isinstance(token, str):
            continue
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def _pattern(dim: list[str | Atom]) -> str:
    """One dimension of an einops pattern. Neighbours without a name are one number."""
    words: list[str] = []
    number = 1
    for token in [*dim, ""]:
        if isinstance(token, Atom):
            number *= token.size
            continue
        if number > 1 or (not token and not words):
            words.append(str(number))
        number = 1
        if token:
            words.append(token)
    return words[0] if len(words) == 1 else f"({' '.join(words)})"
