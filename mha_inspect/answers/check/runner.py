"""Run a module again and again from one state: with other arguments, another seed, or changed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ...running.run import Run
from ...running.subject import Subject
from ...text import message_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a forward, by place and by name."""


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
