"""Each way of moving, joining, cutting and multiplying tensors keeps the axes that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_inspect.graph.axis import Axis, fresh, reshape, resolve, unify
from mha_inspect.graph.dimensions import Dimensions

from ..recorded import record

SIZES = (2, 3, 5, 7)  # of the tensor that goes in: a b c d


def axes(function: Callable[[Tensor], Tensor], *shape: int) -> str:
    """What comes out, in the letters of what goes in; an axis that is new is its size."""
    with torch.no_grad():
        recording, _ = record(function, torch.randn(shape or SIZES))
    dimensions = Dimensions(recording)
    letters: dict[Axis, str] = {}
    for letter, dim in zip("abcdefg", dimensions.of(recording.inputs[0].tensor), strict=False):
        for part, atom in enumerate(dim):
            letters[atom] = letter if len(dim) == 1 else f"{letter}{part}"
    out = dimensions.of(recording.outputs[0].tensor)
    words = [[letters.get(atom, str(atom.size)) for atom in dim if atom.size > 1 or len(dim) == 1] for dim in out]
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in words)


CASES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("a b (c d)", lambda x: x.flatten(2)),
    ("a b c d", lambda x: x.flatten(1, 2).view(2, 3, 5, 7)),
    ("a c b d", lambda x: x.transpose(1, 2)),
    ("d c b a", lambda x: x.permute(3, 2, 1, 0).contiguous()),
    ("a 1 b c d", lambda x: x[:, None]),
    ("a 11 b c d", lambda x: x[:, None].expand(2, 11, 3, 5, 7)),
    ("a b (11 c) d", lambda x: x.repeat(1, 1, 11, 1)),
    ("a b (c 11) d", lambda x: x.repeat_interleave(11, dim=2)),
    ("a b d", lambda x: x[:, :, 2]),
    ("a b 4 d", lambda x: x[:, :, 1:]),
    ("a b c d", lambda x: torch.cat((x[..., 4:], -x[..., :4]), dim=-1)),
    ("a b c d", lambda x: torch.cat(x.split([2, 3], dim=2)[::-1], dim=2)),
    ("a b c d", lambda x: torch.cat((torch.randn(2, 3, 4, 7), x), dim=2)[:, :, 4:]),
    ("a b c d", lambda x: torch.cat((torch.tensor([]), x), dim=2)),
    ("a b 4 c d", lambda x: torch.stack([x] * 4, dim=2)),
    ("a b c d", lambda x: torch.stack(x.unbind(1), dim=1) + x),
    ("a b c 1", lambda x: x.sum(-1, keepdim=True)),
    ("a b d", lambda x: x.mean(2)),
    ("a b c 5", lambda x: x @ x.transpose(-1, -2)),
    ("a b c d", lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x),
    ("a b c d", lambda x: torch.randn(3, 1, 7) + x),
    ("a b c d", lambda x: torch.einsum("abcd,abed->abce", x, x).softmax(-1) @ x),
    ("a b c d", lambda x: torch.as_strided(x, x.shape, x.stride())),
    ("a b 3 d 3", lambda x: x.unfold(2, 3, 1)),
    ("a b c 7", lambda x: x.gather(3, torch.zeros(2, 3, 5, 7, dtype=torch.long))),
    ("a b 4 d", lambda x: x.index_select(2, torch.tensor([0, 1, 1, 3]))),
    ("a b c d", lambda x: x.clone().mul_(2).masked_fill_(x > 0, 0.0)),
    ("a b c d", lambda x: torch.nn.functional.layer_norm(x, (7,))),
)


@pytest.mark.parametrize(("expected", "function"), CASES)
def test_an_operation_keeps_the_axes_that_it_keeps(expected: str, function: Callable[[Tensor], Tensor]) -> None:
    assert axes(function) == expected


def pairs(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.ones(x.shape[-1] // 2, dtype=torch.complex64)
    return torch.view_as_real(turned).flatten(-2)


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def every_other(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize("function", [pairs, halves, every_other])
def test_turning_pairs_of_features_keeps_their_axis(function: Callable[[Tensor], Tensor]) -> None:
    assert axes(function, 2, 3, 22) == "a b (c0 c1)"


def test_axes_of_one_size_stay_apart() -> None:
    # An addition says that dimensions are one, but not that a tensor has one twice.
    assert axes(lambda x: x.transpose(0, 2) + x, 5, 5, 5).split()[1] == "b"
    assert len(set(axes(lambda x: x.transpose(0, 2) + x, 5, 5, 5).split())) == 3
    assert axes(lambda x: x.transpose(0, 2), 5, 5, 5) == "c b a"
    assert axes(lambda x: x.flatten(0, 1).view(5, 5, 5), 5, 5, 5) == "a b c"


def test_the_key_of_self_attention_is_another_axis_than_its_query() -> None:
    query, key = Axis(5), Axis(5)
    key.twins = (query,)
    assert not unify((query,), (key,))
    assert not unify((key,), (query,))
    same_as_key = Axis(5)
    assert unify((key,), (same_as_key,))
    assert not unify((query,), (same_as_key,))


def test_a_split_is_known_wherever_its_axis_is_used() -> None:
    whole = fresh(15)
    ((a,), (b,)) = reshape((whole,), (3, 5))
    assert resolve(whole) == (a, b)
    assert unify(whole, fresh(15))
    left, right = fresh(15), fresh(15)
    reshape((left,), (3, 5))
    assert unify(left, right)
    assert resolve(right) == resolve(left)


def test_axes_of_different_size_are_never_one() -> None:
    assert not unify(fresh(6), fresh(35))
    three, five = fresh(15), fresh(15)
    reshape((three,), (3, 5))
    reshape((five,), (5, 3))
    assert not unify(three, five)


def test_two_orders_of_the_same_pieces_are_not_one_axis():
    """Pairs of features beside halves of them: to say that they are one would make an axis a part of itself."""
    halves, pairs = Axis(4), Axis(2)
    whole, backwards = Axis(8), Axis(8)
    assert unify((whole,), (halves, pairs))
    assert not unify((whole,), (pairs, halves))
    assert unify((backwards,), (pairs, halves))
    assert not unify((whole,), (backwards,))
    assert [[atom.size for atom in resolve((axis,))] for axis in (whole, backwards)] == [[4, 2], [2, 4]]
