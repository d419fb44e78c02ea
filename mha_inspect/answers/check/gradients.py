"""What arrives at each parameter when the output is taken back through the module."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...record.arguments import tensors_in
from .bench import Bench, NotPossibleError


def gradients_of(bench: Bench) -> dict[str, object]:
    """Each parameter that wants a gradient, to the one that it gets; None where it gets none.

    Raises `NotPossibleError` where none can be taken.
    """
    cached: dict[str, object] | None = bench.__dict__.get("gradients")
    if cached is not None:
        return dict(cached)
    named = {name: p for name, p in bench.module.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not named:
        raise NotPossibleError("no parameter wants a gradient")
    args, kwargs = bench.arguments({})
    bench.restore()
    bench.runs += 1
    try:
        with replace(bench.own, args=args, kwargs=kwargs, grad=True).settings():
            returned = bench.module(*args, **kwargs)
            made = [t for _, t in tensors_in(returned) if t.is_floating_point() and t.requires_grad]
            if not made:
                raise NotPossibleError("the output hangs on no parameter that wants a gradient")
            draw = torch.Generator().manual_seed(2)
            loss = torch.stack(
                [(t * torch.randn(t.shape, generator=draw).to(t)).sum().to(made[0].dtype) for t in made]
            ).sum()
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    except NotPossibleError:
        raise
    except Exception as error:  # whatever somebody's code may raise under gradients
        raise NotPossibleError(f"no gradient can be taken: {type(error).__name__}") from error
    finally:
        bench.restore()
    bench.__dict__["gradients"] = dict(zip(named, found, strict=True))
    return dict(bench.__dict__["gradients"])
