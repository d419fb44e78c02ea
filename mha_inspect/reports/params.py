"""Define the report of `params`: the parameters of a module or of a checkpoint file, and how such a file fits a module.

The names of classes and fields are those of the JSON output, and the text below a field is its description there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..explained import explain_fields
from .common import Environment, LayerInfo, Report, Stats, Values
from .trace import Rank


@dataclass(frozen=True)
class HeadSlice:
    """The part of a parameter that belongs to one head. Bounds are Python's: start is included, stop is not."""

    head: int
    """Number of the head, from 0."""
    part: str
    """The matrix or bias that contains it: `W_q`, `b_v`, `W_o`; `norm_q` for a weight that scales the queries."""
    rows: tuple[int, int]
    """Bounds of its rows in the parameter; of a bias, bounds of its elements."""
    columns: tuple[int, int] | None
    """Bounds of its columns in the parameter; None for a bias."""


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    """Its name in the module: `self_attn.in_proj_weight`."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    axes: str
    """Name of each dimension, as an einops pattern; a dimension whose name is not known is a number."""
    dtype: str
    """Data type of the elements."""
    numel: int
    """Number of its elements."""
    nbytes: int
    """Bytes of its elements."""
    share: float
    """Share of the elements of all parameters, from 0 to 1."""
    role: str
    """Its use: `W_q, W_k, W_v stacked: rows 0–511, 512–1023, 1024–1535`; else its layer's class: `LayerNorm`."""
    heads: tuple[HeadSlice, ...] | None = None
    """The rows and columns of each head; None if not requested."""
    stats: Stats | None = None
    """Statistics of the content; None if not requested."""
    values: Values | None = None
    """The content; None if not requested."""
    whole: tuple[int, ...] | None = None
    """Shape over all ranks, if this rank has a part of it; None for a whole parameter."""
    start: tuple[int, ...] | None = None
    """Index of this rank's first element in each dimension of `whole`; None for a whole parameter."""
    tied: tuple[str, ...] = ()
    """Its other names: the same tensor, counted once."""


@dataclass(frozen=True)
class Buffer:
    """A tensor of a module that is not a parameter: a mask, a table of positions, statistics of a batch norm."""

    name: str
    """Its name in the module: `layers.0.mask`."""
    shape: tuple[int, ...]
    """Its size in each dimension."""
    dtype: str
    """Data type of its elements."""
    numel: int
    """Number of its elements."""
    nbytes: int
    """Bytes of its elements."""
    saved: bool
    """Whether it is in the state dict; False for `persistent=False`."""


@dataclass(frozen=True)
class ParametersTotal:
    """The total number of parameters, and the formula for it."""

    numel: int
    """Number of elements of all parameters."""
    nbytes: int
    """Bytes of all parameters."""
    formula: str
    """`4E² + 4E`, with E the embed_dim; empty for the user's own module."""
    formula_numel: int | None
    """Value of the formula, which must equal numel; None without a formula."""


@dataclass(frozen=True)
class HeadCountColumn:
    """The parameters for one head count."""

    num_heads: int
    """Number of query heads."""
    head_dim: int
    """Number of features of a head."""
    numel: int
    """Number of elements of all parameters."""
    shapes: dict[str, tuple[int, ...]]
    """Parameter name to shape."""
    first_head: dict[str, tuple[HeadSlice, ...]]
    """Parameter name to the slices of head 0."""


@dataclass(frozen=True)
class StoredAttention:
    """An attention in a checkpoint, found by names and shapes."""

    module: str
    """Path of the module with the projections; empty if they have no path."""
    parameters: tuple[str, ...]
    """Names of its tensors."""
    num_heads: int | None
    """None if the file does not determine it."""
    num_kv_heads: int | None
    """None if the file does not determine it."""
    head_dim: int | None
    """None if the file does not determine it."""
    fits: tuple[int, ...]
    """Numbers of heads with which the file can be loaded, if the file does not determine the number; else empty."""


@dataclass(frozen=True)
class StoredName:
    """A tensor of a checkpoint or a module that the other of the two lacks, or has with another shape."""

    name: str
    """Its name, in the checkpoint or in the module."""
    shape: tuple[int, ...]
    """Its size in each dimension."""
    expected: tuple[int, ...] | None = None
    """The shape in the module if it is another; else None."""
    buffer: bool = False
    """Whether it is a buffer of the module: a mask or a table, and no weight."""


@dataclass(frozen=True)
class LikeModule:
    """How a checkpoint fits a module."""

    module: str
    """Name of the module."""
    prefix: str
    """`model.` if only names in the file begin with it; `-model.` if only names in the module do; empty without one."""
    matching: int
    """Number of tensors with the same name and shape, without transposed square weights."""
    missing: tuple[StoredName, ...]
    """Tensors that are only in the module."""
    unexpected: tuple[StoredName, ...]
    """Tensors that are only in the file."""
    wrong_shape: tuple[StoredName, ...]
    """Tensors with different shapes in the file and the module, without the transposed ones."""
    called: bool = True
    """Whether the roles of parameters come from a run of the module; otherwise from names and shapes."""
    transposed: tuple[StoredName, ...] = ()
    """Weights that the file has transposed by their shape, and square ones that likely are: all others of their block
    are."""


@dataclass(frozen=True, repr=False)
class ParamsReport(Report):
    """Every parameter tensor of a layer."""

    command = "params"

    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    parameters: tuple[Parameter, ...]
    """Every parameter, in the order of the module."""
    total: ParametersTotal
    """The total number of parameters."""
    side_by_side: tuple[HeadCountColumn, ...] | None = None
    """The parameters for each head count; None if only one was requested."""
    changes: str = ""
    """One sentence on what differs between the head counts; empty for one head count."""
    notes: tuple[str, ...] = ()
    """Sentences on why roles are missing."""
    stored_attentions: tuple[StoredAttention, ...] | None = None
    """The attentions in a checkpoint; None for a module."""
    like: LikeModule | None = None
    """How a checkpoint fits the given module; None without such a module."""
    ranks: tuple[Rank, ...] | None = None
    """The ranks of the process group, as in a trace; None on a single rank."""
    buffers: tuple[Buffer, ...] = ()
    """The buffers of the module, which are not in the total; empty for a checkpoint."""

    @property
    def ok(self) -> bool:
        """Whether the number of parameters matches the formula, and a checkpoint fits the given module."""
        if self.total.formula_numel not in (None, self.total.numel):
            return False
        like = self.like
        if like is None:
            return True
        return not (like.missing or like.unexpected or like.wrong_shape or like.transposed)


# So that `help()` shows the text below each field.
explain_fields(globals())
