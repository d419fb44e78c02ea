"""Run a module in scenes: each run starts from the same state, with other arguments, seed or parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..record.ops import Recording
from ..running.subject import Run, State, Subject
from ..text import message_of


class NotPossibleError(Exception):
    """A check cannot be decided; the message says why, `brief` says it in two words, and `give` is the way out."""

    def __init__(self, reason: str, brief: str = "", *, give: str = "") -> None:
        super().__init__(f"{reason}. {give}" if give else reason)
        self.brief, self.give = brief, give


class UndeclaredError(NotPossibleError):
    """A check needs a declared intent; `flag` is the option that declares it."""

    def __init__(self, flag: str) -> None:
        super().__init__(f"add {flag} to check this", "declare them")


class RaisedError(NotPossibleError):
    """The forward raised on a changed input."""


@dataclass(frozen=True)
class Scene:
    """How a run is made."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """By position and by name."""
    go_on: bool = False
    """Whether it goes on from the state of the last run, instead of the first state."""
    more_seed: int = 0
    """What is added to the seed."""
    instead: Mapping[int, Tensor] = field(default_factory=dict)
    """Replacements of parameters, by their ids."""


class Lab:
    """Runs a module in scenes, and counts the runs."""

    def __init__(self, subject: Subject, tick: Callable[[str], None], state: State | None = None) -> None:
        self.subject = replace(subject, seed=subject.seed or 0, grad=False)
        self.runs = 0
        self.tick = tick
        self._state = subject.state() if state is None else state

    def prepared(self, scene: Scene) -> Subject:
        """Return the subject of a scene, ready to run, with the module in its state, and count the run."""
        if not scene.go_on:
            self._state.restore()
        self.runs += 1
        self.tick(f"run {self.runs}")
        args, kwargs = scene.arguments
        seed = (self.subject.seed or 0) + scene.more_seed
        return replace(self.subject, args=args, kwargs=kwargs, seed=seed, instead=scene.instead)

    def returned(self, scene: Scene) -> Any:
        """Return the result of a scene. Raise `RaisedError` if the forward raises."""
        with errors_of_forward():
            return self.prepared(scene).plain()

    def recorded(self, scene: Scene, *, keep: bool) -> tuple[Run, Subject]:
        """Return the recorded run of a scene, with its tensors if `keep` is set, and the subject that was run."""
        prepared = self.prepared(scene)
        run = prepared.recorded(keep=keep)
        _copy_written(run.recording)
        return run, prepared

    @contextmanager
    def changed_by(self, change: Callable[[nn.Module], object]) -> Iterator[None]:
        """Start runs inside the context from a changed module; restore the module afterwards."""
        before = self._state
        before.restore()
        try:
            change(self.subject.module)
            self._state = self.subject.state()
            yield
        finally:
            self._state = before
            before.restore()


@contextmanager
def errors_of_forward() -> Iterator[None]:
    """Raise `RaisedError` for whatever the forward raises inside the context."""
    try:
        yield
    except Exception as error:  # user code may raise anything on an input that we made up
        raise RaisedError(f"{type(error).__name__}: {message_of(error)}") from error


def _copy_written(recording: Recording) -> None:
    """Copy the kept tensors in memory that the module keeps and a run writes, e.g. a cache: other runs write it too."""
    written = _written_from_outside(recording)
    if not written:
        return
    for number in _in_storages(recording, written):
        if number in recording.values:
            recording.values[number] = recording.values[number].clone()


def _written_from_outside(recording: Recording) -> set[int]:
    """Return the storages that no operation of the run made and that one of them writes."""
    outside: set[int] = set()
    written: set[int] = set()
    for op in recording.ops:
        outside.update(tensor.storage for tensor in op.inputs if recording.producer(tensor) is None)
        if op.kind == "write" and op.outputs:
            written.add(op.output.storage)
    return outside & written


def _in_storages(recording: Recording, storages: set[int]) -> set[int]:
    """Return the ids of the tensors of all operations that lie in these storages."""
    ids: set[int] = set()
    for op in recording.ops:
        for tensor in (*op.inputs, *op.outputs):
            if tensor.storage in storages:
                ids.add(tensor.id)
    return ids
