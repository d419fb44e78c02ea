"""Find the weights of a file that are the transpose of a module's: GPT-2's Conv1D keeps `in out`, nn.Linear `out in`.

The shape shows it for a weight that is not square, together with its bias: a `[64, 192]` with a bias of 192 is the
transpose of a `[192, 64]`. A square weight fits both ways. It is transposed if all other weights of its block and of
its kind of module are. Example: `h.0.attn.c_proj` beside `h.0.attn.c_attn` and `h.0.mlp.c_fc`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..files.tensors import StoredTensor

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Verdict = Literal["as expected", "transposed", "ambiguous", "square"]
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
    owner: str
    """The path of the projection in the module."""
    kind: type
    """The class of the projection; nn.Linear for classes derived from it."""
    stored: Shape
    expected: Shape
    bias: Shape | None
    """The shape of the bias in the file; None without one."""
    expected_bias: Shape | None
    """The shape of the bias in the module; None without one."""

    @property
    def is_reversed(self) -> bool:
        """Whether its shape in the file is the reverse of another shape in the module."""
        return is_transposed(self.stored, self.expected)


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
    matrices = list(_matrices(module, expected, tensors, names))
    blocks: dict[tuple[str, type], list[_Matrix]] = {}
    for matrix in matrices:
        blocks.setdefault((_block(matrix, matrices), matrix.kind), []).append(matrix)
    transposed: set[str] = set()
    unknown: set[str] = set()
    kinds: set[type] = set()
    for (path, kind), block in blocks.items():
        around = _around(path, kind, matrices)
        of_transposed = _verdicts_of_transposed(around)
        if not of_transposed:
            continue
        for matrix in block:
            verdict = _verdict(matrix, around)
            if verdict in of_transposed:
                transposed.add(matrix.name)
                kinds.add(kind)
            elif verdict == "square":
                unknown.add(matrix.name)
    from torch import nn

    return Transposed(
        names=_in_order(transposed, tensors),
        unknown=_in_order(unknown, tensors),
        of_linear=kinds <= {nn.Linear},
    )


def _around(path: str, kind: type, matrices: list[_Matrix]) -> list[_Matrix]:
    """Return the matrices of a kind inside a path.

    Without numbers in the paths, the block of one matrix may contain the block of another.
    """
    around = []
    for matrix in matrices:
        if matrix.kind is kind and _is_inside(matrix, path):
            around.append(matrix)
    return around


def _verdicts_of_transposed(block: list[_Matrix]) -> tuple[Verdict, ...]:
    """Return the verdicts with which a matrix of a block is transposed; empty if none of the block surely is.

    Where no matrix is as expected, one that fits both ways is like the rest.
    """
    verdicts = {_verdict(matrix, block) for matrix in block}
    if "transposed" not in verdicts:
        return ()
    if "as expected" in verdicts:
        return ("transposed",)
    return "transposed", "square", "ambiguous"


def _in_order(names: Collection[str], tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    return tuple(name for name in tensors if name in names)


def _matrices(
    module: nn.Module, expected: Mapping[str, Shape], tensors: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> Iterator[_Matrix]:
    """Yield the weights of projections that the file and the module have."""
    in_file = {in_module: name for name, in_module in names.items()}
    for name, in_module in names.items():
        owner, _, last = in_module.rpartition(".")
        if last != "weight" or len(tensors[name].shape) != 2 or len(expected[in_module]) != 2:
            continue
        kind = _kind(module, owner)
        if kind is None:
            continue
        bias = f"{in_module.removesuffix('weight')}bias"
        yield _Matrix(
            name=name,
            owner=owner,
            kind=kind,
            stored=tensors[name].shape,
            expected=expected[in_module],
            bias=tensors[in_file[bias]].shape if bias in in_file else None,
            expected_bias=expected.get(bias),
        )


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


def _block(matrix: _Matrix, matrices: list[_Matrix]) -> str:
    """Return the path of the layer that a matrix belongs to: `h.0` for `h.0.attn.c_proj`.

    Without a number in the path, it is the nearest module with a matrix that is not square.
    """
    pieces = matrix.owner.split(".")
    for place, piece in enumerate(pieces[:-1]):
        if piece.isdigit():
            return ".".join(pieces[: place + 1])
    for length in range(len(pieces) - 1, 0, -1):
        path = ".".join(pieces[:length])
        if any(_is_evidence(near) and _is_inside(near, path) for near in matrices):
            return path
    return ""


def _is_inside(matrix: _Matrix, path: str) -> bool:
    return not path or matrix.owner.startswith(f"{path}.")


def _is_evidence(matrix: _Matrix) -> bool:
    return matrix.expected[0] != matrix.expected[1]


def _verdict(matrix: _Matrix, block: list[_Matrix]) -> Verdict | None:
    """Return how a matrix lies in the file; None if its sizes are other ones."""
    if matrix.stored == matrix.expected:
        return "as expected" if _is_evidence(matrix) else "square"
    if not matrix.is_reversed:
        return None
    if matrix.bias is not None and matrix.expected_bias is not None:
        # With other features the layer would have another bias.
        return "transposed" if matrix.bias == matrix.expected_bias else None
    # The names of two layers may be exchanged: w2 and w3 of a gated feed-forward.
    may_be_exchanged = any(near.is_reversed and near.stored == matrix.expected for near in block)
    return "ambiguous" if may_be_exchanged else "transposed"
