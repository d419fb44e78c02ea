"""`--input-shape x=2x10x512:float32`: the shape of one argument of a forward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from ..errors import SpecError
from ..text import shown

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")
_LARGEST = 2**40
_FORM = re.compile(r"(?:(?P<name>[^=:\s]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>[\w.]+))?")


@dataclass(frozen=True)
class InputShape:
    """What somebody said of one argument."""

    shape: tuple[int, ...]
    dtype: str | None
    """None: as the module's own parameters, or whole numbers where they are token ids."""


def parse_shapes(typed: list[str] | tuple[str, ...]) -> dict[str, InputShape]:
    """`NAME=SIZExSIZE:DTYPE` texts as a mapping; the name is empty where the text has none.

    Raises `SpecError` for a text of another form, a size of zero, or a dtype that is unknown.
    """
    shapes: dict[str, InputShape] = {}
    for text in typed:
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise SpecError(
                f"--input-shape {shown(text)} is not NAME=SIZExSIZE:DTYPE. "
                "Write it as in --input-shape x=2x10x512:float32."
            )
        sizes = tuple(int(size) if len(size) < 20 else _LARGEST + 1 for size in found["sizes"].split("x"))
        if min(sizes) < 1 or prod(sizes) > _LARGEST:
            raise SpecError(f"--input-shape {shown(text)} is no shape: every size is 1 or more, and all fit in memory.")
        dtype = (found["dtype"] or "").removeprefix("torch.") or None
        if dtype is not None and dtype not in DTYPES:
            raise SpecError(
                f"--input-shape {shown(text)}: {shown(dtype)} is not a dtype of inputs: {', '.join(DTYPES)}."
            )
        if (found["name"] or "") in shapes:
            raise SpecError(f"--input-shape gives {shown(found['name'] or 'one argument')} twice. Give each once.")
        shapes[found["name"] or ""] = InputShape(sizes, dtype)
    return shapes
