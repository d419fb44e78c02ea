"""Compute a tensor of a recording again, from what the run began with: the arguments, the buffers, the parameters.

A mask is made of little (a range, a comparison, a buffer), and a recording holds no content: to know what a mask bars,
the few operations that made it are run once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..record.arguments import tensors_in
from ..record.ops import Op, Recording, TensorRef

_LONGEST = 2000
"""Operations after which it gives up: what takes so many is no mask."""


_LONGEST_CHOICE = 500
"""The same where products are among them."""
_WORK = 1 << 27
"""Multiplications up to which products are run again: which keys are open may be chosen by scores."""


class CannotReplayError(Exception):
    """The tensor hangs on what cannot be computed again."""


def takes_shape_only(op: Op) -> bool:
    """Whether an operation makes its output in the shape of another tensor, whose content it does not read."""
    return op.base_name.endswith("_like") or op.base_name.startswith("new_")


class Replay:
    """Computes tensors of one recording again."""

    def __init__(self, recording: Recording, leaves: Mapping[int, torch.Tensor]) -> None:
        self._recording = recording
        self._leaves: dict[int, torch.Tensor] = {**recording.constants, **leaves, **recording.values}
        self._made: dict[int, torch.Tensor] = {}

    def value(self, tensor: TensorRef) -> torch.Tensor:
        """The content of a tensor.

        Raises `CannotReplayError` where it hangs on random numbers, on what is not known, or on products by which
        nothing is chosen, or which are much to compute.
        """
        if tensor.id in self._leaves:
            return self._leaves[tensor.id]
        if tensor.id not in self._made:
            try:
                with torch.no_grad():
                    self._made[tensor.id] = self._computed(tensor)
            except CannotReplayError:
                raise
            except Exception as error:  # whatever an operation that is called from outside may raise
                raise CannotReplayError(str(error)) from None
        return self._made[tensor.id]

    def _computed(self, tensor: TensorRef) -> torch.Tensor:
        """Run what makes a tensor, in its order; what is written into is copied before: a mask may be large."""
        needed = self._needed(tensor)
        written = {made.storage for op in needed if _may_write(op) for made in (*op.inputs, *op.outputs)}
        memory: dict[int, torch.Tensor] = {}
        known: dict[int, torch.Tensor] = {}

        def content(asked: TensorRef) -> torch.Tensor:
            if asked.id not in known and asked.storage in memory:  # what others wrote, seen in another way
                known[asked.id] = memory[asked.storage].as_strided(asked.shape, asked.stride, asked.offset)
            elif asked.id not in known:
                given = self._given(asked)
                given = given.clone(memory_format=torch.preserve_format) if asked.storage in written else given
                known[asked.id] = given
                if given.stride() == asked.stride and given.storage_offset() == asked.offset:
                    memory[asked.storage] = given
            return known[asked.id]

        for op in needed:
            for made, value in run_again(op, content):
                known[made.id] = value
                if value.stride() == made.stride and value.storage_offset() == made.offset:
                    memory.setdefault(made.storage, value)
        return content(tensor)

    def _given(self, tensor: TensorRef) -> torch.Tensor:
        if tensor.id in self._leaves:
            return self._leaves[tensor.id]
        number = self._recording.scalars.get(tensor.id)
        if number is not None:
            return torch.tensor(number, dtype=getattr(torch, tensor.dtype))
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))  # whose shape alone is taken

    def _needed(self, tensor: TensorRef) -> list[Op]:
        """The operations that make it, in their order."""
        needed: dict[int, Op] = {}
        queue, work = [tensor], 0
        while queue:
            current = queue.pop()
            if current.id in self._leaves or current.id in self._recording.scalars:
                continue
            op = self._recording.producer(current)
            if op is None and not current.numel:
                continue
            if op is None:
                raise CannotReplayError("it came from outside")
            if op.index in needed:
                continue
            if op.does("draws"):
                raise CannotReplayError(f"it hangs on {op.name}")
            needed[op.index] = op
            work += _work(op)
            if work > _WORK or len(needed) > (_LONGEST_CHOICE if work else _LONGEST):
                raise CannotReplayError("it takes too long")
            queue += () if takes_shape_only(op) else op.inputs
        if work and not any(map(_chooses, needed.values())):
            raise CannotReplayError("it hangs on a product")
        return [needed[index] for index in sorted(needed)]


def _work(op: Op) -> int:
    """About how many multiplications a product is; 0 for what is none."""
    if op.does("convolution"):
        return op.output.numel * (op.inputs[1].numel // max(op.inputs[1].shape[0], 1))
    if not op.does("product", "softmax"):
        return 0
    return op.output.numel * max((tensor.shape[-1] for tensor in op.inputs if tensor.shape), default=1)


def _chooses(op: Op) -> bool:
    """Whether an operation makes truths or places of what are numbers: `topk`, a comparison."""
    made = {tensor.dtype for tensor in op.outputs}
    return bool(made & {"bool", "int64"}) and any(tensor.dtype.startswith(("float", "bfloat")) for tensor in op.inputs)


def _may_write(op: Op) -> bool:
    """Whether an operation may write into memory that it was given."""
    return op.kind == "write" or op.base_name.endswith("_") or op.name.endswith("out")


def run_again(op: Op, content: Callable[[TensorRef], torch.Tensor]) -> list[tuple[TensorRef, torch.Tensor]]:
    """Run an operation of a recording once more; what came out, beside what it is in the recording.

    Raises `CannotReplayError` where it comes out in another shape.
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
        raise CannotReplayError("it came out in another shape")
    return list(zip(op.outputs, made, strict=True))
