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
from ..text import plural

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
        parameter = self.module.get_parameter
        return {part: projection.read(parameter) for part, projection in self.projections.items()}

    def write(self, numbers: Mapping[str, Tensor]) -> None:
        """Copy canonical tensors of the same shapes into the parameters, cast to their dtype."""
        parameter = self.module.get_parameter
        with torch.no_grad():
            for part, tensor in numbers.items():
                self.projections[part].write(parameter, tensor)

    def users(self) -> list[int]:
        """Return the key/value head of each query head."""
        kv_heads = max(self.num_kv_heads, 1)
        group = max(self.num_heads // kv_heads, 1)
        users = [head // group for head in range(self.num_heads)]
        for kv_head, heads in enumerate(self._serves()):
            for head in heads:
                if head < self.num_heads:
                    users[head] = kv_head
        return users

    def _serves(self) -> tuple[tuple[int, ...], ...]:
        """Return the query heads that each key/value head serves; empty if no projection says it."""
        for projection in self.projections.values():
            if projection.serves:
                return projection.serves
        return ()


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
        whole: dict[str, Projection] = {}
        missing = []
        # Matrices come first: what is said of them is true of their biases.
        for projection in sorted(parts, key=lambda projection: projection.part[0]):
            if projection.is_whole:
                whole[projection.part] = projection
            else:
                missing.append(_unreadable(projection))
        weights.append(
            Weights(
                module,
                projections=whole,
                num_heads=names.num_heads,
                num_kv_heads=names.num_kv_heads,
                missing=tuple(missing),
            )
        )
    return tuple(weights)


def _unreadable(projection: Projection) -> str:
    parameters = ", ".join(projection.parameters[:2])
    if len(projection.parameters) > 2:
        parameters += " and others"
    order = _order_of_shared(projection)
    if order:
        heads = f"The {len(order)} heads read {plural(len(set(order)), 'head')} of {projection.part} ({parameters})"
        return f"{heads} in the order {' '.join(map(str, order))}, so its rows belong to no head alone."
    return f"Could not match {projection.part} ({parameters}) to heads: the forward does more than view or copy it."


def _order_of_shared(projection: Projection) -> list[int]:
    """Return which rows each head reads, of those that all read: `[0, 1, 0, 1]`; empty if each has rows of its own."""
    if len(projection.parts) != 1:
        return []
    (part,) = projection.parts
    rows = [part.heads[head].tobytes() for head in sorted(part.heads)]
    distinct = list(dict.fromkeys(rows))
    return [distinct.index(each) for each in rows] if len(distinct) < len(rows) else []


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
    originals = source.read() if numbers is None else dict(numbers)
    fitting: Numbers = {}
    not_copied: list[NotCopied] = []
    for part in PARTS:
        if part in originals:
            answer = _fitted(part, originals[part], source, destination)
        elif part in destination.projections:
            answer = _neutral(part, destination.projections[part].shape, next(iter(originals.values())))
        else:
            continue
        if isinstance(answer, Tensor):
            fitting[part] = answer
        elif answer is not None:
            not_copied.append(answer)
    destination.write(fitting)
    copied, filled = [], []
    changed = _changed(fitting, destination.read())
    for part in fitting:
        if part not in originals:
            filled.append(part)
        elif part not in changed:
            copied.append(part)
    for part in changed:
        reason = _why_changed(part, destination)
        not_copied.append(NotCopied(part, reason))
    not_copied.sort(key=_place_of)
    return CopiedParts(tuple(copied), tuple(filled), tuple(not_copied))


def _place_of(absent: NotCopied) -> int:
    return PARTS.index(absent.part)


def _changed(wanted: Numbers, written: Numbers) -> list[str]:
    """Return the parts that have other numbers than were written, after the cast to their dtype."""
    changed = []
    for part, numbers in wanted.items():
        copy = written[part]
        if not same_bits(copy, numbers.to(copy.dtype)):
            changed.append(part)
    return changed


def _fitted(part: str, numbers: Tensor, source: Weights, destination: Weights) -> Tensor | NotCopied | None:
    """Return a part in the destination's form, or why it has none; None if no information is lost."""
    projection = destination.projections.get(part)
    if projection is None:
        reason = _why_lost(part, numbers)
        return NotCopied(part, reason) if reason else None
    shape = tuple(numbers.shape)
    source_size = matrix_shape(part, shape)
    destination_size = matrix_shape(part, projection.shape)
    has_same_size = source_size == destination_size
    sizes = None if has_same_size else (source_size, destination_size)
    may_be_shared = part in _OF_KEYS
    if shape == projection.shape:
        # Of shared keys the same heads have to read the same key head on both sides.
        is_used_alike = not may_be_shared or source.users() == destination.users()
        if is_used_alike:
            return numbers
    has_same_heads = source.num_heads == destination.num_heads and shape[1:] == projection.shape[1:]
    if may_be_shared and has_same_heads:
        count = projection.shape[0]
        regrouped = _regrouped(numbers, source.users(), destination.users(), count)
        if regrouped is None:
            return NotCopied(part, f"it shares {count} key/value heads, but the other side's heads differ", sizes)
        return regrouped
    is_shared = may_be_shared and (_shares_keys(source) or _shares_keys(destination))
    if has_same_size and not is_shared:
        return numbers.reshape(projection.shape)
    if has_same_size:
        return NotCopied(part, "its key/value heads are shared by other query heads")
    return NotCopied(part, f"{[*source_size]} becomes {[*destination_size]}", sizes)


def _shares_keys(weights: Weights) -> bool:
    """Return whether several query heads share a key and value head."""
    return weights.num_kv_heads != weights.num_heads


def matrix_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of `as_matrix` of a part, given its canonical shape."""
    if part == "b_o":
        return shape
    heads, head_dim, *embed = shape
    features = heads * head_dim
    return (*embed, features) if part == "W_o" else (features, *embed)


def _regrouped(numbers: Tensor, users: list[int], wanted: list[int], count: int) -> Tensor | None:
    """Return keys and values regrouped for other query heads; None if heads to merge differ.

    Args:
        numbers: canonical numbers of the source, `kv_heads ...`.
        users: the key/value head of each query head in the source.
        wanted: the same in the destination.
        count: the number of key/value heads in the destination.
    """
    heads: list[Tensor] = []
    for kv_head in range(count):
        sources = [numbers[users[head]] for head, used in enumerate(wanted) if used == kv_head]
        if not sources:
            return None
        if not all(same_bits(sources[0], tensor) for tensor in sources[1:]):
            return None
        heads.append(sources[0])
    return torch.stack(heads)


def _why_lost(part: str, numbers: Tensor) -> str:
    """Return why a part without a place in the destination matters; empty if it has no effect."""
    if part in _BIASES:
        has_effect = bool(numbers.count_nonzero())
        return "it has no such bias, but the other side's bias is not zero" if has_effect else ""
    if part == "W_o":
        matrix = as_matrix(part, numbers)
        identity = torch.eye(len(matrix)).to(matrix)
        is_identity = torch.equal(matrix, identity)
        return "" if is_identity else "it has no output projection"
    if part in ("bias_k", "bias_v"):
        return "it appends no learned key and value"
    return f"it has no {part} that could be matched to heads"


def _neutral(part: str, shape: tuple[int, ...], like: Tensor) -> Tensor | NotCopied:
    """Return numbers without effect for a part that the source lacks, or why there are none."""
    if part in _BIASES:
        return like.new_zeros(shape)
    if part != "W_o":
        return NotCopied(part, f"the other side has no {part}")
    heads, head_dim, embed = shape
    features = heads * head_dim
    if features == embed:
        return torch.eye(features).to(like).reshape(shape)
    return NotCopied(part, f"the other side has no {part}, and {features} features do not fit {embed} unchanged")


def _why_changed(part: str, destination: Weights) -> str:
    """Return why the destination's parameters do not have the numbers that were written into them."""
    projection = destination.projections[part]
    shape = projection.shape
    first = projection.parts[0]
    if first.inner is not None and part != "W_o":
        width = first.inner[0]
        if width < shape[-1]:
            features = len(next(iter(first.heads.values())))
            return f"it has room for {shape[0]} blocks of {[features, width]} only"
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
        seed_of_part = (seed * 1_000_003 + stream) % 2**63
        generator = torch.Generator("cpu").manual_seed(seed_of_part)
        bound = math.sqrt(6 / sum(matrix)) if len(matrix) == 2 else 0.5
        uniform = torch.rand(matrix, generator=generator, dtype=torch.float64)
        numbers = (2 * uniform - 1) * bound
        if part == "W_o":
            numbers = numbers.T
        drawn[part] = numbers.reshape(shapes[part]).to(dtype)
    return drawn
