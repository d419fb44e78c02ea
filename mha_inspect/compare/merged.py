"""An adapter that is merged on one side: its product is in the weight there, and beside the weight on the other side.

q.weight, q.down, q.up    on the left        x @ q.weight.T + 4 * x @ q.down.T @ q.up.T
q.weight                  on the right       the left's q.weight + 4 * q.up @ q.down
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from .pair import are_near

_LEAST = 1e-3
"""A smaller multiple of a product is rounding."""
_ROUNDED = 4
"""How many rounding steps of its dtype a merged weight may be off."""


@dataclass(frozen=True)
class Product:
    """A multiple of two matrices' product."""

    outer: str
    """The parameter `out rank`."""
    inner: str
    """The parameter `rank in`."""
    times: float

    @property
    def words(self) -> str:
        """The product in a sentence: `4 · q.up · q.down`."""
        return f"{self.times:.4g} · {self.outer} · {self.inner}"


@dataclass(frozen=True)
class Merged:
    """A weight of one side that has an adapter of the other side in it."""

    name: str
    product: Product


def merged_in(plain: Mapping[str, Tensor], adapted: Mapping[str, Tensor]) -> list[Merged]:
    """Return the weights of `plain` that are those of `adapted` with a product of two further parameters added.

    Empty unless each parameter of `plain` is in `adapted`, as it is or with such a product.
    """
    if any(tensor.is_meta for tensor in (*plain.values(), *adapted.values())):
        return []
    bases = {name: _base_of(name, tensor, adapted) for name, tensor in plain.items()}
    further = {name: tensor for name, tensor in adapted.items() if name not in bases.values()}
    merged: list[Merged] = []
    for name, base in bases.items():
        if not base:
            return []
        weight = plain[name].detach()
        added = weight.double() - adapted[base].detach().double()
        step = torch.finfo(weight.dtype).eps
        near = _ROUNDED * step * float(weight.abs().max())
        if float(added.abs().max()) <= near:
            continue
        product = product_of(added, further, near)
        if product is None:
            return []
        merged.append(Merged(name, product))
    return merged


def _base_of(name: str, like: Tensor, adapted: Mapping[str, Tensor]) -> str:
    """Return the parameter of this name and shape: `q.weight`, or `q.base_layer.weight` of a module around it."""
    owner, _, last = name.rpartition(".")
    for candidate, tensor in adapted.items():
        path, _, end = candidate.rpartition(".")
        around, _, _ = path.rpartition(".")
        if tensor.shape == like.shape and end == last and owner in (path, around):
            return candidate
    return ""


def product_of(matrix: Tensor, parameters: Mapping[str, Tensor], near: float) -> Product | None:
    """Return the product of low rank of two parameters that a matrix, `out in`, is a multiple of; None without one."""
    matrices = {name: parameter.detach() for name, parameter in parameters.items() if parameter.dim() == 2}
    for outer, inner in permutations(matrices, 2):
        left, right = matrices[outer], matrices[inner]
        rank = len(right)
        has_rank = left.shape[1] == rank and 2 * rank <= min(matrix.shape)
        if not has_rank or (len(left), right.shape[1]) != matrix.shape:
            continue
        product = left.double() @ right.double()
        product = product.to(matrix.device)
        square = float((product * product).sum())
        if not square:
            continue
        times = float((matrix * product).sum()) / square
        if abs(times) > _LEAST and are_near(matrix, times * product, near):
            return Product(outer, inner, times)
    return None
