"""What checks go by: a module's recorded run, who sees whom in it, and how far the outputs of other runs are from its.

An `Evidence` stays as it is made. Every run begins from the same state of the module, unless it is asked to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...naming.named_run import NamedRun
from ...record.arguments import dense, tensors_in
from ...record.ops import Op, TensorRef
from ...running.subject import Run, Subject
from ...text import message_of
from .arguments import Arguments, Source, sources_of
from .intent import Intent
from .sight import SeenKeys, sights_of

OTHER_SIZES = 100.0
"""Results at other sizes are rounded otherwise: so many times what counts at the same sizes."""

T = TypeVar("T")


class NotPossibleError(Exception):
    """A check cannot be made here; the message says why, and `brief` in two words."""

    def __init__(self, reason: str, brief: str = "") -> None:
        super().__init__(reason)
        self.brief = brief


class UndeclaredError(NotPossibleError):
    """A check needs to know what is meant; `flag` is the option that says so."""

    def __init__(self, flag: str) -> None:
        super().__init__(f"add {flag} to check this", "declare them")


class RaisedError(NotPossibleError):
    """The forward raised under a changed input."""


class Runner:
    """Runs a module, counts how often, and begins each run from the same state."""

    def __init__(self, subject: Subject, tick: Callable[[str], None]) -> None:
        self.subject = replace(subject, seed=subject.seed or 0, grad=False)
        self.runs, self.tick, self._state = 0, tick, subject.state()

    def prepared(self, arguments: tuple[Any, ...], *, go_on: bool = False, more_seed: int = 0) -> Subject:
        """Return the subject with these arguments, about to run: the run is counted.

        The module is as it was at the start; or, to `go_on`, as the last run has left it.
        """
        if not go_on:
            self._state.restore()
        self.runs += 1
        self.tick(f"run {self.runs}")
        args, kwargs = arguments
        return replace(self.subject, args=args, kwargs=kwargs, seed=(self.subject.seed or 0) + more_seed)

    @contextmanager
    def changed_by(self, change: Callable[[nn.Module], object]) -> Iterator[None]:
        """Have runs begin with the module changed inside, and with it as it was afterwards."""
        before = self._state
        before.restore()
        try:
            change(self.subject.module)
            self._state = self.subject.state()
            yield
        finally:
            self._state = before
            before.restore()


@dataclass(frozen=True, eq=False)
class Evidence:
    """A module's recorded run, and what it is meant to do."""

    runner: Runner
    subject: Subject
    intent: Intent
    arguments: Arguments
    run: Run
    """Recorded with its tensors."""
    arguments_after: tuple[Any, ...]
    """The arguments, as the run has left them."""
    on_meta: bool
    """Whether there are shapes alone, and no numbers."""
    once: bool
    """Whether it is run once alone."""
    again: Any
    """What a second run returned, which went on from this one with another seed; None where there is none."""
    memory: dict[object, Any] = field(default_factory=dict)
    """What `remembered` functions made of this."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.arguments.values

    @cached_property
    def sights(self) -> tuple[SeenKeys, ...]:
        """What the queries of each attention see."""
        return sights_of(self.run)

    @cached_property
    def _leaves(self) -> dict[int, Tensor]:
        return self.subject.leaves(self.run.recording)

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the content of a recorded tensor, argument, parameter or buffer; None where it was not kept."""
        value: Tensor | None = self.run.recording.values.get(tensor.id, self._leaves.get(tensor.id))
        return None if value is None else value.detach()

    @property
    def writes(self) -> list[Op]:
        """The operations that wrote into a tensor."""
        return [op for op in self.run.recording.ops if op.kind == "write" and op.inputs]

    def line_of(self, tensor: TensorRef) -> str:
        """Return the line that made a recorded tensor; empty for what came from outside."""
        op = self.run.recording.producer(tensor)
        return "" if op is None else op.source

    @property
    def scores_line(self) -> str:
        """The line of the first scores."""
        return self.run.attentions[0][0].score_product.op.source

    @property
    def mask_line(self) -> str:
        """The line of the first mask, or where there is none, of the first scores."""
        return next((each.masks[0].source for each, _ in self.run.attentions if each.masks), self.scores_line)

    # -- other runs ---------------------------------------------------------------------------------------------------

    def returned(self, changes: Mapping[str, Any] | None = None, *, go_on: bool = False, more_seed: int = 0) -> Any:
        """Return what a run with changed arguments returns, prepared as `Runner.prepared` says.

        Raises `RaisedError` where the forward raises.
        """
        with _raised_is_told():
            arguments = self.arguments.of_call(changes or {})
            return self.runner.prepared(arguments, go_on=go_on, more_seed=more_seed).plain()

    def output_with(self, changes: Mapping[str, Any]) -> Tensor:
        """Return the output of a run with changed arguments; raises as `returned` does."""
        return self.output_of(self.returned(changes))

    def first_row(self) -> dict[str, Tensor]:
        """Return the arguments of the first row of the batch alone; empty where there is one row, or none is known."""
        changes: dict[str, Tensor] = {}
        source = next(iter(self.sources), None)
        if source is None or source.batch is None or source.rows < 2:
            return changes
        for name, value in self.values.items():
            same = next((other for other in self.sources if name in other.names), None)
            if same is not None and same.batch is not None:
                changes[name] = value.narrow(same.batch, 0, 1)
            elif isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == source.rows != source.length:
                changes[name] = value[:1]
        return changes

    def with_arguments(self, changes: Mapping[str, Any]) -> Evidence:
        """Return the same of another recorded run, with other arguments. Raises `RaisedError` where that raises."""
        args, kwargs = self.arguments.of_call(changes)
        with _raised_is_told():
            subject = replace(self.subject, args=args, kwargs=kwargs, without_ones=None)
            return evidence_of(self.runner, subject, self.intent, once=True, wider=self.run.wider)

    # -- outputs ------------------------------------------------------------------------------------------------------

    @cached_property
    def output(self) -> Tensor:
        """The output of the recorded run."""
        return self.output_of(self.run.returned)

    def output_of(self, returned: Any) -> Tensor:
        """Return the output to look at: the first without a number for each pair of rows, as of texts and images.

        Where batch and positions come out in the other order it is laid out as the input. Raises `NotPossibleError`
        where a forward returned no tensor of numbers.
        """
        outputs = _outputs(returned)
        given = [value for value in self.values.values() if isinstance(value, Tensor) and value.dim() > 1]
        pairs = len(given) > 1 and not given[0].is_floating_point() and {*outputs[0].shape} == {given[0].shape[0]}
        output = next((output for output in outputs if output.dim() > 2), outputs[0]) if pairs else outputs[0]
        turned = bool(given) and output.dim() > 2 and output.shape[:2] == given[0].shape[1::-1] != output.shape[1::-1]
        return output.transpose(0, 1) if turned else output

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The arguments with tokens, the one that the output follows first."""
        return sources_of(self.subject.module, self.values, self.intent, lambda: self.output.dim())

    @property
    def source(self) -> Source:
        """The first of them. Raises `NotPossibleError` where there is none."""
        if not self.sources:
            raise NotPossibleError("no argument holds tokens that could be changed")
        return self.sources[0]

    @cached_property
    def follows(self) -> bool:
        """Whether the output has a place for every token of the first source, in its layout."""
        if not self.sources or self.source.positions is None:
            return False
        axes, given, out = self.source.axes, self.source.value.shape, self.output.shape
        return len(out) > max(axes) and all(out[axis] == given[axis] for axis in axes)

    @cached_property
    def _rounding(self) -> float:
        """The largest difference that may be rounding."""
        finite = self.output[self.output.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        return 16 * torch.finfo(self.output.dtype).eps * max(largest, 1e-6)

    def moved(self, output: Tensor, base: Tensor | None = None, *, times: float = 1.0) -> Tensor:
        """Return how far each output token is from that of another run, `batch position`; 0 for what may be rounding.

        `times` is how often more than within the recorded run may be rounded; 0 has every bit count. NaN beside NaN
        is no difference, nor an infinity beside the same one. Raises `RaisedError` where the shapes are not the same.
        """
        base = self.output if base is None else base
        if output.shape != base.shape:
            raise RaisedError(f"the output has another shape then: {list(output.shape)}, not {list(base.shape)}")
        left, right = (side.float() if side.itemsize < 4 else side for side in (output, base))
        equal, infinite = (left == right) | (left.isnan() & right.isnan()), float("inf")
        apart = (left - right).abs_().nan_to_num_(nan=infinite, posinf=infinite).masked_fill_(equal, 0.0)
        axes = self.source.axes if self.follows else [0]
        apart = apart.movedim(axes, tuple(range(len(axes))))
        apart = apart.flatten(len(axes)).amax(-1) if apart.dim() > len(axes) else apart
        apart = apart.masked_fill(apart <= times * self._rounding, 0.0)
        return apart[:, None] if not self.follows else apart if len(axes) == 2 else apart[None]

    def apart(self, output: Tensor, base: Tensor | None = None, *, times: float = 1.0) -> float:
        """Return how far outputs are from each other at the most, as `moved` does."""
        return float(self.moved(output, base, times=times).max())

    # -- what tokens move ---------------------------------------------------------------------------------------------

    @cached_property
    def reach_in_bits(self) -> dict[int, Tensor]:
        """Position of a token of the first row to what moves when it is another, `batch position`, be it by one bit.

        Raises `NotPossibleError` where no token can be changed, or the forward raises then. Empty where the module is
        run once alone.
        """
        source, places = self.source, {self.source.length // 2, self.source.length - 1}
        outputs = {place: self.output_with(source.others(place)) for place in sorted(places) if not self.once}
        return {place: self.moved(output, times=0) for place, output in outputs.items()}

    @property
    def reach(self) -> dict[int, Tensor]:
        """The same, without what may be rounding."""
        return {place: moved.masked_fill(moved <= self._rounding, 0) for place, moved in self.reach_in_bits.items()}

    @cached_property
    def reach_of_others(self) -> dict[int, Tensor]:
        """Place of a further source to what moves when its middle token is another, in the first row."""
        further = {place: source for place, source in enumerate(self.sources) if place and len(source.axes) == 2}
        return {p: self.moved(self.output_with(source.others(source.length // 2))) for p, source in further.items()}


def evidence_of(
    runner: Runner, subject: Subject, intent: Intent, *, once: bool, wider: NamedRun | None = None
) -> Evidence:
    """Run a subject and record it; unless that is to be all, a second run tells whether it does the same twice.

    `wider` is a run of the same forward in which no size is one.
    """
    arguments = Arguments(subject)
    tensors = (tensor for _, tensor in tensors_in((subject.args, subject.kwargs)))
    meta = any(tensor.is_meta for tensor in (*subject.module.parameters(), *tensors))
    prepared = runner.prepared(arguments.of_call({}))
    run = prepared.recorded(keep=not meta)
    run = run.beside(wider or subject.wider_run(run))
    again = None
    with suppress(Exception):  # whatever somebody's code may raise in a second run
        if not once and not meta and run.attentions:
            again = runner.prepared(arguments.of_call({}), go_on=True, more_seed=1).plain()
    return Evidence(runner, subject, intent, arguments, run, (prepared.args, prepared.kwargs), meta, once, again)


@contextmanager
def _raised_is_told() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever somebody's code may raise under an input that nobody asked for
        raise RaisedError(f"{type(error).__name__}: {message_of(error)}") from error


def remembered(make: Callable[[Evidence], T]) -> Callable[[Evidence], T]:
    """Have a function of evidence called once for each; what it raises is not remembered."""

    @wraps(make)
    def once(evidence: Evidence) -> T:
        if make not in evidence.memory:
            evidence.memory[make] = make(evidence)
        result: T = evidence.memory[make]
        return result

    return once


def _outputs(returned: Any) -> list[Tensor]:
    """Return the tensors of numbers that a forward returned, a loss and other single numbers last, as `[1]`."""
    tensors = [dense(tensor.detach()) for _, tensor in tensors_in(returned)]
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors if tensor.numel()]
    tensors = sorted((t for t in tensors if t.is_floating_point()), key=lambda tensor: not tensor.dim())
    if not tensors and hasattr(returned, "to_tuple"):
        return _outputs(returned.to_tuple())
    if not tensors:
        raise NotPossibleError("the forward returns no tensor of numbers")
    # Of a byte there is next to nothing that can be computed.
    return [(t.float() if t.itemsize == 1 else t).reshape(t.shape or (1,)) for t in tensors]
