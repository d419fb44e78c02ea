"""Run a module that is cut by heads over several ranks, all in this process, and compare it with the whole module.

torch.distributed's simulation of ranks is private: `LocalTensorMode`, since torch 2.10.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from inspect import signature
from math import prod
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..errors import ForwardError, InputError
from ..graph.attention import Attention
from ..layers.spec import Show
from ..naming.axes import AxisNames
from ..naming.canonical import contents_of
from ..naming.pattern import STAGES
from ..naming.visibility import kinds_of
from ..record.arguments import copy_module, tensors_in
from ..record.ranks import by_rank, local, parameters_of
from ..record.rounding import distances, judge, rounding_error
from ..reports.trace import Proof, Rank, Trace
from ..running.subject import Run, Subject, run_and_record
from ..text import first_few, first_line
from ..text import shape as shape_text
from .decode import rounding_of
from .rank_reasons import StageOfRanks, part_of
from .ranks import rank_of, shards_of, with_copies, with_whole_shapes
from .run_report import drops_at_random, environment_of, layer_of, report
from .shard_plan import Plan, code_of, doubts_of, is_at, plan_of
from .trace import traced

_NO_SIMULATION = "this torch cannot simulate ranks, which needs torch 2.10 or newer. Update torch."


@dataclass(frozen=True)
class _Outcome:
    """A simulated run: the trace of rank 0, and each rank's results and kept tensors."""

    trace: Trace
    run: Run
    kept: dict[int, list[Tensor]]
    returned: dict[str, list[Tensor]]
    keeps: bool
    """Whether the projections returned DTensors."""


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
    else:
        plan = replace(plan, doubts=doubts_of(plan.styles, whole, subject.module, ranks) if plan.styles else ())
    outcome, proof, errors = None, None, list[str]()
    # Only DTensors give each query head its own of copied key heads, and join the heads of ranks without W_o.
    needs_whole = is_ours and ("replicate" in plan.styles.values() or "rowwise" not in plan.styles.values())
    # torch completes a DTensor wherever that is necessary, which would hide that heads are not cut.
    local_only = plan.code is not None or plan.doubts
    for keeps in (True,) if needs_whole else (False,) if local_only else (False, True):
        try:
            outcome = _simulated(subject, show, ranks, plan, keeps)
        except _RankError as error:
            errors.append(str(error))
            continue
        proof = _proof(subject, {name: each.detach() for name, each in tensors_in(whole.returned)}, outcome)
        # With DTensors torch would hide that a user's plan runs and is wrong; not that a result has a rank's part.
        if proof.agrees is not False or not (is_ours or proof.max_abs_difference is None):
            break
    if outcome is None or proof is None:
        why = " ".join(plan.doubts) or f"{'; with DTensors '.join(dict.fromkeys(errors))}."
        raise InputError(f"over {ranks} ranks {why}")
    if proof.agrees is False:
        proof = replace(proof, note=_first_difference(subject, whole, outcome, ranks))
    styles = dict(plan.styles)
    call = "model(..., use_cache=False)" if _takes_cache(subject.module) else "model(...)"
    shared = hasattr(subject.module, "tp_plan") and not outcome.keeps
    code = code_of(styles, call if outcome.keeps else "", hugging_face=shared) if styles else None
    trace, said = outcome.trace, list[str]()
    if not plan.doubts and _scores(whole_trace) == _scores(trace):
        trace, said = _with_all_heads(trace, whole_trace), ["Every rank computes all heads."]
    if errors and not is_ours:
        said.append(f"Only with DTensors, as in the code: without them {errors[0]}.")
    called, cuts = {op.module for op in whole.recording.ops}, [path for path in styles if styles[path] != "replicate"]
    if unused := [pattern for pattern in cuts if not any(is_at(path, pattern) for path in called)]:
        said.append(f"The plan has {first_few(unused, 4)}, which the forward does not call.")
    notes = (*trace.notes, *said, *drawn, *plan.doubts, *subject.notes)
    return replace(trace, proof=proof, plan=styles or None, plan_code=code, notes=notes), outcome.run


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
        yield parameters_of(cut(subject.fresh().module, mesh, Plan(trace.plan or {}))), trace.ranks


def _without_equal_elements(subject: Subject) -> tuple[Subject, list[str]]:
    """Return a subject with random numbers in parameters whose elements are all equal, and a note on them.

    A bias of zeros that is added on every rank, or a part of a norm's ones, changes no output.
    """
    drawn: dict[int, nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)
    parameters = {name: each for name, each in subject.module.named_parameters() if not is_lazy(each)}
    for parameter in parameters.values():
        first = parameter.detach().flatten()[:1]
        if first.is_meta or not first.is_floating_point() or not first.numel() or not (parameter == first).all():
            continue
        if parameter.numel() > 1 or not first.any():
            numbers = torch.randn(parameter.shape, generator=generator).to(parameter) / 8
            drawn[id(parameter)] = nn.Parameter(parameter.detach() + numbers, parameter.requires_grad)
    names = [name for name, parameter in parameters.items() if id(parameter) in drawn]
    said = f"Equal elements hide what is added twice or cut: random numbers were added to {first_few(names, 2)}."
    return subject.fresh(drawn), [said] if names else []


def _scores(trace: Trace) -> list[int]:
    return [prod(stage.shape) for each in trace.attentions for stage in each.stages if stage.name == "scores"]


def _with_all_heads(trace: Trace, whole: Trace) -> Trace:
    """Return a rank's trace with the head counts of the whole module: of gathered heads the axes show one rank's."""
    pairs = zip(trace.attentions, whole.attentions, strict=True)
    every = [replace(own, num_heads=all_.num_heads, num_kv_heads=all_.num_kv_heads) for own, all_ in pairs]
    counts = {(each.num_heads, each.num_kv_heads) for each in every}
    heads, kv_heads = counts.pop() if len(counts) == 1 else (None, None)
    ranks = [replace(rank, heads=heads, kv_heads=kv_heads) for rank in trace.ranks or ()]
    return replace(trace, attentions=tuple(every), ranks=tuple(ranks))


class _RankError(Exception):
    """The forward of a rank raised."""


@contextmanager
def process_group(ranks: int, device: str) -> Iterator[Any]:
    """Yield a device mesh of simulated ranks, of which this process is rank 0.

    Raises `InputError` if there is a process group already, or torch has none to simulate.
    """
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import debug
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise InputError(_NO_SIMULATION) from None
    if dist.is_initialized():
        raise InputError("--ranks simulates a process group, and there is one already. Drop --ranks.")
    # torch caches results of DTensors by the ranks of their mesh, with the groups of an earlier mesh of these ranks.
    forget = getattr(debug, "_clear_sharding_prop_cache", int)
    forget()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # torch logs a traceback where it cannot compute the shape of a DTensor's result; the error says the same.
        with patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
            yield init_device_mesh("cpu" if device == "meta" else device, (ranks,))
    finally:
        dist.destroy_process_group()
        forget()


def cut(module: nn.Module, mesh: Any, plan: Plan, *, keeps: bool = False) -> nn.Module:
    """Return a module whose parameters are cut by a plan; with `keeps` the projections return DTensors."""
    from torch.distributed.tensor import parallel

    if callable(plan.code):
        return plan.code(module, mesh) or module
    styles: Any = plan.code
    if styles is None:
        made = {"colwise": parallel.ColwiseParallel(use_local_output=not keeps), "rowwise": parallel.RowwiseParallel()}
        styles = {path: made[style] for path, style in plan.styles.items() if style in made}
    # torch cuts a parameter into all parts again for each simulated rank, to take one.
    with patch.object(torch, "chunk", lru_cache(maxsize=1)(torch.chunk)):
        # Without a source rank each rank takes its part of the parameter that it has.
        return parallel.parallelize_module(module, mesh, styles, src_data_rank=None)


def _simulated(subject: Subject, show: Show, ranks: int, plan: Plan, keeps: bool) -> _Outcome:
    """Run all ranks. Raises `_RankError` if the plan does not fit or the forward raises."""
    device = environment_of(subject).device
    with process_group(ranks, device.partition(":")[0]) as mesh:
        from torch.distributed.tensor.experimental import implicit_replication

        fresh = subject.fresh()
        if fresh.module is subject.module:
            copy_module(fresh.module)  # raises the reason, for the module itself would be cut
        if keeps and device != "meta" and _takes_cache(subject.module):
            fresh = replace(fresh, kwargs={**fresh.kwargs, "use_cache": False})
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if device != "meta":
                stack.enter_context(_all_ranks(ranks, answers=plan.code is None))
            if keeps and device == "meta":
                stack.enter_context(_JoinedWithoutEmpty())
            if keeps:
                stack.enter_context(implicit_replication())
                # torch derives the placements of a fused kernel's result by trying all; with a mask that takes hours.
                stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
            try:
                module = cut(fresh.module, mesh, plan, keeps=keeps)
            except Exception as error:  # user code and torch may raise anything
                raise _RankError(f"the plan raises: {first_line(error).rstrip('.')}") from None
            spread = replace(fresh, module=module, without_ones=None, grad=False)
            try:
                with spread.settings():
                    run = run_and_record(spread.module, spread.args, spread.kwargs, keep=device != "meta")
                parts = ((name, each.detach()) for name, each in tensors_in(run.returned))
                returned = {
                    name: by_rank(each.full_tensor() if hasattr(each, "full_tensor") else each) for name, each in parts
                }
            except Exception as error:  # torch may raise anything where it completes a result
                raise _RankError(f"the forward raises: {first_line(error).rstrip('.')}") from None
        if run.error is not None:
            raise _failed(spread, run, show, None if plan.code is None else ranks)
        kept = {number: by_rank(value) for number, value in run.recording.values.items()}
        _take_rank(run, kept, 0)
        leaves = {number: by_rank(leaf)[0] for number, leaf in spread.leaves(run.recording).items()}
        about: Any = {"environment": environment_of(subject), "layer": layer_of(subject)}
        trace = report(run, show, kinds=kinds_of(run), leaves=leaves, **about)
        trace = with_whole_shapes(trace, run, spread.module)
        trace = replace(trace, ranks=_ranks(ranks, trace, run, spread.module))
    return _Outcome(trace, run, kept, returned, keeps)


def _failed(spread: Subject, run: Run, show: Show, ranks: int | None) -> Exception:
    """Return the error to raise for a rank's forward that raised: with its trace, if the plan of `ranks` is code."""
    from .failure.report import forward_error

    assert run.error is not None
    failed = forward_error(spread, run, show, spread.state())
    trace = failed.trace if isinstance(failed, ForwardError) else None
    if trace is not None and ranks is not None:
        note = f"This is rank 0 of {ranks}. The whole module runs."
        return ForwardError(str(failed), replace(trace, notes=(*trace.notes, note)))
    place = f" in {trace.failure.module}" if trace is not None and trace.failure and trace.failure.module else ""
    cause = trace.failure.cause if trace is not None and trace.failure else None
    way = f". {cause.explanation} {cause.fix}" if cause is not None and cause.name == "cut_over_ranks" else ""
    return _RankError(f"the forward raises{place}: {first_line(run.error).rstrip('.')}{way.rstrip('.')}")


class _JoinedWithoutEmpty(TorchFunctionMode):
    """Joins tensors without the empty ones: on meta a forward of transformers cannot do without its empty cache."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            args = ([tensor for tensor in args[0] if tensor.numel()] or args[0], *args[1:])
        return func(*args, **(kwargs or {}))


def _takes_cache(module: nn.Module) -> bool:
    """Return whether a forward may cache: transformers joins keys to an empty tensor, which DTensors cannot be."""
    return "use_cache" in signature(module.forward).parameters


@contextmanager
def _all_ranks(ranks: int, *, answers: bool) -> Iterator[None]:
    """Simulate all ranks in the body. Without `answers`, user code that asks which rank it is raises.

    All ranks run at once: any number is wrong for some, and `rank == 0` is false for all.
    """
    try:
        from torch.distributed import _local_tensor as simulation
    except ImportError:
        raise InputError(_NO_SIMULATION) from None
    mesh = simulation._LocalDeviceMesh
    group = torch.distributed.ProcessGroup  # get_rank may have been imported by its name
    asks = (group, "rank"), *((mesh, f"get_{name}") for name in ("rank", "local_rank", "coordinate"))
    with ExitStack() as stack:
        for owner, name in () if answers else asks:
            stack.enter_context(patch.object(owner, name, _guarded(getattr(owner, name))))
        stack.enter_context(simulation.LocalTensorMode(ranks))
        if not answers:  # since torch 2.15 the simulation has a get_rank of its own
            guarded = _guarded(torch.distributed.get_rank)
            stack.enter_context(patch.object(torch.distributed, "get_rank", guarded))
        yield


def _guarded(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers torch's own code, and raises `RuntimeError` for any other caller."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_name in ("get_rank", "asked"):
            caller = caller.f_back
        if caller is None or caller.f_globals.get("__name__", "").startswith("torch."):
            return answer(*args, **kwargs)
        raise RuntimeError(
            "the plan asks which rank it is, and all ranks are simulated at once. Try it on real ranks, with "
            "torchrun -m mha_inspect trace FILE:function"
        )

    return asked


def _take_rank(run: Run, kept: dict[int, list[Tensor]], rank: int) -> None:
    """Make the tensors of a rank those of the run."""
    run.recording.values.update({number: each[rank % len(each)] for number, each in kept.items()})


def _ranks(ranks: int, trace: Trace, run: Run, module: nn.Module) -> tuple[Rank, ...]:
    """Return what each rank has: the parts are equal, so those of rank 0 are moved by their sizes."""
    first = rank_of(0, trace, run, module)
    shards = next(iter(shards_of(run, parameters_of(module))), {})
    if "W_k" in shards and shards["W_k"].size == shards["W_k"].whole and first.kv_heads is not None:
        start, stop = first.rows.get("W_k", (0, 0))  # the stages may have a copied key head once for each query head
        first = replace(first, kv_heads=(stop - start) // trace.attentions[0].head_dim or first.kv_heads)

    def rows(rank: int, name: str, start: int, stop: int) -> tuple[int, int]:
        size, whole = shards[name].size, shards[name].whole
        # Of a parameter that every rank has whole, a rank uses the heads of its queries.
        before = rank * size if size < whole else rank * (whole // (stop - start)) // ranks * (stop - start)
        return start + before, stop + before

    moved = ({name: rows(rank, name, *bounds) for name, bounds in first.rows.items()} for rank in range(ranks))
    return with_copies([replace(first, rank=rank, rows=each) for rank, each in enumerate(moved)])


def _proof(subject: Subject, wholes: dict[str, Tensor], outcome: _Outcome) -> Proof:
    """Compare every rank's results with the whole module's, beside the whole module's rounding error."""
    if any(whole.is_meta for whole in wholes.values()):
        return Proof(None, None, None, "device meta has shapes and no numbers", "ranks")
    if drops_at_random(outcome.run):
        return Proof(None, None, None, "the forward draws random numbers", "ranks")
    worst, proof = -1.0, Proof(None, None, False, of="ranks")
    for name, whole in wholes.items():
        # A further result of another shape has the heads of a rank.
        each = [output for output in outcome.returned.get(name, ()) if output.shape == whole.shape]
        if proof.max_abs_difference is None and not each:
            return proof
        largest = max((distances(whole, output)[0] for output in each), default=0.0)
        floor = rounding_of(subject, whole, partial(_named, name)) if largest else 0.0
        times, verdict = judge(largest, floor)
        if not times <= worst:  # also NaN
            worst, proof = times, Proof(largest, floor, verdict != "differs", of="ranks")
    return proof


def _named(name: str, returned: Any) -> Tensor:
    return dict(tensors_in(returned))[name]


def _first_difference(subject: Subject, whole: Run, outcome: _Outcome, ranks: int) -> str:
    """Return a sentence that names the first stage of a rank that is not its part of the whole module's stage."""
    if len(whole.attentions) != len(outcome.run.attentions):
        found = f"{len(outcome.run.attentions)} attentions where the whole module computes {len(whole.attentions)}"
        return f"A rank computes {found}."
    try:
        exact: Run | None = subject.fresh().copied(torch.float64).recorded(keep=True)
    except Exception:  # user code may raise anything in another dtype
        exact = None
    for number, (named, of_rank) in enumerate(zip(whole.attentions, outcome.run.attentions, strict=True)):
        expected = contents_of(whole, *named)
        precise = contents_of(exact, *exact.attentions[number]) if exact is not None else {}
        for stage in (stage for stage in STAGES if stage in expected):
            for rank in range(ranks):
                _take_rank(outcome.run, outcome.kept, rank)
                got = contents_of(outcome.run, *of_rank).get(stage)
                if got is None:
                    continue
                wanted = part_of(expected[stage], got.shape, rank, ranks)
                which = f" of attention {number + 1}" if len(whole.attentions) > 1 else ""
                said = f"The first difference is {stage}{which}"
                if wanted is None:
                    shapes = f"{shape_text(tuple(got.shape))}, no part of {shape_text(tuple(expected[stage].shape))}"
                    return f"{said}: rank {rank} has {shapes}."
                floor = rounding_error(expected[stage], precise[stage].to(expected[stage].dtype)) if precise else 0.0
                largest = distances(wanted, got)[0]
                if judge(largest, floor)[1] == "differs":
                    every = _of_every_rank(outcome, of_rank, stage, ranks)
                    compared = StageOfRanks(stage, expected, every, _vectors(subject.module), floor)
                    why = _why(compared, rank, ranks)
                    return f"{said} on rank {rank}: {largest:.2g}, rounding {floor:.1g}.{why}"
    return "All stages of all ranks are their part of the whole: the difference comes after the attentions."


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of one dimension: biases, and weights of norms."""
    return {name: local(each).detach() for name, each in module.named_parameters() if each.dim() == 1}


def _of_every_rank(outcome: _Outcome, named: tuple[Attention, AxisNames], stage: str, ranks: int) -> list[Tensor]:
    """Return a stage of each rank in canonical axes; fewer tensors if an axis has no name on a rank."""
    every = []
    for rank in range(ranks):
        _take_rank(outcome.run, outcome.kept, rank)
        content = contents_of(outcome.run, *named).get(stage)
        every += [] if content is None else [content.clone()]
    return every


def _why(stage: StageOfRanks, rank: int, ranks: int) -> str:
    """Return the reason of a rank's stage as a further sentence; empty without one."""
    reason = stage.reason(rank) if len(stage.every) == ranks else ""
    return f" {reason}" if reason else ""
