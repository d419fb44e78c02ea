"""Read canonical weights from any module and copy them into any other: W_q, W_k, W_v, W_o and biases, by head.

The run of a module shows where its weights are (`naming.parameters.projections`). The canonical form is a tensor for
each part: `heads head_dim embed` for a matrix, also W_o; `heads head_dim` for a bias and for a learned key or value;
`embed` for b_o. Keys and values have `kv_heads` instead of heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..naming.parameters import projections
from ..naming.projection import Projection
from ..record.rounding import same_bits
from ..running.subject import Run

PARTS = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v", "W_g", "b_g")
"""Parts in the order of their random draws."""
_OF_KEYS = ("W_k", "W_v", "b_k", "b_v", "bias_k", "bias_v")
_BIASES = ("b_q", "b_k", "b_v", "b_o")

Numbers = dict[str, Tensor]
"""Part to its canonical tensor; a part that the attention lacks is absent."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of one attention, in the parameters of a module."""

    module: nn.Module
    projections: dict[str, Projection]
    """Part to its place in the parameters; a part that the attention lacks is absent."""
    num_heads: int
    num_kv_heads: int
    missing: tuple[str, ...] = ()
    """A sentence for each part that cannot be read: `W_q is made of several parameters.`"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part to its canonical shape."""
        return {part: projection.shape for part, projection in self.projections.items()}

    def read(self) -> Numbers:
        """Return a copy of all parts in the parameters' dtype, with zeros for features that a head does not read."""
        return {part: projection.read(self.module.get_parameter) for part, projection in self.projections.items()}

    def write(self, numbers: Mapping[str, Tensor]) -> None:
        """Copy canonical tensors of the same shapes into the parameters, cast to their dtype."""
        with torch.no_grad():
            for part, tensor in numbers.items():
                self.projections[part].write(self.module.get_parameter, tensor)

    def users(self) -> list[int]:
        """Return the key/value head of each query head."""
        serves = next((projection.serves for projection in self.projections.values() if projection.serves), ())
        by_head = {head: number for number, heads in enumerate(serves) for head in heads}
        shared = max(self.num_heads // max(self.num_kv_heads, 1), 1)
        return [by_head.get(head, head // shared) for head in range(self.num_heads)]


@dataclass(frozen=True)
class NotCopied:
    """A part that could not be copied, and the reason."""

    part: str
    reason: str
    """A phrase, e.g. `the destination shares 2 key/value heads, but the source heads differ`."""
    sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Sizes of the whole matrix in the source and in the destination, if they differ; otherwise None."""


@dataclass(frozen=True)
class CopiedParts:
    """The parts that were copied from one attention to another, and the parts that were not."""

    copied: tuple[str, ...]
    """Parts with equal numbers in source and destination, bit for bit after the cast to the destination's dtype."""
    filled: tuple[str, ...]
    """Parts that the source lacks, filled with no effect: zeros for a bias, the identity for W_o."""
    not_copied: tuple[NotCopied, ...]


def weights_of(run: Run, module: nn.Module) -> tuple[Weights, ...]:
    """Return the weights of each attention of a run of this module, in order; empty if it has no attention."""
    weights = []
    for (_, names), parts in zip(run.attentions, projections(run), strict=True):
        whole = {projection.part: projection for projection in parts if projection.is_whole}
        missing = tuple(map(_unreadable, (projection for projection in parts if not projection.is_whole)))
        weights.append(Weights(module, whole, names.num_heads, names.num_kv_heads, missing))
    return tuple(weights)


def _unreadable(projection: Projection) -> str:
    where = ", ".join(projection.parameters[:2]) + (" and others" if len(projection.parameters) > 2 else "")
    return f"Could not match {projection.part} ({where}) to heads: the forward does more than view or copy it."


def as_matrix(part: str, numbers: Tensor) -> Tensor:
    """Return a canonical tensor as a whole matrix or bias: `(heads head_dim) embed`; W_o is transposed."""
    if part == "b_o":
        return numbers
    flat = numbers.flatten(0, 1)
    return flat.T if part == "W_o" else flat


def copy_by_head(source: Weights, destination: Weights, numbers: Mapping[str, Tensor] | None = None) -> CopiedParts:
    """Copy the weights of one attention into another, and return which parts were copied and which were not.

    Heads keep their number. Shared keys and values are repeated for an attention without sharing. Equal keys and values
    are merged for an attention that shares them. With another number of heads a matrix keeps its rows, regrouped into
    heads. If the destination's heads read a part of the features, that part of the matrix is copied. `numbers` are
    canonical tensors of the source, instead of its current parameters.
    """
    given = dict(source.read() if numbers is None else numbers)
    fitting: Numbers = {}
    not_copied: list[NotCopied] = []
    for part in PARTS:
        if part in given:
            fitted, reason = _fitted(part, given, source, destination)
            shape = tuple(given[part].shape)
            sizes = matrix_shape(part, shape), matrix_shape(part, destination.shapes.get(part, shape))
        elif part in destination.projections:
            fitted, reason = _neutral(part, destination.projections[part].shape, given)
            sizes = (), ()
        else:
            continue
        if fitted is not None:
            fitting[part] = fitted
        elif reason:
            not_copied.append(NotCopied(part, reason, None if sizes[0] == sizes[1] else sizes))
    destination.write(fitting)
    after = destination.read()
    changed = [part for part, wanted in fitting.items() if not same_bits(after[part], wanted.to(after[part].dtype))]
    not_copied += [NotCopied(part, _why_changed(part, destination)) for part in changed]
    copied = tuple(part for part in fitting if part in given and part not in changed)
    filled = tuple(part for part in fitting if part not in given)
    return CopiedParts(copied, filled, tuple(sorted(not_copied, key=lambda absent: PARTS.index(absent.part))))


def _fitted(part: str, given: Numbers, source: Weights, destination: Weights) -> tuple[Tensor | None, str]:
    """Return a part in the destination's form; otherwise None and the reason, empty if no information is lost."""
    projection, numbers = destination.projections.get(part), given[part]
    if projection is None:
        return None, _why_lost(part, numbers)
    wanted = projection.shape
    if tuple(numbers.shape) == wanted and (part not in _OF_KEYS or source.users() == destination.users()):
        return numbers, ""
    if part in _OF_KEYS and source.num_heads == destination.num_heads and numbers.shape[1:] == wanted[1:]:
        return _regrouped(numbers, source.users(), destination.users(), wanted[0])
    source_size, destination_size = matrix_shape(part, tuple(numbers.shape)), matrix_shape(part, wanted)
    unshared = all(side.num_kv_heads == side.num_heads for side in (source, destination))
    fits = source_size == destination_size and (unshared or part not in _OF_KEYS)
    return (numbers.reshape(wanted), "") if fits else (None, f"{[*source_size]} becomes {[*destination_size]}")


def matrix_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `as_matrix` of a part, given its canonical shape."""
    if part == "b_o":
        return shape
    flat = (shape[0] * shape[1], *shape[2:])
    return flat[::-1] if part == "W_o" else flat


def _regrouped(numbers: Tensor, users: list[int], wanted: list[int], count: int) -> tuple[Tensor | None, str]:
    """Return keys and values regrouped for other query heads; None and the reason if heads to merge differ."""
    heads: list[Tensor] = []
    for number in range(count):
        sources = [numbers[users[head]] for head, used in enumerate(wanted) if used == number]
        if not sources or any(not same_bits(sources[0], tensor) for tensor in sources[1:]):
            return None, f"it shares {count} key/value heads, but the other side's heads differ"
        heads.append(sources[0])
    return torch.stack(heads), ""


def _why_lost(part: str, numbers: Tensor) -> str:
    """Return why a part without a place in the destination matters; empty if it has no effect."""
    if part in _BIASES:
        return "" if not bool(numbers.count_nonzero()) else "it has no such bias, but the other side's bias is not zero"
    if part == "W_o":
        matrix = as_matrix(part, numbers)
        return "" if torch.equal(matrix, torch.eye(len(matrix)).to(matrix)) else "it has no output projection"
    if part in ("bias_k", "bias_v"):
        return "it appends no learned key and value"
    return f"it has no {part} that could be matched to heads"


def _neutral(part: str, shape: tuple[int, ...], given: Numbers) -> tuple[Tensor | None, str]:
    """Return numbers without effect for a part that the source lacks; None and the reason if there are none."""
    like = next(iter(given.values()))
    if part in _BIASES:
        return like.new_zeros(shape), ""
    if part == "W_o" and shape[0] * shape[1] == shape[2]:
        return torch.eye(shape[2]).to(like).reshape(shape), ""
    if part == "W_o":
        features = shape[0] * shape[1]
        return None, f"the other side has no {part}, and {features} features do not fit {shape[2]} unchanged"
    return None, f"the other side has no {part}"


def _why_changed(part: str, destination: Weights) -> str:
    shape, first = destination.projections[part].shape, destination.projections[part].parts[0]
    if first.inner is not None and first.inner[0] < shape[-1] and part != "W_o":
        features = len(next(iter(first.heads.values())))
        return f"it has room for {shape[0]} blocks of {[features, first.inner[0]]} only"
    return "one parameter is used by several of its projections"


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> Numbers:
    """Return random weights by Xavier's rule. Biases are not zero, so that a wrong bias has an effect.

    Each part has its own random stream and is drawn in float64 as a matrix. For one seed it does not depend on the
    number of heads.
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
