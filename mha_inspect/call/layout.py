"""Whether the batch is the first axis of a forward's inputs, by what the module and the words of its code say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

from torch import nn

_BATCH = ("b", "bs", "bsz", "batch", "batch_size", "bsize")
_UNPACKED = r"^\s*(\w+), *(\w+)(?:, *\w+)* *= *(\w+)\.(?:shape|size\(\)) *(?:#.*)?$"


def batch_axis_in_words(module: nn.Module, arguments: Collection[str]) -> tuple[int, str] | None:
    """Return the axis that the forward calls the batch where it takes a shape apart, and the words that say so.

    `T, B, C = x.shape` gives axis 1. None where it does not do so for any of these arguments as it comes in.
    """
    try:
        code = inspect.getsource(type(module).forward)
    except (OSError, TypeError, AttributeError):  # the class of what is scripted has no forward
        return None
    for line in re.finditer(_UNPACKED, code, re.MULTILINE):
        name = line[3]
        changed_before = rf"\b{name}\b[^=\n]*(?<![=!<>])=(?!=)"
        if name not in arguments or re.search(changed_before, code[code.find(":\n") : line.start()]):
            continue
        for axis, word in enumerate(line.groups()[:2]):
            if word.lower() in _BATCH:
                return axis, f"the forward unpacks {name}.shape as {line[1]}, {line[2]}"
    return None


def batch_first_of(module: nn.Module, arguments: Collection[str]) -> tuple[bool, str]:
    """Return whether the batch comes first in these arguments, and why: the end of a sentence, empty where it is plain.

    The module says it by `batch_first`, or its forward by `B, T, C = x.shape`; else the batch is first.
    """
    is_torchs = type(module).__module__.startswith("torch.nn.")
    for part in module.modules() if is_torchs else [module]:
        if isinstance(said := getattr(part, "batch_first", None), bool):
            return said, ""
    words = batch_axis_in_words(module, arguments)
    if words is not None:
        return words[0] == 0, "" if words[0] == 0 else f"{words[1]}. --batch-first lays it out the other way."
    inside = (type(part).__name__ for part in module.modules() if getattr(part, "batch_first", None) is False)
    if (kind := next(inside, None)) is None:
        return True, ""
    return True, f"the forward does not say, and the {kind} in it takes the sequence first. --seq-first turns it."
