"""The same weights under another head count, carried over as far as there is a place for them, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...layers.places import places_of
from ...layers.weights import AttentionWeights, load_weights, read_weights
from ...measure.compare import same_bits
from ...record.copying import copy_module
from ..sides.shared_weights import within_slices

_READS_INPUT = ("w_q", "w_k", "w_v")


@dataclass(frozen=True)
class Carried:
    """What became of the baseline's weights in a layer with another head count."""

    same: bool
    """Whether the layer holds the baseline's numbers, bit for bit, all of them and no others."""
    carried: tuple[str, ...]
    """`W_o`: those that are the same, as matrices."""
    changes: tuple[str, ...]
    """What cannot be the same: `W_k [32, 64] becomes [16, 64]`."""


def carry(baseline: nn.Module, module: nn.Module) -> Carried:
    """Write the baseline's weights into `module`, and compare what it then holds with the baseline's, bit for bit.

    A matrix `(heads head_dim) embed` does not know where its heads begin: where its size is the same it is carried over
    whole. Where each head reads its own slice of the embedding, what lies outside of the slices has no place. A matrix
    of another size keeps the numbers that it was built with.
    """
    if _same_parameters(baseline, module):
        return Carried(True, (), ())
    theirs, mine = read_weights(baseline), read_weights(module)
    sliced = places_of(module).sliced
    taken: dict[str, Tensor] = {}
    carried, changes = [], []
    for name, own in mine.tensors().items():
        given = theirs.tensors()[name]
        label = _label(name)
        if _flat(name, given).shape != _flat(name, own).shape:
            changes.append(f"{label} {list(_flat(name, given).shape)} becomes {list(_flat(name, own).shape)}")
            continue
        cut = given.reshape(own.shape)
        if sliced and name in _READS_INPUT:
            kept = within_slices(cut)
            if not torch.equal(kept, cut):
                heads, width = own.shape[0], own.shape[1]
                changes.append(f"{label} keeps {heads} blocks of {[width, width]} and loses the rest")
                taken[name] = kept
                continue
            cut = kept
        taken[name] = cut
        carried.append(label)
    load_weights(module, replace(mine, **taken))
    whole = not changes and _numel(baseline) == _numel(module) and _equal_as_matrices(theirs, read_weights(module))
    if not whole and not changes:
        changes.append(f"{_numel(baseline):,} parameters become {_numel(module):,}")
    return Carried(whole, tuple(carried), tuple(changes))


def copy_parameters(source: nn.Module, module: nn.Module) -> bool:
    """Copy every parameter, where both have the same ones by name and shape; whether they have."""
    mine, theirs = dict(module.named_parameters()), dict(source.named_parameters())
    if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
        return False
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(theirs[name])
    return True


def matrices(module: nn.Module, numbers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The module's weights as whole matrices, `W_q` to `b_o`, whatever parameters it keeps them in.

    With `numbers`, by the parameter's name, those stand for what the parameters hold: gradients, for instance.
    """
    if numbers is not None:
        module = copy_module(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(numbers[name])
    return {_label(name): _flat(name, tensor).detach() for name, tensor in read_weights(module).tensors().items()}


def _label(name: str) -> str:
    return f"W{name[1:]}" if name[0] == "w" else name


def _same_parameters(left: nn.Module, right: nn.Module) -> bool:
    mine, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    return mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)


def _equal_as_matrices(left: AttentionWeights, right: AttentionWeights) -> bool:
    mine, theirs = left.tensors(), right.tensors()
    return mine.keys() == theirs.keys() and all(
        same_bits(_flat(name, mine[name]), _flat(name, theirs[name])) for name in mine
    )


def _flat(name: str, tensor: Tensor) -> Tensor:
    """By head to the matrix, or bias, that it was cut from."""
    if name == "w_o":
        return tensor.flatten(1)
    return tensor if name == "b_o" else tensor.flatten(0, 1)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
