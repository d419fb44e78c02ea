"""Name the dimensions of an attention's tensors, from evidence, as einops patterns.

The evidence is `dimensions`: which parts of which tensors are the same axis. The product of the scores says which axes are
query, key and head_dim; what the query's projection takes in says which are batch; the other axes of that product are the
heads. An axis that this leaves open is named when one name and one axis are left; otherwise it stays a number.
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

_KEY_SIDE = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")


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
        self._source_keys = key_operand[-2] if found.key_first else key_operand[-1]
        self._head_dim = dimensions.of(left)[-1]
        folded = product[0] if len(product) == 3 else ()
        self._batch, self._heads = self._batch_and_heads(folded)
        self._shared: list[Group] = [("batch", self._batch), *self._head_groups(), ("head_dim", self._head_dim)]
        self._query, self._key = ("query", query), ("key", key)

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return prod(atom.size for atom in self._heads)

    @property
    def num_kv_heads(self) -> int:
        """Number of heads that keys and values were projected to, before they were repeated."""
        return prod(atom.size for atom in self._kv_heads()) if "k_proj" in self._found.stages else self.num_heads

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return prod(atom.size for atom in self._head_dim)

    def of_stage(self, stage: str) -> str:
        """The axes of a stage, as this implementation lays it out."""
        tensor = self._found.stages[stage]
        if stage in _KEY_SIDE:
            groups = [*self._shared, ("key", self._source_keys), self._key]
        else:
            groups = [*self._shared, self._query, self._key]
        return self._write(tensor, groups, _expected(stage))

    def of(self, tensor: Tensor) -> str:
        """The axes of any other tensor of this attention, such as the weights that it returns."""
        return self._write(tensor, [*self._shared, self._query, self._key], ())

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
        return batch, tuple(atom for atom in folded if atom not in batch)

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

    def _write(self, tensor: Tensor, groups: Sequence[Group], expected: Sequence[str]) -> str:
        dims = [_name(dim, groups) for dim in self._dimensions.of(tensor)]
        missing = [name for name in expected if all(name != token for dim in dims for token in dim)]
        open_runs = [(place, run) for place, dim in enumerate(dims) for run in _runs(dim)]
        if len(missing) == len(open_runs) == 1 and self._fits(missing[0], open_runs[0][1], dims[open_runs[0][0]]):
            place, (start, stop) = open_runs[0]
            dims[place][start:stop] = [missing[0]]
        return " ".join(_pattern(dim) for dim in dims)

    def _fits(self, name: str, run: tuple[int, int], dim: list[str | Atom]) -> bool:
        size = prod(token.size for token in dim[run[0] : run[1]] if isinstance(token, Atom))
        return name != "head_dim" or size == self.head_dim


def _expected(stage: str) -> list[str]:
    """The names that a stage's canonical axes have; heads there are by evidence or not at all."""
    names = CANONICAL_AXES[stage].replace("(", " ").replace(")", " ").split()
    return [name for name in names if name not in ("heads", "kv_heads", "batch")]


def _name(dim: Dim, groups: Sequence[Group]) -> list[str | Atom]:
    """A dimension as names, and atoms where there is none."""
    atoms, tokens = list(resolve(dim)), []
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
