"""Define the report of `trace`, also for a forward that raised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..explained import explain_fields
from .check import Finding
from .common import Difference, Environment, LayerInfo, Report, Stats, Values

Memory = Literal["input", "view", "copy", "new"]
"""Where a tensor's memory comes from: an input, shared with the tensor it was made from, copied, or computed."""

WITHIN_TOKENS = "over the heads within each token"
"""The kind of an attention whose heads were never transposed: no token attends to another."""
PIECES_OF_TOKENS = "over pieces of tokens"
"""The kind of an attention whose heads were split by a view that makes positions of features."""


@dataclass(frozen=True)
class Path:
    """How PyTorch runs the plain forward with these settings."""

    plain: str
    """A phrase on the attention kernel of the plain forward."""
    reason: str | None
    """torch's own reason for not taking the fast path, or that it gives none; None if it is taken or does not exist."""
    opened: tuple[str, ...]
    """Fused operations of the run that were opened to show their stages."""
    not_opened: tuple[str, ...] = ()
    """Fused operations of the run that were not opened, each with the reason."""
    _kernels: tuple[str, ...] = ()
    """Names of the kernels of the plain forward."""


@dataclass(frozen=True)
class OpRef:
    """The operation that produced a stage."""

    index: int
    """Its number in the list of operations."""
    name: str
    """Its name in torch: `aten.bmm.default`."""
    source: str
    """The line that called it: `torch/nn/functional.py:6400`."""


@dataclass(frozen=True)
class Stage:
    """One step of attention as a textbook names it."""

    name: str
    """One of `mha_inspect.naming.pattern.STAGES`."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""
    formula: str
    """The computation with the real numbers: `softmax(scores)`, `q_heads · k_headsᵀ / √64`."""
    dtype: str
    """Data type of the elements."""
    nbytes: int
    """Bytes of the tensor's elements, also for a view."""
    flops: int
    """Floating-point operations of this stage's matrix products; a multiply-add counts as two."""
    memory: Memory
    """Where its memory comes from: an input, shared with its source, copied, or computed."""
    opened: bool
    """Whether a fused kernel of the plain forward hides this stage, so that the kernel was opened."""
    op: OpRef | None
    """The operation that made it; None for an input."""
    stats: Stats | None = None
    """Statistics of the content; None if not requested."""
    values: Values | None = None
    """The content; None if not requested."""
    shape_only: bool = False
    """Whether the stage has a shape and no numbers, because the scores are too large to compute."""
    whole: tuple[int, ...] | None = None
    """Shape of the tensor over all ranks; None if this rank computes all of it, or it is unknown."""
    _brief: str = ""
    """The formula with `split` or `merge` instead of a pattern."""


@dataclass(frozen=True)
class Position:
    """How positions enter the scores."""

    kind: Literal["rotary", "relative bias", "alibi"]
    """How positions enter: rotated queries and keys, a bias by distance, or slopes of ALiBi."""
    layout: Literal["half", "interleaved"] | None = None
    """The features of a rotated pair: i and i + dims / 2, or 2i and 2i + 1; None if nothing is rotated."""
    dims: int | None = None
    """Number of rotated features of a head; None if nothing is rotated."""
    query_offset: int | None = None
    """Position of the first query in its rotation; None if it is unknown or the query is not rotated."""
    key_offset: int | None = None
    """The same for the first key of this call."""


@dataclass(frozen=True)
class QKNorm:
    """A norm of queries and keys after their projection."""

    kind: Literal["rms", "layer", "l2"]
    """RMS norm, layer norm, or division by the length."""
    over: Literal["head", "all"]
    """The features of a head, or the features of all heads together."""


@dataclass(frozen=True)
class Cache:
    """Keys of earlier calls beside the keys of this call."""

    past: int
    """Number of keys of earlier calls."""
    new: int
    """Number of keys of this call."""
    empty: int
    """Number of keys that are slots without content."""
    way: Literal["concatenated", "in place", "paged"]
    """Keys are appended to a copy, written into memory of fixed size, or written and read by their slots."""


@dataclass(frozen=True)
class AttentionReport:
    """One attention: scores of queries and keys, weights computed from them, and the weighted average of the values."""

    module: str
    """Path of the module that computes it; empty for the traced module itself."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """Number of features of a head."""
    scale: float
    """The factor that q·kᵀ was multiplied by in the run; NaN if it is not a single number or there is no q·kᵀ."""
    stages: tuple[Stage, ...]
    """The stages in the order of a textbook, from `query` to `output`."""
    position: Position | None
    """How positions enter between the projections and the weights; None if they do not, or it is unknown."""
    qk_norm: QKNorm | None
    """The norm between the projections and the scores; None without one."""
    cache: Cache | None
    """The keys of earlier calls; None without any."""
    window: int | None
    """Number of keys, its own included, that a query sees back; None without a limit."""
    notes: tuple[str, ...] = ()
    """Important sentences on this attention."""
    kind: tuple[str, ...] = ()
    """`self` or `cross`, `causal`, `grouped`: the kinds that the recording shows."""
    call: int | None = None
    """Number of the attention among those that its module computed, from 1; None if it is the only one."""
    bias: bool = False
    """Whether finite numbers are added to the scores, apart from masks."""


@dataclass(frozen=True)
class Returned:
    """One tensor that the module returned."""

    name: str
    """`output`, `weights`, or its position in the result."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""
    dtype: str
    """Data type of the elements."""
    stats: Stats | None = None
    """Statistics of the content; None if not requested."""
    values: Values | None = None
    """The content; None if not requested."""
    mean_of_heads: int | None = None
    """The number of heads whose weights it is the mean of, as its numbers show; None if it is no mean, or unknown."""


@dataclass(frozen=True)
class OpTensor:
    """A tensor that an operation read or wrote."""

    id: int
    """Number of this tensor in the recording; the same number means the same content."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    dtype: str
    """Data type of the elements."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""


@dataclass(frozen=True)
class OpLine:
    """One operation that PyTorch dispatched."""

    index: int
    """Its number in the list of operations."""
    name: str
    """Its name in torch: `aten.bmm.default`."""
    module: str
    """Path of the module; empty for the traced module itself."""
    source: str
    """The line that called it: `attention.py:41`; empty if not known."""
    inputs: tuple[OpTensor, ...]
    """The tensors that it read."""
    outputs: tuple[OpTensor, ...]
    """The tensors that it wrote."""
    settings: str
    """Arguments that are not tensors, as text: `-1, False`."""
    memory: Memory
    """Where the memory of its result comes from."""
    stage: str
    """Name of the stage that this operation completes, or several (`q_proj, k_proj`); empty if it completes none."""


@dataclass(frozen=True)
class Proof:
    """Whether the steps of fused kernels compute the kernels' results: the kernel with the largest difference.

    With --ranks: whether every rank's output is the whole module's.
    """

    max_abs_difference: float | None
    """Largest difference between a kernel's result and that of its steps; None without numbers (device meta)."""
    noise_floor: float | None
    """Largest rounding error of these steps in this dtype, measured against float64 on the kernel's own inputs."""
    agrees: bool | None
    """Whether the result and the steps agree within rounding; None if not measured."""
    note: str = ""
    """Why there is no measurement, which kernels it omits, or the first stage that differs; else empty."""
    of: Literal["kernels", "ranks"] = "kernels"
    """The results that are compared with a second computation."""


@dataclass(frozen=True)
class Step:
    """One call of a decode loop: a prompt, or a single token after it."""

    queries: int
    """Number of tokens that the call was given."""
    past: int
    """Number of keys from earlier calls."""
    new: int
    """Number of keys that this call adds."""
    scores: tuple[int, ...]
    """Shape of the scores, in the attention with the most keys."""
    cache_bytes: int
    """Bytes of the cache that the call returned. Without one: of the keys and values of all attentions, with empty
    slots, in as many heads as are projected."""
    flops: int
    """Floating-point operations of all stages of all attentions."""
    query_offset: int | None = None
    """Position by which the first query is rotated; None if it is unknown or varies, or if nothing is rotated."""
    key_offset: int | None = None
    """The same for the first key that this call rotates."""


@dataclass(frozen=True)
class DecodeProof(Difference):
    """The last position of the prompt and of each step beside that position of one forward over all tokens."""

    tokens: int
    """Number of all tokens: the prompt and the steps."""
    note: str = ""
    """Why they were not compared; empty if they were."""
    reason: str = ""
    """The first difference between a call and the one forward, if an output differs; empty if none was found."""
    fix: str = ""
    """How to fix the difference; empty if the runs do not show it."""


@dataclass(frozen=True)
class FailedOperand:
    """One tensor among the arguments of the failing call."""

    name: str
    """Its expression in the user's line: `k.transpose(-2, -1)`; a parameter's path; else the argument's name."""
    role: str
    """The argument that it was passed as: `attn_mask`; empty if the call has no argument names."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    dtype: str
    """Data type of the elements."""
    device: str
    """Device of the tensor."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""


@dataclass(frozen=True)
class Cause:
    """A mistake that the evidence shows, with a fix that was tried."""

    name: str
    """A key of `mha_inspect.failures.causes`: `heads_not_transposed`."""
    explanation: str
    """The mistake, with the real numbers."""
    fix: str
    """The code to write instead: the failing call ran with it. Empty if no fix was found that runs."""


@dataclass(frozen=True)
class ReachedStage:
    """A tensor of the attention that was not completed."""

    name: str
    """A stage of `mha_inspect.naming.pattern.STAGES`; empty if its place in the attention is not known."""
    variable: str
    """Its name in the user's code or the module; empty if it has no name there."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""
    dtype: str
    """Data type of the elements."""
    op: str
    """The operation that made it: `aten.view.default`; empty for an input."""
    source: str
    """The line that called it: `attention.py:41`; empty if not known."""


@dataclass(frozen=True)
class ReachedOp:
    """One of the last operations before the failure."""

    index: int
    """Its number in the list of operations."""
    name: str
    """Its name in torch: `aten.bmm.default`."""
    module: str
    """Path of the module; empty for the traced module itself."""
    source: str
    """The line that called it: `attention.py:41`; empty if not known."""
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that it read."""
    outputs: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that it wrote."""


@dataclass(frozen=True)
class Failure:
    """The failure of a forward pass that raised an error."""

    error: str
    """Class of the exception: `RuntimeError`."""
    message: str
    """The part of its message that is about the failure."""
    call: str
    """The function that raised, called in the user's line: `torch.matmul`, `Tensor.view`; empty if the line raised."""
    op: str
    """The operation that PyTorch had dispatched; empty if it raised before dispatching one."""
    module: str
    """Path of the innermost module whose forward was running; empty for the traced module itself."""
    source: str
    """The line of the user's code: `attention.py:41`."""
    line: str
    """The text of that line."""
    operands: tuple[FailedOperand, ...]
    """The tensors among the arguments of the failing call."""
    clash: str
    """The mismatch in words, with the real numbers; empty if not known."""
    cause: Cause | None
    """None if the evidence shows no cause; then there are only facts."""
    completed: tuple[ReachedStage, ...]
    """The stages that were completed, in order."""
    last_ops: tuple[ReachedOp, ...]
    """The last completed operations, in order."""
    num_ops: int
    """Number of completed operations."""
    note: str = ""
    """The parts that could not be recorded, and why; empty if everything was recorded."""


@dataclass(frozen=True)
class Collective:
    """An exchange of elements between the ranks of a process group."""

    name: str
    """`all_reduce`, `all_gather_into_tensor`."""
    stage: str
    """The stage of an attention that it makes; empty for any other tensor."""
    shape: tuple[int, ...]
    """Shape of its largest tensor on this rank."""
    dtype: str
    """Data type of the elements."""
    nbytes: int
    """Bytes of that tensor."""
    module: str
    """Path of the module; empty for the traced module itself."""
    source: str
    """The line that called it: `attention.py:41`; empty if not known."""


@dataclass(frozen=True)
class Rank:
    """The part of the attentions that one rank of a process group has."""

    rank: int
    """Number of the rank, from 0."""
    heads: int | None
    """Number of query heads that it computes; None if its attentions differ in it, or it computes none."""
    kv_heads: int | None
    """Number of key and value heads that it computes; None as for `heads`."""
    kv_copied: bool
    """Whether other ranks have the same key heads."""
    rows: dict[str, tuple[int, int]]
    """First row and the row after the last, in the whole, of W_q, W_k and W_v; the same for the columns of W_o."""
    bytes: int
    """Bytes of all parameters on this rank."""
    flops: int
    """Floating-point operations of all stages of its attentions."""
    exchanged: int
    """Bytes of the tensors that it exchanges with other ranks in one forward."""


@dataclass(frozen=True, repr=False)
class Trace(Report):
    """One recorded forward pass, with its attentions and the check of its opened kernels."""

    command = "trace"

    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    path: Path
    """How PyTorch ran the forward: its kernel, and why."""
    attentions: tuple[AttentionReport, ...]
    """The attentions, in the order of computation."""
    returns: tuple[Returned, ...]
    """The tensors that the module returned."""
    proof: Proof
    """Whether the opened stages compute the kernels' results."""
    notes: tuple[str, ...] = ()
    """Important sentences on this report."""
    findings: tuple[Finding, ...] = ()
    """The mistakes, and possible mistakes, that this run alone shows. `check` changes the input and looks further."""
    unjudged: str | None = None
    """Why the run was not judged, as a phrase; None if it was."""
    ops: tuple[OpLine, ...] | None = None
    """Every operation; None if not requested."""
    collectives: tuple[Collective, ...] | None = None
    """The exchanges with other ranks; None if this rank exchanged nothing."""
    ranks: tuple[Rank, ...] | None = None
    """The ranks of the process group; None on a single rank, or if they were not asked."""
    plan: dict[str, Literal["colwise", "rowwise", "replicate"]] | None = None
    """How each module's parameters are sharded, by its path, for `parallelize_module`; None without --ranks."""
    plan_code: str | None = None
    """Python code that applies the plan; None without one."""
    failure: Failure | None = None
    """The failure of a forward that raised, after which the rest is what was completed before; None if it returned."""
    chosen: tuple[int, ...] | None = None
    """Numbers, from 1, of the attentions requested in full; None if not requested. The report has every attention."""
    steps: tuple[Step, ...] | None = None
    """The calls of a decode loop, the prompt first. With `--decode` the attentions are those of the last call, in a
    recorded block those of every call. None without a decode loop."""
    decode: DecodeProof | None = None
    """Whether every call equals one forward over all tokens; None if not requested."""
    patch: str | None = None
    """A unified diff of the target's own file with which no check fails; None if none was found in the time."""
    _shows_cost: bool = False
    """Whether the page has the bytes, operations and memory of each stage."""

    @property
    def ok(self) -> bool:
        """Whether the run is complete, and nothing is surely wrong in it."""
        return self.complete and not any(finding.sure for finding in self.findings)

    @property
    def complete(self) -> bool:
        """Whether the forward returned, every opened stage agrees with its kernel, and steps with one forward."""
        differs = self.decode is not None and self.decode.verdict == "differs"
        return self.failure is None and self.proof.agrees is not False and not differs


def attention_names(trace: Trace) -> list[str]:
    """Return a name for each attention: `attention 2 of 12 in encoder.layer.1`; empty for a single attention."""
    count = len(trace.attentions)
    if count == 1:
        return [""]
    return [
        f"attention {number} of {count}" + (f" in {attention.module}" if attention.module else "")
        for number, attention in enumerate(trace.attentions, 1)
    ]


explain_fields(globals())
