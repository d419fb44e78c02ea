"""The gradients of the projections when the output is taken back through the module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from ...record.arguments import tensors_in
from ...record.ops import Op
from .bench import Bench, kinds, remembered
from .runner import NotPossibleError

MOST_HEADS = 64
"""Heads of which it is said what hangs on them."""

Gradients = dict[str, Tensor | None]


def weight_of(bench: Bench, op: Op) -> str:
    """Return the name of the parameter that a projection multiplies by, or a piece of; empty where it is none."""
    graph, storages = bench.recorded.graph, bench.recorded.recording.parameter_storages
    for tensor in reversed(op.inputs):
        if tensor.storage in storages and len(tensor.shape) > 1 and graph.is_weight(tensor):
            return storages[tensor.storage].name
    return ""


@remembered
def gradients_of(bench: Bench) -> Gradients:
    """Return the gradient of each projection's parameter that wants one; None where it gets none.

    There are those of each kind of attention, and those from the heads to the output. Raises `NotPossibleError` where
    none can be taken.
    """
    run = bench.recorded
    names = {weight_of(bench, op) for attention, _, _ in kinds(run) for op in attention.projections.values()}
    heads = 0
    for attention, axes in run.attentions:
        heads += axes.num_heads
        if "output" in attention.projections and heads <= MOST_HEADS:
            names.add(weight_of(bench, attention.projections["output"]))
    parameters = {
        name: parameter
        for name, parameter in bench.module.named_parameters()
        if name in names and parameter.requires_grad and parameter.is_floating_point()
    }
    if not parameters:
        raise NotPossibleError("no projection wants a gradient")
    try:
        with _alone(bench.module, set(parameters)):
            gradients = _of_one_row(bench, parameters) or _backwards(bench, parameters, {})
    except NotPossibleError:
        raise
    except Exception as error:  # whatever somebody's code may raise under gradients
        raise NotPossibleError(f"no gradient can be taken: {type(error).__name__}") from error
    finally:
        bench.runner.restore()
    return dict(zip(parameters, gradients, strict=True))


def _of_one_row(bench: Bench, parameters: dict[str, nn.Parameter]) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of the first row alone: that is enough, and takes less.

    None where one row is none of several, does not run alone, or leaves a parameter without: rows may attend to others.
    """
    with suppress(Exception):
        gradients = _backwards(bench, parameters, row) if (row := bench.first_row()) else (None,)
        return None if any(map(_lacks, gradients)) else gradients
    return None


def _lacks(gradient: Tensor | None) -> bool:
    """Whether there is none, or none for a whole row or column."""
    return gradient is None or any(bool((gradient == 0).all(axis).any()) for axis in range(min(gradient.dim(), 2)))


def _backwards(bench: Bench, parameters: dict[str, nn.Parameter], row: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each parameter; of one row of the batch alone, where its arguments are given."""
    without_cache = {"use_cache": False} if "use_cache" in bench.given.parameters else {}
    subject = bench.runner.prepared(bench.given.of_call({**row, **without_cache}), grad=True)
    with subject.settings():
        returned = subject.module(*subject.args, **subject.kwargs)
        outputs = [t for _, t in tensors_in(returned) if t.is_floating_point() and t.requires_grad and t.dim()]
        if not outputs:
            raise NotPossibleError("the output hangs on no projection that wants a gradient")
        loss = torch.stack([_mixed(t).to(outputs[0].dtype) for t in outputs]).sum()
        return torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)


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
