"""Know what each torch operation does: from one table, and from torch's own schema. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Trait = Literal[
    "product",  # a matrix product
    "convolution",
    "distances",  # the distance between every two rows
    "softmax",
    "norms",  # is a norm, or one step of a norm
    "pools",  # takes the maximum or the average of neighbours
    "scales",  # may multiply by a single number
    "guards",  # may keep a sum from being zero
    "bends",  # applies a nonlinear function to each score
    "fills",  # writes a constant or other values into some elements
    "fills_where",  # fills the elements that a boolean mask selects
    "masks",  # may come between exponentials and their sum
    "picks",  # selects some of its input
    "runs",  # sums cumulatively or cuts out a triangle
    "gathers",  # reads by indices
    "joins",  # concatenates tensors
    "cuts",  # takes a slice
    "passes_on",  # is not pointwise and moves, joins, pads or drops elements of its input
    "copies",  # moves elements into other memory without computing
    "reshapes",  # may change the dimensions before the last
    "broadcasts",  # may lay out a factor for a product written with mul and sum
    "draws",  # draws random numbers
    "adds_ranks",  # adds up the parts of a tensor that the ranks of a process group have; each may keep a piece
]
"""The effects of an operation that the search for attention depends on."""

_TABLE = (
    "view _unsafe_view reshape | reshape | reshapes broadcasts",
    "_reshape_alias | reshape |",
    "clone contiguous | pointwise | reshapes copies masks",
    "squeeze | reduce | reshapes",
    "unsqueeze | unsqueeze | reshapes broadcasts",
    "transpose t | permute |",
    "permute | permute |",
    "expand | repeat | broadcasts",
    "repeat | repeat | passes_on copies",
    "select unbind | reduce |",
    "slice | slice | cuts",
    "constant_pad_nd | pad | joins passes_on copies",
    "topk | - | picks",
    "scatter | index_write | picks",
    "split split_with_sizes chunk | split | cuts",
    "unsafe_split | split |",
    "narrow | - | cuts",
    "cat | join | joins passes_on copies",
    "stack | join | joins passes_on copies",
    "native_dropout | - | passes_on draws",
    "roll | - | passes_on copies",
    "complex | pointwise | passes_on copies",
    "view_as_complex | complex | passes_on",
    "view_as_real | complex | passes_on",
    "embedding | index | gathers",
    "index | index | gathers",
    "index_select | index | gathers copies",
    "gather | gather | gathers",
    "im2col | columns | copies",
    "detach | pointwise | masks",
    "alias lift_fresh | pointwise |",
    "_to_copy | pointwise | copies masks",
    "copy | pointwise | copies fills",
    "masked_fill where | pointwise | fills fills_where masks",
    "flip | - | copies runs",
    "index_put | index_write | fills",
    "index_copy | index_write |",
    "masked_scatter | - | fills",
    "mul | - | masks scales",
    "div | - | scales",
    "add maximum | - | guards",
    "clamp clamp_min | - | guards bends",
    "tanh clamp_max relu leaky_relu sigmoid softplus rsub abs | - | bends",
    "pow | - | bends norms",
    "cumsum cumprod | - | runs",
    "tril triu | pointwise | runs fills_where masks",
    "bmm mm addmm baddbmm _addmm_activation | product | product",
    "mv dot | product | product",
    "_cdist_forward _euclidean_dist | product | distances",
    "convolution | convolution | convolution",
    "_softmax _safe_softmax | - | softmax",
    "attention_scores | scores | product",
    "attention_mask | mask |",
    "attention_context | context | product",
    "sum mean linalg_vector_norm | reduce | norms",
    "amax max | reduce | pools",
    "amin var std prod any all argmax argmin norm min logsumexp | reduce |",
    "native_layer_norm native_group_norm native_batch_norm | - | norms",
    "_native_batch_norm_legit _native_batch_norm_legit_no_training | - | norms",
    "_fused_rms_norm var_mean | - | norms",
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d | - | pools",
    "avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d | - | pools",
    "_fused_dropout rrelu_with_noise bernoulli rand rand_like randn | - | draws",
    "randn_like randint randint_like randperm uniform normal log_normal | - | draws",
    "exponential geometric cauchy random multinomial poisson | - | draws",
    "all_reduce allreduce reduce_scatter_tensor _reduce_scatter_base | - | passes_on adds_ranks",
    "wait_tensor _wrap_tensor_autograd | - | passes_on",
    "all_gather_into_tensor all_to_all_single broadcast | - | passes_on",
    "allgather _allgather_base alltoall alltoall_base | - | passes_on",
)
"""Similar operations, the rule for their axes (in `graph.rules` or `graph.labels`, `-` for none), and their traits.

Names have no namespace, overload or trailing underscore of in-place operations. torch itself tags pointwise operations.
An operation that is neither here nor tagged keeps the axes of its input if it keeps the shape.
"""


def _read(table: tuple[str, ...]) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the rule and the traits of each operation in the table."""
    operations = {}
    for row in table:
        names, axes, traits = row.split("|")
        rule = axes.strip().strip("-")
        for name in names.split():
            operations[name] = rule, frozenset(traits.split())
    return operations


_OPERATIONS = _read(_TABLE)


@cache
def _row_of(base_name: str) -> tuple[str, frozenset[str]]:
    return _OPERATIONS.get(base_name) or _OPERATIONS.get(base_name.rstrip("_")) or ("", frozenset())


def traits(base_name: str) -> frozenset[str]:
    """Return the traits of an operation; empty if it is not in the table."""
    return _row_of(base_name)[1]


def axes_rule(base_name: str) -> str:
    """Return the name of an operation's rule for axes; empty if it has no rule."""
    return _row_of(base_name)[0]


Way = Literal["reopen", "attention", "part", "adding", "unknown"]
"""How the steps of a fused kernel are recorded. `reopen`: the kernel dispatches its own operations, which are recorded.
`attention`, `part`, `adding`: an attention, part of an attention, or a product plus mask is computed again in steps.
`unknown`: its steps are not known."""


@dataclass(frozen=True)
class Fused:
    """A torch kernel that computes several steps of attention at once."""

    way: Way
    title: str
    """A phrase that describes the kernel."""
    hides: frozenset[str]
    """The stages of attention that the kernel does not return."""


_HIDDEN = {
    "layer": "q_proj k_proj v_proj q_heads k_heads v_heads scores masked_scores weights context concat",
    "attention": "scores masked_scores weights",
    "softmax": "masked_scores",
    "product": "scores",
    "split": "",
}
MULTI_HEAD = "aten._native_multi_head_attention"
_KERNELS = (
    f"{MULTI_HEAD} | reopen | layer | fast path: one kernel for the layer",
    "aten._transformer_encoder_layer_fwd | reopen | layer | fast path: one kernel for the encoder layer",
    "aten._triton_multi_head_attention | unknown | layer | one kernel for the layer",
    "higher_order.flex_attention | reopen | attention | flex attention: one kernel",
    "aten._scaled_dot_product | attention | attention | fused attention",
    "aten._flash_attention_forward | attention | attention | flash attention",
    "aten._efficient_attention_forward | attention | attention | memory-efficient attention",
    "aten._cudnn_attention_forward | attention | attention | cuDNN's attention",
    "aten._triton_scaled_dot_attention | attention | attention | fused attention",
    "torch_attn._varlen_attn | attention | attention | attention over packed sequences",
    "aten._transform_bias_rescale_qkv.default | part | split | adds the bias and splits queries, keys and values",
    "aten._transform_bias_rescale_qkv | unknown | split | adds the bias and splits queries, keys and values",
    "aten._masked_softmax.default | part | softmax | masks the scores and takes the softmax",
    "aten._masked_softmax | unknown | softmax | masks the scores and takes the softmax",
    "aten.baddbmm.default | adding | product | a matrix product that adds the mask",
    "aten.addmm.default | adding | product | a matrix product that adds the mask",
)
"""The start of a kernel's full name, how it is opened, the stages that it hides, and its title."""
_FUSED = {
    start: Fused(way, title, frozenset(_HIDDEN[hidden].split()))  # type: ignore[arg-type]  # a word of the table
    for start, way, hidden, title in ((part.strip() for part in row.split("|")) for row in _KERNELS)
}


def fused(name: str) -> Fused | None:
    """Return the fused kernel of this name; None for any other operation."""
    if "backward" in name or name.startswith("aten._scaled_dot_product_attention_math."):
        return None  # the operations of the math path are recorded one by one
    for start, kernel in _FUSED.items():
        if name.startswith(start):
            is_reopened_out = kernel.way == "reopen" and name.endswith(".out")
            return None if is_reopened_out else kernel
    return None


# -- what torch says --------------------------------------------------------------------------------------------------

_WEIGHS = frozenset({"_softmax", "_safe_softmax", "exp", "sigmoid"})
_UNTAGGED = frozenset({"leaky_relu", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu_", "selu_"})
"""Pointwise activations that torch 2.10 does not tag as pointwise."""


@dataclass(frozen=True, slots=True)
class About:
    """The properties of an operation that are the same in every call."""

    func: Any
    """The operation; referenced so that its id stays unique."""
    run: Any
    """Runs the operation without its Python wrapper, which is slower."""
    name: str
    base_name: str
    pointwise: bool = False
    composite: bool = False
    makes_views: bool = False
    written: tuple[tuple[int, str], ...] = ()
    """Position and name of each argument that the operation writes into."""
    fused: Fused | None = None
    copies: bool = False
    weighs: bool = False
    """Whether the operation may turn scores into weights."""
    adds: bool = False
    """Whether it computes a product plus a tensor, which may be a mask."""
    needs_care: bool = True
    """Whether it is fused, composite, writes into arguments or weighs: the recorder then takes its slow path."""


ABOUT: dict[int, About] = {}
"""Operation id to its properties: hashing the operation itself is slower."""


def about(func: Any) -> About:
    """Return the properties of an operation, from its schema, tags and kernels."""
    properties = ABOUT.get(id(func))
    if properties is None:
        properties = ABOUT[id(func)] = _inspect(func)
    return properties


def _inspect(func: Any) -> About:
    import torch

    name = str(func)
    if isinstance(func, torch._ops.HigherOrderOperator):  # flex_attention: it has no schema
        return About(func, func, f"higher_order.{name}", name, fused=fused(f"higher_order.{name}"))

    def has_kernel(operation: str, key: str) -> bool:
        try:
            return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
        except RuntimeError:  # the dispatcher does not know it, e.g. prim.device of a fake tensor
            return False

    base_name = name.split(".")[1]
    kernel, composite = fused(name), has_kernel(func.name(), "CompositeImplicitAutograd")
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((place, argument.name))
    if name.startswith("c10d.") and base_name.endswith("_"):
        written = [(0, func._schema.arguments[0].name)]  # the schema does not say that a collective writes
    return About(
        func,
        func._op,
        name=name,
        base_name=base_name,
        pointwise=torch.Tag.pointwise in func.tags or base_name in _UNTAGGED,
        composite=composite,
        makes_views=has_kernel(func.name(), "ADInplaceOrView"),
        written=() if name.startswith("fsdp.") else tuple(written),  # FSDP puts the same parameters there again
        fused=kernel,
        copies="copies" in traits(base_name),
        weighs=base_name in _WEIGHS,
        adds=kernel is not None and kernel.way == "adding",
        needs_care=bool(kernel or composite or written or base_name in _WEIGHS),
    )


def adds_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `baddbmm` or `addmm` may add a mask to scores, rather than a bias to a linear layer.

    A linear layer adds one number per column, or adds a parameter to a product with a parameter. A learned score bias
    with a learned query or key looks the same, so it counts as a linear layer.
    """
    added, left, right = args[:3]
    if kwargs.get("beta", 1) == 0:
        return False
    if added.dim() < 2:
        return left.dim() == 3 and not (_is_parameter(added) or _is_parameter(right))
    return not (_is_parameter(added) and (_is_parameter(left) or _is_parameter(right)))


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of a parameter."""
    from torch import nn

    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
