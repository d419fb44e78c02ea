"""Check that the forward does not write into its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.rerun import between
from ...record.arguments import argument_names, tensors_in
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from ..evidence import Evidence
from ..factors import factors_of
from ..given import without_effect
from ..registry import rule


@rule(of_outputs="the forward changes none of its inputs, and each has an effect")
def inputs(evidence: Evidence) -> Iterator[Finding]:
    """The forward changes none of its inputs, and each has an effect.

    The arguments of the forward are copied before the run and compared with the copies after it. A
    forward that writes into an argument changes the caller's tensor, e.g. the residual that is added
    next, or a batch that is used again. In training, autograd raises, or the gradients are those of
    other numbers. Then every other tensor of the call, e.g. a mask, gets other values in a run of its
    own: if no output changes, bit for bit, it is passed for nothing.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            x += self.out((weights @ v).transpose(1, 2).flatten(2))
            return x
    ```

    ## Right

    ```diff
    -        x += self.out((weights @ v).transpose(1, 2).flatten(2))
    +        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
    ```
    """
    module = evidence.subject.module
    before = dict(tensors_in(argument_names(module, *evidence.arguments.of_call({}))))
    after = tensors_in(argument_names(module, *evidence.arguments_after))
    reported: set[int] = set()
    for name, tensor in after:
        if id(tensor) in reported or not _is_written(before[name], tensor):
            continue
        if name.split(".")[0] == evidence.intent.cache:
            continue
        reported.add(id(tensor))
        writes = _writes_into(evidence, name)
        if not _fill_a_cache(evidence, writes):
            yield _finding(name, before[name], tensor, writes)
    yield from without_effect(evidence)


def _finding(name: str, before: Tensor, after: Tensor, writes: Sequence[Op]) -> Finding:
    changed = int((after != before).sum())
    may_be_written = not after.is_floating_point() or "mask" in name or "cache" in name
    return Finding(
        "inputs",
        f"The forward writes into its argument {name}.",
        f"The run changes {changed} of its {after.numel()} numbers.",
        sure=not may_be_written,
        source=writes[0].source if writes else "",
        fix="Write into a copy: x = x + ... instead of x += ....",
    )


def _is_written(before: Tensor, after: Tensor) -> bool:
    """Return whether an argument has other numbers after the run. One that was resized is not compared."""
    return before.shape == after.shape and not torch.equal(after.nan_to_num(), before.nan_to_num())


def _writes_into(evidence: Evidence, name: str) -> list[Op]:
    """Return the in-place operations on the memory of an argument, in order."""
    storages = {named.tensor.storage for named in evidence.run.recording.inputs if named.name == name}
    return [op for op in evidence.writes if op.inputs[0].storage in storages]


def _fill_a_cache(evidence: Evidence, writes: Sequence[Op]) -> bool:
    """Return whether an attention projects what one of these operations writes, and reads it as keys or values."""
    for attention, _ in evidence.run.attentions:
        for side, factor in factors_of(attention).items():
            projected = attention.stages.get(f"{side[0]}_proj")
            if projected is None:
                continue
            for op in writes:
                if _goes_through(evidence, projected, op, factor):
                    return True
    return False


def _goes_through(evidence: Evidence, start: TensorRef, write: Op, end: TensorRef) -> bool:
    """Return whether something that an operation writes is computed from `start`, and `end` is computed from it."""
    recording = evidence.run.recording
    for tensor in write.inputs[1:]:
        comes_from_start = between(recording, {start.id}, tensor)
        if comes_from_start and between(recording, {tensor.id}, end):
            return True
    return False
