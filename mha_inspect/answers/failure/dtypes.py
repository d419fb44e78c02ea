"""Causes in the devices and dtypes of operands: first devices, then masks, then other dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .facts import Facts, Operand
from .reached import LAYERS
from .sequences import is_mask_of_keys
from .suspect import Suspect
from .tried import Fix, of_shape


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
    elsewhere = [o for o in facts.operands if o.device != usual]
    if odd.operand.device == "meta":
        zeros = [(o, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=usual)) for o in elsewhere]
        return Fix(f"create {odd.operand.name} on {usual}, e.g. with device=x.device or register_buffer", zeros)
    return Fix(
        f"use .to({usual!r}) on the tensor, or move the module and its inputs to one device. Create tensors inside "
        "the module with device=x.device or register_buffer",
        [(o, lambda tensor: tensor.to(usual)) for o in elsewhere],
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
    fixes = (
        Fix(f"{mask.name} == 0 if 0 means masked out", [(mask, lambda tensor: tensor == 0)]),
        Fix(f"{mask.name}.bool() if 1 does", [(mask, lambda tensor: tensor.bool())]),
    )
    return Suspect("mask_dtype", f"{mask.name} is {mask.dtype}. {rule}", fixes)


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
    mask, usual = odd.operand, odd.usual
    if mask is not facts.given("attn_mask"):
        return None
    fixes: tuple[Fix, ...] = (_converted([mask], usual),)
    if has_integers(mask):
        fixes = (
            Fix(f"{mask.name}.bool() if 1 keeps a key", [(mask, lambda tensor: tensor.bool())]),
            Fix(f"{mask.name} == 0 if 0 does", [(mask, lambda tensor: tensor == 0)]),
        )
    return Suspect(
        "mask_dtype",
        f"{mask.name} is {mask.dtype} and the queries are {usual}. A mask must be boolean (True keeps a key) or have "
        "the dtype of the queries (added to the scores).",
        fixes,
    )


def integers_for_numbers(facts: Facts) -> Suspect | None:
    """Judge integers that are given to a layer for floating numbers: token ids without an embedding."""
    x = facts.given("input")
    if not facts.mixes_dtypes or x is None or not has_integers(x):
        return None
    usual = _odd_one(facts, "dtype").usual
    kind: torch.dtype = getattr(torch, usual)
    fixes = [Fix(f"convert numbers with .to(torch.{usual})", [(x, lambda tensor: tensor.to(kind))])]
    if facts.base == "linear":
        embedded = of_shape((*x.shape, facts.operands[1].shape[-1]), kind)
        fixes.insert(0, Fix("pass token ids through nn.Embedding first", [(x, embedded)]))
    return Suspect("mixed_dtypes", f"{x.name} is {x.dtype}: integers, as token ids are.", tuple(fixes))


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
    yield _converted([o for o in facts.operands if o.dtype == dtype], odd.usual)
    usual_ones = [o for o in facts.operands if o.dtype == odd.usual]
    if all(o.is_parameter for o in usual_ones):
        kind: torch.dtype = getattr(torch, dtype)
        edits = [(o, lambda tensor: tensor.to(kind)) for o in usual_ones]
        yield Fix(f"convert the module with .to(torch.{dtype})", edits)
    function, device = facts.call.function, odd.operand.given.value.device.type
    if function is None:
        return

    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device):
            return function(*args, **kwargs)

    yield Fix("run under torch.autocast", function=under_autocast)


def _converted(operands: Sequence[Operand], dtype: str) -> Fix:
    kind: torch.dtype = getattr(torch, dtype)
    return Fix(f"use {operands[0].name}.to(torch.{dtype})", [(o, lambda tensor: tensor.to(kind)) for o in operands])


def has_integers(operand: Operand) -> bool:
    """Return whether an operand has whole numbers, as ids and some masks have."""
    return operand.dtype.startswith(("int", "uint"))


def _odd_one(facts: Facts, what: Literal["device", "dtype"]) -> _Odd:
    """Return the first operand that differs from the majority; parameters count twice.

    A tensor that is given several times counts once.
    """
    votes = Counter[str]()
    by_tensor = {o.given.tensor.id: o for o in facts.operands}
    for operand in by_tensor.values():
        votes[getattr(operand, what)] += 2 if operand.is_parameter else 1
    usual = max(votes, key=votes.__getitem__)
    odd = next(o for o in facts.operands if getattr(o, what) != usual)
    return _Odd(odd, usual)
