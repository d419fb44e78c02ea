"""Run a module that is cut by heads over several ranks, all in this process, and compare it with the whole module.

torch.distributed's simulation of ranks is private: `LocalTensorMode`, since torch 2.10.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
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
from .ranks import Shard, rank_of, shards_of, with_copies, with_whole_shapes
from .run_report import drops_at_random, environment_of, layer_of, report
from .shard_plan import Plan, Style, code_of, doubts_of, is_at, plan_of
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
    tried = _tried(subject, show, ranks, plan, whole, is_ours=is_ours)
    outcome, proof = tried.outcome, tried.proof
    if outcome is None or proof is None:
        why = " ".join(plan.doubts) or f"{'; with DTensors '.join(dict.fromkeys(tried.errors))}."
        raise InputError(f"over {ranks} ranks {why}")
    if proof.agrees is False:
        proof = replace(proof, note=_first_difference(subject, whole, outcome, ranks))
    trace = outcome.trace
    notes = [*trace.notes]
    if not plan.doubts and _scores(whole_trace) == _scores(trace):
        trace = _with_all_heads(trace, whole_trace)
        notes.append("Every rank computes all heads.")
    if tried.errors and not is_ours:
        notes.append(f"Only with DTensors, as in the code: without them {tried.errors[0]}.")
    uncalled = _uncalled(plan, whole)
    if uncalled:
        notes.append(f"The plan has {first_few(uncalled, 4)}, which the forward does not call.")
    notes += [*drawn, *plan.doubts, *subject.notes]
    styles = dict(plan.styles)
    code = _code(subject, styles, outcome) if styles else None
    return replace(trace, proof=proof, plan=styles or None, plan_code=code, notes=tuple(notes)), outcome.run


@dataclass(frozen=True)
class _Tried:
    """The runs of a plan, without DTensors and with them, as far as they were necessary."""

    outcome: _Outcome | None
    """The last run that did not raise; None if all raised."""
    proof: Proof | None
    """Its comparison with the whole module."""
    errors: list[str]
    """Why the others raised."""


def _tried(subject: Subject, show: Show, ranks: int, plan: Plan, whole: Run, *, is_ours: bool) -> _Tried:
    """Run a plan until its results are those of the whole module."""
    outcome, proof, errors = None, None, list[str]()
    wholes = {name: tensor.detach() for name, tensor in tensors_in(whole.returned)}
    for keeps in _ways_to_run(plan, is_ours=is_ours):
        try:
            outcome = _simulated(subject, show, ranks, plan, keeps)
        except _RankError as error:
            errors.append(str(error))
            continue
        proof = _proof(subject, wholes, outcome)
        if proof.agrees is not False:
            break
        # With DTensors torch would hide that a user's plan runs and is wrong; not that a result has a rank's part.
        has_part_of_rank = proof.max_abs_difference is None
        if not is_ours and not has_part_of_rank:
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
    if outcome.keeps:
        call = "model(..., use_cache=False)" if _takes_cache(subject.module) else "model(...)"
    shared = hasattr(subject.module, "tp_plan") and not outcome.keeps
    return code_of(styles, call, hugging_face=shared)


def _uncalled(plan: Plan, whole: Run) -> list[str]:
    """Return the patterns of a plan that cut no module of the forward."""
    called = {op.module for op in whole.recording.ops}
    uncalled = []
    for pattern, style in plan.styles.items():
        if style != "replicate" and not any(is_at(path, pattern) for path in called):
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
        yield parameters_of(cut(subject.fresh().module, mesh, Plan(trace.plan or {}))), trace.ranks


def _without_equal_elements(subject: Subject) -> tuple[Subject, list[str]]:
    """Return a subject with random numbers in parameters whose elements are all equal, and a note on them.

    A bias of zeros that is added on every rank, or a part of a norm's ones, changes no output.
    """
    drawn: dict[int, nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)
    names = []
    for name, parameter in subject.module.named_parameters():
        if is_lazy(parameter) or not _has_equal_elements(parameter):
            continue
        names.append(name)
        numbers = torch.randn(parameter.shape, generator=generator).to(parameter) / 8
        drawn[id(parameter)] = nn.Parameter(parameter.detach() + numbers, parameter.requires_grad)
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
        numels += [prod(stage.shape) for stage in attention.stages if stage.name == "scores"]
    return numels


def _with_all_heads(trace: Trace, whole: Trace) -> Trace:
    """Return a rank's trace with the head counts of the whole module: of gathered heads the axes show one rank's."""
    attentions = []
    for attention, uncut in zip(trace.attentions, whole.attentions, strict=True):
        attentions.append(replace(attention, num_heads=uncut.num_heads, num_kv_heads=uncut.num_kv_heads))
    counts = {(attention.num_heads, attention.num_kv_heads) for attention in attentions}
    heads, kv_heads = counts.pop() if len(counts) == 1 else (None, None)
    ranks = [replace(rank, heads=heads, kv_heads=kv_heads) for rank in trace.ranks or ()]
    return replace(trace, attentions=tuple(attentions), ranks=tuple(ranks))


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
        raise InputError("--ranks simulates a process group, but one is already running. Drop --ranks.")
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
        classes = {
            "colwise": parallel.ColwiseParallel(use_local_output=not keeps),
            "rowwise": parallel.RowwiseParallel(),
        }
        styles = {path: classes[style] for path, style in plan.styles.items() if style in classes}
    # torch cuts a parameter into all parts again for each simulated rank, to take one.
    with patch.object(torch, "chunk", lru_cache(maxsize=1)(torch.chunk)):
        # Without a source rank each rank takes its part of the parameter that it has.
        return parallel.parallelize_module(module, mesh, styles, src_data_rank=None)


def _simulated(subject: Subject, show: Show, ranks: int, plan: Plan, keeps: bool) -> _Outcome:
    """Run all ranks. Raises `_RankError` if the plan does not fit or the forward raises."""
    device = environment_of(subject).device
    with process_group(ranks, device.partition(":")[0]) as mesh:
        fresh = subject.fresh()
        if fresh.module is subject.module:
            copy_module(fresh.module)  # raises the reason, for the module itself would be cut
        if keeps and device != "meta" and _takes_cache(subject.module):
            fresh = replace(fresh, kwargs={**fresh.kwargs, "use_cache": False})
        with _simulation(ranks, plan, keeps=keeps, on_meta=device == "meta"):
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
            raise _failed(spread, run, show, None if plan.code is None else ranks)
        kept = {number: by_rank(value) for number, value in run.recording.values.items()}
        _take_rank(run, kept, 0)
        leaves = {number: by_rank(leaf)[0] for number, leaf in spread.leaves(run.recording).items()}
        trace = report(
            run,
            show,
            kinds=kinds_of(run),
            leaves=leaves,
            environment=environment_of(subject),
            layer=layer_of(subject),
        )
        trace = with_whole_shapes(trace, run, spread.module)
        trace = replace(trace, ranks=_ranks(ranks, trace, run, spread.module))
    return _Outcome(trace, run, kept, returned, keeps)


@contextmanager
def _simulation(ranks: int, plan: Plan, *, keeps: bool, on_meta: bool) -> Iterator[None]:
    """Run the body on all ranks, or on meta on rank 0 alone; with `keeps` on DTensors."""
    from torch.distributed.tensor.experimental import implicit_replication

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if not on_meta:
            stack.enter_context(_all_ranks(ranks, answers=plan.code is None))
        if keeps and on_meta:
            stack.enter_context(_JoinedWithoutEmpty())
        if keeps:
            stack.enter_context(implicit_replication())
            # torch derives the placements of a fused kernel's result by trying all; with a mask that takes hours.
            stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        yield


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
    from .failure.report import forward_error

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
    asks = ((group, "rank"), (mesh, "get_rank"), (mesh, "get_local_rank"), (mesh, "get_coordinate"))
    with ExitStack() as stack:
        if not answers:
            for owner, name in asks:
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
            "the plan asks for its rank, but all ranks are simulated at once. Try it on real ranks, with "
            "torchrun -m mha_inspect trace FILE:function"
        )

    return asked


def _take_rank(run: Run, kept: dict[int, list[Tensor]], rank: int) -> None:
    """Make the tensors of a rank those of the run."""
    for number, tensors in kept.items():
        run.recording.values[number] = tensors[rank % len(tensors)]


def _ranks(ranks: int, trace: Trace, run: Run, module: nn.Module) -> tuple[Rank, ...]:
    """Return what each rank has: the parts are equal, so those of rank 0 are moved by their sizes."""
    first = rank_of(0, trace, run, module)
    shards = next(iter(shards_of(run, parameters_of(module))), {})
    if "W_k" in shards and shards["W_k"].size == shards["W_k"].whole and first.kv_heads is not None:
        start, stop = first.rows.get("W_k", (0, 0))  # the stages may have a copied key head once for each query head
        first = replace(first, kv_heads=(stop - start) // trace.attentions[0].head_dim or first.kv_heads)

    moved = []
    for rank in range(ranks):
        rows = {name: _moved(bounds, shards[name], rank, ranks) for name, bounds in first.rows.items()}
        moved.append(replace(first, rank=rank, rows=rows))
    return with_copies(moved)


def _moved(rows: tuple[int, int], shard: Shard, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows of a part on a rank, given those on rank 0."""
    start, stop = rows
    if shard.size < shard.whole:
        before = rank * shard.size
    else:
        # Of a parameter that every rank has whole, a rank uses the heads of its queries.
        used = stop - start
        before = rank * (shard.whole // used) // ranks * used
    return start + before, stop + before


def _proof(subject: Subject, wholes: dict[str, Tensor], outcome: _Outcome) -> Proof:
    """Compare every rank's results with the whole module's, beside the whole module's rounding error."""
    if any(whole.is_meta for whole in wholes.values()):
        return Proof(None, None, None, "device meta has shapes and no numbers", "ranks")
    if drops_at_random(outcome.run):
        return Proof(None, None, None, "the forward draws random numbers", "ranks")
    worst, proof = -1.0, Proof(None, None, False, of="ranks")
    for name, whole in wholes.items():
        # A further result of another shape has the heads of a rank.
        outputs = [output for output in outcome.returned.get(name, ()) if output.shape == whole.shape]
        if proof.max_abs_difference is None and not outputs:
            return proof
        largest = max((distances(whole, output)[0] for output in outputs), default=0.0)
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
        count = len(outcome.run.attentions)
        return f"A rank computes {count} attentions where the whole module computes {len(whole.attentions)}."
    try:
        exact: Run | None = subject.fresh().copied(torch.float64).recorded(keep=True)
    except Exception:  # user code may raise anything in another dtype
        exact = None
    for number, attention in enumerate(whole.attentions):
        expected = contents_of(whole, *attention)
        precise = contents_of(exact, *exact.attentions[number]) if exact is not None else {}
        cut_attention = outcome.run.attentions[number]
        for stage in [name for name in STAGES if name in expected]:
            for rank in range(ranks):
                _take_rank(outcome.run, outcome.kept, rank)
                content = contents_of(outcome.run, *cut_attention).get(stage)
                if content is None:
                    continue
                difference = _difference_on(rank, ranks, content, expected[stage], precise.get(stage))
                if difference is None:
                    continue
                of_attention = f" of attention {number + 1}" if len(whole.attentions) > 1 else ""
                why = ""
                if difference.is_part:
                    every = _of_every_rank(outcome, cut_attention, stage, ranks)
                    compared = StageOfRanks(stage, expected, every, _vectors(subject.module), difference.floor)
                    why = _why(compared, rank, ranks)
                return f"The first difference is {stage}{of_attention}{difference.words}{why}"
    return "Every stage of every rank agrees with the whole module: the difference comes after the attentions."


@dataclass(frozen=True)
class _RankDifference:
    """How a stage of a rank is not its part of the whole module's."""

    words: str
    """The end of a sentence."""
    floor: float
    """The rounding error of the whole module's stage."""
    is_part: bool
    """Whether its shape is that of a part."""


def _difference_on(
    rank: int, ranks: int, content: Tensor, expected: Tensor, precise: Tensor | None
) -> _RankDifference | None:
    """Return how a stage of a rank is not its part of the whole module's; None if it is.

    `precise` is the whole module's stage in float64, which shows its rounding error.
    """
    part = part_of(expected, content.shape, rank, ranks)
    floor = 0.0 if precise is None else rounding_error(expected, precise.to(expected.dtype))
    if part is None:
        shape, whole = shape_text(tuple(content.shape)), shape_text(tuple(expected.shape))
        return _RankDifference(f": rank {rank} has {shape}, no part of {whole}.", floor, is_part=False)
    largest = distances(part, content)[0]
    if judge(largest, floor)[1] != "differs":
        return None
    return _RankDifference(f" on rank {rank}: {largest:.2g}, rounding {floor:.1g}.", floor, is_part=True)


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of one dimension: biases, and weights of norms."""
    return {name: local(vector).detach() for name, vector in module.named_parameters() if vector.dim() == 1}


def _of_every_rank(outcome: _Outcome, named: tuple[Attention, AxisNames], stage: str, ranks: int) -> list[Tensor]:
    """Return a stage of each rank in canonical axes; fewer tensors if an axis has no name on a rank."""
    every = []
    for rank in range(ranks):
        _take_rank(outcome.run, outcome.kept, rank)
        content = contents_of(outcome.run, *named).get(stage)
        if content is not None:
            every.append(content.clone())
    return every


def _why(stage: StageOfRanks, rank: int, ranks: int) -> str:
    """Return the reason of a rank's stage as a further sentence; empty without one."""
    reason = stage.reason(rank) if len(stage.every) == ranks else ""
    return f" {reason}" if reason else ""
