"""Find the argument for a mask of keys, `batch key`, that was passed as a mask of queries and keys, and its meaning.

nn.TransformerDecoder has `tgt_mask` and `tgt_key_padding_mask`; in the latter True masks a key out. The attention_mask
of a tokenizer has 1 for tokens, and 0 for the padding behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .facts import Facts, Operand, Passed
from .tried import Fix

_PADDING = "key_padding_mask"
Meaning = Literal["keeps", "masks", "either"]


@dataclass(frozen=True, eq=False)
class _PassedMask:
    """A mask as the user's line passes it."""

    argument: str
    """The argument of the module that the line calls; empty if unknown."""
    passed: Passed


@dataclass(frozen=True)
class _Spelling:
    """How to write a mask of the user in source code."""

    name: str
    unchanged: str
    """As a padding mask with the same meaning: `mask.bool()`."""
    inverted: str
    """As a padding mask with the other meaning: `~mask`."""
    true: str
    """Its entry that is not 0: `True` or `1`."""


def as_padding(facts: Facts, mask: Operand) -> Fix:
    """Return the fix to pass a mask of keys, `batch key`, as the padding mask, with True for padding."""
    masking = _passed_mask(facts, mask)
    argument = _padding_argument(facts, masking.argument)
    value = masking.passed.value
    spelling = _spelling_of(masking.passed)
    meaning = _meaning(value)
    if meaning == "masks":
        return Fix(
            f"pass it as {argument}={spelling.unchanged}",
            settings={"attn_mask": None, _PADDING: _boolean(value)},
        )
    if meaning == "either":
        way = _either_way(argument, spelling)
    else:
        keeps = f"{spelling.true} keeps a key in {spelling.name}"
        way = f"pass {argument}={spelling.inverted}: {keeps}, and True masks a key out in {argument}"
    return Fix(
        way,
        settings={"attn_mask": None, _PADDING: value == 0},
    )


def _either_way(argument: str, spelling: _Spelling) -> str:
    """Return how to pass a mask whose meaning its numbers do not show."""
    inverted = f"pass {argument}={spelling.inverted} if {spelling.true} keeps a key in {spelling.name}"
    return f"{inverted}, or {argument}={spelling.unchanged} if {spelling.true} masks it out"


def _spelling_of(passed: Passed) -> _Spelling:
    """Return how to write a mask in source code: booleans, zeros and ones, or numbers that are added to scores."""
    name = passed.name
    if passed.value.dtype == torch.bool:
        return _Spelling(name, unchanged=name, inverted=f"~{name}", true="True")
    unchanged = name
    if _is_of_two(passed.value):
        unchanged = f"{name}.bool()"
    return _Spelling(name, unchanged, inverted=f"({name} == 0)", true="1")


def _passed_mask(facts: Facts, mask: Operand) -> _PassedMask:
    """Return the argument of a mask, and the mask as the user's line passes it.

    Modules of torch convert a boolean mask inside, so the only one of its shape counts too.
    """
    alike = []
    for argument, passed in facts.passed.items():
        if passed.value is mask.given.value:
            return _PassedMask(argument, passed)
        if _is_of_pairs(argument) and passed.value.shape == mask.shape:
            alike.append(_PassedMask(argument, passed))
    if len(alike) == 1:
        return alike[0]
    return _PassedMask("", Passed(mask.name, mask.given.value))


def _is_of_pairs(argument: str) -> bool:
    """Return whether an argument is a mask of queries and keys by its name."""
    if argument.endswith(_PADDING):
        return False
    return argument.endswith("mask")


def _padding_argument(facts: Facts, mask_argument: str) -> str:
    """Return the padding mask among the arguments of the module that the user's line calls, for the same keys."""
    names = [name for name in facts.called if name.endswith(_PADDING)]
    if len(names) == 1:
        return names[0]
    side = mask_argument.removesuffix("mask")
    of_same_keys = f"{side}{_PADDING}"
    if of_same_keys in names:
        return of_same_keys
    return _PADDING


def _meaning(mask: Tensor) -> Meaning:
    """Return what 1 or True means in a mask, `batch key`: every item has a key that is not masked out.

    Without an item that has no padding, numbers are a tokenizer's if ones come first, and booleans may be of either
    kind. Masks of other numbers than zeros and ones are added to the scores.
    """
    if not _is_of_two(mask):
        return "masks"
    ones = mask == 1
    zeros = ~ones
    has_full_row = bool(ones.all(-1).any())
    has_empty_row = bool(zeros.all(-1).any())
    if has_full_row and not has_empty_row:
        return "keeps"
    if has_empty_row and not has_full_row:
        return "masks"
    if mask.dtype == torch.bool:
        return "either"
    never_rises = ones[:, 1:] <= ones[:, :-1]
    if bool(never_rises.all()):
        return "keeps"
    return "either"


def _is_of_two(mask: Tensor) -> bool:
    """Return whether a mask has only zeros and ones."""
    if mask.is_meta:
        return False
    are_of_two = (mask == 0) | (mask == 1)
    return bool(are_of_two.all())


def _boolean(mask: Tensor) -> Tensor:
    """Return a mask of zeros and ones as booleans, and one of other numbers unchanged."""
    if _is_of_two(mask):
        return mask.bool()
    return mask
