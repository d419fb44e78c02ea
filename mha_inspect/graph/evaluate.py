"""Run one operation of a recording once more, on other content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..record.arguments import tensors_in
from ..record.ops import Op, TensorRef


def run_again(op: Op, content: Callable[[TensorRef], torch.Tensor]) -> list[tuple[TensorRef, torch.Tensor]]:
    """Run an operation of a recording once more; what came out, beside what it is in the recording.

    Raises `ValueError` where it comes out in another shape.
    """
    if op.makes_result:
        return [(op.output, content(op.inputs[0]))]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return content(value)
        if isinstance(value, tuple):
            return [argument(item) for item in value]
        if isinstance(value, str):
            if value.startswith("torch."):
                return getattr(torch, value.removeprefix("torch."))
            if value.split(":")[0] in ("cpu", "cuda", "mps", "meta", "xpu"):
                return torch.device(value)
        return value

    namespace, name, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    result = function(*map(argument, op.args), **{key: argument(value) for key, value in op.kwargs.items()})
    made = [tensor for _, tensor in tensors_in(result)]
    if [tuple(tensor.shape) for tensor in made] != [tensor.shape for tensor in op.outputs]:
        raise ValueError("it came out in another shape")
    return list(zip(op.outputs, made, strict=True))
