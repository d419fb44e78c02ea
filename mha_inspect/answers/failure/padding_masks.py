"""Find the argument for a mask of keys, `batch key`, that was passed as a mask of queries and keys, and its meaning.

nn.TransformerDecoder has `tgt_mask` and `tgt_key_padding_mask`; in the latter True masks a key out. The attention_mask
of a tokenizer has 1 for tokens, and 0 for the padding behind them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .facts import Facts, Operand, Passed
from .tried import Fix

_PADDING = "key_padding_mask"
Meaning = Literal["keeps", "masks", "either"]


def as_padding(facts: Facts, mask: Operand) -> Fix:
    """Return the fix to pass a mask of keys, `batch key`, as the padding mask, with True for padding."""
    passed_as, passed = _passed(facts, mask)
    argument, value, name = _padding_argument(facts, passed_as), passed.value, passed.name
    inverted, true = f"~{name}", "True"
    as_it_is = name
    if value.dtype != torch.bool:
        inverted, true = f"({name} == 0)", "1"
        as_it_is = f"{name}.bool()" if _is_of_two(value) else name
    meaning = _meaning(value)
    if meaning == "masks":
        return Fix(f"pass it as {argument}={as_it_is}", settings={"attn_mask": None, _PADDING: _boolean(value)})
    way = f"pass {argument}={inverted}: {true} keeps a key in {name}, and True masks a key out in {argument}"
    if meaning == "either":
        keeps = f"pass {argument}={inverted} if {true} keeps a key in {name}"
        way = f"{keeps}, or {argument}={as_it_is} if {true} masks it out"
    return Fix(way, settings={"attn_mask": None, _PADDING: value == 0})


def _passed(facts: Facts, mask: Operand) -> tuple[str, Passed]:
    """Return the argument of a mask, and the mask as the user's line passes it.

    Modules of torch convert a boolean mask inside, so the only one of its shape counts too.
    """
    alike = []
    for argument, passed in facts.passed.items():
        if passed.value is mask.given.value:
            return argument, passed
        is_of_pairs = argument.endswith("mask") and not argument.endswith(_PADDING)
        if is_of_pairs and passed.value.shape == mask.shape:
            alike.append((argument, passed))
    return alike[0] if len(alike) == 1 else ("", Passed(mask.name, mask.given.value))


def _padding_argument(facts: Facts, passed_as: str) -> str:
    """Return the padding mask among the arguments of the module that the user's line calls, for the same keys."""
    names = [name for name in facts.called if name.endswith(_PADDING)]
    if len(names) == 1:
        return names[0]
    side = passed_as.removesuffix("mask")
    return next((name for name in names if name == f"{side}{_PADDING}"), _PADDING)


def _meaning(mask: Tensor) -> Meaning:
    """Return what 1 or True means in a mask, `batch key`: every item has a key that is not masked out.

    Without an item that has no padding, numbers are a tokenizer's if ones come first, and booleans may be of either
    kind. Masks of other numbers than zeros and ones are added to the scores.
    """
    if not _is_of_two(mask):
        return "masks"
    ones = mask == 1
    has_full_row, has_empty_row = bool(ones.all(-1).any()), bool((~ones).all(-1).any())
    if has_full_row != has_empty_row:
        return "keeps" if has_full_row else "masks"
    starts_with_ones = bool((ones[:, 1:] <= ones[:, :-1]).all())
    return "keeps" if starts_with_ones and mask.dtype != torch.bool else "either"


def _is_of_two(mask: Tensor) -> bool:
    """Return whether a mask has only zeros and ones."""
    return not mask.is_meta and bool(((mask == 0) | (mask == 1)).all())


def _boolean(mask: Tensor) -> Tensor:
    """Return a mask of zeros and ones as booleans, and one of other numbers unchanged."""
    return mask.bool() if _is_of_two(mask) else mask
