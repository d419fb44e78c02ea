"""Run a module again and again from one state, and tell how far apart the outputs of two runs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...record.arguments import dense, tensors_in
from ...running.run import Run
from ...running.subject import Subject
from ...text import message_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a forward, by place and by name."""


_AT_ONCE = 1 << 18
"""Numbers that are compared at once."""


class NotPossibleError(Exception):
    """A check cannot be made here; the message says why."""


class RaisedError(Exception):
    """The forward raised under a changed input."""

    @classmethod
    def of(cls, error: Exception) -> RaisedError:
        """Return it for what was raised."""
        return cls(f"{type(error).__name__}: {message_of(error)}")


class Runner:
    """Runs a module, counts how often, and begins each run from the same state."""

    def __init__(self, subject: Subject, tick: Callable[[str], None] = lambda _: None) -> None:
        self.seed = subject.seed or 0
        self.subject = replace(subject, seed=self.seed, grad=False)
        self.runs = 0
        self.tick = tick
        self._state = subject.state()

    def restore(self) -> None:
        """Put back what a run may change."""
        self._state.restore()

    def prepared(self, call: Call, *, seed: int | None = None, grad: bool = False, first: bool = True) -> Subject:
        """Return the subject with these arguments, about to run: the run is counted.

        The module is as it was at the start; where this is not the `first`, as the last run has left it.
        """
        if first:
            self.restore()
        self.runs += 1
        self.tick(f"run {self.runs}")
        args, kwargs = call
        return replace(self.subject, args=args, kwargs=kwargs, seed=self.seed if seed is None else seed, grad=grad)

    def run(self, call: Call, *, seed: int | None = None, first: bool = True) -> Any:
        """Return what a run gives, prepared as `prepared` says. Raises `RaisedError` where the forward raises."""
        subject = self.prepared(call, seed=seed, first=first)
        try:
            return subject.plain()
        except Exception as error:  # whatever somebody's code may raise under an input that nobody asked for
            raise RaisedError.of(error) from error

    def record(self, call: Call, *, keep: bool) -> Run:
        """Return a recorded run; raises what the forward raises."""
        return self.prepared(call).recorded(keep=keep)

    @contextmanager
    def changed_by(self, change: Callable[[nn.Module], object]) -> Iterator[None]:
        """Have runs begin with the module changed inside, and with it as it was afterwards."""
        self.restore()
        before = self._state
        try:
            change(self.subject.module)
            self._state = self.subject.state()
            yield
        finally:
            self._state = before
            self.restore()


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the tensors of numbers that a forward returned, a loss and other single numbers last, as `[1]`.

    Raises `NotPossibleError` where there is none.
    """
    tensors = [_numbers(dense(tensor.detach())) for _, tensor in tensors_in(returned)]
    tensors = sorted((t for t in tensors if t.is_floating_point() and t.numel()), key=lambda t: not t.dim())
    if not tensors and hasattr(returned, "to_tuple"):
        return outputs_of(returned.to_tuple())
    if not tensors:
        raise NotPossibleError("the forward returns no tensor of numbers")
    return [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]


def _numbers(tensor: Tensor) -> Tensor:
    """Return real numbers that can be compared: a complex one is two, and those of a byte are widened."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def difference(left: Tensor, right: Tensor) -> Tensor:
    """Return the largest difference of each row along the last dimension, in float64.

    NaN beside NaN and an infinity beside the same one are none. Raises `RaisedError` where the shapes are not the same.
    """
    if left.shape != right.shape:
        raise RaisedError(f"the output has another shape then: {list(left.shape)}, not {list(right.shape)}")
    width = left.shape[-1] if left.dim() else 1
    rows = left.detach().reshape(-1, width), right.detach().reshape(-1, width)
    step = max(_AT_ONCE // max(width, 1), 1)
    parts = [_differences(*(side[at : at + step] for side in rows)) for at in range(0, max(len(rows[0]), 1), step)]
    return torch.cat(parts).reshape(left.shape[:-1])


def _differences(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.double(), right.double()
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf")).masked_fill_(equal, 0.0)
    return apart.amax(-1) if apart.shape[-1] else apart.sum(-1)
