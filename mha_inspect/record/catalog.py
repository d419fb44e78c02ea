"""What each operation of torch does: the one table, without torch."""

from __future__ import annotations

from functools import cache
from typing import Literal

Trait = Literal[
    "product",  # a matrix product
    "convolution",
    "softmax",
    "norms",  # is a norm, or one of the steps that a norm is written out in
    "pools",  # takes the largest, or the average, of neighbours
    "scales",  # multiplies by what may be one number
    "guards",  # may keep a sum from being zero
    "bends",  # changes scores one by one, so that they are no multiple of the product any more
    "fills",  # writes a constant, or other values, into some elements
    "fills_where",  # the same where a mask of bools says
    "masks",  # may stand between exponentials and their sum
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
squeeze | squeeze | reshapes
unsqueeze | unsqueeze | reshapes broadcasts
transpose t | transpose |
permute | permute |
expand | expand | broadcasts
repeat | repeat | carries copies
select unbind | select |
slice | slice | cuts
constant_pad_nd | narrow | joins carries copies
topk | narrow |
split split_with_sizes | split | cuts
unsafe_split | split |
narrow | - | cuts
cat | cat | joins carries copies
stack | stack | joins carries copies
native_dropout | - | carries draws
roll | - | carries copies
view_as_complex | complex | carries
view_as_real | real | carries
embedding | embedding | gathers
index | index | gathers
index_select | index_select | gathers copies
gather | gather | gathers
as_strided | strided |
unfold | unfold |
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
mv dot | vector_product | product
convolution | convolution | convolution
_softmax _safe_softmax | - | softmax
sum mean linalg_vector_norm | reduce | norms
amax max | reduce | pools
amin var std prod any all argmax argmin norm min logsumexp | reduce |
native_layer_norm native_group_norm native_batch_norm | - | norms
_native_batch_norm_legit _native_batch_norm_legit_no_training | - | norms
_fused_rms_norm var_mean | - | norms
max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d | narrow | pools
avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d | narrow | pools
_fused_dropout rrelu_with_noise bernoulli rand rand_like randn | - | draws
randn_like randint randint_like randperm uniform normal log_normal | - | draws
exponential geometric cauchy random multinomial poisson | - | draws
_scaled_dot_product_flash_attention_for_cpu | attention |
_scaled_dot_product_flash_attention | attention |
_scaled_dot_product_efficient_attention | attention |
_scaled_dot_product_cudnn_attention | attention |
_scaled_dot_product_fused_attention_overrideable | attention |
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


def does(base_name: str, *traits: Trait) -> bool:
    """Return whether an operation has one of these traits; false for one that the table does not know."""
    return not _known(base_name)[1].isdisjoint(traits)


def axes_rule(base_name: str) -> str:
    """Return the name of the rule for what an operation does to axes; empty where it needs none of its own."""
    return _known(base_name)[0]


def named(trait: Trait) -> frozenset[str]:
    """Return the names of the operations that have a trait."""
    return frozenset(name for name, (_, traits) in _OPERATIONS.items() if trait in traits)
