"""A mask of keys, `batch key`, that was passed as a mask of queries and keys, and the argument that it is for.

nn.TransformerDecoder has `tgt_mask` and `tgt_key_padding_mask`; in the latter True masks a key out. What True means in
the mask is the user's to say: in the attention_mask of a tokenizer 1 stands for tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .edit import PLAIN, Edit
from .facts import Facts, Operand, Passed

_PADDING = "key_padding_mask"


def as_padding(facts: Facts, mask: Operand, why: str) -> Iterator[Edit]:
    """Yield a mask of keys as the padding mask, with True for padding: unchanged, and the other way round."""
    argument, passed = _passed_mask(facts, mask)
    name, value = passed.name, passed.value
    padding = _padding_argument(facts, argument)
    is_boolean = value.dtype == torch.bool
    if not is_boolean and not is_of_two(value):
        # Its numbers are added to the scores, as those of the other mask are.
        yield _as_padding(why, f"pass it as {padding}={name}", value)
        return
    keeps, masks = (f"~{name}", name) if is_boolean else (f"({name} == 0)", f"{name}.bool()")
    true = "True" if is_boolean else "1"
    yield _as_padding(why, f"pass {padding}={keeps} if {true} keeps a key in {name}", value == 0)
    yield _as_padding(why, f"{padding}={masks} if {true} masks it out", value.bool())


def _as_padding(why: str, way: str, value: Tensor) -> Edit:
    return Edit("mask_rank", why, way=way, kwargs={"attn_mask": None, _PADDING: value})


def _passed_mask(facts: Facts, mask: Operand) -> tuple[str, Passed]:
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
    if len(alike) == 1:
        return alike[0]
    return "", Passed(mask.name, mask.given.value)


def _padding_argument(facts: Facts, mask_argument: str) -> str:
    """Return the padding mask among the arguments of the module that the user's line calls, for the same keys."""
    names = [name for name in facts.called if name.endswith(_PADDING)]
    if len(names) == 1:
        return names[0]
    of_same_keys = f"{mask_argument.removesuffix('mask')}{_PADDING}"
    return of_same_keys if of_same_keys in names else _PADDING


def is_of_two(mask: Tensor) -> bool:
    """Return whether a mask has only zeros and ones."""
    if not is_readable(mask):
        return False
    return bool(((mask == 0) | (mask == 1)).all())


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers to read here: not on the meta device, and not on several ranks."""
    return type(tensor) in PLAIN and not tensor.is_meta and not tensor.is_complex()
