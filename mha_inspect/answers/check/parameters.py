"""Faults of parameters: unused projections, projections used twice, missing gradients."""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...record.arguments import tensors_in
from ...record.ops import Op
from ...reports.check import Finding, SkippedCheck
from ...text import first_few, listed, shortened, spans
from .adapters import factors_elsewhere
from .each_kind import of_each_kind
from .evidence import Evidence, NotPossibleError, RaisedError
from .replay import SIDES
from .scores import masks_everything

_EXACT = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which small gradients do not underflow to zero."""
_LARGEST = 1 << 24
"""The largest output of a projection, in elements, whose unread features are searched."""
_MOST_HEADS = 64
"""The largest number of heads whose gradients are computed."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers, which are not run themselves."""
_SHOWN = 4
"""The largest number of parameters to name."""
_NAN = "NaN"
"""The brief reason of a backward that gives NaN."""
_FIRST_NAN = re.compile(r"Function '(\w+)' returned nan values")
"""What autograd raises if it searches for NaN."""

Gradients = dict[str, Tensor | None]


class Readers:
    """The operations that read each parameter, limited to those that an output depends on."""

    def __init__(self, evidence: Evidence) -> None:
        recording = evidence.run.recording
        self._graph, self._module = evidence.run.graph, evidence.subject.module
        ids, storages = {named.tensor.id for named in recording.outputs}, set[int]()
        written = {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}
        self._read = [named.tensor for named in recording.outputs]
        calls: dict[int, dict[int, Op]] = defaultdict(dict)
        for op in reversed(recording.ops):
            into = {op.inputs[0].storage} if op.kind == "write" and op.inputs else set()
            if any(tensor.id in ids for tensor in op.outputs) or into & (storages | written):
                ids |= {tensor.id for tensor in op.inputs}
                storages |= {tensor.storage for tensor in op.inputs}
                for tensor in op.inputs if op.kind != "view" else ():
                    self._read.append(tensor)
                    calls[tensor.storage].setdefault(op.call, op)
        self.shapes = {named.name: named.tensor.shape for named in recording.parameters}
        self.ops = {named.name: [*calls[named.tensor.storage].values()] for named in recording.parameters}
        """Parameter to the operations that use it, one per call."""
        self.mentioned: set[str] = set()
        """Parameters and modules that a finding already names."""

    def owners(self, name: str) -> set[str]:
        """Return the module of a parameter, and the module that runs that one: lists are not run."""
        path, owners = name.split(".")[:-1], set[str]()
        for _ in range(2):
            while path and isinstance(self._module.get_submodule(".".join(path)), _LISTS):
                path.pop()
            owners.add(".".join(path))
            path = path[:-1]
        return owners

    def unread(self) -> list[str]:
        """Return unused parameters that no finding names yet."""
        names = (name for name, ops in self.ops.items() if not ops)
        return [name for name in names if not any(f"{name}.".startswith(f"{path}.") for path in self.mentioned)]

    def unread_features(self, projection: Op) -> set[int]:
        """Return the output features of a projection, after its bias, that no operation reads."""
        result = self._graph.after_projection(projection)
        if result.numel > _LARGEST or result.stride != torch.empty(result.shape, device="meta").stride():
            return set()
        read = torch.zeros(result.offset + result.numel, dtype=torch.bool)
        for tensor in self._read:
            if tensor.storage == result.storage and tensor.shape and tensor.numel:
                # A complex number covers two features.
                parts = max(tensor.itemsize // result.itemsize, 1)
                strides = *(stride * parts for stride in tensor.stride), 1
                read.as_strided((*tensor.shape, parts), strides, tensor.offset * parts).fill_(True)
        by_feature = read[result.offset :].reshape(-1, result.shape[-1]).any(0)
        return {int(place) for place in (~by_feature).nonzero().flatten()}


def parameters(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """Yield projections that are used twice, are unused, or get no gradient."""
    if not evidence.run.recording.outputs:
        raise NotPossibleError("the forward returns no tensor, so the effect of its parameters is unknown")
    readers = Readers(evidence)
    yield from list(_twice(evidence, readers)) or _copied_heads(evidence)
    yield from factors_elsewhere(evidence)
    for attention, _, _ in evidence.kinds:
        yield from _unused(readers, attention)
        yield from _unread_features(evidence, readers, attention)
    if evidence.on_meta:
        yield SkippedCheck("parameters", "gradients cannot be computed on meta; use --device cpu")
    elif evidence.once:
        yield SkippedCheck("parameters", "gradients need another run")
    elif not masks_everything(evidence):
        yield from _without_gradient(evidence, readers)


def _twice(evidence: Evidence, readers: Readers) -> Iterator[Finding]:
    """Yield parameters that are used twice while a sibling of the same shape is unused."""
    sides: dict[str, dict[str, Op]] = defaultdict(dict)
    turns = [turn for attention, _ in evidence.run.attentions for turn in (attention, *attention.branches)]
    for turn in turns:
        for side, op in turn.projections.items():
            sides[_weight_of(evidence, op, whole=True)].setdefault(side, op)
    inside = tuple(f"{turn.module}." if turn.module else "" for turn in turns)
    for name, ops in readers.ops.items():
        if (len(ops) < 2 and len(sides.get(name, ())) < 2) or not (name in sides or name.startswith(inside)):
            continue
        spare = {n: _beside(n, name) for n in readers.unread() if readers.shapes[n] == readers.shapes[name]}
        names = [other for other, path in spare.items() if path]
        if not names:
            continue
        readers.mentioned.update(spare[other] for other in names)
        served = sides.get(name, {})
        uses = f"projects the {' and the '.join(served)}" if len(served) > 1 else f"is used {len(ops)} times"
        others = f"{', '.join(names[:2])}{' and more' if len(names) > 2 else ''}"
        yield Finding(
            "parameters",
            f"{name} {uses}, and {others} {'is' if len(names) == 1 else 'are'} unused.",
            "The unused parameter has the same shape and gets no gradient.",
            source=[*ops, *served.values()][-1].source,
            module=ops[-1].module if ops else "",
            fix=f"Use {names[0]} where it belongs.",
        )


def _beside(name: str, other: str) -> str:
    """Return the module of a parameter if the other parameter is in a sibling module; else empty.

    `k_norm` for `k_norm.weight` beside `q_norm.weight`, `heads.1` for `heads.1.key.weight` beside `heads.0.key.weight`.
    """
    left, right = name.split("."), other.split(".")
    differ = [place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
    if len(left) != len(right) or len(differ) != 1 or (differ[0] == len(left) - 1 and len(left) > 1):
        return ""
    return ".".join(left[: differ[0] + 1])


def _weight_of(evidence: Evidence, op: Op | None, *, whole: bool = False) -> str:
    """Return the name of the weight of a projection, whole or a slice; empty if it is not a parameter."""
    graph, storages = evidence.run.graph, evidence.run.recording.parameter_storages
    for tensor in reversed(op.inputs if op else ()):
        storage = graph.before_moves(tensor).storage  # einsum copies a weight by head
        if storage in storages and len(tensor.shape) > 1 and graph.is_weight(tensor):
            named = storages[storage]
            return named.name if not whole or tensor.numel == named.tensor.numel else ""
    return ""


@partial(of_each_kind, "")
def _copied_heads(_: Evidence, attention: Attention, __: AxisNames) -> Iterator[Finding]:
    signs: dict[tuple[object, ...], int] = {}
    turns = attention.branches
    for place, turn in enumerate(turns):
        sign = tuple(
            (side, tensor.storage, tensor.offset, tensor.shape, turn.stages[f"{side[0]}_heads"].offset)
            for side in SIDES
            if side in turn.projections
            for tensor in turn.projections[side].inputs
        )
        first = signs.setdefault(sign, place)
        anew = all(turns[first].projections.get(side) is not turn.projections.get(side) for side in SIDES)
        if len(sign) >= 2 * len(SIDES) and first != place and anew:
            yield Finding(
                "parameters",
                f"Heads {first} and {place} are the same head: they share their weights.",
                "W_q, W_k and W_v of both heads are in the same memory.",
                source=turn.score_product.op.source,
                fix="Create each head separately: [Head() for _ in range(heads)] instead of [Head()] * heads.",
            )
            return


def _unused(readers: Readers, attention: Attention) -> Iterator[Finding]:
    # `self_attn.q_proj.weight` belongs to the module `self_attn`, and so does `self_attn.sinks`.
    unread = [name for name in readers.unread() if attention.module in readers.owners(name)]
    readers.mentioned.update(unread)
    # The bias of an unused layer is no further finding.
    layers = {name.removesuffix("weight") for name in unread}
    spare = [name for name in unread if name.removesuffix("bias") == name or name.removesuffix("bias") not in layers]
    width = attention.stages["concat"].shape[-1] if "concat" in attention.stages else None
    matrices = [name for name in spare if len(readers.shapes[name]) > 1]
    missed = [name for name in matrices if "output" not in attention.projections and width in readers.shapes[name]]
    for names, sure in ((missed, len(missed) == 1), ([n for n in spare if n not in missed], False)):
        if names:
            yield Finding(
                "parameters",
                f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} "
                f"{'is' if len(names) == 1 else 'are'} unused"
                + (": the concatenated heads are never projected." if sure else "."),
                "The output does not depend on any operation that reads it.",
                sure=sure,
                module=attention.module,
            )


def _unread_features(evidence: Evidence, readers: Readers, attention: Attention) -> Iterator[Finding]:
    """Yield packed projections with unread features: one of q, k and v uses the part of another."""
    packed = Counter(op.index for side, op in attention.projections.items() if side in SIDES)
    for side in SIDES:
        op = attention.projections.get(side)
        if op is None or packed.pop(op.index, 0) < 2 or attention.branches:
            continue
        name, features = _weight_of(evidence, op), op.output.shape[-1]
        uses = [op, *filter(evidence.run.graph.is_projection, readers.ops.get(name, ()))]
        unread = set[int].intersection(*map(readers.unread_features, uses))
        if attention.stages[f"{side[0]}_heads"].shape[-1] <= len(unread) < features:
            readers.mentioned.add(name)
            yield Finding(
                "parameters",
                f"{len(unread)} of the {features} output features of {name or 'the projection'} are unused: query, key "
                "and value do not use three separate parts.",
                f"The output does not depend on features {shortened(spans(unread), 60)}.",
                source=op.source,
                module=attention.module,
                fix="Take query, key and value from separate parts.",
            )


def _without_gradient(evidence: Evidence, readers: Readers) -> Iterator[Finding]:
    """Yield projections that the output depends on without a gradient, for the whole weight or for some heads."""
    gradients, weights = gradients_of(evidence), dict(evidence.subject.module.named_parameters())
    if any(gradient is not None and bool(gradient.isnan().any()) for gradient in gradients.values()):
        yield from _of_nan(evidence)
        return
    for attention, _, _ in evidence.kinds:
        # A softmax that gives all of its weight to one key has zero gradient although nothing cuts it.
        found = (sight.shares for sight in evidence.sights if sight.attention is attention)
        shares = next(found, torch.zeros(1, dtype=torch.bool))
        constant = not evidence.follows or not bool(shares.any())
        for side, op in attention.projections.items():
            name = _weight_of(evidence, op)
            if name in readers.mentioned or name not in gradients:
                continue
            gradient, weight, whole = gradients[name], weights[name], _weight_of(evidence, op, whole=True)
            features, dead = "", torch.ones((), dtype=torch.bool)
            if gradient is None:
                lacks = bool(whole) and not _is_coded(evidence, op)
            else:
                width = evidence.run.graph.projected(op).shape[-1]
                inner = [dim for dim, size in enumerate(gradient.shape) if size == width]
                if side not in SIDES or constant or gradient.dtype not in _EXACT or not inner:
                    continue
                dead = (gradient == 0).all(inner[-1], keepdim=True)  # a square matrix has out_features first
                made = dead.numel()
                if whole and made == op.output.shape[-1]:
                    dead.view(-1)[sorted(readers.unread_features(op))] = False
                features = f"features {shortened(spans(dead.flatten().nonzero().flatten().tolist()), 60)} of {made}"
                lacks = attention.stages[f"{side[0]}_heads"].shape[-1] <= int(dead.sum()) < made
            if not lacks:
                continue
            readers.mentioned.add(name)
            is_cut = _moves_the_output(evidence, weight, dead.to(weight.device))
            if is_cut and gradient is not None and side != "value" and not bool(shares.all()):
                continue
            made_by = attention.projections.items()
            sides = listed([each for each, other in made_by if _weight_of(evidence, other) == name])
            gets = f"gets no gradient{f' for {features}' * bool(features)}: the autograd graph is cut after it"
            parts = f"{features or 'its features'} have no part in the output"
            yield Finding(
                "parameters",
                f"{name} projects the {sides} and {gets}." if is_cut else f"{name} projects the {sides}, and {parts}.",
                "The gradients are of a random weighted sum of the output."
                if is_cut
                else "With other numbers in the weight, the output is the same bit for bit.",
                sure=is_cut,
                source=op.source,
                module=attention.module,
                fix="Remove detach(), no_grad() or .data." if is_cut else "",
            )


def _moves_the_output(evidence: Evidence, weight: Tensor, marks: Tensor) -> bool:
    """Return whether the output changes, bit for bit, when the marked elements of a weight do."""
    draw, value = torch.Generator().manual_seed(1729), weight.detach()
    other = value + 2 * (float(value.std()) or 1.0) * torch.randn(value.shape, generator=draw).to(value)
    returned = evidence.returned(instead={id(weight): torch.where(marks, other, value)})
    return bool(evidence.apart(evidence.output_of(returned), times=0))


def _is_coded(evidence: Evidence, op: Op) -> bool:
    """Return whether whole numbers, which have no gradient, are made of a projection on the way to the output."""
    recording = evidence.run.recording
    ways = (between(recording, {op.output.id}, named.tensor) for named in recording.outputs)
    return any(output.dtype.startswith("int") for way in ways for step in way for output in step.outputs)


def gradients_of(evidence: Evidence) -> Gradients:
    """Return the gradient of each projection weight that requires one; None if no gradient arrives.

    Covered are each kind of attention, and the attentions of the first 64 heads. Raises `NotPossibleError` if no
    gradient can be computed.
    """
    attentions = _first_attentions(evidence)
    attentions += [attention for attention, _, _ in evidence.kinds]
    names = {_weight_of(evidence, op) for attention in attentions for op in attention.projections.values()}
    wanted = {n: p for n, p in evidence.subject.module.named_parameters() if n in names and p.requires_grad}
    if not wanted:
        raise NotPossibleError("no projection requires a gradient")
    outputs, found = _gradients(evidence, wanted)
    if not found:
        raise NotPossibleError("the output depends on no projection that requires a gradient")
    if any(gradient is None for gradient in found.values()) and _has_own_backward(outputs):
        return {name: gradient for name, gradient in found.items() if gradient is not None}  # it may give the others
    return found


def _gradients(
    evidence: Evidence, wanted: Mapping[str, nn.Parameter], *, finite: bool = False
) -> tuple[list[Tensor], Gradients]:
    """Return the outputs of a run, and the gradient of each parameter; no gradients if no output has one.

    With `finite` the loss leaves out outputs with NaN or infinity. Raises `NotPossibleError` if the run raises.
    """
    arguments, found = evidence.arguments, Gradients()
    without_cache = {"use_cache": False} if "use_cache" in arguments.parameters else {}
    subject = replace(evidence.runner.prepared(arguments.of_call(without_cache)), grad=True)
    try:
        with subject.settings():
            returned = subject.module(*subject.args, **subject.kwargs)
            outputs = [t for _, t in tensors_in(returned) if t.is_floating_point() and t.requires_grad and t.dim()]
            outputs = [t for t in outputs if not finite or bool(t.isfinite().all())]
            if outputs:
                loss = torch.stack([_mixed(output).to(outputs[0].dtype) for output in outputs]).sum()
                gradients = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
                found = dict(zip(wanted, gradients, strict=True))
    except Exception as error:  # user code may raise anything under autograd
        nan = _FIRST_NAN.search(str(error))
        reason = nan[1] if nan else f"no gradient can be computed: {type(error).__name__}"
        raise NotPossibleError(reason, _NAN * bool(nan)) from error
    return outputs, found


def _of_nan(evidence: Evidence) -> Iterator[Finding]:
    """Yield the parameters whose gradients are NaN although the output is finite, and where the NaN begins.

    Raises `NotPossibleError` if no output is finite.
    """
    wanted = {name: weight for name, weight in evidence.subject.module.named_parameters() if weight.requires_grad}
    outputs, gradients = _gradients(evidence, wanted, finite=True)
    if not outputs:
        raise NotPossibleError("the output is not finite, so its gradients are NaN", "until finite passes")
    names = [name for name, gradient in gradients.items() if gradient is not None and bool(gradient.isnan().any())]
    if not names:
        return
    blind = next((sight for sight in evidence.sights if sight.has_blind_query), None)
    begins = _first_nan(evidence, wanted)
    proof = f"The NaN begins in {begins}, in the backward. " if begins else ""
    if blind is not None:
        proof += "A query has every key masked out: the output leaves its NaN out, but in the backward 0 · NaN is NaN. "
    yield Finding(
        "parameters",
        f"{first_few(names, _SHOWN)} get{'s' * (len(names) == 1)} NaN gradients, although the output is finite.",
        f"{proof}The gradients are of a random weighted sum of the output.",
        source=blind.line if blind is not None else "",
        module=blind.module if blind is not None else "",
    )


def _first_nan(evidence: Evidence, wanted: Mapping[str, nn.Parameter]) -> str:
    """Return the first function of the backward that gives NaN, e.g. `SoftmaxBackward0`; empty if it is unknown."""
    with warnings.catch_warnings(), suppress(RaisedError):
        warnings.simplefilter("ignore")  # autograd warns that this is slow
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                _gradients(evidence, wanted, finite=True)
        except NotPossibleError as error:
            return str(error) if error.brief == _NAN else ""
    return ""


def _has_own_backward(outputs: Sequence[Tensor]) -> bool:
    """Return whether a function with a backward in Python is behind one of these tensors."""
    nodes = {output.grad_fn: None for output in outputs}
    queue = [*nodes]
    for node in queue:  # which grows meanwhile
        following = [after for after, _ in getattr(node, "next_functions", ()) if after not in nodes]
        nodes |= dict.fromkeys(following)
        queue += following
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


def _mixed(output: Tensor) -> Tensor:
    """Return a weighted sum with a random weight for every position and feature of an output."""
    draw, rows = torch.Generator().manual_seed(2), output.reshape(-1, output.shape[-1])
    left, right = (torch.randn(size, generator=draw).to(output) for size in rows.shape)
    return (rows @ right) @ left


def _first_attentions(evidence: Evidence) -> list[Attention]:
    """Return the first attentions with at most `_MOST_HEADS` heads together."""
    attentions = evidence.run.attentions
    heads = accumulate(names.num_heads for _, names in attentions)
    return [attention for (attention, _), number in zip(attentions, heads, strict=True) if number <= _MOST_HEADS]
