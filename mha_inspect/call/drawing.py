"""The tensors that a forward is called with: what each is to be, and how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ..build.vocabulary import Kind
from ..files.memory import require_memory
from ..layers.spec import InputSpec

INPUT_STREAM = 0x6D68612D696E70
"""Added to the seed of the inputs, so that they are not the numbers that the parameters were drawn from."""


Axis = int | Literal["batch", "query", "key"]
"""A size of a tensor, or which size of the inputs it is."""


@dataclass(frozen=True)
class Plan:
    """One tensor to draw, for inputs of any size."""

    kind: Kind
    axes: tuple[Axis, ...]
    """Batch first; `batch query` and `batch key` are laid out as the forward takes them when they are drawn."""
    dtype: str = ""
    """Empty: that of the module's parameters; whole numbers for token ids."""
    below: int = 2
    """Token ids are drawn below this number."""
    avoid: tuple[int, ...] = ()
    """Token ids that mean something of their own, such as padding."""

    def shape(self, inputs: InputSpec) -> tuple[int, ...]:
        """Return its shape for inputs."""
        sizes = {"batch": inputs.batch, "query": inputs.seq_len, "key": inputs.keys}
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    @property
    def is_given(self) -> bool:
        """Whether somebody said its shape."""
        return all(isinstance(axis, int) for axis in self.axes)

    @property
    def is_sequence(self) -> bool:
        """Whether it is `batch sequence ...`, and `sequence batch ...` for a forward that takes the sequence first."""
        return self.axes[:2] in (("batch", "query"), ("batch", "key"))

    def draw(self, inputs: InputSpec, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
        """Return the tensor for inputs: in `dtype` where the plan has none, on meta without content."""
        shape, dtype = self.shape(inputs), getattr(torch, self.dtype) if self.dtype else dtype
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        size = prod(shape) * dtype.itemsize
        require_memory(size, device, f"an input {list(shape)}", "Try a smaller --batch or --seq-len.")
        if self.kind == "lengths":
            tensor = torch.full(shape, inputs.seq_len)
        elif dtype == torch.bool:
            # Both words in every row: never fully masked, whichever of them means masked.
            tensor = (torch.arange(shape[-1]) % 2 == 0).expand(shape).clone()
        elif dtype.is_floating_point:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        else:
            tensor = torch.randint(0, max(self.below, 1), shape, generator=generator)
            free = next((n for n in range(self.below) if n not in self.avoid), None)
            if free is not None and self.avoid:
                tensor[torch.isin(tensor, torch.tensor(self.avoid))] = free
        return tensor.to(device=device, dtype=dtype)

    @property
    def code(self) -> str:
        """How to write it in Python."""
        shape = self.shape(InputSpec(batch=2))
        return f"torch.randint({self.below}, {shape})" if self.kind == "ids" else f"torch.randn{shape}"


def generator_of(seed: int) -> torch.Generator:
    """Return what inputs are drawn from."""
    return torch.Generator("cpu").manual_seed((seed + INPUT_STREAM) % 2**64)
