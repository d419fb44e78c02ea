"""Run a module again and again with one thing changed, from the same state, and see which outputs moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...naming.subject import Run, Subject
from ...record.arguments import dense, tensors_in
from ...reports.check import Finding
from ...text import message_of
from .evidence import Evidence, Outline, held, kinds, of_same_ops, outlined, whole
from .intent import Intent
from .sight import Sight, sights_of
from .sources import Arguments, Source, sources_of
from .tokens import Flow, LostError, Tokens

_AT_ONCE = 1 << 18
"""Numbers that are compared at once."""


LOOSE = 100.0
"""Results at other sizes are rounded otherwise: so many times what counts at the same sizes."""


class RaisedError(Exception):
    """The forward raised under a changed input."""

    @classmethod
    def of(cls, error: Exception) -> RaisedError:
        """Return it for what was raised."""
        return cls(f"{type(error).__name__}: {message_of(error)}")


class NotPossibleError(Exception):
    """A check cannot be made here; the message says why."""


class Bench:
    """A module under test: its arguments by name, its base run, and how often it was run."""

    def __init__(
        self, own: Subject, intent: Intent, tick: Callable[[str], None] = lambda _: None, *, once: bool = False
    ) -> None:
        self.seed = own.seed or 0
        self.own = replace(own, seed=self.seed, grad=False)
        self.module, self.intent = own.module, intent
        self.once = once
        """Whether it is run once alone."""
        given = tensors_in((own.args, own.kwargs))
        self.on_meta = any(tensor.is_meta for tensor in (*own.module.parameters(), *(t for _, t in given)))
        """Whether there are shapes alone, and no numbers."""
        self.runs = 0
        self.outline: Outline | None = None
        """The base run without its tensors, where it does the same twice."""
        self.raised_again: RaisedError | None = None
        """What the forward raised when it was called a second time."""
        self.found: set[str] = set()
        """Checks that have found something for sure."""
        self.asides: dict[str, list[str]] = defaultdict(list)
        """Check to why parts of it could not be made."""
        self.tick = tick
        self.given = Arguments(own)
        self.values = self.given.values
        """The arguments by name."""
        self._state = own.state()
        self._draw = torch.Generator().manual_seed(self.seed)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The arguments with tokens, the one that the output follows first."""
        return sources_of(self.module, self.values, self.intent, lambda: self.output.dim())

    @cached_property
    def sights(self) -> tuple[Sight, ...]:
        """What the queries of each attention see in the base run."""
        return sights_of(self.seen)

    def restore(self) -> None:
        """Put back what a run may change."""
        self._state.restore()

    def returned(self, changes: Mapping[str, Any] | None = None, *, seed: int | None = None, first: bool = True) -> Any:
        """What a run with changed arguments returns, from the state before the base run.

        Where it is not the `first` it goes on from the state that the last run has left.

        Raises `RaisedError` where the forward raises.
        """
        own = self.subject(changes, seed=seed, first=first)
        try:
            return own.plain()
        except Exception as error:  # whatever somebody's code may raise under an input that nobody asked for
            raise RaisedError.of(error) from error

    def run(self, changes: Mapping[str, Any] | None = None, *, seed: int | None = None) -> Tensor:
        """The output of a run with changed arguments; raises as `returned` does."""
        return self.output_of(self.returned(changes, seed=seed))

    @cached_property
    def evidence(self) -> Evidence:
        """The recorded base run, with what checks read of its tensors."""
        first = self.subject()
        self.after = first.args, first.kwargs
        try:
            if self.on_meta:
                return Evidence(self._with_wider(first.recorded()))
            if self.once:
                return whole(first, self._with_wider)
            outline = outlined(first)
            outline = replace(outline, run=self._with_wider(outline.run))
            if not outline.run.attentions:
                return Evidence(outline.run)
            stages, returned = self.intent.reference is not None, outline.run.returned
            try:
                made = held(self.subject(seed=self.seed + 1, first=False), outline, stages=stages)
            except Exception as error:  # whatever somebody's code may raise when it is called twice
                self.raised_again = RaisedError.of(error)
                made = None
            again = None if made is None else made.run.returned
            if made is not None and not _alike(again, returned):
                made = held(self.subject(), outline, stages=stages)
            if made is None:  # what does not do the same twice is held whole, from one run
                return whole(self.subject(), self._with_wider)
            self.outline = outline
            return replace(made, run=of_same_ops(made.run, returned=returned), again=again)
        finally:
            self.restore()

    def other(self, changes: Mapping[str, Any], intent: Intent) -> Bench:
        """Return the same with other arguments and another intent."""
        args, kwargs = self.given.of_call(changes)
        return Bench(replace(self.own, args=args, kwargs=kwargs, without_ones=None), intent, self.tick)

    def changed(self, changes: Mapping[str, Any]) -> Bench:
        """Return the same with other arguments, recorded.

        Raises `RaisedError` where the forward raises.
        """
        made = self.other(changes, Intent())
        self.restore()
        try:
            evidence = held(made.subject(), self.outline) if self.outline is not None else None
            made.evidence = evidence or made.evidence
        except Exception as error:  # whatever somebody's code may raise under a mask that nobody asked for
            raise RaisedError.of(error) from error
        finally:
            self.restore()
            self.runs += made.runs
        return made

    def subject(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        grad: bool = False,
        first: bool = True,
    ) -> Subject:
        """The subject, about to run: with changed arguments, which the forward may write into.

        The module is as it was before the base run; where this is not the `first`, as the last run has left it.
        """
        args, kwargs = self.given.of_call(changes or {})
        if first:
            self.restore()
        self.runs += 1
        self.tick(f"run {self.runs}")
        return replace(self.own, args=args, kwargs=kwargs, seed=self.seed if seed is None else seed, grad=grad)

    def _with_wider(self, seen: Run) -> Run:
        return replace(seen, wider=self.own.wider_run(seen)) if self.own.without_ones is not None else seen

    @property
    def seen(self) -> Run:
        """The recorded base run."""
        return self.evidence.run

    @cached_property
    def flow(self) -> Flow:
        """Computes what was recorded again."""
        return Flow(self.seen, self.own)

    @property
    def mask_line(self) -> str:
        """The line of the first mask, or where there is none, of the first scores; empty without any."""
        masks = [found.masks[0].source for found, _ in self.seen.attentions if found.masks]
        scores = [found.score_product.op.source for found, _ in self.seen.attentions]
        return next(iter([*masks, *scores]), "")

    def release(self) -> None:
        """Let go of what was held of the base run."""
        self.__dict__.pop("flow", None)
        self.seen.recording.values.clear()

    @cached_property
    def output(self) -> Tensor:
        """The output of the base run."""
        return self.output_of(self.seen.returned)

    def output_of(self, returned: Any) -> Tensor:
        """The output that is looked at: the first one that has no number for each pair of rows, as of texts and images.

        Where batch and positions come out in the other order it is laid out as the input. Raises `NotPossibleError`
        where a forward returned no tensor of numbers.
        """
        made = outputs_of(returned)
        given = [value for value in self.values.values() if isinstance(value, Tensor) and value.dim() > 1]
        pairs = len(given) > 1 and not given[0].is_floating_point() and {*made[0].shape} == {given[0].shape[0]}
        output = next((output for output in made if output.dim() > 2), made[0]) if pairs else made[0]
        turned = bool(given) and output.dim() > 2 and output.shape[:2] == given[0].shape[1::-1] != output.shape[1::-1]
        return output.transpose(0, 1) if turned else output

    @cached_property
    def follows(self) -> bool:
        """Whether the output has a place for every token of the first source, in its layout."""
        if not self.sources or self.sources[0].positions is None:
            return False
        source, out = self.sources[0], self.output
        return out.dim() > max(source.axes) and all(out.shape[axis] == source.value.shape[axis] for axis in source.axes)

    def first_row(self) -> dict[str, Tensor]:
        """The arguments of the first row of the batch alone; empty where there is one row, or none is known."""
        source = self.sources[0] if self.sources else None
        if source is None or source.batch is None or source.rows < 2:
            return {}
        changes = {}
        for name, value in self.values.items():
            own = next((other for other in self.sources if name in other.names), None)
            if own is not None and own.batch is not None:
                changes[name] = value.narrow(own.batch, 0, 1)
            elif isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == source.rows != source.length:
                changes[name] = value[:1]
        return changes

    def other_tokens(self, source: Source, index: tuple[Any, ...], *, by: float = 2.0) -> dict[str, Tensor]:
        """The arguments with other tokens at an index: other numbers of the same kind, or other ids that occur."""
        changed = source.value.detach().clone()
        old = changed[index]
        if changed.is_floating_point():
            spread = float(source.value.detach().float().std()) or 1.0
            drawn = torch.randn(old.shape, generator=self._draw) * spread * by
            changed[index] = drawn.to(old)
        else:
            known = torch.unique(source.value)
            known = torch.cat([known, known.new_tensor([int(known.max()) - 1])]) if len(known) < 2 else known
            place = torch.searchsorted(known, old.contiguous())
            step = torch.randint(1, len(known), old.shape, generator=self._draw).to(old.device)
            changed[index] = known[(place + step) % len(known)]
        return dict.fromkeys(source.names, changed)

    def moved(self, output: Tensor, base: Tensor | None = None) -> Tensor:
        """How far each output token is from that of another run, `batch position`; 0 within rounding."""
        return self._beyond_rounding(self.apart(output, self.output if base is None else base))

    def _beyond_rounding(self, apart: Tensor) -> Tensor:
        return torch.where(apart > self.limit, apart, torch.zeros_like(apart))

    def apart(self, output: Tensor, base: Tensor) -> Tensor:
        """The largest difference of each output token, `batch position`."""
        axes = self.sources[0].axes if self.follows else [0]
        both = [value.movedim(axes, tuple(range(len(axes)))).flatten(len(axes)) for value in (output, base)]
        if output.dim() == len(axes):
            both = [value[..., None] for value in both]
        apart = difference(*both)
        return apart[:, None] if not self.follows else apart if len(axes) == 2 else apart[None]

    @cached_property
    def reach_of_others(self) -> dict[int, Tensor]:
        """Place of each further source to what moves when its middle token is another, in the first row."""
        found = {}
        for place, other in enumerate(self.sources[1:], 1):
            if other.batch is not None and other.positions is not None:
                changes = self.other_tokens(other, other.at(0, other.length // 2))
                found[place] = self.moved(self.run(changes))
        return found

    @cached_property
    def limit(self) -> float:
        """The largest difference that may be rounding."""
        out = self.output
        finite = out[out.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        return 16 * torch.finfo(out.dtype).eps * max(largest, 1e-6)

    @cached_property
    def bits_moved(self) -> dict[int, Tensor]:
        """Position to what moves, by one bit or more, when the token there is another: `batch position`.

        The token is one of the first row. Raises `NotPossibleError` where no token can be changed, `RaisedError` where
        the forward raises then. Empty where it is run once alone.
        """
        if self.once:
            return {}
        if not self.sources:
            raise NotPossibleError("no argument holds tokens that could be changed")
        source = self.sources[0]
        places = {place: source.at(0, place) for place in sorted({source.length // 2, source.length - 1})}
        if source.positions is None:
            places = {0: (0, slice(None), slice(0, 2), slice(0, 2))[: source.value.dim()]}
        outputs = {place: self.run(self.other_tokens(source, index)) for place, index in places.items()}
        return {place: self.apart(output, self.output) for place, output in outputs.items()}

    @cached_property
    def reach(self) -> dict[int, Tensor]:
        """The same as `bits_moved`, 0 within rounding."""
        return {place: self._beyond_rounding(apart) for place, apart in self.bits_moved.items()}

    @contextmanager
    def changed_by(self, change: Callable[[nn.Module], object]) -> Iterator[None]:
        """Have runs begin with the module changed inside, and with it as it was afterwards."""
        self.restore()
        before = self._state
        try:
            change(self.module)
            self._state = self.own.state()
            yield
        finally:
            self._state = before
            self.restore()


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the tensors of numbers that a forward returned, a loss and other single numbers last, as `[1]`.

    Raises `NotPossibleError` where there is none.
    """
    made = [_numbers(dense(tensor.detach())) for _, tensor in tensors_in(returned)]
    made = sorted((t for t in made if t.is_floating_point() and t.numel()), key=lambda t: not t.dim())
    if not made and hasattr(returned, "to_tuple"):
        return outputs_of(returned.to_tuple())
    if not made:
        raise NotPossibleError("the forward returns no tensor of numbers")
    return [tensor if tensor.dim() else tensor.reshape(1) for tensor in made]


def _numbers(tensor: Tensor) -> Tensor:
    """Real numbers that can be compared: a complex one is two, and those of a byte are widened."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def difference(left: Tensor, right: Tensor) -> Tensor:
    """The largest difference of each row along the last dimension, in float64.

    NaN beside NaN and an infinity beside the same one are none. Raises `RaisedError` where the shapes are not the same.
    """
    if left.shape != right.shape:
        raise RaisedError(f"the output has another shape then: {list(left.shape)}, not {list(right.shape)}")
    width = left.shape[-1] if left.dim() else 1
    rows = left.detach().reshape(-1, width), right.detach().reshape(-1, width)
    step = max(_AT_ONCE // max(width, 1), 1)
    parts = [_differences(*(every[at : at + step] for every in rows)) for at in range(0, max(len(rows[0]), 1), step)]
    return torch.cat(parts).reshape(left.shape[:-1])


def _differences(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.double(), right.double()
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf")).masked_fill_(equal, 0.0)
    return apart.amax(-1) if apart.shape[-1] else apart.sum(-1)


def _alike(left: Any, right: Any) -> bool:
    """Whether two runs returned the same, to the bit; so are any two that returned no numbers."""
    try:
        one, other = outputs_of(left)[0], outputs_of(right)[0]
    except NotPossibleError:
        return True
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def each_kind(
    bench: Bench, judge: Callable[[Bench, Tokens], Iterator[Finding]], without: str = ""
) -> Iterator[Finding]:
    """Yield what a judge finds in each kind of attention, with its module, and how many attentions have it.

    A judge raises `LostError` where it cannot be told. Raises `NotPossibleError`, saying what is `without`, where it
    can be told of none; unless nothing is said of that.
    """
    is_told = not without
    for found, names, count in kinds(bench.seen):
        try:
            findings = list(judge(bench, Tokens(bench.flow, found, names)))
        except LostError:
            continue
        is_told = True
        more = f" The same in {count} attentions." if count > 1 else ""
        for finding in findings:
            yield replace(finding, module=found.module, evidence=finding.evidence + more)
    if not is_told:
        raise NotPossibleError(without)
