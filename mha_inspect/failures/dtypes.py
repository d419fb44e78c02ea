"""Causes in the devices and dtypes of operands: first devices, then masks, then other dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .facts import Facts, Operand
from .reached import LAYERS
from .sequences import is_mask_of_keys
from .suspect import Suspect
from .tried import Fix, of_shape, to_dtype


@dataclass(frozen=True, eq=False)
class _Odd:
    """The operand that differs from the majority."""

    operand: Operand
    usual: str
    """The device or the dtype of the majority: `cpu`, `float32`."""


def mixed_devices(facts: Facts) -> Suspect | None:
    """Judge operands on several devices."""
    if not facts.mixes_devices:
        return None
    odd = _odd_one(facts, "device")
    what = f"{odd.operand.name} is on {odd.operand.device}; the other tensors are on {odd.usual}."
    return Suspect("mixed_devices", what, (_to_one_device(facts, odd),))


def _to_one_device(facts: Facts, odd: _Odd) -> Fix:
    """Return how to get the tensors of other devices to the usual one. A tensor on meta has no numbers to move."""
    usual = odd.usual
    elsewhere = [operand for operand in facts.operands if operand.device != usual]

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(usual)

    def created(tensor: Tensor) -> Tensor:
        return torch.zeros(
            tensor.shape,
            dtype=tensor.dtype,
            device=usual,
        )

    if odd.operand.device == "meta":
        return Fix(
            f"create {odd.operand.name} on {usual}, e.g. with device=x.device or register_buffer",
            edits=[(operand, created) for operand in elsewhere],
        )
    return Fix(
        f"use .to({usual!r}) on the tensor, or move the module and its inputs to one device. Create tensors inside "
        "the module with device=x.device or register_buffer",
        edits=[(operand, moved) for operand in elsewhere],
    )


def mask_of_integers(facts: Facts) -> Suspect | None:
    """Judge a mask of integers, where True masks a key out: in a layer of torch, and in masked_fill."""
    mask: Operand | None = None
    if facts.base in LAYERS:
        mask = _mask_of_layer(facts)
        rule = "The layer expects a boolean mask (True masks a key out) or a floating one (added to the scores)."
    elif facts.base == "masked_fill" and "boolean mask" in facts.message and len(facts.operands) > 1:
        mask = facts.operands[1]
        rule = "masked_fill takes a boolean mask (True masks a key out)."
    if mask is None:
        return None
    return Suspect(
        "mask_dtype",
        f"{mask.name} is {mask.dtype}. {rule}",
        (
            Fix.editing(mask, _is_zero, f"{mask.name} == 0 if 0 means masked out"),
            Fix.editing(mask, _is_not_zero, f"{mask.name}.bool() if 1 does"),
        ),
    )


def _is_zero(mask: Tensor) -> Tensor:
    return mask == 0


def _is_not_zero(mask: Tensor) -> Tensor:
    return mask.bool()


def _mask_of_layer(facts: Facts) -> Operand | None:
    """Return the first mask of integers that a layer of torch is given; None without one."""
    padding, mask = facts.given("key_padding_mask"), facts.given("attn_mask")
    if padding is not None and has_integers(padding):
        return padding
    # A mask of keys in the place of a mask of queries and keys: its dtype is the smaller mistake.
    if mask is not None and has_integers(mask) and not is_mask_of_keys(facts, mask):
        return mask
    return None


def mask_of_another_dtype(facts: Facts) -> Suspect | None:
    """Judge a mask that has another dtype than the queries."""
    if not facts.mixes_dtypes:
        return None
    odd = _odd_one(facts, "dtype")
    mask = odd.operand
    if mask is not facts.given("attn_mask"):
        return None
    fixes: tuple[Fix, ...] = (_converted([mask], odd.usual),)
    if has_integers(mask):
        fixes = (
            Fix.editing(mask, _is_not_zero, f"{mask.name}.bool() if 1 keeps a key"),
            Fix.editing(mask, _is_zero, f"{mask.name} == 0 if 0 does"),
        )
    return Suspect(
        "mask_dtype",
        f"{mask.name} is {mask.dtype} and the queries are {odd.usual}. A mask must be boolean (True keeps a key) or "
        "have the dtype of the queries (added to the scores).",
        fixes,
    )


def integers_for_numbers(facts: Facts) -> Suspect | None:
    """Judge integers that are given to a layer for floating numbers: token ids without an embedding."""
    if not facts.mixes_dtypes:
        return None
    x = facts.given("input")
    if x is None or not has_integers(x):
        return None
    usual = _odd_one(facts, "dtype").usual
    fixes = []
    if facts.base == "linear":
        weight = facts.operands[1]
        embedded = of_shape((*x.shape, weight.shape[-1]), getattr(torch, usual))
        fixes.append(Fix.editing(x, embedded, "pass token ids through nn.Embedding first"))
    fixes.append(Fix.editing(x, to_dtype(usual), f"convert numbers with .to(torch.{usual})"))
    return Suspect(
        "mixed_dtypes",
        f"{x.name} is {x.dtype}: integers, as token ids are.",
        tuple(fixes),
    )


def mixed_dtypes(facts: Facts) -> Suspect | None:
    """Judge operands of several dtypes."""
    if not facts.mixes_dtypes:
        return None
    odd = _odd_one(facts, "dtype")
    what = f"{odd.operand.name} is {odd.operand.dtype}; the other tensors are {odd.usual}."
    return Suspect("mixed_dtypes", what, tuple(_to_one_dtype(facts, odd)))


def _to_one_dtype(facts: Facts, odd: _Odd) -> Iterator[Fix]:
    """Yield how to bring the operands to one dtype."""
    dtype = odd.operand.dtype
    yield _converted([operand for operand in facts.operands if operand.dtype == dtype], odd.usual)
    usual_ones = [operand for operand in facts.operands if operand.dtype == odd.usual]
    if all(operand.is_parameter for operand in usual_ones):
        yield Fix(
            f"convert the module with .to(torch.{dtype})",
            edits=[(operand, to_dtype(dtype)) for operand in usual_ones],
        )
    function = facts.call.function
    device = odd.operand.given.value.device.type
    if function is None:
        return

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device):
            return function(*args, **kwargs)

    yield Fix("run under torch.autocast", function=under_autocast)


def _converted(operands: Sequence[Operand], dtype: str) -> Fix:
    return Fix(
        f"use {operands[0].name}.to(torch.{dtype})",
        edits=[(operand, to_dtype(dtype)) for operand in operands],
    )


def has_integers(operand: Operand) -> bool:
    """Return whether an operand has whole numbers, as ids and some masks have."""
    return operand.dtype.startswith(("int", "uint"))


def _odd_one(facts: Facts, what: Literal["device", "dtype"]) -> _Odd:
    """Return the first operand that differs from the majority; parameters count twice.

    A tensor that is given several times counts once.
    """
    votes = Counter[str]()
    by_tensor = {operand.given.tensor.id: operand for operand in facts.operands}
    for operand in by_tensor.values():
        weight = 1
        if operand.is_parameter:
            weight = 2
        votes[getattr(operand, what)] += weight
    usual = max(votes, key=votes.__getitem__)
    odd = next(operand for operand in facts.operands if getattr(operand, what) != usual)
    return _Odd(odd, usual)
