"""Compute a tensor of a recording again, from what the run began with: the arguments, the buffers, the parameters.

A mask is made of little (a range, a comparison, a buffer), and a recording holds no content: to know what a mask bars,
the few operations that made it are run once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..record.arguments import argument_names, tensors_in
from ..record.ops import Op, Recording, TensorRef
from ..record.subject import Subject

_LONGEST = 400
"""Operations after which it gives up: what takes so many is no mask."""


class CannotReplayError(Exception):
    """The tensor hangs on what cannot be computed again."""


def leaves_of(recording: Recording, own: Subject) -> dict[int, torch.Tensor]:
    """The content of what came from outside, by the ids of the recording."""
    given = dict(tensors_in(argument_names(own.module, own.args, own.kwargs)))
    held = {**dict(own.module.named_buffers()), **dict(own.module.named_parameters())}
    leaves = {
        named.tensor.id: held[named.name] for named in (*recording.buffers, *recording.parameters) if named.name in held
    }
    leaves |= {named.tensor.id: given[named.name] for named in recording.inputs if named.name in given}
    return {number: tensor.detach() for number, tensor in leaves.items()}


def takes_shape_only(op: Op) -> bool:
    """Whether an operation makes its output in the shape of another tensor, whose content it does not read."""
    return op.base_name.endswith("_like") or op.base_name.startswith("new_")


class Replay:
    """Computes tensors of one recording again, each operation once."""

    def __init__(self, recording: Recording, leaves: Mapping[int, torch.Tensor]) -> None:
        self._recording = recording
        self._known: dict[int, torch.Tensor] = {**leaves, **recording.values}

    def value(self, tensor: TensorRef) -> torch.Tensor:
        """The content of a tensor.

        Raises `CannotReplayError` where it hangs on a product, on random numbers, or on what is not known.
        """
        if tensor.id in self._known:
            return self._known[tensor.id]
        try:
            with torch.no_grad():
                for op in self._needed(tensor):
                    self._run(op)
        except CannotReplayError:
            raise
        except Exception as error:  # whatever an operation that is called from outside may raise
            raise CannotReplayError(str(error)) from None
        if tensor.id not in self._known:
            raise CannotReplayError("it was written piece by piece")
        return self._known[tensor.id]

    def _needed(self, tensor: TensorRef) -> list[Op]:
        """The operations that make it, in their order."""
        needed: dict[int, Op] = {}
        queue = [tensor]
        while queue:
            current = queue.pop()
            if current.id in self._known:
                continue
            op = self._recording.producer(current)
            if op is None:
                raise CannotReplayError("it came from outside")
            if op.index in needed:
                continue
            if op.does("product", "convolution", "softmax", "draws"):
                raise CannotReplayError(f"it hangs on {op.name}")
            needed[op.index] = op
            if len(needed) > _LONGEST:
                raise CannotReplayError("it takes too long")
            queue += () if takes_shape_only(op) else op.inputs
        return [needed[index] for index in sorted(needed)]

    def _run(self, op: Op) -> None:
        if all(tensor.id in self._known for tensor in op.outputs):
            return
        for tensor, made in run_again(op, self._content):
            self._known[tensor.id] = made

    def _content(self, tensor: TensorRef) -> torch.Tensor:
        if tensor.id not in self._known:  # of which the operation takes the shape alone
            return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        return self._known[tensor.id]


def run_again(op: Op, content: Callable[[TensorRef], torch.Tensor]) -> list[tuple[TensorRef, torch.Tensor]]:
    """Run an operation of a recording once more; what came out, beside what it is in the recording.

    Raises `CannotReplayError` where it comes out in another shape.
    """
    if op.makes_result:
        return [(op.output, content(op.inputs[0]))]
    writes = op.kind == "write"

    def argument(value: Any) -> Any:
        if isinstance(value, TensorRef):
            # What an operation writes into is written once, in the run: here it must stay as it was.
            return content(value).clone() if writes else content(value)
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
        raise CannotReplayError("it came out in another shape")
    return list(zip(op.outputs, made, strict=True))
