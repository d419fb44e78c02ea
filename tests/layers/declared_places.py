"""Where a layer keeps each head's matrices: views into its parameters, found by the roles that it declares."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, nn

from mha_inspect.errors import WeightsError
from mha_inspect.layers import torch_mha
from mha_inspect.layers.roles import Role
from mha_inspect.reports.params import HeadSlice
from mha_inspect.targets.spec import AttentionSpec

Heads = tuple[Tensor, ...]
"""One view a head."""


@dataclass(frozen=True, eq=False)
class Places:
    """Views into the parameters of a layer, one a head. Writing to a view writes to the parameter."""

    w_q: Heads
    """`head_dim embed` for each head; `head_dim head_dim` where `sliced`."""
    w_k: Heads
    """`head_dim kdim` for each key/value head."""
    w_v: Heads
    """`head_dim vdim` for each key/value head."""
    w_o: Heads | None
    """`embed head_dim` for each head; None where the layer has no output projection."""
    b_q: Heads | None
    """`head_dim` for each head; None where the layer has no biases."""
    b_k: Heads | None
    b_v: Heads | None
    b_o: Tensor | None
    """`embed`."""
    bias_k: Heads | None
    """`head_dim` for each head: the learned key that is appended to the sequence."""
    bias_v: Heads | None
    sliced: bool
    """Whether head i reads slice i of the embedding only, so that its matrices have those columns and no others."""


def places_of(module: nn.Module) -> Places:
    """Where this layer keeps each head's matrices.

    Raises `WeightsError` for a module that is none of the layers.
    """
    spec, roles = _declared(module)
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        for part in roles[name].parts:
            # A part that belongs to no head is found as that of head 0.
            slices = part.slices() or (HeadSlice(0, part.name, part.rows, part.columns),)
            for piece in slices:
                found[part.name][piece.head] = _view(parameter.detach(), piece)

    def heads(part: str) -> Heads | None:
        return tuple(found[part][head] for head in sorted(found[part])) or None

    w_q, w_k, w_v = (heads(part) or () for part in ("W_q", "W_k", "W_v"))
    return Places(
        w_q=w_q,
        w_k=w_k,
        w_v=w_v,
        w_o=heads("W_o"),
        b_q=heads("b_q"),
        b_k=heads("b_k"),
        b_v=heads("b_v"),
        b_o=found["b_o"].get(0),
        bias_k=heads("bias_k"),
        bias_v=heads("bias_v"),
        sliced=w_q[0].shape[1] != spec.embed_dim,
    )


def _declared(module: nn.Module) -> tuple[AttentionSpec, dict[str, Role]]:
    """The sizes of a layer, and what its parameters are for, as the file that builds it declares them."""
    if isinstance(module, nn.MultiheadAttention):
        spec = torch_mha.spec_of(module)
        return spec, torch_mha.roles(spec)
    home = type(module).__module__
    code = sys.modules.get(home)
    if code is None or not home.startswith("mha_inspect.layers.") or not hasattr(code, "roles"):
        raise WeightsError(
            f"The weights of {type(module).__name__} cannot be told apart by head: which of its parameters are W_q, "
            "W_k, W_v and W_o is known for the layers that mha-inspect builds, and for torch.nn.MultiheadAttention."
        )
    spec = code.spec_of(module)
    return spec, code.roles(spec)


def _view(parameter: Tensor, piece: HeadSlice) -> Tensor:
    if piece.columns is None:
        # Of a bias, also of torch's `1 1 embed`.
        return parameter.view(-1)[slice(*piece.rows)]
    return parameter[slice(*piece.rows), slice(*piece.columns)]
