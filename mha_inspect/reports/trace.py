"""The report of `trace`, and of a forward that raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .common import Environment, LayerInfo, Report, Stats, Values

Memory = Literal["input", "view", "copy", "new"]
"""How a tensor came by its memory: given, shared with what it was made from, moved without computing, or computed."""


@dataclass(frozen=True)
class Path:
    """How PyTorch runs the plain forward under these settings."""

    plain: str
    """The attention kernel that the plain forward takes, in one phrase."""
    reason: str | None
    """Why it is not the fast path, in torch's own words, or that it names none; None where it is, or there is none."""
    opened: tuple[str, ...]
    """Operations of the run that hide stages, and that were opened to show them."""
    not_opened: tuple[str, ...] = ()
    """Operations of the run that hide stages and were not opened, each with the reason."""
    _kernels: tuple[str, ...] = ()
    """The kernels that the plain forward takes, by their names alone."""


@dataclass(frozen=True)
class OpRef:
    """The operation that produced a stage."""

    index: int
    """Its number in the list of operations."""
    name: str
    """Its name in torch: `aten.bmm.default`."""
    source: str
    """The line that asked for it: `torch/nn/functional.py:6400`."""


@dataclass(frozen=True)
class Stage:
    """One step of attention as a textbook names it."""

    name: str
    """One of `mha_inspect.naming.pattern.STAGES`."""
    shape: tuple[int, ...]
    axes: str
    """What each dimension is, as an einops pattern; a dimension that no evidence names stays a number."""
    formula: str
    """What is computed, with the real numbers: `softmax(scores)`, `q_heads · k_headsᵀ / √64`."""
    dtype: str
    nbytes: int
    """Bytes of the tensor's elements (of those a view shows, though it owns none)."""
    flops: int
    """Floating-point operations of the matrix products that this stage added, a multiply-add counted as two."""
    memory: Memory
    opened: bool
    """Whether the plain forward fuses this stage away, and it was opened to be seen."""
    op: OpRef | None
    """None for an input."""
    stats: Stats | None = None
    values: Values | None = None
    shape_only: bool = False
    """Whether it was never made, there being too many scores: its shape is known, and no number."""
    _brief: str = ""
    """The formula with `split` or `merge` in the place of a pattern."""


@dataclass(frozen=True)
class AttentionReport:
    """One attention: scores of queries and keys, weights made of them, and the average of the values."""

    module: str
    """Path of the module that computes it; empty for the traced module itself."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """What q·kᵀ is multiplied by, as it was really applied; NaN where it is no one number, or there is no q·kᵀ."""
    stages: tuple[Stage, ...]
    notes: tuple[str, ...] = ()
    """Sentences about this attention that a reader should not miss."""
    kind: tuple[str, ...] = ()
    """`self` or `cross`, `causal`, `grouped`: what the recording gives evidence of."""
    call: int | None = None
    """Which of the attentions that its module computed it is, from 1; None where it is the only one."""


@dataclass(frozen=True)
class Returned:
    """One tensor that the module returned."""

    name: str
    """`output`, `weights`, or its place in what was returned."""
    shape: tuple[int, ...]
    axes: str
    dtype: str
    stats: Stats | None = None
    values: Values | None = None


@dataclass(frozen=True)
class OpTensor:
    """A tensor that an operation read or wrote."""

    id: int
    """Number of this tensor in the recording: the same number is the same content."""
    shape: tuple[int, ...]
    dtype: str
    axes: str


@dataclass(frozen=True)
class OpLine:
    """One operation that PyTorch dispatched."""

    index: int
    name: str
    module: str
    source: str
    inputs: tuple[OpTensor, ...]
    outputs: tuple[OpTensor, ...]
    settings: str
    """Arguments that are not tensors, as text: `-1, False`."""
    memory: Memory
    stage: str
    """Name of the stage that this operation completes, or several (`q_proj, k_proj`); empty for the others."""


@dataclass(frozen=True)
class Proof:
    """Whether the steps of a fused kernel compute what the kernel computes: of all that ran, the one farthest off."""

    max_abs_difference: float | None
    """Largest difference between a kernel's result and its steps'; None where there are no numbers (device meta)."""
    noise_floor: float | None
    """Largest rounding error of these steps in this dtype, measured against float64 of the kernel's own inputs."""
    agrees: bool | None
    """None where it was not measured."""
    note: str = ""
    """Why there is no measurement, or what it leaves out."""


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
    """`heads_not_transposed`: a word of `mha_inspect.answers.failure.causes`."""
    explanation: str
    """What is wrong, with the real numbers."""
    fix: str
    """What to write instead."""


@dataclass(frozen=True)
class ReachedStage:
    """A tensor on the way to the attention that was not completed."""

    name: str
    """A stage of `mha_inspect.naming.pattern.STAGES` where its place in the attention is known; else empty."""
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


@dataclass(frozen=True, repr=False)
class Trace(Report):
    """One recorded forward pass, the attentions in it, and the proof."""

    command = "trace"

    environment: Environment
    layer: LayerInfo
    path: Path
    attentions: tuple[AttentionReport, ...]
    returns: tuple[Returned, ...]
    proof: Proof
    notes: tuple[str, ...] = ()
    ops: tuple[OpLine, ...] | None = None
    """Every operation, when asked for."""
    failure: Failure | None = None
    """How the forward ended, where it raised; then the rest is what was completed before."""
    chosen: tuple[int, ...] | None = None
    """Numbers, from 1, of the attentions that were asked to be shown in full; all of them are here in any case."""

    @property
    def ok(self) -> bool:
        """Whether the forward returned, and every opened stage agrees with its kernel."""
        return self.failure is None and self.proof.agrees is not False


def attention_names(trace: Trace) -> list[str]:
    """Return which attention each is, where there are several: `attention 2 of 12 in encoder.layer.1`; else nothing."""
    count = len(trace.attentions)
    if count == 1:
        return [""]
    return [
        f"attention {number} of {count}" + (f" in {one.module}" if one.module else "")
        for number, one in enumerate(trace.attentions, 1)
    ]
