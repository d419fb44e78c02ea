"""Record the steps of a fused kernel again for a further call on tensors of the same layout, without running them.

Steps without numbers depend on the layout of the operands alone. The operations of the first call are noted again, on
the operands of the further call, with new tensors in the place of those that the steps made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .ops import Op, TensorRef
from .recorder import Entry
from .site import numbers_of_site
from .tensors import Look, Tensors


@dataclass(frozen=True)
class RecordedSteps:
    """The steps of one call of a kernel."""

    ops: tuple[Op, ...]
    """The steps, in order, and the links from the last steps to the results."""
    operands: tuple[TensorRef, ...]
    """The tensors in the arguments of the kernel, in order."""

    def again(
        self, tensors: Tensors, entry: Entry, place: tuple[str, str], results: Sequence[Sequence[Look]], start: int
    ) -> Iterator[Op]:
        """Yield the steps of another call, from the index `start` on.

        Args:
            tensors: the tensors of the recording.
            entry: the note of that call.
            place: its line and the path of its module.
            results: what each link returns.
            start: index of the first step.
        """
        _, args, kwargs, _, _, site, call, kernel, *_ = entry
        refs: dict[int, TensorRef] = {}
        storages: dict[int, Any] = {}
        for operand, look in zip(self.operands, looks_in([args, kwargs]), strict=True):
            refs[operand.id] = tensors.read(look)
            storages[operand.storage] = tensors.storage_of(look)
        further, forwards = iter(results), numbers_of_site(site)
        for index, op in enumerate(self.ops, start):
            inputs = tuple([refs[tensor.id] for tensor in op.inputs])
            args = inputs if op.args is op.inputs else _replaced(op.args, refs)
            if op.makes_result:
                outputs = tuple([tensors.write(look, index, inputs, False, True) for look in next(further)])
            else:
                for tensor in op.outputs:
                    if tensor.id not in refs:
                        refs[tensor.id] = tensors.add_like(tensor, storages, index)
                outputs = tuple([refs[tensor.id] for tensor in op.outputs])
            yield Op(
                index,
                op.name,
                args,
                op.kwargs,
                inputs,
                outputs,
                op.kind,
                op.pointwise,
                *place,
                call,
                kernel,
                forwards,
            )


def looks_in(value: Any) -> Iterator[Look]:
    """Yield the looks in noted arguments, in order."""
    if isinstance(value, tuple):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from looks_in(part)
    elif isinstance(value, dict):
        yield from looks_in([*value.values()])


def layout_of(value: Any, memory: dict[Any, int]) -> Any:
    """Return noted arguments, hashable, with the layout of each tensor; `memory` numbers the memory of tensors."""
    if isinstance(value, tuple):
        return memory.setdefault(value[0], len(memory)), value[1:]
    if isinstance(value, list):
        return tuple([layout_of(part, memory) for part in value])
    if isinstance(value, dict):
        return tuple([(name, layout_of(part, memory)) for name, part in value.items()])
    return type(value), value


def _replaced(value: Any, refs: dict[int, TensorRef]) -> Any:
    if type(value) is tuple:
        return tuple([_replaced(part, refs) for part in value])
    return refs[value.id] if type(value) is TensorRef else value
