"""A head's piece of a parameter, by the rows and columns that a report gives."""

from __future__ import annotations

from torch import Tensor

from mha_inspect.reports.params import HeadSlice


def cut(parameter: Tensor, piece: HeadSlice) -> Tensor:
    """The rows and columns of a matrix, or the elements of a bias, that a head owns: a view."""
    if piece.columns is None:
        return parameter.view(-1)[slice(*piece.rows)]
    return parameter[slice(*piece.rows), slice(*piece.columns)]
