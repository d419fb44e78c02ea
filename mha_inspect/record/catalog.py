"""What each operation of torch does: the one table, and what torch itself says of one. To import it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Trait = Literal[
    "product",  # a matrix product
    "convolution",
    "distances",  # the length of the difference of every two rows
    "softmax",
    "norms",  # is a norm, or one of the steps that a norm is written out in
    "pools",  # takes the largest, or the average, of neighbours
    "scales",  # multiplies by what may be one number
    "guards",  # may keep a sum from being zero
    "bends",  # changes scores one by one, so that they are no multiple of the product any more
    "fills",  # writes a constant, or other values, into some elements
    "fills_where",  # the same where a mask of bools says
    "masks",  # may stand between exponentials and their sum
    "picks",  # leaves some of what it was given out, or in its place
    "runs",  # sums up over time, or cuts a triangle out
    "gathers",  # reads by indices
    "joins",  # puts tensors side by side
    "cuts",  # takes a part
    "carries",  # is no pointwise operation, and passes on what it was given: moved, joined, padded, dropped
    "copies",  # moves elements into other memory and computes nothing
    "reshapes",  # may change how the dimensions before the last are counted
    "broadcasts",  # may lay out a factor for a product that is written out
    "draws",  # draws random numbers
]
"""What an operation does, as far as finding attention asks."""

_TABLE = """
view _unsafe_view reshape | reshape | reshapes broadcasts
_reshape_alias | reshape |
clone | pointwise | reshapes copies masks
squeeze | reduce | reshapes
unsqueeze | unsqueeze | reshapes broadcasts
transpose t | permute |
permute | permute |
expand | repeat | broadcasts
repeat | repeat | carries copies
select unbind | reduce |
slice | slice | cuts
constant_pad_nd | pad | joins carries copies
topk | - | picks
scatter | - | picks
split split_with_sizes | split | cuts
unsafe_split | split |
narrow | - | cuts
cat | join | joins carries copies
stack | join | joins carries copies
native_dropout | - | carries draws
roll | - | carries copies
view_as_complex | complex | carries
view_as_real | complex | carries
embedding | index | gathers
index | index | gathers
index_select | index | gathers copies
gather | gather | gathers
im2col | columns | copies
detach | pointwise | masks
alias lift_fresh | pointwise |
_to_copy | pointwise | copies masks
copy | pointwise | copies fills
masked_fill where | pointwise | fills fills_where masks
flip | - | copies runs
index_put masked_scatter | - | fills
mul | - | masks scales
div | - | scales
add maximum | - | guards
clamp clamp_min | - | guards bends
tanh clamp_max relu leaky_relu sigmoid softplus rsub abs | - | bends
pow | - | bends norms
cumsum cumprod tril triu | - | runs
bmm mm addmm baddbmm _addmm_activation | product | product
mv dot | - | product
_cdist_forward _euclidean_dist | product | distances
convolution | convolution | convolution
_softmax _safe_softmax | - | softmax
sum mean linalg_vector_norm | reduce | norms
amax max | reduce | pools
amin var std prod any all argmax argmin norm min logsumexp | reduce |
native_layer_norm native_group_norm native_batch_norm | - | norms
_native_batch_norm_legit _native_batch_norm_legit_no_training | - | norms
_fused_rms_norm var_mean | - | norms
max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d | - | pools
avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d | - | pools
_fused_dropout rrelu_with_noise bernoulli rand rand_like randn | - | draws
randn_like randint randint_like randperm uniform normal log_normal | - | draws
exponential geometric cauchy random multinomial poisson | - | draws
"""
"""Operations that are alike, the rule for what they do to axes (of `graph.rules`), and their traits.

Names are without namespace, overload, and the underscore of those that work in place. Pointwise operations are tagged
by torch itself; an operation that is not here and has no tag keeps the axes of its input where it keeps the shape.
"""


def _read(table: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Read the table as operation to rule and traits."""
    found = {}
    for names, axes, traits in (line.split("|") for line in table.strip().splitlines()):
        found.update(dict.fromkeys(names.split(), (axes.strip().strip("-"), frozenset(traits.split()))))
    return found


_OPERATIONS = _read(_TABLE)


@cache
def _known(base_name: str) -> tuple[str, frozenset[str]]:
    return _OPERATIONS.get(base_name) or _OPERATIONS.get(base_name.rstrip("_")) or ("", frozenset())


def traits(base_name: str) -> frozenset[str]:
    """Return the traits of an operation; none for one that the table does not know."""
    return _known(base_name)[1]


def does(base_name: str, *wanted: Trait) -> bool:
    """Return whether an operation has one of these traits."""
    return not traits(base_name).isdisjoint(wanted)


def axes_rule(base_name: str) -> str:
    """Return the name of the rule for what an operation does to axes; empty where it needs none of its own."""
    return _known(base_name)[0]


def named(trait: Trait) -> frozenset[str]:
    """Return the names of the operations that have a trait."""
    return frozenset(name for name, (_, traits) in _OPERATIONS.items() if trait in traits)


Way = Literal["reopen", "attention", "part", "adding", "unknown"]
"""How a fused kernel is opened. One that is a program over the dispatcher is watched where it runs; a leaf is computed
once more beside its result: an attention, a part of one, a product that adds a mask. Of others no steps are known."""


@dataclass(frozen=True)
class Fused:
    """A kernel of torch that does several steps of attention in one."""

    way: Way
    title: str
    """What it is, in one phrase."""
    hides: frozenset[str]
    """The stages of attention that it hides from who runs it."""


_HIDDEN = {
    "layer": "q_proj k_proj v_proj q_heads k_heads v_heads scores masked_scores weights context concat",
    "attention": "scores masked_scores weights",
    "softmax": "masked_scores",
    "product": "scores",
    "split": "",
}
MULTI_HEAD = "aten._native_multi_head_attention"
_KERNELS = f"""
{MULTI_HEAD} | reopen | layer | fast path: one kernel for the layer
aten._transformer_encoder_layer_fwd | reopen | layer | fast path: one kernel for the encoder layer
aten._triton_multi_head_attention | unknown | layer | one kernel for the layer
higher_order.flex_attention | reopen | attention | flex attention: one kernel
aten._scaled_dot_product | attention | attention | fused attention
aten._flash_attention_forward | attention | attention | flash attention
aten._efficient_attention_forward | attention | attention | memory-efficient attention
aten._cudnn_attention_forward | attention | attention | cuDNN's attention
aten._triton_scaled_dot_attention | attention | attention | fused attention
torch_attn._varlen_attn | attention | attention | attention over packed rows
aten._transform_bias_rescale_qkv.default | part | split | adds the bias, and splits queries, keys and values
aten._transform_bias_rescale_qkv | unknown | split | adds the bias, and splits queries, keys and values
aten._masked_softmax.default | part | softmax | masks the scores, then takes the softmax
aten._masked_softmax | unknown | softmax | masks the scores, then takes the softmax
aten.baddbmm.default | adding | product | a matrix product that adds the mask
aten.addmm.default | adding | product | a matrix product that adds the mask
"""
"""Start of a kernel's whole name, how it is opened, what it hides, and what it is."""
_FUSED = {
    start: Fused(way, title, frozenset(_HIDDEN[hidden].split()))  # type: ignore[arg-type]  # a word of the table
    for start, way, hidden, title in (
        (part.strip() for part in row.split("|")) for row in _KERNELS.strip().splitlines()
    )
}


def fused(name: str) -> Fused | None:
    """Return what a kernel of this name hides, and how it is opened; None for an operation that hides nothing."""
    if "backward" in name or name.startswith("aten._scaled_dot_product_attention_math."):
        return None  # the latter is a composite of operations that are seen
    found = next((kernel for start, kernel in _FUSED.items() if name.startswith(start)), None)
    return None if found is not None and found.way == "reopen" and name.endswith(".out") else found


# -- what torch says --------------------------------------------------------------------------------------------------

_WEIGHS = frozenset({"_softmax", "_safe_softmax", "exp", "sigmoid"})
_UNTAGGED = frozenset({"leaky_relu", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu_", "selu_"})
"""Activations that torch 2.10 does not say to be pointwise."""


@dataclass(frozen=True, slots=True)
class About:
    """What does not change from one use of an operation to the next."""

    func: Any
    """It is held, so that no other has its id."""
    run: Any
    """Runs it; without the function of Python's around that."""
    name: str
    base_name: str
    pointwise: bool
    composite: bool
    makes_views: bool
    written: tuple[tuple[int, str], ...]
    """Place and name of each argument that it writes into."""
    fused: Fused | None = None
    copies: bool = False
    weighs: bool = False
    """Whether scores become weights by it."""

    adds: bool = False
    """Whether it is a product to which something is added, that may be a mask."""
    needs_care: bool = True
    """Whether it hides steps, writes, weighs, or may arrive whole: any of the above."""


ABOUT: dict[int, About] = {}
"""By the id of an operation, as to hash one takes longer."""


def about(func: Any) -> About:
    """Return what is known of an operation, read off its schema, tags and kernels."""
    known = ABOUT.get(id(func))
    if known is None:
        known = ABOUT[id(func)] = _asked(func)
    return known


def _asked(func: Any) -> About:
    import torch

    name = str(func)
    if isinstance(func, torch._ops.HigherOrderOperator):  # flex_attention: it runs as a whole, and has no schema
        return About(
            func,
            func,
            f"higher_order.{name}",
            name,
            pointwise=False,
            composite=False,
            makes_views=False,
            written=(),
            fused=fused(f"higher_order.{name}"),
        )

    def has_kernel(operation: str, key: str) -> bool:
        try:
            return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
        except RuntimeError:  # one that the dispatcher does not know: prim.device, asked of a fake tensor
            return False

    base_name = name.split(".")[1]
    kernel, composite = fused(name), has_kernel(func.name(), "CompositeImplicitAutograd")
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return About(
        func,
        func._op,
        name=name,
        base_name=base_name,
        pointwise=torch.Tag.pointwise in func.tags or base_name in _UNTAGGED,
        composite=composite,
        makes_views=has_kernel(func.name(), "ADInplaceOrView"),
        written=written,
        fused=kernel,
        copies=does(base_name, "copies"),
        weighs=base_name in _WEIGHS,
        adds=kernel is not None and kernel.way == "adding",
        needs_care=bool(kernel or composite or written or base_name in _WEIGHS),
    )


def adds_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `baddbmm` or `addmm` may add a mask to a product that is scores, and no bias to one with a weight.

    A learned query or key is a parameter too, and so is a learned bias of the scores: both together look like a layer.
    So does one number for each column of a single matrix, whose weight and bias may be given as plain tensors.
    """
    added, left, right = args[:3]
    if kwargs.get("beta", 1) == 0:
        return False
    if added.dim() < 2:
        return left.dim() == 3 and not (_is_parameter(added) or _is_parameter(right))
    return not (_is_parameter(added) and (_is_parameter(left) or _is_parameter(right)))


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether this is a parameter, or a view of one."""
    from torch import nn

    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
