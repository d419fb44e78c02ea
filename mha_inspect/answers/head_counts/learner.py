"""What learns under one head count: a layer that was built from flags, or any module with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...measure.stages import in_dtype
from ...record.rounding import first_tensor
from ...record.subject import Subject
from ...targets.load import Layer
from ..sides.module_run import ModuleSide
from .weights import matrices

_TARGET_STREAM = 0x746172676574
"""Added to the seed of the target, so that it is neither the weights nor the input."""

Read = Callable[[nn.Module, Mapping[str, Tensor] | None], dict[str, Tensor]]


@dataclass(frozen=True)
class Learner:
    """A module with its arguments, and what is needed to compare what it learns."""

    num_heads: int
    own: Subject
    dtype: torch.dtype
    seed: int
    read: Read
    """What a module has learned, by part; with numbers, by the parameter's name, those stand for the parameters."""
    cast: Callable[[torch.dtype], Subject]
    """The same in another dtype."""
    nan: str = ""
    """Why every gradient would be NaN; empty where none needs to be."""

    @property
    def exact(self) -> Learner:
        """The same in float64; for float64, in float32, whose rounding is scaled by `noise_scale`."""
        dtype = torch.float32 if self.dtype == torch.float64 else torch.float64
        return replace(self, own=self.cast(dtype), dtype=dtype)

    @property
    def noise_scale(self) -> float:
        """What a rounding error that was measured against `exact` has to be multiplied by."""
        steps = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return steps if self.dtype == torch.float64 else 1.0

    def parts(self, numbers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What it holds, by part."""
        return self.read(self.own.module, numbers)

    def require_finite(self, what: str) -> None:
        """Raise `InputError` where every gradient would be NaN."""
        if self.nan:
            raise InputError(f"{what} would be NaN: {self.nan}. Leave each query a key, or leave this out.")

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run the body with the random numbers of the seed, and put generators and buffers back after it.

        A backward pass belongs into it as well: it reads buffers, which must not have been put back before.
        """
        with self.own.replaying(self.own.state()), torch.enable_grad():
            torch.manual_seed(self.seed % 2**64)
            yield

    def loss(self) -> Tensor:
        """mean((output - target)²) of one run, with its graph.

        Raises `InputError` where no gradient could come of it.
        """
        output = first_tensor(self.own.module(*self.own.args, **self.own.kwargs))
        if not output.requires_grad:
            raise InputError(
                "There is no gradient: the output hangs on no parameter that learns (a forward under no_grad, whole "
                "numbers, frozen parameters). Leave out --gradients and --steps."
            )
        generator = torch.Generator("cpu").manual_seed((self.seed + _TARGET_STREAM) % 2**64)
        target = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
        return (output - target.to(device=output.device, dtype=output.dtype)).square().mean()


def layer_learner(forward: Layer) -> Learner:
    """A layer that was built from flags: its parts are its matrices and biases, whatever parameters keep them."""
    masked = forward.inputs.fully_masked_rows(forward.spec.num_heads)
    return Learner(
        num_heads=forward.spec.num_heads,
        own=forward,
        dtype=getattr(torch, forward.spec.dtype),
        seed=forward.spec.seed,
        read=matrices,
        cast=partial(in_dtype, forward),
        nan=f"query {masked[0][1]} of batch row {masked[0][0]} has no key left to look at" if masked else "",
    )


def module_learner(num_heads: int, side: ModuleSide, output: Tensor) -> Learner:
    """Any module: its parts are its parameters, by their own names. Those that are frozen have no gradient."""
    nan = int(output.isnan().sum())
    return Learner(
        num_heads=num_heads,
        own=side.own,
        dtype=getattr(torch, side.dtype),
        seed=side.seed,
        read=_by_name,
        cast=partial(side.in_dtype, training=side.own.module.training),
        nan=f"{nan:,} of {output.numel():,} numbers of the output of {side.label} are NaN" if nan else "",
    )


def _by_name(module: nn.Module, numbers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    held = module.named_parameters() if numbers is None else numbers.items()
    return {name: tensor.detach() for name, tensor in held}
