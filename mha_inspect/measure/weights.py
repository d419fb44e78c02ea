"""Canonical weights: the same W_q, W_k, W_v, W_o and biases, by head, out of any module and into any other.

Where a module keeps them is read off a run of it (`naming.parameters.projections`). The canonical form is a tensor for
each part: `heads head_dim embed` for a matrix, W_o too; `heads head_dim` for a bias and for a learned key or value, and
`embed` for b_o; keys and values have `kv_heads` for heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..naming.parameters import Projection, projections
from ..record.rounding import same_bits
from ..running.subject import Run

PARTS = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v")
"""In the order in which their numbers are drawn."""
_OF_KEYS = ("W_k", "W_v", "b_k", "b_v", "bias_k", "bias_v")
_BIASES = ("b_q", "b_k", "b_v", "b_o")

Numbers = dict[str, Tensor]
"""Part to its numbers in the canonical form; those that there are."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of one attention, as the parameters of a module hold them."""

    module: nn.Module
    projections: dict[str, Projection]
    """Part to where it is, of those that there are."""
    num_heads: int
    num_kv_heads: int
    missing: tuple[str, ...] = ()
    """A sentence for each part that is there and cannot be read: `W_q is made of several parameters.`"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part to the shape of its canonical form."""
        return {part: own.shape for part, own in self.projections.items()}

    def read(self) -> Numbers:
        """Return a copy of all parts, with zeros for the features that a head does not read."""
        return {part: own.read(self.module.get_parameter) for part, own in self.projections.items()}

    def write(self, numbers: Mapping[str, Tensor]) -> None:
        """Copy numbers of the same shapes into the parameters, those that are given, cast to their dtype."""
        with torch.no_grad():
            for part, own in numbers.items():
                self.projections[part].write(self.module.get_parameter, own)

    def users(self) -> list[int]:
        """Return for each query head which key/value head it uses."""
        serves = next((own.serves for own in self.projections.values() if own.serves), ())
        by_head = {head: number for number, heads in enumerate(serves) for head in heads}
        shared = max(self.num_heads // max(self.num_kv_heads, 1), 1)
        return [by_head.get(head, head // shared) for head in range(self.num_heads)]

    def matrices(self) -> Numbers:
        """Return the parts as whole matrices: `(heads head_dim) embed`; W_o is `embed (heads head_dim)`."""
        return {part: as_matrix(part, own) for part, own in self.read().items()}


@dataclass(frozen=True)
class LeftOut:
    """What could not be carried, and why."""

    part: str
    reason: str
    """`the heads of the destination share 2 keys, and those of the source differ`."""
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of the whole matrix in the source and in the destination, where these do not fit."""


@dataclass(frozen=True)
class Carried:
    """What went from one attention to another, and what did not."""

    went: tuple[str, ...]
    """Parts that the destination now holds as the source does, bit for bit after the cast to its dtype."""
    filled: tuple[str, ...]
    """Parts that the source does not have, and that now do nothing: zeros for a bias, the identity for W_o."""
    left_out: tuple[LeftOut, ...]

    @property
    def whole(self) -> bool:
        """Whether both compute with the same numbers now."""
        return not self.left_out


def weights_of(run: Run, module: nn.Module) -> tuple[Weights, ...]:
    """Return the weights of each attention of a run of this module, in order."""
    weights = []
    for (_, names), parts in zip(run.attentions, projections(run), strict=True):
        whole = {projection.part: projection for projection in parts if projection.is_whole}
        missing = tuple(map(_unreadable, (projection for projection in parts if not projection.is_whole)))
        weights.append(Weights(module, whole, names.num_heads, names.num_kv_heads, missing))
    return tuple(weights)


def _unreadable(projection: Projection) -> str:
    where = ", ".join(projection.parameters[:2]) + (" and others" if len(projection.parameters) > 2 else "")
    return f"{projection.part} ({where}) cannot be read by head: the forward does more with it than to move it."


def as_matrix(part: str, numbers: Tensor) -> Tensor:
    """Return a part of the canonical form as a whole matrix or bias: `(heads head_dim) embed`; W_o transposed."""
    if part == "b_o":
        return numbers
    flat = numbers.flatten(0, 1)
    return flat.T if part == "W_o" else flat


def carry(source: Weights, destination: Weights, numbers: Mapping[str, Tensor] | None = None) -> Carried:
    """Write the weights of one attention into another, as far as it has a place for them; say what went and what not.

    Heads keep their number. Shared keys and values are repeated for an attention that has one for every head, and are
    put together where those that would be shared are equal. With another number of heads a matrix keeps its rows, which
    are counted out anew. Where the destination's heads read a part of the features, that part of the matrix goes.

    Args:
        source: whose numbers are carried.
        destination: where they go.
        numbers: in the source's form, instead of those that its parameters hold now.
    """
    given = dict(source.read() if numbers is None else numbers)
    fitting: Numbers = {}
    left_out: list[LeftOut] = []
    for part in PARTS:
        if part in given:
            fitted, reason = _fitted(part, given, source, destination)
            sizes = _sizes(part, given[part], destination)
        elif part in destination.projections:
            fitted, reason = _filling(part, destination.projections[part].shape, given)
            sizes = None
        else:
            continue
        if fitted is not None:
            fitting[part] = fitted
        elif reason:
            left_out.append(LeftOut(part, reason, sizes))
    destination.write(fitting)
    after = destination.read()
    lost = [part for part, wanted in fitting.items() if not same_bits(after[part], wanted.to(after[part].dtype))]
    left_out += [LeftOut(part, _why_not(part, destination)) for part in lost]
    went = tuple(part for part in fitting if part in given and part not in lost)
    filled = tuple(part for part in fitting if part not in given)
    return Carried(went, filled, tuple(sorted(left_out, key=lambda one: PARTS.index(one.part))))


def _fitted(part: str, given: Numbers, source: Weights, destination: Weights) -> tuple[Tensor | None, str]:
    """Return a part in the destination's form, or the reason why not, which is empty where no number is lost."""
    own, numbers = destination.projections.get(part), given[part]
    if own is None:
        return None, _of_no_place(part, numbers)
    wanted = own.shape
    if tuple(numbers.shape) == wanted and (part not in _OF_KEYS or source.users() == destination.users()):
        return numbers, ""
    if part in _OF_KEYS and source.num_heads == destination.num_heads and numbers.shape[1:] == wanted[1:]:
        return _shared_anew(numbers, source.users(), destination.users(), wanted[0])
    mine, theirs = matrix_shape(part, tuple(numbers.shape)), matrix_shape(part, wanted)
    one_each = all(side.num_kv_heads == side.num_heads for side in (source, destination))
    fits = mine == theirs and (one_each or part not in _OF_KEYS)
    return (numbers.reshape(wanted), "") if fits else (None, f"{[*mine]} becomes {[*theirs]}")


def _sizes(part: str, numbers: Tensor, destination: Weights) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of the whole matrix on both sides, where they differ."""
    if part not in destination.projections:
        return None
    sizes = matrix_shape(part, tuple(numbers.shape)), matrix_shape(part, destination.projections[part].shape)
    return None if sizes[0] == sizes[1] else sizes


def matrix_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `as_matrix` of a part in the canonical form."""
    if part == "b_o":
        return shape
    flat = (shape[0] * shape[1], *shape[2:])
    return flat[::-1] if part == "W_o" else flat


def _shared_anew(numbers: Tensor, users: list[int], wanted: list[int], count: int) -> tuple[Tensor | None, str]:
    """Keys and values for other groups of heads: None where heads that would share one have different ones."""
    heads: list[Tensor] = []
    for number in range(count):
        own = [numbers[users[head]] for head, used in enumerate(wanted) if used == number]
        if not own or any(not same_bits(own[0], other) for other in own[1:]):
            return None, f"its heads share {count} keys and values, and those of the other side differ"
        heads.append(own[0])
    return torch.stack(heads), ""


def _of_no_place(part: str, numbers: Tensor) -> str:
    """Why numbers that have no place matter; empty where they do nothing."""
    if part in _BIASES:
        return "" if not bool(numbers.count_nonzero()) else "it has no such bias, and the other side's is not zero"
    if part == "W_o":
        matrix = as_matrix(part, numbers)
        return "" if torch.equal(matrix, torch.eye(len(matrix)).to(matrix)) else "it has no output projection"
    if part in ("bias_k", "bias_v"):
        return "it appends no learned key and value"
    return f"it has no {part} that can be read by head"


def _filling(part: str, shape: tuple[int, ...], given: Numbers) -> tuple[Tensor | None, str]:
    """What does nothing in the place of a part that the source lacks; None and the reason where nothing does."""
    like = next(iter(given.values()))
    if part in _BIASES:
        return like.new_zeros(shape), ""
    if part == "W_o" and shape[0] * shape[1] == shape[2]:
        return torch.eye(shape[2]).to(like).reshape(shape), ""
    if part == "W_o":
        features = shape[0] * shape[1]
        return None, f"the other side has none, and no identity gives {shape[2]} features of {features}"
    return None, f"the other side has no {part}, and no number stands for one that is not there"


def _why_not(part: str, destination: Weights) -> str:
    shape, first = destination.projections[part].shape, destination.projections[part].parts[0]
    if first.inner is not None and first.inner[0] < shape[-1] and part != "W_o":
        features = len(next(iter(first.heads.values())))
        return f"keeps {shape[0]} blocks of {[features, first.inner[0]]} and loses the rest"
    return "one parameter serves several of its projections"


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> Numbers:
    """Draw weights by Xavier's rule, with biases that are not zero, so that a mistake in one shows.

    Each part has a stream of its own and is drawn in float64 as a matrix: for one seed it does not depend on how many
    heads its rows are counted out to.
    """
    drawn: Numbers = {}
    for stream, part in enumerate(PARTS):
        if part not in shapes:
            continue
        matrix = matrix_shape(part, shapes[part])
        generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + stream) % 2**63)
        bound = math.sqrt(6 / sum(matrix)) if len(matrix) == 2 else 0.5
        uniform = torch.rand(matrix, generator=generator, dtype=torch.float64)
        numbers = (2 * uniform - 1) * bound
        drawn[part] = (numbers.T if part == "W_o" else numbers).reshape(shapes[part]).to(dtype)
    return drawn
