"""The report of `params`."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Environment, LayerInfo, Report, Stats, Values


@dataclass(frozen=True)
class HeadSlice:
    """The part of a parameter that belongs to one head. Bounds are Python's: start included, stop not."""

    head: int
    part: str
    """The matrix or bias that it is a part of: `W_q`, `b_v`, `W_o`; `norm_q` for what scales the queries."""
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    """None for a bias."""


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    name: str
    shape: tuple[int, ...]
    axes: str
    dtype: str
    numel: int
    nbytes: int
    share: float
    """Part of the whole, 0 to 1."""
    role: str
    """What it is for: `W_q, W_k, W_v one above the other: rows 0–511, 512–1023, 1024–1535`."""
    heads: tuple[HeadSlice, ...] | None = None
    """Which rows and columns belong to each head, when asked for."""
    stats: Stats | None = None
    values: Values | None = None


@dataclass(frozen=True)
class HeadNorms:
    """How large each head's part of one matrix is."""

    owner: str
    """Path of the module that the attention's matrices are in; empty for the module itself."""
    part: str
    """`W_q`, `W_k`, `W_v` or `W_o`."""
    norms: tuple[float, ...]
    """‖rows, or columns, of the head‖ for each head in order; fewer where heads of queries share keys and values."""


@dataclass(frozen=True)
class ParametersTotal:
    """The whole, and the closed formula beside the count."""

    numel: int
    nbytes: int
    formula: str
    """`4E² + 4E`, with E the embed_dim; empty for a module that was brought along."""
    formula_numel: int | None
    """What the formula gives; equal to numel, or one of the two is wrong."""


@dataclass(frozen=True)
class HeadCountColumn:
    """The parameters under one head count."""

    num_heads: int
    head_dim: int
    numel: int
    shapes: dict[str, tuple[int, ...]]
    """Name to shape."""
    first_head: dict[str, tuple[HeadSlice, ...]]
    """Name to the slices that head 0 owns."""


@dataclass(frozen=True)
class StoredAttention:
    """An attention of a checkpoint, as names and shapes tell it."""

    module: str
    """Path of the module that holds the projections; empty where they have no path."""
    parameters: tuple[str, ...]
    num_heads: int | None
    """None where nothing tells it."""
    num_kv_heads: int | None
    head_dim: int | None
    fits: tuple[int, ...]
    """Numbers of heads that the shapes allow, where nothing in the file tells which: it loads with any of them."""


@dataclass(frozen=True)
class StoredName:
    """A tensor of a checkpoint or of a module that the other has not, or has in another shape."""

    name: str
    shape: tuple[int, ...]
    expected: tuple[int, ...] | None = None
    """The other shape: that in the module."""


@dataclass(frozen=True)
class LikeModule:
    """How a checkpoint fits a module."""

    module: str
    """What the module is called."""
    prefix: str
    """What stands before the names in the file and not in the module; after a minus sign the other way round."""
    matching: int
    """Tensors of the same name and shape."""
    missing: tuple[StoredName, ...]
    """What the module has and the file has not."""
    unexpected: tuple[StoredName, ...]
    """What the file has and the module has not."""
    wrong_shape: tuple[StoredName, ...]


@dataclass(frozen=True, repr=False)
class ParamsReport(Report):
    """Every parameter tensor of a layer."""

    command = "params"

    environment: Environment
    layer: LayerInfo
    parameters: tuple[Parameter, ...]
    total: ParametersTotal
    side_by_side: tuple[HeadCountColumn, ...] | None = None
    """One a head count, when several were asked for."""
    changes: str = ""
    """What changes between the head counts, in one sentence."""
    notes: tuple[str, ...] = ()
    """Why there are no roles, where there are none."""
    head_norms: tuple[HeadNorms, ...] | None = None
    """How large each head's part of each matrix is, when asked for."""
    stored_attentions: tuple[StoredAttention, ...] | None = None
    """Those of a checkpoint."""
    like: LikeModule | None = None
    """How a checkpoint fits the module that it was held against."""

    @property
    def ok(self) -> bool:
        """Whether the parameters are as many as the formula says, and a checkpoint fits the module beside it."""
        misfits = self.like and (self.like.missing or self.like.unexpected or self.like.wrong_shape)
        return self.total.formula_numel in (None, self.total.numel) and not misfits
