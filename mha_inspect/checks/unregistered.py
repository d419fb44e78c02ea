"""Find learned tensors that a run reads and the module does not know: layers in a plain list, tensors as attributes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ..record.arguments import parts_of
from ..reports.check import Finding
from ..text import listed, plural
from .evidence import Evidence

_OF_TORCH = ("_parameters", "_buffers", "_modules")
"""Attributes that have what a module registered."""


def unregistered(evidence: Evidence) -> Iterator[Finding]:
    """Yield the learned tensors that the run reads and that are no parameters of the module."""
    recording = evidence.run.recording
    read = {tensor.data_ptr(): number for number, tensor in recording.constants.items()}
    held: dict[int, str] = {}
    may_be_meant = True
    for name, value, tensor in _held_by(evidence.subject.module):
        if tensor.requires_grad and tensor.is_leaf and tensor.data_ptr() in read:
            held.setdefault(read[tensor.data_ptr()], name)
            # A single module in a list is a usual way to refer to one that another module has registered.
            may_be_meant &= isinstance(value, (list, tuple)) and len(value) == 1
    if not held:
        return
    first = min(op.index for number in held for op in recording.consumers[number])
    yield Finding(
        "parameters",
        f"{plural(len(held), 'learned tensor')} in {listed(list(dict.fromkeys(held.values())))} that the forward reads "
        f"{'is' if len(held) == 1 else 'are'} not registered: an optimizer does not get what parameters() leaves out.",
        "state_dict() and to() leave out the same.",
        sure=not may_be_meant,
        source=recording.ops[first].source,
        fix="Use nn.ModuleList or nn.ModuleDict for layers, nn.Parameter for a tensor.",
    )


def _held_by(module: nn.Module) -> Iterator[tuple[str, object, Tensor]]:
    """Yield the path and the value of each attribute of a module, and of those in it, with each tensor in it.

    What is registered is left out.
    """
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _OF_TORCH:
                continue
            for tensor in _tensors_of(value):
                yield f"{path}.{name}" if path else name, value, tensor


def _tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors of nested containers, and the parameters of the modules in them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    else:
        for _, part in parts_of(value):
            yield from _tensors_of(part)
