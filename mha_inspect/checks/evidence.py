"""The evidence of checks: a recorded run, who sees whom in it, and how much the outputs of other runs differ.

An `Evidence` is immutable. Every run starts from the same state of the module, except with `go_on`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..naming.inner_steps import InnerSteps, InnerStepsReader
from ..naming.named_run import NamedRun
from ..naming.pattern import dims_of
from ..record.arguments import tensors_in
from ..record.ops import Op, TensorRef
from ..record.ranks import needs_ranks
from ..running.subject import Run, Subject
from .alike import Kind, Named, groups_of
from .arguments import Arguments, Source, masks_by_item, sources_of
from .factors import first_key
from .intent import Intent
from .lab import Lab, NotPossibleError, RaisedError, Scene, errors_of_forward
from .outputs import apart, output_of_tokens
from .padded_tokens import dropped_tokens, hidden_tokens, marked_tokens
from .seen_keys import SeenKeys
from .sight import sights_of

OF_OUTPUTS = ("heads", "softmax", "masking", "finite", "batch", "repeat", "causal")
"""Checks whose faults also make outputs differ that should be equal."""
OTHER_SIZES = 100.0
"""Runs of other sizes round differently: their tolerance is this many times larger."""

_MOST_TOKENS = 12
"""Of more tokens, a few are changed one by one."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A recorded run of a module, and its declared intent."""

    lab: Lab
    subject: Subject
    intent: Intent
    arguments: Arguments
    run: Run
    """The recording, including tensors."""
    arguments_after: tuple[Any, ...]
    """The arguments after the run."""
    on_meta: bool
    """Whether tensors have shapes but no numbers."""
    once: bool
    """Whether only one run is allowed."""
    again: Any
    """The result of a second run, continued from this one with another seed; None without a second run."""
    masked_runs: list[Any] = field(default_factory=list)
    """The runs with a changed mask, once the check of padding needed them."""
    failed: set[str] = field(default_factory=set)
    """The checks that have a sure finding so far."""
    notes: list[str] = field(default_factory=list)
    """Sentences of checks about what is no fault."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.arguments.values

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """One attention for each code, with the number of those with equal code."""
        return tuple((*group[0], len(group)) for group in self._groups)

    @cached_property
    def _groups(self) -> tuple[tuple[Named, ...], ...]:
        """The attentions of each code."""
        return groups_of(self.run, self.content)

    @cached_property
    def sights(self) -> tuple[SeenKeys, ...]:
        """The visible keys of each attention; those of equal code have the same in one run."""
        groups = self._groups if self.once else ()
        return sights_of(self, partial(first_key, self), self.padded, groups)

    def sight_of(self, attention: Attention) -> SeenKeys | None:
        """Return the visible keys of an attention; None if its weights are unknown."""
        for sight in self.sights:
            if sight.attention is attention:
                return sight
        return None

    @cached_property
    def padded(self) -> Tensor | None:
        """Padding tokens, `batch position`: an argument marks them, and no other query sees them. None if none are."""
        if not self.sources:
            return None
        source = self.sources[0]
        hidden = hidden_tokens(self, source, self.values, self.intent)
        is_nested = any("nested" in op.base_name for op in self.run.recording.ops)
        if hidden is not None or self.on_meta or not is_nested or not self.follows or source.batch is None:
            return hidden
        output = self.output.movedim(source.axes, (0, 1)).cpu()
        return dropped_tokens(output, marked_tokens(source, self.values))

    @cached_property
    def leaves(self) -> dict[int, Tensor]:
        """The values of arguments, parameters and buffers, by tensor id."""
        return self.subject.leaves(self.run.recording)

    def inner_of(self, attention: Attention, names: AxisNames) -> InnerSteps:
        """Return the positions, norms and cache of an attention."""
        stays = any(attention is like for like, _ in self.run.distinct.run.attentions)
        reader = self._inner_of_distinct if stays else self._inner
        return reader.of(attention, names)

    @cached_property
    def _inner(self) -> InnerStepsReader:
        return InnerStepsReader(self.run, self.leaves)

    @cached_property
    def _inner_of_distinct(self) -> InnerStepsReader:
        """Reads attentions that are the same where equal layers are left out."""
        return InnerStepsReader(self.run.distinct.run, self.leaves)

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a recorded tensor, argument, parameter or buffer; None if it was not kept."""
        value: Tensor | None = self.run.recording.values.get(tensor.id, self.leaves.get(tensor.id))
        return None if value is None else value.detach()

    @property
    def writes(self) -> list[Op]:
        """The in-place operations."""
        return [op for op in self.run.recording.ops if op.kind == "write" and op.inputs]

    def line_of(self, tensor: TensorRef) -> str:
        """Return the line that made a recorded tensor; empty for arguments, parameters and buffers."""
        op = self.run.recording.producer(tensor)
        return "" if op is None else op.source

    @property
    def scores_line(self) -> str:
        """The line of the first scores; empty without attention."""
        return self.run.attentions[0][0].score_product.op.source if self.run.attentions else ""

    @property
    def mask_line(self) -> str:
        """The line of the first mask; without a mask, of the first scores."""
        for attention, _ in self.run.attentions:
            if attention.masks:
                return attention.masks[0].source
        return self.scores_line

    def require_passed(self, *checks: str) -> None:
        """Raise `NotPossibleError` if one of these checks failed: another finding would be its consequence."""
        for check in self.failed.intersection(checks):
            raise NotPossibleError(f"cannot be judged until {check} passes", f"until {check} passes")

    # -- other runs ---------------------------------------------------------------------------------------------------

    def returned(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        go_on: bool = False,
        more_seed: int = 0,
        instead: Mapping[int, Tensor] | None = None,
    ) -> Any:
        """Return the result of a run with changed arguments; the rest is as in `Scene`.

        Raises `RaisedError` if the forward raises.
        """
        return self.lab.returned(Scene(self.arguments.of_call(changes or {}), go_on, more_seed, instead or {}))

    def output_with(self, changes: Mapping[str, Any]) -> Tensor:
        """Return the output of a run with changed arguments. Raise `RaisedError` if the forward raises."""
        return self.output_of(self.returned(changes))

    def with_arguments(self, changes: Mapping[str, Any], *, go_on: bool = False) -> Evidence:
        """Return the evidence of another recorded run with changed arguments. Raise `RaisedError` if it raises."""
        args, kwargs = self.arguments.of_call(changes)
        with errors_of_forward():
            subject = replace(self.subject, args=args, kwargs=kwargs, without_ones=None)
            return evidence_of(self.lab, subject, self.intent, once=True, wider=self.run.wider, go_on=go_on)

    def piece(
        self, source: Source, start: int, stop: int, *, first: int = 0, positions: str | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a call with the tokens from `start` to `stop` only, as `Arguments.piece`."""
        return self.arguments.piece(source, start, stop, by_item=self.by_item, first=first, positions=positions)

    @cached_property
    def by_item(self) -> frozenset[str]:
        """Names of the masks that are `batch key`: a declared padding mask, and those that the dataflow shows."""
        return masks_by_item(self.run) | {self.intent.padding or ""}

    # -- outputs ------------------------------------------------------------------------------------------------------

    @cached_property
    def output(self) -> Tensor:
        """The output of the recorded run."""
        return self.output_of(self.run.returned)

    def output_of(self, returned: Any) -> Tensor:
        """Return the output with tokens in what a forward returned, as `output_of_tokens`."""
        inputs = [value for value in self.values.values() if isinstance(value, Tensor) and value.dim() > 1]
        return output_of_tokens(returned, inputs)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The arguments with tokens; the one that the output follows comes first."""
        sources = []
        for source in sources_of(self.subject, self.values, self.intent, self._is_one_sequence, self._embedded):
            if source.value.shape in self._shapes_by_channel:
                source = Source(source.names, source.value, 0, 2)
            sources.append(source)
        if len(sources) < 2:
            return tuple(sources)
        return tuple(self._followed_first(sources))

    def _followed_first(self, sources: list[Source]) -> list[Source]:
        """Return sources with the one first whose tokens the output has, if it is the only one."""
        try:
            followed = [source for source in sources if self._has_entries_of(source)]
        except NotPossibleError:  # no tensor was returned
            return sources
        if len(followed) != 1:
            return sources
        others = [source for source in sources if source is not followed[0]]
        return [followed[0], *others]

    @cached_property
    def _shapes_by_channel(self) -> set[tuple[int, ...]]:
        """The shapes of inputs in which channels come before positions."""
        return {shape for shape, dims in self.queries if dims[1:] == [["embed"], ["query"]]}

    @property
    def _embedded(self) -> frozenset[str]:
        """Names of the inputs that an embedding reads as ids."""
        recording = self.run.recording
        ids = set()
        for op in recording.ops:
            if op.base_name == "embedding" and len(op.inputs) > 1:
                ids.add(op.inputs[1].id)
        return frozenset(named.name for named in recording.inputs if named.tensor.id in ids)

    def _has_entries_of(self, source: Source) -> bool:
        """Return whether the output has an entry for every token of a source, in the same layout."""
        if source.positions is None or self.output.dim() <= max(source.axes):
            return False
        return all(self.output.shape[axis] == source.value.shape[axis] for axis in source.axes)

    @cached_property
    def queries(self) -> list[tuple[tuple[int, ...], list[list[str]]]]:
        """The shape and the axes of the query of each attention."""
        queries = []
        for attention, names in self.run.attentions:
            query = attention.stages.get("query")
            if query is not None:
                queries.append((query.shape, dims_of(names.of_stage("query"))))
        return queries

    def _is_one_sequence(self, matrix: Tensor) -> bool:
        """Return whether a matrix is tokens by features without a batch: a matrix comes out, and no item is a row."""
        if self.output.dim() != 2:
            return False
        for shape, dims in self.queries:
            if len(shape) > 2 and shape[0] == len(matrix) and dims[0] == ["batch"]:
                return False
        return True

    @property
    def source(self) -> Source:
        """The first argument with tokens. Raises `NotPossibleError` without one."""
        if not self.sources:
            raise NotPossibleError("no argument with tokens was found")
        return self.sources[0]

    @cached_property
    def follows(self) -> bool:
        """Whether the output has an entry for every token of the first source, in the same layout."""
        return bool(self.sources) and self._has_entries_of(self.source)

    @cached_property
    def _largest(self) -> float:
        """The largest finite number of the output, and at least 1e-6; 1 if none is finite."""
        finite = self.output[self.output.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 1.0
        return max(largest, 1e-6)

    def _rounding(self, times: float = 1.0) -> float:
        """Return the largest difference that rounding can explain: in no dtype is it a large part of the output."""
        most = 1 / 64 if times == 1 else 1 / 8
        relative = times * 16 * torch.finfo(self.output.dtype).eps
        return min(relative, most) * self._largest

    def differences(self, output: Tensor, base: Tensor | None = None, *, times: float = 1.0) -> Tensor:
        """Return the difference of each output token from another run, `batch position`; 0 within rounding.

        `times` multiplies the tolerance for rounding; 0 compares bit for bit. Two NaNs are equal, and so are two
        infinities of the same sign. Outputs of padded tokens are no outputs: their difference is 0. Raises
        `RaisedError` if the shapes differ.
        """
        apart = self.differences_with_padding(output, base, times=times)
        padded = self.padded
        if padded is None or not self.follows or padded.shape != apart.shape:
            return apart
        return apart.masked_fill(padded.to(apart.device), 0.0)

    def differences_with_padding(self, output: Tensor, base: Tensor | None = None, *, times: float = 1.0) -> Tensor:
        """Return what `differences` does, with the differences of padded tokens."""
        base = self.output if base is None else base
        if output.shape != base.shape:
            raise RaisedError(f"expected output shape {list(base.shape)}, got {list(output.shape)}")
        difference = apart(output, base)
        axes = self.source.axes if self.follows else [0]
        difference = difference.movedim(axes, tuple(range(len(axes))))
        if difference.dim() > len(axes):
            difference = difference.flatten(len(axes)).amax(-1)
        difference = difference.masked_fill(difference <= self._rounding(times), 0.0)
        if not self.follows:
            return difference[:, None]  # an entry for each batch item alone
        return difference if len(axes) == 2 else difference[None]

    def apart(self, output: Tensor, base: Tensor | None = None, *, times: float = 1.0) -> float:
        """Return the largest difference between two outputs, as `differences` measures it."""
        return float(self.differences(output, base, times=times).max())

    # -- effects of tokens --------------------------------------------------------------------------------------------

    @cached_property
    def reach_in_bits(self) -> dict[int, Tensor]:
        """Position of a token in the first batch item to the outputs that it changes, bit for bit, `batch position`.

        Empty if only one run is allowed. Raises `NotPossibleError` if no token can be changed, or the forward raises.
        """
        source = self.source
        first_item = self.output
        if self.follows and source.batch is not None:
            first_item = self.output.narrow(source.batch, 0, 1)
        if not first_item.isfinite().any():
            raise NotPossibleError("the output of the first batch item has no finite number")
        places = self._real_places()
        if not places:
            raise NotPossibleError("the first batch item is padding throughout")
        if self.once:
            return {}
        outputs = {}
        for place in self._places_to_change(places):
            outputs[place] = self.output_with(source.others(place))
        return {place: self.differences(output, times=0) for place, output in outputs.items()}

    def _places_to_change(self, places: list[int]) -> list[int]:
        """Return the positions of real tokens of the first batch item to change: all of them if they are few.

        Of many, some that another query sees: a token that a mask hides from every other changes nothing, whatever the
        code does.
        """
        if len(places) <= _MOST_TOKENS:
            return places
        seen = [place for place in places if place in self.seen_by_others] or places
        return sorted({seen[0], seen[len(seen) // 2], places[-1]})

    def _real_places(self) -> list[int]:
        """Return the positions of the first batch item that are no padding."""
        if self.padded is None:
            return list(range(self.source.length))
        places: list[int] = (~self.padded[0]).nonzero().flatten().tolist()
        return places

    @cached_property
    def seen_by_others(self) -> frozenset[int]:
        """Positions in the first batch item that another real query sees in some attention.

        All positions if no scores show it.
        """
        length = self.source.length
        sights = [sight for sight in self.sights if sight.queries == length <= sight.keys]
        if not sights:
            return frozenset(range(length))
        places: set[int] = set()
        for sight in sights:
            by_others = sight.seen[0] & (sight.distance != 0)  # query key
            if self.padded is not None:
                by_others = by_others[~self.padded[0]]
            is_seen = by_others.any(0)[sight.first :][:length]
            places.update(is_seen.nonzero().flatten().tolist())
        return frozenset(places)

    @property
    def reach(self) -> dict[int, Tensor]:
        """The same, without differences that rounding can explain."""
        least = self._rounding()
        return {place: apart.masked_fill(apart <= least, 0) for place, apart in self.reach_in_bits.items()}

    @cached_property
    def reach_of_others(self) -> dict[int, Tensor]:
        """Index of a further source to the outputs that its middle token in the first batch item changes."""
        outputs = {}
        for place, source in enumerate(self.sources):
            if place and len(source.axes) == 2:
                outputs[place] = self.output_with(source.others(source.length // 2))
        return {place: self.differences(output) for place, output in outputs.items()}


def evidence_of(
    lab: Lab, subject: Subject, intent: Intent, *, once: bool, wider: NamedRun | None = None, go_on: bool = False
) -> Evidence:
    """Run and record a subject; unless `once` is set or other ranks are needed, run it again to compare the results.

    `wider` is a run of the same forward without sizes of 1; `go_on` is that of `Scene`.
    """
    arguments = Arguments(subject)
    on_meta = _is_on_meta(subject)
    run, prepared = lab.recorded(Scene(arguments.of_call({}), go_on), keep=not on_meta)
    once = once or needs_ranks(prepared.module, run.recording)
    run = run.beside(wider or subject.wider_run(run))
    again = None
    if not once and not on_meta:
        with suppress(NotPossibleError):
            again = lab.returned(Scene(arguments.of_call({}), go_on=True, more_seed=1))
    return Evidence(
        lab=lab,
        subject=subject,
        intent=intent,
        arguments=arguments,
        run=run,
        arguments_after=(prepared.args, prepared.kwargs),
        on_meta=on_meta,
        once=once,
        again=again,
    )


def _is_on_meta(subject: Subject) -> bool:
    """Return whether a parameter or an argument has a shape but no numbers."""
    if any(parameter.is_meta for parameter in subject.module.parameters()):
        return True
    return any(tensor.is_meta for _, tensor in tensors_in((subject.args, subject.kwargs)))
