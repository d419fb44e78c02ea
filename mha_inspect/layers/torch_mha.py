"""`torch.nn.MultiheadAttention`, as PyTorch ships it, with torch's own initialisation.

torch starts `in_proj_bias` and `out_proj.bias` at 0, and so does this layer: it is shown as it really is. A mistake in
a bias therefore does not show in the output of a fresh layer; a test of biases must fill them first.

No parameter's shape depends on num_heads, so one seed gives the same parameters bit for bit for every head count.
"""

from __future__ import annotations

from torch.nn import MultiheadAttention

from .spec import DTYPES, AttentionSpec


def spec_of(module: MultiheadAttention) -> AttentionSpec:
    """The spec that such a module answers to; a dtype that no layer is built in is float32, a dropout of 1 is 0."""
    weight = module.out_proj.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    same = ("embed_dim", "num_heads", "kdim", "vdim", "add_zero_attn", "batch_first", "training")
    return AttentionSpec(
        **{name: getattr(module, name) for name in same},
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        dropout=module.dropout if module.dropout < 1 else 0.0,
        dtype=dtype if dtype in DTYPES else "float32",
    )
