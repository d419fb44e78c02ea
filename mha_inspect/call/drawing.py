"""The tensors that a forward is called with: what each is to be, and how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..build.vocabulary import Kind
from ..files.memory import require_memory

INPUT_STREAM = 0x6D68612D696E70
"""Added to the seed of the inputs, so that they are not the numbers that the parameters were drawn from."""


@dataclass(frozen=True)
class Plan:
    """One tensor to draw."""

    kind: Kind
    shape: tuple[int, ...]
    """Batch first; a sequence is laid out as the forward takes it when it is drawn."""
    dtype: str = ""
    """Empty: that of the module's parameters; whole numbers for token ids."""
    below: int = 2
    """Token ids are drawn below this number."""
    avoid: tuple[int, ...] = ()
    """Token ids that mean something of their own, such as padding."""
    rows: tuple[int, ...] = ()
    """What each row holds, where that is known; empty: it is drawn."""
    sequence: bool = False
    """Whether it is `batch sequence ...`, and `sequence batch ...` for a forward that takes the sequence first."""

    @property
    def code(self) -> str:
        """How to write it in Python."""
        if self.kind == "ids":
            return f"torch.randint({self.below}, {self.shape})"
        return f"torch.randn{self.shape}"


def generator_of(seed: int) -> torch.Generator:
    """Return what inputs are drawn from."""
    return torch.Generator("cpu").manual_seed((seed + INPUT_STREAM) % 2**64)


def draw(plan: Plan, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw the tensor that a plan asks for: in `dtype` where it asks for none, on meta without content."""
    dtype = getattr(torch, plan.dtype) if plan.dtype else dtype
    if device.type == "meta":
        return torch.empty(plan.shape, dtype=dtype, device="meta")
    size = prod(plan.shape) * dtype.itemsize
    require_memory(size, device, f"an input {list(plan.shape)}", "Try a smaller --batch or --seq-len.")
    if plan.rows:
        tensor = torch.tensor(plan.rows).expand(plan.shape).clone()
    elif dtype == torch.bool:
        # Both words in every row: never fully masked, whichever of them means masked.
        tensor = (torch.arange(plan.shape[-1]) % 2 == 0).expand(plan.shape).clone()
    elif dtype.is_floating_point:
        tensor = torch.randn(plan.shape, generator=generator, dtype=torch.float32, device="cpu")
    else:
        tensor = torch.randint(0, max(plan.below, 1), plan.shape, generator=generator)
        free = next((n for n in range(plan.below) if n not in plan.avoid), None)
        if free is not None and plan.avoid:
            tensor[torch.isin(tensor, torch.tensor(plan.avoid))] = free
    return tensor.to(device=device, dtype=dtype)
