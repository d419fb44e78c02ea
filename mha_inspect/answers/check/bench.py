"""Run a module again and again with one thing changed, from the same state, and see which outputs moved."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...naming.subject import Run, Subject
from ...record.arguments import tensors_in, with_copies
from ...targets.layout import batch_axis_in_words
from ...text import did_you_mean, message_of
from .evidence import Evidence, Outline, held, outlined, whole
from .intent import Intent
from .tokens import Flow

_NO_SOURCE = re.compile(r"mask|position|type_ids|bias|cache|past|cos|sin|freqs", re.IGNORECASE)
"""Arguments of these names hold no tokens."""
_AT_ONCE = 1 << 18
"""Numbers that are compared at once."""


class RaisedError(Exception):
    """The forward raised under a changed input."""


class NotPossibleError(Exception):
    """A check cannot be made here; the message says why."""


@dataclass(frozen=True)
class Source:
    """Arguments that hold the same tokens: their names, and where the batch and the positions are."""

    names: tuple[str, ...]
    value: Tensor
    batch: int | None
    """The dimension that counts sequences; None where there is none."""
    positions: int | None
    """The dimension that counts tokens; None for an image."""

    @property
    def length(self) -> int:
        """How many tokens there are in a row."""
        return 1 if self.positions is None else self.value.shape[self.positions]

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return 1 if self.batch is None else self.value.shape[self.batch]

    def at(self, row: int | slice, position: int | slice | Tensor) -> tuple[Any, ...]:
        """The index of one token, or of some."""
        index: list[Any] = [slice(None)] * self.value.dim()
        if self.batch is not None:
            index[self.batch] = row
        if self.positions is not None:
            index[self.positions] = position
        return tuple(index)


class Bench:
    """A module under test: its arguments by name, its base run, and how often it was run."""

    def __init__(
        self, own: Subject, intent: Intent, tick: Callable[[str], None] = lambda _: None, *, once: bool = False
    ) -> None:
        self.own = replace(own, seed=own.seed or 0, grad=False)
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
        self._raw: dict[int, Tensor] = {}
        self.found: set[str] = set()
        """Checks that have found something for sure."""
        self.asides: list[tuple[str, str]] = []
        """Parts of checks that could not be made, and why."""
        self._tick = tick
        try:
            self._bound: inspect.BoundArguments | None = inspect.signature(own.module.forward).bind(
                *own.args, **own.kwargs
            )
        except (TypeError, ValueError):
            self._bound = None
        self._state = own.state()
        self._attributes = _attributes_of(own.module)
        self._draw = torch.Generator().manual_seed(self.own.seed or 0)

    # -- arguments ----------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What the forward takes, by name."""
        try:
            return dict(inspect.signature(self.module.forward).parameters)
        except (TypeError, ValueError):
            return {}

    @cached_property
    def values(self) -> dict[str, Any]:
        """The arguments by name, those of **kwargs among them."""
        if self._bound is None:
            return {**{str(place): value for place, value in enumerate(self.own.args)}, **self.own.kwargs}
        found: dict[str, Any] = {}
        for name, value in self._bound.arguments.items():
            kind = self.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                found.update({f"{name}.{place}": item for place, item in enumerate(value)})
            else:
                found[name] = value
        return found

    def require(self, name: str) -> str:
        """The name of an argument of the forward.

        Raises `InputError` with those that there are.
        """
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self.parameters.values())
        if name in self.parameters or name in self.values or takes_any:
            return name
        there = ", ".join(self.parameters) or "none"
        raise InputError(
            f"{name} is no argument of {type(self.module).__name__}.forward, which takes {there}."
            f"{did_you_mean(name, self.parameters)}"
        )

    def arguments(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with changes by name, every tensor a copy that the module may write into."""
        if self._bound is None:
            args = tuple(changes.get(str(place), value) for place, value in enumerate(self.own.args))
            kwargs = {**self.own.kwargs, **{name: v for name, v in changes.items() if not name.isdigit()}}
            return with_copies((args, kwargs))
        args_list: list[Any] = []
        kwargs = {}
        left = dict(changes)
        for name, value in self._bound.arguments.items():
            kind = self.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args_list += [left.pop(f"{name}.{place}", item) for place, item in enumerate(value)]
            elif kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= {key: left.pop(key, item) for key, item in value.items()}
            elif kind is inspect.Parameter.KEYWORD_ONLY or kwargs or self._skips(name, len(args_list)):
                kwargs[name] = left.pop(name, value)
            else:
                args_list.append(left.pop(name, value))
        kwargs.update(left)
        return with_copies((tuple(args_list), kwargs))

    def _skips(self, name: str, place: int) -> bool:
        """Whether an argument before this one was not given, so that this one must go by name."""
        return list(self.parameters).index(name) != place

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The arguments with tokens, those that hold the same ones together, the one that the output follows first."""
        groups: list[tuple[list[str], Tensor]] = []
        for name, value in self.values.items():
            if not isinstance(value, Tensor) or not self._has_tokens(name, value, first=not groups):
                continue
            for names, other in groups:
                if other is value or (other.shape == value.shape and torch.equal(other, value)):
                    names.append(name)
                    break
            else:
                groups.append(([name], value))
        found = [self._source(tuple(names), value) for names, value in groups]
        return tuple(sorted(found, key=lambda source: not any(name.startswith("decoder") for name in source.names)))

    def _has_tokens(self, name: str, value: Tensor, *, first: bool) -> bool:
        told = (self.intent.padding, self.intent.cache)
        if name in told or _NO_SOURCE.search(name) or value.dim() < 2 or value.dtype == torch.bool:
            return False
        if value.is_floating_point():
            flat = self.values and next((v.dim() for v in self.values.values() if isinstance(v, Tensor)), 0) == 2
            return value.dim() > 2 or first or bool(flat)
        return not value.is_complex() and value.dim() == 2 and (first or "id" in name)

    def _source(self, names: tuple[str, ...], value: Tensor) -> Source:
        if value.dim() > 3:
            return Source(names, value, 0, None)
        if value.dim() == 2 and value.is_floating_point() and self.intent.batch_axis is None:
            # Features of tokens without a batch; or sequences of samples, of which something with features is made.
            return Source(names, value, None, 0) if self.output.dim() == 2 else Source(names, value, 0, 1)
        batch = self.batch_axis[0]
        return Source(names, value, batch, 1 - batch)

    @cached_property
    def batch_axis(self) -> tuple[int, str]:
        """Which dimension of the tokens counts sequences, and who says so; empty where nobody does."""
        if self.intent.batch_axis is not None:
            return self.intent.batch_axis, "declared"
        own = getattr(self.module, "batch_first", None)
        if isinstance(own, bool):
            return (0 if own else 1), "batch_first"
        told = batch_axis_in_words(self.module, self.values)
        if told is not None:
            return told
        if any(isinstance(v, Tensor) and v.dim() == 2 and "ids" in name for name, v in self.values.items()):
            return 0, "token ids"
        return 0, ""

    # -- runs ---------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put back what a run may change: generators, buffers, and what the modules hold by name."""
        self._state.restore()
        for part, attributes, buffers in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)

    def returned(self, changes: Mapping[str, Any] | None = None, *, seed: int | None = None, first: bool = True) -> Any:
        """What a run with changed arguments returns, from the state before the base run.

        Where it is not the `first` it goes on from the state that the last run has left.

        Raises `RaisedError` where the forward raises.
        """
        own = self.subject(changes, seed=seed, first=first)
        try:
            return own.plain()
        except Exception as error:  # whatever somebody's code may raise under an input that nobody asked for
            raise RaisedError(f"{type(error).__name__}: {message_of(error)}") from error

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
                made = held(self.subject(seed=(self.own.seed or 0) + 1, first=False), outline, stages=stages)
            except Exception as error:  # whatever somebody's code may raise when it is called twice
                self.raised_again = RaisedError(f"{type(error).__name__}: {message_of(error)}")
                made = None
            again = None if made is None else made.run.returned
            if made is not None and not _alike(again, returned):
                made = held(self.subject(), outline, stages=stages)
            if made is None:  # what does not do the same twice is held whole, from one run
                return whole(self.subject(), self._with_wider)
            self.outline = outline
            return replace(made, run=_returning(made.run, returned), again=again)
        finally:
            self.restore()

    def changed(self, changes: Mapping[str, Any]) -> Bench:
        """Return the same with other arguments, recorded.

        Raises `RaisedError` where the forward raises.
        """
        args, kwargs = self.arguments(changes)
        made = Bench(replace(self.own, args=args, kwargs=kwargs, without_ones=None), Intent(), self._tick)
        self.restore()
        try:
            evidence = held(made.subject(), self.outline) if self.outline is not None else None
            made.__dict__["evidence"] = evidence or made.evidence
        except Exception as error:  # whatever somebody's code may raise under a mask that nobody asked for
            raise RaisedError(f"{type(error).__name__}: {message_of(error)}") from error
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
        args, kwargs = self.arguments(changes or {})
        if first:
            self.restore()
        self.runs += 1
        self._tick(f"run {self.runs}")
        return replace(self.own, args=args, kwargs=kwargs, seed=self.own.seed if seed is None else seed, grad=grad)

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
        axes = [axis for axis in (source.batch, source.positions) if axis is not None]
        return out.dim() > max(axes) and all(out.shape[axis] == source.value.shape[axis] for axis in axes)

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
        apart = self.apart(output, self.output if base is None else base)
        limit = self.limit
        return torch.where(apart > limit, apart, torch.zeros_like(apart))

    def apart(self, output: Tensor, base: Tensor) -> Tensor:
        """The largest difference of each output token, `batch position`."""
        source = self.sources[0]
        axes = [axis for axis in (source.batch, source.positions) if axis is not None]
        if not self.follows:
            axes = [0]
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
    def reach(self) -> dict[int, Tensor]:
        """Position to what moves when the token there is another, in the first row: `batch position`.

        Raises `NotPossibleError` where no token can be changed, `RaisedError` where the forward raises then.
        """
        if not self.sources:
            raise NotPossibleError("no argument holds tokens that could be changed")
        source = self.sources[0]
        if source.positions is None:
            index = (0, slice(None), slice(0, 2), slice(0, 2))[: source.value.dim()]
            return {0: self.moved(self.run(self.other_tokens(source, index)))}
        found = {}
        for place in sorted({source.length // 2, source.length - 1}):
            output = self.run(self.other_tokens(source, source.at(0, place)))
            self._raw[place] = self.apart(output, self.output)
            found[place] = self.moved(output)
        return found

    def aside(self, check: str, reason: str) -> None:
        """Say that a part of a check could not be made."""
        self.asides.append((check, reason))

    def apart_of(self, place: int) -> Tensor:
        """What moves, by one bit or more, when the token at a place of `reach` is another: `batch position`."""
        return self._raw[place]

    def plain_output(self) -> Tensor:
        """The output of a run as it is, without a recording."""
        if "output" not in self.__dict__:
            self.__dict__["output"] = self.run()
        return self.output

    def remember(self) -> None:
        """Take what the modules hold now for the state from which runs begin."""
        self._attributes = _attributes_of(self.module)

    @contextmanager
    def as_evaluated(self) -> Iterator[None]:
        """Have the module in eval inside, and as it was afterwards."""
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        self.remember()
        try:
            yield
        finally:
            self.restore()
            for part, mode in modes:
                part.training = mode


def _attributes_of(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    """Each part of a module with its attributes and buffers by name."""
    return [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the tensors of numbers that a forward returned.

    Raises `NotPossibleError` where there is none.
    """
    made = [t.detach() for _, t in tensors_in(returned) if t.is_floating_point() and t.dim()]
    if not made and hasattr(returned, "to_tuple"):
        return outputs_of(returned.to_tuple())
    if not made:
        raise NotPossibleError("the forward returns no tensor of numbers")
    return made


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


def _returning(seen: Run, returned: Any) -> Run:
    """The same run with what it returned another time."""
    made = replace(seen, returned=returned)
    vars(made).update(graph=seen.graph, attentions=seen.attentions)
    return made


def _alike(left: Any, right: Any) -> bool:
    """Whether two runs returned the same, to the bit."""
    one, other = outputs_of(left)[0], outputs_of(right)[0]
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def modules_of(module: nn.Module, *kinds: type) -> bool:
    """Whether a module has parts of these kinds."""
    return any(isinstance(part, kinds) for part in module.modules())
