"""Rows by head: each element of a projection belongs to one head, as the truth says, and only that head hangs on it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from mha_inspect.reports.params import HeadSlice

from .entry import Entry, Truth, owners
from .every import ENTRIES, entries
from .runs import parameters
from .test_truth import NOT_YET, first_of_each

KNOWN = [name for name in entries() if ENTRIES[name].rows is not None and name not in NOT_YET]


def cut(parameter: Tensor, piece: HeadSlice) -> Tensor:
    """Return the rows and columns of a matrix, or the elements of a bias, that a head owns: a view."""
    if piece.columns is None:
        return parameter.view(-1)[slice(*piece.rows)]
    return parameter[slice(*piece.rows), slice(*piece.columns)]


@cache
def told(name: str) -> dict[str, dict[tuple[str, int], Tensor]]:
    """Return of each projection of an entry where the report says whose it is: `("q", 0)` to a mask."""
    masks: dict[str, dict[tuple[str, int], Tensor]] = {}
    for row in parameters(name).parameters:
        for piece in row.heads or ():
            if piece.part[:2] in ("W_", "b_"):
                mask = masks.setdefault(row.name, {}).setdefault(
                    (piece.part[2:], piece.head), torch.zeros(row.shape, dtype=torch.bool)
                )
                assert not cut(mask, piece).any(), "no piece is told twice"
                cut(mask, piece).fill_(True)
    return masks


@pytest.mark.parametrize("name", KNOWN)
def test_heads_tile_each_projection(name: str) -> None:
    entry = ENTRIES[name]
    for parameter, masks in told(name).items():
        counts = torch.stack([mask.long() for mask in masks.values()]).sum(0)
        assert counts.max() == 1, parameter
        assert counts.min() == 1 or parameter in entry.partly, parameter
    assert set(told(name)) <= {*(entry.rows or {}), *entry.partly}


@pytest.mark.parametrize("name", KNOWN)
def test_rows_are_those_of_the_true_heads(name: str) -> None:
    entry, truth = ENTRIES[name], ENTRIES[name].attentions[0]
    shapes = {key: tuple(parameter.shape) for key, parameter in entry.made().named_parameters()}
    for parameter, axes in (entry.rows or {}).items():
        expected, said = owners(axes, shapes[parameter], truth), told(name)[parameter]
        assert set(said) == set(expected), parameter
        assert all(torch.equal(said[owner], expected[owner]) for owner in expected), parameter


@pytest.mark.parametrize("name", KNOWN)
def test_a_bias_of_the_output_is_of_no_head(name: str) -> None:
    for row in parameters(name).parameters:
        if row.name == f"{ENTRIES[name].output}.bias":
            assert row.heads == ()
            assert row.role.startswith("b_o: added once")


def is_measured(entry: Entry) -> bool:
    return bool(entry.output) and not entry.attentions[0].mixed


def owned(entry: Entry) -> tuple[Any, ...]:
    """Return whose the rows of an entry are."""
    truth = entry.attentions[0]
    return entry.rows, truth.heads, truth.kv_heads, truth.tiled, truth.split


@pytest.mark.parametrize("name", first_of_each((name for name in KNOWN if is_measured(ENTRIES[name])), owned))
@torch.no_grad()
def test_only_its_head_hangs_on_a_row(name: str) -> None:
    """Measured on what the output's projection is given, with other numbers in the rows of a matrix."""
    entry, truth = ENTRIES[name], ENTRIES[name].attentions[0]
    before = contexts(entry, truth)
    matrices = {name: masks for name, masks in told(name).items() if len(entry.made().get_parameter(name).shape) > 1}
    for parameter, masks in matrices.items():
        for (letter, head), mask in masks.items():
            if letter in "qkv":
                moved = (contexts(entry, truth, parameter, mask) - before).abs().amax((0, 1, 3)) > 1e-5
                heads = moved.nonzero().flatten().tolist()
                assert heads == users(letter, head, truth), (parameter, letter, head)


def users(letter: str, head: int, truth: Truth) -> list[int]:
    """Return the query heads that use a head of a matrix."""
    group = 1 if letter == "q" else truth.heads // truth.true_kv_heads
    if truth.tiled and letter != "q":
        return list(range(head, truth.heads, truth.true_kv_heads))
    return list(range(head * group, (head + 1) * group))


def contexts(entry: Entry, truth: Truth, parameter: str = "", mask: Tensor | None = None) -> Tensor:
    """Return the contexts, `batch query heads head_dim`, with other numbers at a mask of a parameter."""
    module, given = entry.made(), list[Tensor]()
    if mask is not None:
        module.get_parameter(parameter)[mask] += torch.arange(1.0, mask.sum() + 1).sin()
    module.get_submodule(entry.output).register_forward_pre_hook(lambda _, args: given.append(args[0]))
    args, kwargs = entry.arguments()
    module(*args, **kwargs)
    (context,) = given
    axes = truth.stages()["concat"]
    return rearrange(_flat(context), f"first second ({features(axes)}) -> first second heads v", heads=truth.heads)


def _flat(context: Tensor) -> Tensor:
    return context[None] if context.dim() == 2 else context.flatten(1, -2)


def features(axes: str) -> str:
    return "v heads" if axes.endswith("head_dim heads)") else "heads v"


def is_textbook(entry: Entry) -> bool:
    return bool(entry.output) and entry.attentions[0].is_textbook and entry.reads_arguments


TEXTBOOK = [name for name in KNOWN if is_textbook(ENTRIES[name])]


@pytest.mark.parametrize("name", TEXTBOOK)
@torch.no_grad()
def test_the_rows_of_one_head_alone_give_its_context(name: str) -> None:
    """By hand in float64: softmax(scale · q·kᵀ) · v of what the rows that are told of a head make of the inputs."""
    entry, truth = ENTRIES[name], ENTRIES[name].attentions[0]
    (args, kwargs), measured = entry.arguments(), contexts(entry, truth)
    tensors = (*args, *(value for value in kwargs.values() if value.dim() == 3))
    given = [_flat(tensor.double()) for tensor in tensors]
    for head in range(truth.heads):
        group = next(number for number in range(truth.true_kv_heads) if head in users("k", number, truth))
        q = projected(name, "q", head, given[0])
        k, v = (projected(name, letter, group, given[-1]) for letter in "kv")
        scores = q @ k.mT * truth.head_dim**-0.5
        if "causal" in truth.kind:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        expected = (scores.softmax(-1) @ v).view(*measured.shape[:2], -1)
        torch.testing.assert_close(measured[:, :, head].double(), expected, rtol=1e-4, atol=1e-5)


def projected(name: str, letter: str, head: int, x: Tensor) -> Tensor:
    """Return what the elements that are told of a head make of an input: `batch token head_dim`."""
    module, total = ENTRIES[name].made(), torch.zeros(()).double()
    for parameter, masks in told(name).items():
        if (letter, head) in masks:
            value, mask = module.get_parameter(parameter).double(), masks[letter, head]
            if value.dim() == 1:
                total = total + value[mask]
            elif mask[:, 0].any() and not mask[:, 0].all():
                total = total + x @ value[mask[:, 0]].T
            else:
                total = total + x @ value[:, mask[0]] if not mask[0].all() else total + x @ value.T
    return total


def is_summed(entry: Entry) -> bool:
    return bool(entry.output) and not entry.training and entry.returns_output


def first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("name", [name for name in KNOWN if is_summed(ENTRIES[name])])
@torch.no_grad()
def test_the_output_is_the_sum_of_what_each_head_gives(name: str) -> None:
    """By the columns of W_o that are told of each head."""
    entry = ENTRIES[name]
    parameter = f"{entry.output}.weight"
    module = entry.made()
    args, kwargs = entry.arguments()
    layer: Any = module.get_submodule(entry.output)
    whole, weight = first(module(*args, **kwargs)), layer.weight.clone()
    bias = torch.zeros(()) if layer.bias is None else layer.bias
    total = torch.zeros_like(whole)
    for mask in told(name)[parameter].values():
        layer.weight.copy_(torch.where(mask, weight, 0))
        alone = first(module(*args, **kwargs)) - bias
        assert alone.abs().max() > 0
        total += alone
    torch.testing.assert_close(total + bias, whole, rtol=1e-4, atol=1e-5)
