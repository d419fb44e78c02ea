"""Proving by running it that one big projection then split equals one small matrix per head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.roles import Role
from ..record.copying import copy_module
from ..record.rounding import first_tensor, judge, max_difference, noise_floor
from ..reports.common import Verdict
from ..reports.params import HeadSlice, PerHeadProof
from ..targets.flag_inputs import Inputs
from ..targets.spec import AttentionSpec

_SAID: dict[Verdict, str] = {
    "same": "give the same output",
    "differs": "give different outputs",
    "inconclusive": "give outputs too close to tell apart from rounding",
}


class HeadMatrices:
    """The small matrices and biases of each head, cut out of a layer's parameters by their roles."""

    def __init__(self, parameters: Mapping[str, Tensor], roles: Mapping[str, Role]) -> None:
        self._pieces: dict[tuple[str, int], Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        """By name, what belongs to no head: `b_o`."""
        self.widths: dict[str, int] = {}
        """By name, how many columns the parameter that a piece was cut from has."""
        for name, role in roles.items():
            if name not in parameters:
                continue
            parameter = parameters[name].detach()
            for part in role.parts:
                if part.columns is not None:
                    self.widths[part.name] = parameter.shape[-1]
                if part.split is None:
                    self.shared[part.name] = _cut(parameter, part.rows, part.columns)
                for piece in part.slices():
                    self._pieces[part.name, piece.head] = cut(parameter, piece)

    def get(self, part: str, head: int) -> Tensor | None:
        """This head's piece of a part: `W_q` is `head_dim embed`, `b_q` is `head_dim`, `W_o` is `embed head_dim`."""
        return self._pieces.get((part, head))

    def heads(self, part: str) -> int:
        """How many heads own a piece of this part."""
        return sum(name == part for name, _ in self._pieces)


def cut(parameter: Tensor, piece: HeadSlice) -> Tensor:
    """The rows and columns of a matrix, or the elements of a bias, that a head owns: a view."""
    return _cut(parameter, piece.rows, piece.columns)


def _cut(parameter: Tensor, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
    if columns is None:
        return parameter.view(-1)[slice(*rows)]
    return parameter[slice(*rows), slice(*columns)]


def output_by_head(matrices: HeadMatrices, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Concat(head_1 … head_h) W_o with head_i = Attention(Q W_q_i, K W_k_i, V W_v_i), one head at a time.

    "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.2, read literally: no matrix here is wider than a
    head.

    Args:
        matrices: the pieces of each head.
        spec: for the head counts, and for what the layer appends to the keys.
        query: `batch query embed` or `query embed`.
        key: `batch key kdim` or `key kdim`.
        value: `batch key vdim` or `key vdim`.

    Returns:
        `batch query embed` or `query embed`.
    """
    contexts = []
    for head in range(spec.num_heads):
        shared = head // (spec.num_heads // spec.kv_heads)
        q = _project(query, matrices, "q", head)
        k = _append(_project(key, matrices, "k", shared), matrices.get("bias_k", shared), spec.add_zero_attn)
        v = _append(_project(value, matrices, "v", shared), matrices.get("bias_v", shared), spec.add_zero_attn)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        contexts.append(weights @ v)
    concat = torch.cat(contexts, dim=-1)
    pieces = (matrices.get("W_o", head) for head in range(spec.num_heads))
    columns = [piece for piece in pieces if piece is not None]
    if not columns:
        return concat
    output = concat @ torch.cat(columns, dim=1).T
    return output + matrices.shared["b_o"] if "b_o" in matrices.shared else output


def _project(x: Tensor, matrices: HeadMatrices, letter: str, head: int) -> Tensor:
    """x W_hᵀ + b_h: `batch seq width` to `batch seq head_dim`."""
    weight, bias = matrices.get(f"W_{letter}", head), matrices.get(f"b_{letter}", head)
    assert weight is not None, f"no head {head} in W_{letter}"
    return x @ weight.T if bias is None else x @ weight.T + bias


def _append(x: Tensor, learned: Tensor | None, zeros: bool) -> Tensor:
    """`batch key head_dim` with the learned key or value after it, and then one of zeros."""
    one_more = (*x.shape[:-2], 1, x.shape[-1])
    if learned is not None:
        x = torch.cat([x, learned.expand(one_more)], dim=-2)
    return torch.cat([x, x.new_zeros(one_more)], dim=-2) if zeros else x


def prove(
    module: nn.Module,
    roles: Mapping[str, Role],
    spec: AttentionSpec,
    inputs: Inputs,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
) -> PerHeadProof | None:
    """Run the layer, and the same with one small matrix per head; None where its heads are not such matrices.

    Without masks and dropout: what is proved is the projections. A module in training mode is run as a copy in eval
    mode.
    """
    matrices = HeadMatrices(dict(module.named_parameters()), roles)
    if inputs.query.is_meta or spec.rope or not _reads_whole_inputs(matrices, spec):
        return None
    args, kwargs = arguments
    layer = copy_module(module).eval() if module.training else module
    with torch.no_grad():
        expected = first_tensor(layer(*args, **kwargs))
        swap = not spec.batch_first and not inputs.unbatched
        tensors = (inputs.query, inputs.key, inputs.value)
        query, key, value = (tensor.transpose(0, 1) if swap else tensor for tensor in tensors)
        output = output_by_head(matrices, spec, query, key, value)
        difference = max_difference(output.transpose(0, 1) if swap else output, expected)
    floor = noise_floor(layer, args, kwargs)
    times, verdict = judge(difference, floor)
    width = int(spec.head_dim)
    sentence = (
        f"One projection to {spec.num_heads * width} features split into {spec.num_heads} "
        f"{'head' if spec.num_heads == 1 else 'heads'} of {width}, and one small matrix of {width} rows per head, "
        f"{_SAID[verdict]}: {_apart(difference, times)}."
    )
    return PerHeadProof(max_abs_difference=difference, noise_floor=floor, verdict=verdict, sentence=sentence)


def _apart(difference: float, times: float) -> str:
    """The report has the numbers themselves beside the sentence."""
    return "bit for bit" if difference == 0 else f"they are {times:.2g} times the rounding error apart"


def _reads_whole_inputs(matrices: HeadMatrices, spec: AttentionSpec) -> bool:
    """Whether every head has its own W_q, W_k and W_v, each as wide as the input."""
    counts = {"W_q": spec.num_heads, "W_k": spec.kv_heads, "W_v": spec.kv_heads}
    widths = {"W_q": spec.embed_dim, "W_k": spec.key_width, "W_v": spec.value_width}
    for name, count in counts.items():
        first = matrices.get(name, 0)
        if first is None or matrices.heads(name) != count or first.shape[-1] != widths[name]:
            return False
    return True
