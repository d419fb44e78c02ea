"""A module under test: its arguments, its recorded base run, and how far the outputs of other runs are from its."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.named_run import NamedRun
from ...record.arguments import tensors_in
from ...reports.check import Finding
from ...running.run import Run
from ...running.subject import Subject
from .intent import Intent
from .runner import Call, NotPossibleError, RaisedError, Runner, difference, outputs_of
from .sight import SeenKeys, sights_of
from .sources import Arguments, Source, sources_of
from .tokens import Flow, LostError, Tokens

LOOSE = 100.0
"""Results at other sizes are rounded otherwise: so many times what counts at the same sizes."""

T = TypeVar("T")
Judge = Callable[["Bench", Tokens], Iterator[Finding]]
"""Yields what is wrong with one attention."""


class BaseRun:
    """One recorded run. Its tensors are there until `release`."""

    def __init__(self, run: Run, subject: Subject, after: Call, again: Any = None) -> None:
        self.run = run
        self.after = after
        """The arguments, as the run has left them."""
        self.again = again
        """What a second run returned, which went on from this one and drew other numbers, or its `RaisedError`."""
        self.flow = Flow(run, subject)
        """Computes what was recorded again."""

    @cached_property
    def sights(self) -> tuple[SeenKeys, ...]:
        """What the queries of each attention see."""
        return sights_of(self.run)

    def release(self) -> None:
        """Let go of the tensors; what queries see stays."""
        _ = self.sights
        self.flow.values.clear()
        self.run.recording.values.clear()


class Bench:
    """A module under test with its arguments and what it is meant to do."""

    def __init__(
        self, runner: Runner, subject: Subject, intent: Intent, *, once: bool = False, wider: NamedRun | None = None
    ) -> None:
        self.runner, self.subject, self.intent = runner, subject, intent
        self.module = subject.module
        self.once = once
        """Whether it is run once alone."""
        self._wider = wider
        """A run of the same forward in which no size is one."""
        given = tensors_in((subject.args, subject.kwargs))
        self.on_meta = any(tensor.is_meta for tensor in (*self.module.parameters(), *(t for _, t in given)))
        """Whether there are shapes alone, and no numbers."""
        self.failed: set[str] = set()
        """Checks that have found something for sure."""
        self.given = Arguments(subject)
        self.values = self.given.values
        """The arguments by name."""
        self.draw = torch.Generator().manual_seed(runner.seed)
        """Draws other tokens."""
        self.memory: dict[object, Any] = {}
        """What `remembered` functions have made of this."""

    @cached_property
    def base(self) -> BaseRun:
        """The recorded base run; unless there is to be one alone, a second one tells whether it does the same twice."""
        runner = self.runner
        try:
            first = runner.prepared(self.given.of_call({}))
            run = first.recorded(keep=not self.on_meta)
            wider = self._wider or self.subject.wider_run(run)
            run = run.beside(wider)
            again: Any = None
            if not (self.once or self.on_meta) and run.attentions:
                try:
                    again = runner.run(self.given.of_call({}), seed=runner.seed + 1, first=False)
                except RaisedError as error:
                    again = error
            return BaseRun(run, self.subject, (first.args, first.kwargs), again)
        finally:
            runner.restore()

    def with_arguments(self, changes: Mapping[str, Any]) -> Bench:
        """Return the same with other arguments, run once. Raises `RaisedError` where the forward raises."""
        args, kwargs = self.given.of_call(changes)
        subject = replace(self.subject, args=args, kwargs=kwargs, without_ones=None)
        bench = Bench(self.runner, subject, self.intent, once=True, wider=self.recorded.wider)
        try:
            _ = bench.base
        except Exception as error:  # whatever somebody's code may raise under an input that nobody asked for
            raise RaisedError.of(error) from error
        return bench

    @property
    def recorded(self) -> Run:
        """The recorded base run."""
        return self.base.run

    @property
    def sights(self) -> tuple[SeenKeys, ...]:
        """What the queries of each attention see in the base run."""
        return self.base.sights

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The arguments with tokens, the one that the output follows first."""
        return sources_of(self.module, self.values, self.intent, lambda: self.output.dim())

    def returned(self, changes: Mapping[str, Any] | None = None, *, seed: int | None = None, first: bool = True) -> Any:
        """Return what a run with changed arguments returns; `Runner.run` says when, and what it raises."""
        return self.runner.run(self.given.of_call(changes or {}), seed=seed, first=first)

    def run(self, changes: Mapping[str, Any] | None = None, *, seed: int | None = None) -> Tensor:
        """Return the output of a run with changed arguments; raises as `returned` does."""
        return self.output_of(self.returned(changes, seed=seed))

    @property
    def mask_line(self) -> str:
        """The line of the first mask, or where there is none, of the first scores; empty without any."""
        masks = [attention.masks[0].source for attention, _ in self.recorded.attentions if attention.masks]
        return masks[0] if masks else self.scores_line

    @property
    def scores_line(self) -> str:
        """The line of the first scores; empty without any."""
        return next((attention.score_product.op.source for attention, _ in self.recorded.attentions), "")

    @cached_property
    def output(self) -> Tensor:
        """The output of the base run."""
        return self.output_of(self.recorded.returned)

    def output_of(self, returned: Any) -> Tensor:
        """Return the output to look at: the first without a number for each pair of rows, as of texts and images.

        Where batch and positions come out in the other order it is laid out as the input. Raises `NotPossibleError`
        where a forward returned no tensor of numbers.
        """
        outputs = outputs_of(returned)
        given = [value for value in self.values.values() if isinstance(value, Tensor) and value.dim() > 1]
        pairs = len(given) > 1 and not given[0].is_floating_point() and {*outputs[0].shape} == {given[0].shape[0]}
        output = next((output for output in outputs if output.dim() > 2), outputs[0]) if pairs else outputs[0]
        turned = bool(given) and output.dim() > 2 and output.shape[:2] == given[0].shape[1::-1] != output.shape[1::-1]
        return output.transpose(0, 1) if turned else output

    @cached_property
    def follows(self) -> bool:
        """Whether the output has a place for every token of the first source, in its layout."""
        if not self.sources or self.sources[0].positions is None:
            return False
        source, out = self.sources[0], self.output
        return out.dim() > max(source.axes) and all(out.shape[axis] == source.value.shape[axis] for axis in source.axes)

    def base_row(self, positions: slice) -> tuple[Any, ...]:
        """Return the index of some outputs of row 0."""
        return self.sources[0].at(0, positions)[: self.output.dim()]

    def first_row(self) -> dict[str, Tensor]:
        """Return the arguments of the first row of the batch alone; empty where there is one row, or none is known."""
        source = self.sources[0] if self.sources else None
        if source is None or source.batch is None or source.rows < 2:
            return {}
        changes = {}
        for name, value in self.values.items():
            same = next((other for other in self.sources if name in other.names), None)
            if same is not None and same.batch is not None:
                changes[name] = value.narrow(same.batch, 0, 1)
            elif isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == source.rows != source.length:
                changes[name] = value[:1]
        return changes

    @cached_property
    def limit(self) -> float:
        """The largest difference that may be rounding."""
        out = self.output
        finite = out[out.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        return 16 * torch.finfo(out.dtype).eps * max(largest, 1e-6)

    def apart(self, output: Tensor, base: Tensor) -> Tensor:
        """Return the largest difference of each output token, `batch position`."""
        axes = self.sources[0].axes if self.follows else [0]
        both = [value.movedim(axes, tuple(range(len(axes)))).flatten(len(axes)) for value in (output, base)]
        if output.dim() == len(axes):
            both = [value[..., None] for value in both]
        apart = difference(*both)
        return apart[:, None] if not self.follows else apart if len(axes) == 2 else apart[None]

    def moved(self, output: Tensor, base: Tensor | None = None) -> Tensor:
        """Return how far each output token is from that of another run, `batch position`; 0 within rounding."""
        return self.beyond_rounding(self.apart(output, self.output if base is None else base))

    def beyond_rounding(self, apart: Tensor) -> Tensor:
        """Return differences, with 0 for those that may be rounding."""
        return torch.where(apart > self.limit, apart, torch.zeros_like(apart))


def kinds(run: Run) -> list[tuple[Attention, AxisNames, int]]:
    """Return each kind of attention once, by its lines and shapes, with how many there are."""
    groups: dict[tuple[object, ...], list[tuple[Attention, AxisNames]]] = {}
    for attention, names in run.attentions:
        ops = (attention.score_product.op, attention.value_product.op)
        sign = (*((op.source, op.output.shape, op.name) for op in ops), attention.scale, len(attention.masks))
        groups.setdefault(sign, []).append((attention, names))
    return [(*group[0], len(group)) for group in groups.values()]


def remembered(make: Callable[[Bench], T]) -> Callable[[Bench], T]:
    """Have a function called once for each bench: what it returned, or the `NotPossibleError` that it raised, stays."""

    @wraps(make)
    def once(bench: Bench) -> T:
        if make not in bench.memory:
            try:
                bench.memory[make] = make(bench)
            except NotPossibleError as error:
                bench.memory[make] = error
        result = bench.memory[make]
        if isinstance(result, NotPossibleError):
            raise result
        return cast(T, result)

    return once


def each_kind(without: str = "") -> Callable[[Judge], Callable[[Bench], Iterator[Finding]]]:
    """Make a check of a function that judges one attention, and raises `LostError` where it cannot be told.

    The check yields what it finds in each kind of attention, with its module, and how many attentions have it. Raises
    `NotPossibleError`, saying what is `without`, where it can be told of none; unless nothing is said of that.
    """

    def of(judge: Judge) -> Callable[[Bench], Iterator[Finding]]:
        @wraps(judge)
        def check(bench: Bench) -> Iterator[Finding]:
            is_told = not without
            for attention, names, count in kinds(bench.recorded):
                try:
                    findings = list(judge(bench, Tokens(bench.base.flow, attention, names)))
                except LostError:
                    continue
                is_told = True
                more = f" The same in {count} attentions." if count > 1 else ""
                for finding in findings:
                    yield replace(finding, module=attention.module, evidence=finding.evidence + more)
            if not is_told:
                raise NotPossibleError(without)

        return check

    return of
