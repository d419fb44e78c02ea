"""What arrives at the projections when the output is taken back through the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ...record.arguments import tensors_in
from ...record.ops import Op
from .bench import Bench, NotPossibleError
from .evidence import MOST_HEADS, kinds


def gradients_of(bench: Bench) -> dict[str, Tensor | None]:
    """Return the gradient of each projection's parameter that wants one; None where it gets none.

    There are those of each kind of attention, and those from the heads to the output. Raises `NotPossibleError` where
    none can be taken.
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
    names = {weight_of(bench, op) for found, _, _ in kinds(bench.seen) for op in found.projections.values()}
    heads = 0
    for found, axes in bench.seen.attentions:
        heads += axes.num_heads
        if "output" in found.projections and heads <= MOST_HEADS:
            names.add(weight_of(bench, found.projections["output"]))
    named = {
        name: p
        for name, p in bench.module.named_parameters()
        if name in names and p.requires_grad and p.is_floating_point()
    }
    if not named:
        raise NotPossibleError("no projection wants a gradient")
    try:
        with _alone(bench.module, set(named)):
            # One row is enough, and a layer that is run again does not hold what its gradients need. It may not be
            # possible: a layer with a cache does something else when it is run again. And where rows attend to each
            # other, what gets none from a row alone may get one from all of them.
            try:
                made = _backwards(bench, list(named.values()), sparing=True)
            except NotPossibleError:
                raise
            except Exception:
                made = (None,)
            if any(map(_lacks, made)):
                made = _backwards(bench, list(named.values()), sparing=False)
    except NotPossibleError:
        raise
    except Exception as error:  # whatever somebody's code may raise under gradients
        raise NotPossibleError(f"no gradient can be taken: {type(error).__name__}") from error
    finally:
        bench.restore()
    return dict(zip(named, made, strict=True))


def _lacks(gradient: Tensor | None) -> bool:
    """Return whether there is none, or none for a whole row or column."""
    return gradient is None or any(bool((gradient == 0).all(axis).any()) for axis in range(min(gradient.dim(), 2)))


def _backwards(bench: Bench, parameters: list[nn.Parameter], *, sparing: bool) -> tuple[Tensor | None, ...]:
    """Return the gradient of each parameter.

    Where it is `sparing`, of one row of the batch alone, and each layer of a list is run again when its turn comes.
    """
    without_cache = {"use_cache": False} if "use_cache" in bench.given.parameters else {}
    own = bench.subject({**(bench.first_row() if sparing else {}), **without_cache}, grad=True)
    latest: dict[str, dict[int, Tensor]] = {}
    for layers in (part for part in own.module.modules() if sparing and isinstance(part, nn.ModuleList)):
        for layer in layers if len(layers) > 2 else ():
            vars(layer)["forward"] = partial(_run_again_backwards, layer.forward, latest)
    with own.settings():
        returned = own.module(*own.args, **own.kwargs)
        made = [t for _, t in tensors_in(returned) if t.is_floating_point() and t.requires_grad and t.dim()]
        if not made:
            raise NotPossibleError("the output hangs on no projection that wants a gradient")
        loss = torch.stack([_mixed(t).to(made[0].dtype) for t in made]).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)


def _run_again_backwards(
    forward: Callable[..., Any], latest: dict[str, dict[int, Tensor]], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward without keeping what its gradients need: it is run once more when they are asked for.

    torch.utils.checkpoint does the same, and imports the compiler. `latest` holds what one forward alone keeps.
    """
    numbers, again = count(), dict[int, Tensor]()

    def unpack(number: int) -> Tensor:
        if number not in again:
            latest.get("again", again).clear()
            latest["again"] = again
            inner = count()

            def keep(tensor: Tensor) -> int:
                number = next(inner)
                again[number] = tensor.detach()
                return number

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, again.__getitem__):
                forward(*args, **kwargs)
        return again.pop(number)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: next(numbers), unpack):
        return forward(*args, **kwargs)


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
