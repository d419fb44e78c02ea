"""How large each head's part of each matrix is: a head that is dead, or the twin of another, is seen by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

import torch
from torch import Tensor

from ..reports.params import HeadNorms, Parameter


def head_norms(content_of: Callable[[str], Tensor], parameters: Iterable[Parameter]) -> tuple[HeadNorms, ...]:
    """Return the norm of each head's part of W_q, W_k, W_v and W_o, in float64.

    `content_of` gives a parameter by its name. The parameters come with their `heads`, in the order of the module:
    where a part of a head comes again, the matrices of the next attention begin.
    """
    groups: list[dict[str, dict[int, torch.Tensor]]] = []
    names: list[list[str]] = []
    for parameter in parameters:
        slices = [one for one in parameter.heads or () if one.part.startswith("W_") and one.columns is not None]
        if not slices:
            continue
        if not groups or any(one.head in groups[-1].get(one.part, {}) for one in slices):
            groups.append({})
            names.append([])
        names[-1].append(parameter.name)
        content = content_of(parameter.name).detach()
        for one in slices:
            assert one.columns is not None
            own = content[slice(*one.rows), slice(*one.columns)].double().square().sum()
            of_part = groups[-1].setdefault(one.part, {})
            of_part[one.head] = of_part.get(one.head, torch.zeros_like(own)) + own
    return tuple(
        HeadNorms(owner, part, tuple(float(squares[head].sqrt()) for head in sorted(squares)))
        for owner, group in zip(map(_owner, names), groups, strict=True)
        for part, squares in sorted(group.items(), key=lambda item: "qkvo".find(item[0][2:3]))
    )


def _owner(names: list[str]) -> str:
    """Return the path of the module that all of these parameters are in."""
    paths = [name.split(".")[:-1] for name in names]
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in alike)
