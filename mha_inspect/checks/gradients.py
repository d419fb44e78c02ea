"""Compute the gradients of projections, and find those that are cut off or NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..graph.attention import Attention
from ..graph.rerun import between
from ..record.arguments import tensors_in
from ..record.ops import Op
from ..reports.check import Finding
from ..text import first_few, listed, shortened, spans
from .evidence import Evidence
from .factors import SIDES
from .lab import NotPossibleError, Scene
from .readers import Readers, weight_of

_EXACT = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which small gradients do not underflow to zero."""
_NO_PART = 1e-6
"""A gradient that is smaller than the largest by this factor is rounding."""
_SHOWN = 4
"""The largest number of parameters to name."""

Gradients = dict[str, Tensor | None]
"""Name of a parameter to its gradient; None if no gradient arrives."""


def without_gradient(evidence: Evidence, readers: Readers) -> Iterator[Finding]:
    """Yield projections that the output depends on without a gradient, for the whole weight or for some heads."""
    gradients = gradients_of(evidence)
    if _with_nan(gradients):
        yield from _of_nan(evidence)
        return
    for attention, _, _ in evidence.kinds:
        yield from _of_attention(evidence, readers, attention, gradients)


def _of_attention(
    evidence: Evidence, readers: Readers, attention: Attention, gradients: Gradients
) -> Iterator[Finding]:
    """Yield the projections of one attention that the output depends on without a gradient."""
    weights = dict(evidence.subject.module.named_parameters())
    shares = _shares_of(evidence, attention)
    # A softmax that gives all of its weight to one key has zero gradient although nothing cuts it.
    judges_features = evidence.follows and bool(shares.any())
    for side, op in attention.projections.items():
        weight = weight_of(evidence, op)
        if weight is None or weight.name in readers.mentioned or weight.name not in gradients:
            continue
        name, gradient = weight.name, gradients[weight.name]
        if gradient is None:
            dead = _dead_weight(evidence, op)
        elif judges_features and side in SIDES:
            head_dim = attention.stages[f"{side[0]}_heads"].shape[-1]
            dead = _dead_features(evidence, readers, op, gradient, head_dim)
        else:
            dead = None
        if dead is None:
            continue
        readers.mentioned.add(name)
        is_cut = _moves_the_output(evidence, weights[name], dead.marks.to(weights[name].device))
        gives_all_to_one_key = side != "value" and not bool(shares.all())
        if is_cut and gradient is not None and gives_all_to_one_key:
            continue
        sides = _sides_of(evidence, attention, name)
        yield _cut_off(attention, op, name, sides, dead) if is_cut else _no_part(attention, op, name, sides, dead)


def _sides_of(evidence: Evidence, attention: Attention, name: str) -> list[str]:
    """Return the sides that a parameter projects."""
    sides = []
    for side, op in attention.projections.items():
        weight = weight_of(evidence, op)
        if weight is not None and weight.name == name:
            sides.append(side)
    return sides


def _shares_of(evidence: Evidence, attention: Attention) -> Tensor:
    """Return by head whether a query gives weight to several keys; False for an attention without keys to see."""
    sight = evidence.sight_of(attention)
    if sight is None:
        return torch.zeros(1, dtype=torch.bool)
    return sight.shares


# -- elements without a gradient --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dead:
    """The elements of a weight that get no gradient."""

    marks: Tensor
    """True at these elements, in a shape that can be expanded to that of the weight."""
    features: str = ""
    """The output features that they make, `features 0–3 of 12`; empty for the whole weight."""


def _dead_weight(evidence: Evidence, op: Op) -> _Dead | None:
    """Return all elements of a weight that no gradient reaches; None if none can be expected to."""
    weight = weight_of(evidence, op)
    if weight is None or not weight.is_whole or _is_coded(evidence, op):
        return None
    return _Dead(torch.ones((), dtype=torch.bool))


def _dead_features(evidence: Evidence, readers: Readers, op: Op, gradient: Tensor, head_dim: int) -> _Dead | None:
    """Return the features of a projection with zero gradient; None if they are fewer than a head has, or all.

    The gradient is `features width`, or `width features` for a weight that multiplies from the right.
    """
    width = evidence.run.graph.projected(op).shape[-1]
    inner = [dim for dim, size in enumerate(gradient.shape) if size == width]
    if gradient.dtype not in _EXACT or not inner:
        return None
    # A square matrix has out_features first.
    marks = (gradient == 0).all(inner[-1], keepdim=True)
    count = marks.numel()
    weight = weight_of(evidence, op)
    if weight is not None and weight.is_whole and count == op.output.shape[-1]:
        marks.view(-1)[sorted(readers.unread_features(op))] = False
    if not head_dim <= int(marks.sum()) < count:
        return None
    places = marks.flatten().nonzero().flatten().tolist()
    return _Dead(marks, f"features {shortened(spans(places), 60)} of {count}")


def _is_coded(evidence: Evidence, op: Op) -> bool:
    """Return whether whole numbers, which have no gradient, are made of a projection on the way to the output."""
    recording = evidence.run.recording
    for named in recording.outputs:
        for step in between(recording, {op.output.id}, named.tensor):
            if any(output.dtype.startswith("int") for output in step.outputs):
                return True
    return False


def _moves_the_output(evidence: Evidence, weight: Tensor, marks: Tensor) -> bool:
    """Return whether the output changes, bit for bit, when the marked elements of a weight do."""
    draw = torch.Generator().manual_seed(1729)
    value = weight.detach()
    spread = float(value.std()) or 1.0
    moved = value + 2 * spread * torch.randn(value.shape, generator=draw).to(value)
    returned = evidence.returned(instead={id(weight): torch.where(marks, moved, value)})
    return bool(evidence.apart(evidence.output_of(returned), times=0))


def _cut_off(attention: Attention, op: Op, name: str, sides: Sequence[str], dead: _Dead) -> Finding:
    """Return the fault that the autograd graph is cut after a projection."""
    of_features = f" for {dead.features}" if dead.features else ""
    return Finding(
        "parameters",
        f"{name} projects the {listed(sides)} and gets no gradient{of_features}: the autograd graph is cut after it.",
        "The gradients are of a random weighted sum of the output.",
        source=op.source,
        module=attention.module,
        fix="Remove detach(), no_grad() or .data.",
    )


def _no_part(attention: Attention, op: Op, name: str, sides: Sequence[str], dead: _Dead) -> Finding:
    """Return the suspicion that the output does not depend on a projection."""
    return Finding(
        "parameters",
        f"{name} projects the {listed(sides)}, and {dead.features or 'its features'} do not affect the output.",
        "With other numbers in the weight, the output is the same bit for bit.",
        sure=False,
        source=op.source,
        module=attention.module,
    )


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients_of(evidence: Evidence) -> Gradients:
    """Return the gradient of each projection weight that requires one; None if no gradient arrives.

    Covered is the first attention of each kind: a NaN of a later layer reaches it. Raises `NotPossibleError` if no
    gradient can be computed.
    """
    names = _projection_weights(evidence)
    wanted = {}
    for name, parameter in evidence.subject.module.named_parameters():
        if name in names and parameter.requires_grad:
            wanted[name] = parameter
    if not wanted:
        raise NotPossibleError("no projection requires a gradient")
    backward = _backward(evidence, wanted)
    gradients = backward.gradients
    if not gradients:
        raise NotPossibleError("the output depends on no projection that requires a gradient")
    is_complete = all(gradient is not None for gradient in gradients.values())
    if is_complete or not _has_custom_backward(backward.outputs):
        return gradients
    # A backward in Python may give the missing ones.
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def _projection_weights(evidence: Evidence) -> set[str]:
    """Return the names of the weights of the projections whose gradients are computed."""
    names = set()
    for attention, _, _ in evidence.kinds:
        for op in attention.projections.values():
            weight = weight_of(evidence, op)
            if weight is not None:
                names.add(weight.name)
    return names


@dataclass(frozen=True)
class _Backward:
    """A run and its backward."""

    outputs: Sequence[Tensor]
    """The outputs with a gradient."""
    gradients: Gradients
    """The gradient of each parameter; empty if no output has one."""


def _backward(evidence: Evidence, wanted: Mapping[str, nn.Parameter], *, finite: bool = False) -> _Backward:
    """Return a run with the gradient of each parameter.

    With `finite` the loss leaves out outputs with NaN or infinity. Raises `NotPossibleError` if the run raises.
    """
    arguments = evidence.arguments
    without_cache = {"use_cache": False} if "use_cache" in arguments.parameters else {}
    subject = replace(evidence.lab.prepared(Scene(arguments.of_call(without_cache))), grad=True)
    try:
        with subject.settings():
            outputs = _outputs_of_loss(subject.module(*subject.args, **subject.kwargs), finite=finite)
            if not outputs:
                return _Backward((), {})
            loss = torch.stack([_mixed(output).to(outputs[0].dtype) for output in outputs]).sum()
            gradients = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
    except Exception as error:  # user code may raise anything under autograd
        raise NotPossibleError(f"no gradient can be computed: {type(error).__name__}") from error
    return _Backward(outputs, dict(zip(wanted, gradients, strict=True)))


def _outputs_of_loss(returned: object, *, finite: bool) -> list[Tensor]:
    """Return the tensors that a forward returned and that have a gradient; with `finite` those without NaN."""
    outputs = []
    for _, tensor in tensors_in(returned):
        has_gradient = tensor.is_floating_point() and tensor.requires_grad and tensor.dim()
        if has_gradient and (not finite or bool(tensor.isfinite().all())):
            outputs.append(tensor)
    return outputs


def _mixed(output: Tensor) -> Tensor:
    """Return a weighted sum with a random weight for every position and feature of an output."""
    draw, rows = torch.Generator().manual_seed(2), output.reshape(-1, output.shape[-1])
    left, right = (torch.randn(size, generator=draw).to(output) for size in rows.shape)
    return (rows @ right) @ left


def _has_custom_backward(outputs: Sequence[Tensor]) -> bool:
    """Return whether a function with a backward in Python is behind one of these tensors."""
    queue = list({output.grad_fn: None for output in outputs})
    visited = set(queue)
    while queue:
        node = queue.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        for following, _ in getattr(node, "next_functions", ()):
            if following not in visited:
                visited.add(following)
                queue.append(following)
    return False


def without_part(evidence: Evidence) -> Iterator[Finding]:
    """Yield the projections on which an output depends only in form: their gradients are 0 but for rounding.

    So it is where weights that sum to 1 are summed before they are multiplied by the values. A parameter of zeros, e.g.
    a gate before training, explains it too.
    """
    parameters = dict(evidence.subject.module.named_parameters())
    if any(not bool(parameter.any()) for parameter in parameters.values()):
        return
    weights = [weight_of(evidence, op) for op in evidence.run.recording.ops if evidence.run.graph.is_projection(op)]
    projections = {weight.name for weight in weights if weight is not None and weight.is_whole}
    wanted = {name: parameters[name] for name in projections if parameters[name].requires_grad}
    sizes = {}
    for name, gradient in _backward(evidence, wanted).gradients.items():
        if gradient is not None:
            sizes[name] = gradient.abs().flatten(1).amax(1)
    largest = max((float(size.max()) for size in sizes.values()), default=0.0)
    names = [_features_of(name, size <= _NO_PART * largest) for name, size in sizes.items()]
    names = [name for name in names if name]
    if not names:
        return
    yield Finding(
        "parameters",
        f"The output is the same with any numbers in {first_few(names, _SHOWN)}.",
        "The gradients of a random weighted sum of the output are 0 there, and not in other matrices.",
        sure=False,
        fix="Check what is summed: weights that are summed over the keys before the values are 1.",
    )


def _features_of(name: str, without: Tensor) -> str:
    """Return the name of a matrix, or of its marked output features if they are a third or more; else empty."""
    marked = without.nonzero().flatten().tolist()
    if len(marked) == len(without):
        return name
    return f"features {spans(marked)} of {name}" if 3 * len(marked) >= len(without) else ""


# -- gradients of NaN -------------------------------------------------------------------------------------------------


def _with_nan(gradients: Gradients) -> list[str]:
    """Return the names of the parameters whose gradients have NaN."""
    names = []
    for name, gradient in gradients.items():
        if gradient is not None and bool(gradient.isnan().any()):
            names.append(name)
    return names


def _of_nan(evidence: Evidence) -> Iterator[Finding]:
    """Yield the parameters whose gradients are NaN although the output is finite.

    Raises `NotPossibleError` if no output is finite.
    """
    wanted = {name: weight for name, weight in evidence.subject.module.named_parameters() if weight.requires_grad}
    backward = _backward(evidence, wanted, finite=True)
    if not backward.outputs:
        raise NotPossibleError("the output is not finite, so its gradients are NaN", "until finite passes")
    names = _with_nan(backward.gradients)
    if not names:
        return
    proof = line = module = ""
    blind = [sight for sight in evidence.sights if sight.has_blind_query]
    if blind:
        line, module = blind[0].line, blind[0].module
        proof = "A query has every key masked out: the output discards its NaN, but in the backward 0 · NaN is NaN. "
    get = "gets" if len(names) == 1 else "get"
    yield Finding(
        "parameters",
        f"{first_few(names, _SHOWN)} {get} NaN gradients, although the output is finite.",
        f"{proof}The gradients are of a random weighted sum of the output.",
        source=line,
        module=module,
    )
