"""A forward that raised: what was completed, what clashed, and why where the evidence says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FailedOperand:
    """One tensor that the failing call was given."""

    name: str
    """As the user's line writes it: `k.transpose(-2, -1)`; a parameter's path; else the argument's name."""
    role: str
    """The argument that it was given for: `attn_mask`; empty where the call has no names for them."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    axes: str
    """What each dimension is, as an einops pattern; a dimension that no evidence names stays a number."""


@dataclass(frozen=True)
class Cause:
    """A mistake that the evidence shows, and a way out of it."""

    name: str
    """`heads_not_transposed`: a word of `mha_inspect.answers.failure.report`."""
    explanation: str
    """What is wrong, with the real numbers."""
    fix: str
    """What to write instead."""


@dataclass(frozen=True)
class ReachedStage:
    """A tensor on the way to the attention that was not completed."""

    name: str
    """A stage of `mha_inspect.naming.stages.STAGES` where its place in the attention is known; else empty."""
    variable: str
    """What the user's code, or the module, calls it; empty where it has no name there."""
    shape: tuple[int, ...]
    axes: str
    dtype: str
    op: str
    """The operation that made it: `aten.view.default`; empty for an input."""
    source: str


@dataclass(frozen=True)
class ReachedOp:
    """One of the last operations before the failure."""

    index: int
    name: str
    module: str
    source: str
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of what it read."""
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of what it wrote."""


@dataclass(frozen=True)
class Failure:
    """How a forward pass ended that did not return."""

    error: str
    """Class of the exception: `RuntimeError`."""
    message: str
    """Its message, as far as it is about the failure."""
    call: str
    """What the user's line called that raised: `torch.matmul`, `Tensor.view`; empty where it raised by itself."""
    op: str
    """The operation that PyTorch had dispatched when it raised; empty where it raised before any."""
    module: str
    """Path of the innermost module whose forward was running; empty for the traced module itself."""
    source: str
    """The line of the user's code: `attention.py:41`."""
    line: str
    """The text of that line."""
    operands: tuple[FailedOperand, ...]
    clash: str
    """What does not fit, in words with the real numbers; empty where that is not known."""
    cause: Cause | None
    """None where the evidence shows none: then there are facts and no guess."""
    completed: tuple[ReachedStage, ...]
    last_ops: tuple[ReachedOp, ...]
    """The last operations that were completed, in order."""
    num_ops: int
    """How many operations were completed."""
    note: str = ""
    """What could not be seen, and why."""
