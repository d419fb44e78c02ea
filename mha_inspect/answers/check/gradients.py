"""What arrives at the projections when the output is taken back through the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...record.arguments import tensors_in
from ...record.ops import Op
from .bench import Bench, NotPossibleError


def gradients_of(bench: Bench) -> dict[str, Tensor | None]:
    """Return each parameter of a projection that wants a gradient, to the one that it gets; None where it gets none.

    Raises `NotPossibleError` where none can be taken.
    """
    cached: dict[str, Tensor | None] | NotPossibleError | None = bench.__dict__.get("gradients")
    if cached is None:
        try:
            cached = _taken(bench)
        except NotPossibleError as error:
            cached = error
        bench.__dict__["gradients"] = cached
    if isinstance(cached, NotPossibleError):
        raise cached
    return cached


def weight_of(bench: Bench, op: Op) -> str:
    """Return the name of the parameter that a projection multiplies by, or a piece of; empty where it is none."""
    graph, storages = bench.seen.graph, bench.seen.recording.parameter_storages
    for tensor in reversed(op.inputs):
        if tensor.storage in storages and len(tensor.shape) > 1 and graph.is_weight(tensor):
            return storages[tensor.storage].name
    return ""


def _taken(bench: Bench) -> dict[str, Tensor | None]:
    names = {weight_of(bench, op) for found, _ in bench.seen.attentions for op in found.projections.values()}
    named = {
        name: p
        for name, p in bench.module.named_parameters()
        if name in names and p.requires_grad and p.is_floating_point()
    }
    if not named:
        raise NotPossibleError("no projection wants a gradient")
    own = bench.subject(grad=True)
    try:
        with own.settings(), _alone(bench.module, set(named)):
            returned = own.module(*own.args, **own.kwargs)
            made = [t for _, t in tensors_in(returned) if t.is_floating_point() and t.requires_grad and t.dim()]
            if not made:
                raise NotPossibleError("the output hangs on no projection that wants a gradient")
            loss = torch.stack([_mixed(t).to(made[0].dtype) for t in made]).sum()
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    except NotPossibleError:
        raise
    except Exception as error:  # whatever somebody's code may raise under gradients
        raise NotPossibleError(f"no gradient can be taken: {type(error).__name__}") from error
    finally:
        bench.restore()
    return dict(zip(named, found, strict=True))


def _mixed(output: Tensor) -> Tensor:
    """Return a sum of an output in which every row and every feature counts otherwise."""
    draw = torch.Generator().manual_seed(2)
    rows = output.reshape(-1, output.shape[-1])
    left, right = (torch.randn(size, generator=draw).to(output) for size in rows.shape)
    return (rows @ right) @ left


@contextmanager
def _alone(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Have these parameters alone want gradients: what only others need is not kept."""
    others = [p for name, p in module.named_parameters() if p.requires_grad and name not in names]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
