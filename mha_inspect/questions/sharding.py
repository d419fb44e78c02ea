"""Run a module that is cut by heads over several ranks, all in this process, and compare it with the whole module.

torch.distributed's simulation of ranks is private: `LocalTensorMode`, since torch 2.10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..compare.ranks import RunOfRanks, first_difference
from ..errors import ForwardError, InputError
from ..layers.spec import Show
from ..measure.ranks import Shard, rank_of, shards_of, with_copies, with_whole_shapes
from ..measure.run_report import drops_at_random, environment_of, layer_of, report
from ..naming.visibility import kinds_of
from ..record.arguments import copy_module, tensors_in
from ..record.ranks import by_rank, parameters_of
from ..record.rounding import distances, judge
from ..reports.trace import Proof, Rank, Trace
from ..running.subject import Run, Subject, run_and_record
from ..text import first_few, first_line
from .decode import rounding_of
from .shard_plan import Plan, Style, code_of, doubts_of, is_at, plan_of
from .simulated_ranks import cut, process_group, simulation, takes_cache
from .trace import traced


@dataclass(frozen=True, eq=False)
class _Request:
    """A module, and how it is to be cut."""

    subject: Subject
    show: Show
    ranks: int
    plan: Plan
    is_ours: bool
    """Whether the plan was made of the roles of the parameters."""

    @property
    def device(self) -> str:
        """The device of inputs and parameters: `cpu`, `cuda:0`, `meta`."""
        return environment_of(self.subject).device


@dataclass(frozen=True, eq=False)
class _Outcome:
    """A simulated run: the trace of rank 0, and each rank's results and kept tensors."""

    trace: Trace
    of_ranks: RunOfRanks
    returned: Mapping[str, list[Tensor]]
    """Each result by its name, for each rank."""
    keeps: bool
    """Whether the projections returned DTensors."""

    @property
    def run(self) -> Run:
        """The run, with the tensors of one rank."""
        return self.of_ranks.run


def sharded(subject: Subject, show: Show, ranks: int, plan: Plan | None = None) -> tuple[Trace, Run]:
    """Trace rank 0 of a module that is cut over `ranks`, and compare every rank's output with the whole module's.

    Without a `plan` it is made of the roles of the parameters. On device meta there are shapes and no comparison.

    Raises `InputError` if the module cannot be cut, the forward of a rank raises, or torch cannot simulate ranks.
    """
    subject, drawn = _without_equal_elements(subject)
    whole_trace, whole = traced(subject.fresh(), Show(), keep=True)
    is_ours = plan is None
    if plan is None:
        plan = plan_of(whole, subject.module, whole_trace.attentions, ranks)
    elif plan.styles:
        plan = replace(plan, doubts=doubts_of(plan.styles, whole, subject.module, ranks))
    else:
        plan = replace(plan, doubts=())
    request = _Request(subject, show, ranks, plan, is_ours)
    tried = _tried(request, whole)
    if tried.outcome is None or tried.proof is None:
        raise InputError(f"over {ranks} ranks {_why_not(plan, tried)}")
    outcome = tried.outcome
    proof = tried.proof
    if proof.agrees is False:
        proof = replace(proof, note=first_difference(subject, whole, outcome.of_ranks))
    trace = outcome.trace
    notes = [*trace.notes]
    if not plan.doubts and _scores(whole_trace) == _scores(trace):
        trace = _with_all_heads(trace, whole_trace)
        notes.append("Every rank computes all heads.")
    notes += _notes_on_plan(request, tried, whole)
    notes += [*drawn, *plan.doubts, *subject.notes]
    trace = replace(trace, proof=proof, notes=tuple(notes), plan=None, plan_code=None)
    if plan.styles:
        code = _code(subject, plan.styles, outcome)
        trace = replace(trace, plan=dict(plan.styles), plan_code=code)
    return trace, outcome.run


def _why_not(plan: Plan, tried: _Tried) -> str:
    """Return why no run of a plan came to its end: what is doubtful in the plan, or else what the runs raised."""
    if plan.doubts:
        return " ".join(plan.doubts)
    errors = dict.fromkeys(tried.errors)
    return f"{'; with DTensors '.join(errors)}."


def _notes_on_plan(request: _Request, tried: _Tried, whole: Run) -> Iterator[str]:
    """Yield that a user's plan runs only with DTensors, and which of its modules are not called."""
    if tried.errors and not request.is_ours:
        yield f"Only with DTensors, as in the code: without them {tried.errors[0]}."
    uncalled = _uncalled(request.plan, whole)
    if uncalled:
        yield f"The plan has {first_few(uncalled, 4)}, which the forward does not call."


@dataclass(frozen=True, eq=False)
class _Tried:
    """The runs of a plan, without DTensors and with them, as far as they were necessary."""

    outcome: _Outcome | None
    """The last run that did not raise; None if all raised."""
    proof: Proof | None
    """Its comparison with the whole module."""
    errors: list[str]
    """Why the others raised."""


def _tried(request: _Request, whole: Run) -> _Tried:
    """Run a plan until its results are those of the whole module."""
    outcome: _Outcome | None = None
    proof: Proof | None = None
    errors: list[str] = []
    wholes = {name: tensor.detach() for name, tensor in tensors_in(whole.returned)}
    for keeps in _ways_to_run(request.plan, is_ours=request.is_ours):
        try:
            outcome = _simulated(request, keeps=keeps)
        except _RankError as error:
            errors.append(str(error))
            continue
        proof = _proof(request.subject, wholes, outcome)
        if proof.agrees is not False:
            break
        # With DTensors torch would hide that a user's plan runs and is wrong; not that a result has a rank's part.
        has_part_of_rank = proof.max_abs_difference is None
        if not request.is_ours and not has_part_of_rank:
            break
    return _Tried(outcome, proof, errors)


def _ways_to_run(plan: Plan, *, is_ours: bool) -> tuple[bool, ...]:
    """Return whether to run a plan with DTensors: without them first, then with them, or one of both."""
    styles = plan.styles.values()
    # Only DTensors give each query head its own of copied key heads.
    if is_ours and "replicate" in styles:
        return (True,)
    # Only DTensors join the heads of ranks without W_o.
    if is_ours and "rowwise" not in styles:
        return (True,)
    # torch completes a DTensor wherever that is necessary, which would hide that heads are not cut.
    if plan.code is not None or plan.doubts:
        return (False,)
    return (False, True)


def _code(subject: Subject, styles: Mapping[str, Style], outcome: _Outcome) -> str:
    """Return the code that applies the styles, with the call if that must be another one, for DTensors."""
    call = ""
    if outcome.keeps and takes_cache(subject.module):
        call = "model(..., use_cache=False)"
    elif outcome.keeps:
        call = "model(...)"
    has_plan_of_its_class = hasattr(subject.module, "tp_plan")
    return code_of(styles, call, hugging_face=has_plan_of_its_class and not outcome.keeps)


def _uncalled(plan: Plan, whole: Run) -> list[str]:
    """Return the patterns of a plan that cut no module of the forward."""
    called = {op.module for op in whole.recording.ops}
    uncalled = []
    for pattern, style in plan.styles.items():
        is_called = any(is_at(path, pattern) for path in called)
        if style != "replicate" and not is_called:
            uncalled.append(pattern)
    return uncalled


@contextmanager
def cut_parameters(subject: Subject, ranks: int | None) -> Iterator[tuple[dict[str, Tensor], tuple[Rank, ...] | None]]:
    """Yield the parameters of rank 0 by name and what each rank has, if heads are cut over `ranks`; else none.

    Raises `InputError` as `sharded` does.
    """
    if ranks is None:
        yield {}, None
        return
    trace, _ = sharded(subject, Show(), ranks)
    with process_group(ranks, "cpu") as mesh:
        module = cut(subject.fresh().module, mesh, Plan(trace.plan or {}))
        yield parameters_of(module), trace.ranks


def _without_equal_elements(subject: Subject) -> tuple[Subject, list[str]]:
    """Return a subject with random numbers in parameters whose elements are all equal, and a note on them.

    A bias of zeros that is added on every rank, or a part of a norm's ones, changes no output.
    """
    drawn: dict[int, nn.Parameter] = {}
    names: list[str] = []
    generator = torch.Generator().manual_seed(0)
    for name, parameter in subject.module.named_parameters():
        if is_lazy(parameter) or not _has_equal_elements(parameter):
            continue
        names.append(name)
        numbers = torch.randn(parameter.shape, generator=generator) / 8
        changed = parameter.detach() + numbers.to(parameter)
        drawn[id(parameter)] = nn.Parameter(changed, parameter.requires_grad)
    notes = []
    if names:
        shown = first_few(names, 2)
        notes.append(f"Equal elements would hide a doubled or missing sum, so random numbers were added to {shown}.")
    return subject.fresh(drawn), notes


def _has_equal_elements(parameter: nn.Parameter) -> bool:
    """Return whether all numbers of a parameter are equal; a single one counts if it is 0."""
    first = parameter.detach().flatten()[:1]
    if first.is_meta or not first.is_floating_point() or not first.numel():
        return False
    if not bool((parameter == first).all()):
        return False
    return parameter.numel() > 1 or not bool(first.any())


def _scores(trace: Trace) -> list[int]:
    """Return the number of scores of each attention."""
    numels = []
    for attention in trace.attentions:
        for stage in attention.stages:
            if stage.name == "scores":
                numels.append(prod(stage.shape))
    return numels


def _with_all_heads(trace: Trace, whole: Trace) -> Trace:
    """Return a rank's trace with the head counts of the whole module: of gathered heads the axes show one rank's."""
    attentions = []
    for attention, uncut in zip(trace.attentions, whole.attentions, strict=True):
        attentions.append(replace(attention, num_heads=uncut.num_heads, num_kv_heads=uncut.num_kv_heads))
    heads: int | None = None
    kv_heads: int | None = None
    counts = {(attention.num_heads, attention.num_kv_heads) for attention in attentions}
    if len(counts) == 1:
        heads, kv_heads = counts.pop()
    ranks = [replace(rank, heads=heads, kv_heads=kv_heads) for rank in trace.ranks or ()]
    return replace(trace, attentions=tuple(attentions), ranks=tuple(ranks))


class _RankError(Exception):
    """The forward of a rank raised."""


def _simulated(request: _Request, *, keeps: bool) -> _Outcome:
    """Run all ranks; with `keeps` the projections return DTensors.

    Raises `_RankError` if the plan does not fit or the forward raises.
    """
    device = request.device
    plan = request.plan
    with process_group(request.ranks, device.partition(":")[0]) as mesh:
        fresh = _fresh(request, keeps=keeps)
        with simulation(request.ranks, plan, keeps=keeps, on_meta=device == "meta"):
            try:
                module = cut(fresh.module, mesh, plan, keeps=keeps)
            except Exception as error:  # user code and torch may raise anything
                raise _RankError(f"the plan raises: {first_line(error).rstrip('.')}") from None
            spread = replace(fresh, module=module, without_ones=None, grad=False)
            try:
                with spread.settings():
                    run = run_and_record(spread.module, spread.args, spread.kwargs, keep=device != "meta")
                returned = _returned_by_rank(run)
            except Exception as error:  # torch may raise anything where it completes a result
                raise _RankError(f"the forward raises: {first_line(error).rstrip('.')}") from None
        if run.error is not None:
            ranks_of_code = None if plan.code is None else request.ranks
            raise _failed(spread, run, request.show, ranks_of_code)
        kept = {number: by_rank(tensor) for number, tensor in run.recording.values.items()}
        of_ranks = RunOfRanks(run, kept, request.ranks)
        of_ranks.take(0)
        return _Outcome(_trace_of_rank(request, run, spread), of_ranks, returned, keeps)


def _fresh(request: _Request, *, keeps: bool) -> Subject:
    """Return a copy of the subject to cut; for DTensors without a cache."""
    fresh = request.subject.fresh()
    if fresh.module is request.subject.module:
        copy_module(fresh.module)  # raises the reason, for the module itself would be cut
    if keeps and request.device != "meta" and takes_cache(request.subject.module):
        return replace(fresh, kwargs={**fresh.kwargs, "use_cache": False})
    return fresh


def _trace_of_rank(request: _Request, run: Run, spread: Subject) -> Trace:
    """Return the trace of rank 0, whose tensors are in the run, with what each rank has."""
    leaves = {number: by_rank(leaf)[0] for number, leaf in spread.leaves(run.recording).items()}
    trace = report(
        run,
        request.show,
        kinds=kinds_of(run),
        leaves=leaves,
        environment=environment_of(request.subject),
        layer=layer_of(request.subject),
    )
    trace = with_whole_shapes(trace, run, spread.module)
    return replace(trace, ranks=_ranks(request.ranks, trace, run, spread.module))


def _returned_by_rank(run: Run) -> dict[str, list[Tensor]]:
    """Return each result by its name, for each rank; a DTensor as the whole that its parts are."""
    returned = {}
    for name, output in tensors_in(run.returned):
        tensor = output.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        returned[name] = by_rank(tensor)
    return returned


def _failed(spread: Subject, run: Run, show: Show, ranks: int | None) -> Exception:
    """Return the error to raise for a rank's forward that raised: with its trace, if the plan of `ranks` is code."""
    from ..failures.report import forward_error

    assert run.error is not None
    failed = forward_error(spread, run, show, spread.state())
    trace = failed.trace if isinstance(failed, ForwardError) else None
    if trace is not None and ranks is not None:
        note = f"The stages are those of rank 0 of {ranks}. The whole module runs."
        return ForwardError(str(failed), replace(trace, notes=(*trace.notes, note)))
    place = way = ""
    failure = None if trace is None else trace.failure
    if failure is not None and failure.module:
        place = f" in {failure.module}"
    if failure is not None and failure.cause is not None and failure.cause.name == "cut_over_ranks":
        way = f". {failure.cause.explanation} {failure.cause.fix}"
    return _RankError(f"the forward raises{place}: {first_line(run.error).rstrip('.')}{way.rstrip('.')}")


def _ranks(ranks: int, trace: Trace, run: Run, module: nn.Module) -> tuple[Rank, ...]:
    """Return what each rank has: the parts are equal, so those of rank 0 are moved by their sizes."""
    first = rank_of(0, trace, run, module)
    of_attentions = shards_of(run, parameters_of(module))
    shards = of_attentions[0] if of_attentions else {}
    if "W_k" in shards and shards["W_k"].is_on_every_rank and first.kv_heads is not None:
        # The stages may have a copied key head once for each query head.
        start, stop = first.rows.get("W_k", (0, 0))
        key_heads = (stop - start) // trace.attentions[0].head_dim
        first = replace(first, kv_heads=key_heads or first.kv_heads)
    moved = []
    for rank in range(ranks):
        rows: dict[str, tuple[int, int]] = {}
        for name, rows_of_first in first.rows.items():
            rows[name] = _moved(rows_of_first, shards[name], rank, ranks)
        moved.append(replace(first, rank=rank, rows=rows))
    return with_copies(moved)


def _moved(rows: tuple[int, int], shard: Shard, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows of a part on a rank, given those on rank 0."""
    start, stop = rows
    before = rank * shard.size
    if shard.is_on_every_rank:
        # Of a parameter that every rank has whole, a rank uses the heads of its queries.
        used = stop - start
        parts = shard.whole // used
        before = rank * parts // ranks * used
    return start + before, stop + before


def _proof(subject: Subject, wholes: dict[str, Tensor], outcome: _Outcome) -> Proof:
    """Compare every rank's results with the whole module's, beside the whole module's rounding error."""
    if any(whole.is_meta for whole in wholes.values()):
        return Proof(None, None, None, "device meta has shapes and no numbers", "ranks")
    if drops_at_random(outcome.run):
        return Proof(None, None, None, "the forward draws random numbers", "ranks")
    worst = -1.0
    proof = Proof(None, None, False, of="ranks")
    for name, whole in wholes.items():
        # A further result of another shape has the heads of a rank.
        outputs = [output for output in outcome.returned.get(name, ()) if output.shape == whole.shape]
        if proof.max_abs_difference is None and not outputs:
            return proof
        largest = max((distances(whole, output)[0] for output in outputs), default=0.0)
        floor = 0.0
        if largest:
            floor = rounding_of(subject, whole, partial(_result_named, name))
        times_noise, verdict = judge(largest, floor)
        if not times_noise <= worst:  # also NaN
            worst = times_noise
            proof = Proof(largest, floor, verdict != "differs", of="ranks")
    return proof


def _result_named(name: str, returned: Any) -> Tensor:
    return dict(tensors_in(returned))[name]
