"""Find the weights of a file that are the transpose of a module's: GPT-2's Conv1D keeps `in out`, nn.Linear `out in`.

The shape shows it for a weight that is not square, together with its bias: a `[64, 192]` with a bias of 192 is the
transpose of a `[192, 64]`. A square weight fits both ways. It is transposed if all other weights of its block and of
its kind of module are. Example: `h.0.attn.c_proj` beside `h.0.attn.c_attn` and `h.0.mlp.c_fc`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..files.tensors import StoredTensor

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Verdict = Literal["as expected", "transposed", "ambiguous", "square", "other"]
"""How a matrix lies in a file. Ambiguous: its shape is transposed, and another layer's matrix would fit there."""


@dataclass(frozen=True)
class Transposed:
    """The weights of a file that are transposed, and the square ones whose orientation is unknown."""

    names: tuple[str, ...] = ()
    """Names in the file."""
    unknown: tuple[str, ...] = ()
    """Square weights beside weights that are transposed and weights that are not."""
    of_linear: bool = False
    """Whether all of them belong to nn.Linear, which keeps `out in`."""


@dataclass(frozen=True)
class _Matrix:
    """The weight of a projection, in a file and in a module."""

    name: str
    block: str
    """The path of its layer: `h.0` of `h.0.attn.c_proj`; empty without a number."""
    kind: type
    """The class of the projection; nn.Linear for classes derived from it."""
    stored: Shape
    expected: Shape
    bias_fits: bool | None
    """Whether the bias has its shape in the module; None without one on either side."""

    def verdict(self, block: Sequence[_Matrix]) -> Verdict:
        """Return how it lies in the file, beside the matrices of its block."""
        if self.stored == self.expected:
            return "square" if self.expected[0] == self.expected[1] else "as expected"
        if not is_transposed(self.stored, self.expected):
            return "other"
        if self.bias_fits is not None:
            # With other features the layer would have another bias.
            return "transposed" if self.bias_fits else "other"
        # The names of two layers may be exchanged: w2 and w3 of a gated feed-forward.
        for near in block:
            if is_transposed(near.stored, near.expected) and near.stored == self.expected:
                return "ambiguous"
        return "transposed"


def is_transposed(left: Shape, right: Shape) -> bool:
    """Return whether two different shapes of matrices are each other's transpose."""
    return len(left) == 2 and left != right and left == right[::-1]


def find_transposed(
    module: nn.Module,
    expected: Mapping[str, Shape],
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, str],
) -> Transposed:
    """Return the weights that the file has transposed.

    `expected` has the shapes in the module. `names` maps names in the file to names in the module.
    """
    from torch import nn

    blocks: dict[tuple[str, type], list[_Matrix]] = defaultdict(list)
    for matrix in _matrices(module, expected, tensors, names):
        blocks[matrix.block, matrix.kind].append(matrix)
    transposed: list[_Matrix] = []
    unknown: list[_Matrix] = []
    for block in blocks.values():
        verdicts = {matrix.name: matrix.verdict(block) for matrix in block}
        if "transposed" not in verdicts.values():
            continue
        # Where no matrix is as expected, one that fits both ways is like the rest.
        is_mixed = "as expected" in verdicts.values()
        of_transposed = ("transposed",) if is_mixed else ("transposed", "square", "ambiguous")
        transposed += [matrix for matrix in block if verdicts[matrix.name] in of_transposed]
        unknown += [matrix for matrix in block if is_mixed and verdicts[matrix.name] == "square"]
    return Transposed(
        names=_in_order(transposed, tensors),
        unknown=_in_order(unknown, tensors),
        of_linear={matrix.kind for matrix in transposed} <= {nn.Linear},
    )


def _in_order(matrices: Sequence[_Matrix], tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    names = {matrix.name for matrix in matrices}
    return tuple(name for name in tensors if name in names)


def _matrices(
    module: nn.Module, expected: Mapping[str, Shape], tensors: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> Iterator[_Matrix]:
    """Yield the weights of projections that the file and the module have."""
    in_file = {in_module: name for name, in_module in names.items()}
    for name, in_module in names.items():
        owner, _, last = in_module.rpartition(".")
        stored = tensors[name].shape
        shape = expected[in_module]
        if last != "weight" or len(stored) != 2 or len(shape) != 2:
            continue
        kind = _kind(module, owner)
        if kind is None:
            continue
        bias = f"{owner}.bias".removeprefix(".")
        bias_fits = None
        if bias in in_file and bias in expected:
            bias_fits = tensors[in_file[bias]].shape == expected[bias]
        yield _Matrix(name, block_of(owner), kind, stored, shape, bias_fits)


def _kind(module: nn.Module, path: str) -> type | None:
    """Return the class of a projection; None for any other module. Rows of an embedding are no features."""
    from torch import nn

    try:
        projection = module.get_submodule(path)
    except AttributeError:  # a name that the state dict alone has
        return None
    if isinstance(projection, nn.Embedding) or [*projection.children()]:
        return None
    return nn.Linear if isinstance(projection, nn.Linear) else type(projection)


def block_of(owner: str) -> str:
    """Return the path of the layer of a projection: `h.0` for `h.0.attn.c_proj`; empty without a number."""
    pieces = owner.split(".")
    for place, piece in enumerate(pieces[:-1]):
        if piece.isdigit():
            return ".".join(pieces[: place + 1])
    return ""
