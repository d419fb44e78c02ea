"""Weights of what is linear in its values, whatever makes them: linear attention, retention, graph attention.

Where nothing computes softmax(QKᵀ)V, the values are the last tensor of each token in which a later result is affine:
moved by `+d` and by `-d`, the result moves by as much to either side. Moved by `c` at all tokens, it moves by `c` times
the sum of its weights; moved at one token, by `c` times the weight of that token. All of it is replayed on one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..compare.replay import LostError, Recorded, again, content_of
from ..graph.dataflow import made_of
from ..graph.rerun import between
from ..record.ops import TensorRef
from ..reports.check import Fact, Finding

_MOST_TOKENS = 64
_MOST_VALUES = 12
"""The most tensors that are tried as values."""
_MOST_STEPS = 200
_ERROR = 1e-4
"""Sums of weights are as exact as this in float32."""


@dataclass(frozen=True)
class LinearWeights:
    """The values of a run, and the weights with which a result is made of them."""

    recorded: Recorded
    values: TensorRef
    result: TensorRef
    size: tuple[int, int]
    """Batch items and tokens."""

    @cached_property
    def _step(self) -> Tensor:
        """What is added to the features of the values: `feature`, none of it near 0."""
        drawn = torch.rand(self.values.shape[-1], generator=torch.Generator().manual_seed(0))
        return (1 + drawn).to(getattr(torch, self.values.dtype))

    @cached_property
    def _before(self) -> Tensor:
        """The values as they were: `batch token feature`."""
        return content_of(self.recorded, self.values).reshape(*self.size, -1)

    def moved(self, change: Tensor) -> Tensor:
        """Return by how much the result moves if this is added to the values: both `batch token feature`."""
        value = (self._before + change).reshape(self.values.shape)
        result = again(self.recorded, self.values, value, self.result)
        return (result - content_of(self.recorded, self.result)).reshape(*self.size, -1)

    @property
    def is_affine(self) -> bool:
        """Whether the result moves by as much to either side, in proportion, and each feature by itself."""
        if self.values.shape[-1] != self.result.shape[-1]:
            return False
        drawn = torch.randn(self._before.shape, generator=torch.Generator().manual_seed(1)).to(self._before)
        up, down = self.moved(drawn), self.moved(-drawn)
        size = float(up.abs().max())
        if size == 0 or float((up + down).abs().max()) > _ERROR * size:
            return False
        marked = self._step.clone()
        marked[1:] = 0
        others = self.moved(marked.expand_as(self._before))[..., 1:]
        return float(others.abs().max()) <= _ERROR * size if others.numel() else True

    @cached_property
    def sums(self) -> Tensor:
        """What the weights of an output sum to: `batch token feature`."""
        return self.moved(self._step.expand_as(self._before)) / self._step

    @cached_property
    def weights(self) -> Tensor:
        """The weight of each token in each output, the largest of all features: `batch query key`."""
        columns = []
        for token in range(self.size[1]):
            change = torch.zeros_like(self._before)
            change[:, token] = self._step
            weight = self.moved(change) / self._step
            place = weight.abs().argmax(-1, keepdim=True)
            columns.append(weight.gather(-1, place).squeeze(-1))
        return torch.stack(columns, -1)

    @property
    def mixes(self) -> bool:
        """Whether an output has weight on another token than its own."""
        others = self.weights.abs().clone()
        others.diagonal(dim1=-2, dim2=-1).zero_()
        return float(others.max()) > _ERROR

    @property
    def line(self) -> str:
        """The line that makes the values; empty for an argument."""
        op = self.recorded.run.recording.producer(self.values)
        return "" if op is None else op.source

    @property
    def where(self) -> str:
        """What is linear in the values: the output, or a result before it, which a norm may follow."""
        recording = self.recorded.run.recording
        op = recording.producer(self.result)
        is_output = any(named.tensor.storage == self.result.storage for named in recording.outputs)
        return "the output" if op is None or is_output else f"the result of {op.source}"

    @property
    def sum_to_one(self) -> bool:
        """Whether the weights of each output that has any sum to 1."""
        return float((self._of_any - 1).abs().max()) <= _ERROR

    @cached_property
    def _of_any(self) -> Tensor:
        """The sums of outputs that have weights, in a row: none are left where every key is masked out."""
        has_any = self.weights.abs().amax(-1) > _ERROR
        return self.sums[has_any]

    @property
    def total(self) -> str:
        """What the weights of an output sum to: `1`, `1, times a gate`, or `between 0.3 and 2`."""
        if self.sum_to_one:
            return "1"
        if self.is_gated:
            return "1, times a gate"
        low, high = float(self._of_any.min()), float(self._of_any.max())
        return f"{low:.3g}" if high - low <= _ERROR else f"between {low:.3g} and {high:.3g}"

    @cached_property
    def is_gated(self) -> bool:
        """Whether the sums are the numbers of a tensor of the run, which multiplies an average, e.g. a sigmoid."""
        sums = self.sums.flatten().sort().values
        for op in self.recorded.run.recording.ops:
            if not op.outputs or op.output.numel != sums.numel():
                continue
            gate = self.recorded.content(op.output)
            if gate is None or not gate.is_floating_point():
                continue
            if float((gate.flatten().sort().values - sums).abs().max()) <= _ERROR:
                return True
        return False

    def is_divided(self) -> bool:
        """Whether the result is divided by a sum over tokens of something that it is made of.

        It then stays as it is while all of that is doubled, and moves while one token of it is.
        """
        recording = self.recorded.run.recording
        of_values = made_of({self.values.id}, recording.ops)
        for op in between(recording, set(recording.input_ids), self.result):
            is_number = op.output.dtype.startswith("float")
            if op.kind == "view" or op.output.id in of_values or not is_number:
                continue
            with suppress(LostError):
                if self._is_divided_by_sum_of(op.output):
                    return True
        return False

    def _is_divided_by_sum_of(self, tensor: TensorRef) -> bool:
        content = content_of(self.recorded, tensor)
        if self._moves_with(tensor, content * 2):
            return False
        for dim in range(content.dim() - 1):
            if content.shape[dim] != self.size[1]:
                continue
            one_doubled = content.clone()
            one_doubled.select(dim, 0).mul_(2)
            if self._moves_with(tensor, one_doubled):
                return True
        return False

    def _moves_with(self, tensor: TensorRef, content: Tensor) -> bool:
        """Return whether the result is another one where this tensor has another content."""
        before = content_of(self.recorded, self.result)
        after = again(self.recorded, tensor, content, self.result)
        return float((after - before).abs().max()) > _ERROR * float(before.abs().max())


def linear_weights(recorded: Recorded) -> LinearWeights | None:
    """Return the values and weights of a run without attention; None if nothing in it is affine in tokens it mixes.

    Those of an average come first: in AFT a result is linear in `exp(k) * v`, and an average of `v`.
    """
    first = None
    for found in _linear_in_values(recorded):
        if found.sum_to_one or found.is_gated:
            return found
        first = first or found
    return first


def _linear_in_values(recorded: Recorded) -> Iterator[LinearWeights]:
    """Yield tensors of tokens in which a later result is affine and mixes tokens, the last values first."""
    size = _batch_and_tokens(recorded)
    recording = recorded.run.recording
    if size is None or size[1] > _MOST_TOKENS or not recording.outputs:
        return
    results = _of_tokens([named.tensor for named in recording.outputs[:1]], size)
    if not results:
        return
    steps = between(recording, set(recording.input_ids), results[0])
    if len(steps) > _MOST_STEPS:
        return
    tensors = _of_tokens([op.output for op in steps], size)
    for values in list(reversed(tensors))[:_MOST_VALUES]:
        for result in _ends(recorded, values, tensors):
            found = LinearWeights(recorded, values, result, size)
            with suppress(LostError):
                if found.is_affine and found.mixes:
                    yield found


def _batch_and_tokens(recorded: Recorded) -> tuple[int, int] | None:
    """Return the batch items and the tokens of the first input `batch token feature`, or `token feature`."""
    for named in recorded.run.recording.inputs:
        tensor = named.tensor
        if tensor.dtype == "float32" and len(tensor.shape) == 3:
            return tensor.shape[0], tensor.shape[1]
        if tensor.dtype == "float32" and len(tensor.shape) == 2:
            return 1, tensor.shape[0]
    return None


def _of_tokens(tensors: Sequence[TensorRef], size: tuple[int, int]) -> list[TensorRef]:
    """Return the tensors that are `batch token feature`, or `(batch token) feature`."""
    batch, tokens = size
    layouts = ((batch, tokens), (batch * tokens,))
    return [tensor for tensor in tensors if tensor.dtype == "float32" and tensor.shape[:-1] in layouts]


def _ends(recorded: Recorded, values: TensorRef, tensors: Sequence[TensorRef]) -> Iterator[TensorRef]:
    """Yield tensors that are computed from the values, as wide as these, the last one first."""
    computed = made_of({values.id}, recorded.run.recording.ops)
    for tensor in reversed(tensors):
        if tensor.id in computed and tensor.id != values.id and tensor.shape[-1] == values.shape[-1]:
            yield tensor


# -- what is said of them ---------------------------------------------------------------------------------------------


def facts_of(found: LinearWeights) -> Iterator[Fact]:
    """Yield what the weights sum to, and who sees whom."""
    line = found.line
    of = f"the values of {line}" if line else "its values"
    yield Fact("weights", f"{found.where} is linear in {of}, and its weights sum to {found.total}")
    seen = found.weights.abs() > _ERROR * float(found.weights.abs().max())
    if bool((seen == seen[:1]).all()):
        yield Fact("who sees whom", _words(seen[0]), _picture(seen[0]))


def _words(seen: Tensor) -> str:
    """Return who sees whom, of a bool `query key`."""
    if bool(seen.all()):
        return "every query sees every key"
    if torch.equal(seen, torch.ones_like(seen).tril()):
        return "causal"
    return "a custom pattern"


def _picture(seen: Tensor) -> tuple[str, ...]:
    rows = ["".join("■" if sees else "·" for sees in row) for row in seen[:16, :16].tolist()]
    return tuple(rows)


def not_divided_rightly(found: LinearWeights) -> Iterator[Finding]:
    """Yield that weights which are divided by a sum do not sum to 1; none if they do, or nothing is divided."""
    if found.sum_to_one or float(found.weights.min()) < -_ERROR:
        return
    if not found.is_divided() or found.is_gated:
        return
    yield Finding(
        "softmax",
        f"The weights are divided by a sum, and those of an output sum to {found.total}, not to 1.",
        "The same numbers were added to the values of all tokens: an average would move by just these numbers.",
        sure=False,
        source=_line_of_division(found),
        fix="Divide by the sum of the same weights, over the keys of each query.",
    )


def _line_of_division(found: LinearWeights) -> str:
    """Return the line of the last division on the way from the values to the result; empty without one."""
    recording = found.recorded.run.recording
    lines = [op.source for op in between(recording, {found.values.id}, found.result) if op.base_name.startswith("div")]
    return lines[-1] if lines else ""
