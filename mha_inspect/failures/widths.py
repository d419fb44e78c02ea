"""Causes in the width of an input: `batch sequence embed` where a layer takes another number of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from .facts import HEADS, Facts, Operand
from .reached import behind_of
from .suspect import Suspect
from .tried import Fix, of_shape, resized, transposed

_SETTING_OF = {"query": "embed_dim", "key": "kdim", "value": "vdim"}
"""Argument of nn.MultiheadAttention to the setting for its width."""


@dataclass(frozen=True, eq=False)
class _Misfit:
    """An input whose last dimension is not what its layer takes."""

    x: Operand
    takes: int
    """The features that the layer takes."""
    weight: Operand | None
    """The weight of the layer; None for nn.MultiheadAttention."""

    @property
    def has(self) -> int:
        """The features of the input."""
        return self.x.shape[-1]

    def fits(self) -> bool:
        """Return whether the input has the features that the layer takes; also where these are unknown."""
        if not self.x.shape or not self.takes:
            return True
        return self.has == self.takes


def _misfit(facts: Facts) -> _Misfit | None:
    """Return the first input of the failing call with another width than its layer takes; None without one."""
    inputs = _inputs_of_attention(facts)
    if facts.attention is None:
        inputs = _weighted(facts)
    for layer_input in inputs:
        if not layer_input.fits():
            return layer_input
    return None


def _inputs_of_attention(facts: Facts) -> Iterator[_Misfit]:
    """Yield the inputs of an nn.MultiheadAttention, with the features that it takes of them."""
    layer = facts.attention
    if layer is None:
        return
    widths = {"query": layer.embed_dim, "key": layer.kdim, "value": layer.vdim}
    for role, takes in widths.items():
        x = facts.given(role)
        if x is not None and takes is not None:
            yield _Misfit(x, takes, None)


def _weighted(facts: Facts) -> Iterator[_Misfit]:
    """Yield the input of a layer and its weight, whether it fits or not; nothing for other calls."""
    if facts.base in ("linear", "layer_norm") and len(facts.operands) >= 2 and facts.given("input") is not None:
        x = facts.operands[0]
        weight = facts.operands[1]
        if facts.base == "layer_norm":
            weight = facts.operands[-1]
        yield _Misfit(x, weight.shape[-1] if weight.shape else 0, weight)
    elif facts.pair is not None:
        x, weight = facts.pair
        if weight.is_parameter and len(weight.shape) == 2:
            yield _Misfit(x, weight.shape[0], weight)


def heads_without_name(facts: Facts) -> Suspect | None:
    """Judge an input that ends in two dimensions whose product the layer takes."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None:
        return None
    x = misfit.x
    if len(x.shape) < 4 or x.place(*HEADS) is not None:
        return None
    if x.shape[-1] * x.shape[-2] != misfit.takes:
        return None

    def joined(tensor: Tensor) -> Tensor:
        """Return the last two dimensions as one, with the last of them outside."""
        return tensor.transpose(-2, -1).flatten(-2)

    fix = Fix.editing(
        x,
        joined,
        "use torch.cat(heads, dim=-1), or .flatten(-2) with the heads just before their features",
    )
    return Suspect(
        "heads_not_joined",
        f"{x.name} ends in {x.axis(-2)} and {x.axis(-1)}; the layer expects one dimension of {misfit.takes}.",
        (fix,),
    )


def heads_not_joined(facts: Facts) -> Suspect | None:
    """Judge an input whose heads would fit the layer if they were concatenated."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None:
        return None
    x = misfit.x
    place = x.place(*HEADS)
    place_of_features = x.place("head_dim")
    if place is None or place_of_features is None:
        return None
    heads = x.shape[place]
    head_dim = x.shape[place_of_features]
    if place == place_of_features or heads * head_dim != misfit.takes:
        return None
    return Suspect(
        "heads_not_joined",
        f"{x.name} still has {heads} heads of {head_dim}; the layer expects them concatenated, "
        f"{heads}·{head_dim} = {misfit.takes}.",
        _joining(x, place),
    )


def _joining(x: Operand, place: int) -> tuple[Fix, ...]:
    """Return the fix to join the heads at a place with their features; none if they are at an unusual one."""
    merge = "move heads after the sequence, then merge them with their features"
    if place == len(x.shape) - 2:
        return (Fix.editing(x, _joined, f"{x.name}.flatten(-2): {merge}"),)
    if place != 1:
        return ()

    def transposed_and_joined(tensor: Tensor) -> Tensor:
        return _joined(tensor.transpose(1, 2))

    return (Fix.editing(x, transposed_and_joined, f"{x.name}.transpose(1, 2).flatten(-2): {merge}"),)


def _joined(tensor: Tensor) -> Tensor:
    """Return `batch sequence (heads head_dim)` of `batch sequence heads head_dim`."""
    return tensor.flatten(-2)


def weight_not_transposed(facts: Facts) -> Suspect | None:
    """Judge a product with a weight whose columns are the features of the input: `x @ weight` for nn.Linear's."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None or facts.pair is None:
        return None
    x = misfit.x
    weight = misfit.weight
    if weight.shape[-1] != misfit.has:
        return None
    fix = Fix.editing(
        weight,
        transposed(0, 1),
        f"{x.name} @ {weight.name}.T, or call the layer",
    )
    return Suspect(
        "weight_not_transposed",
        f"{weight.is_shape}, (out_features, in_features) as in nn.Linear; {x.name} has {misfit.has} features.",
        (fix,),
    )


def features_not_last(facts: Facts) -> Suspect | None:
    """Judge an input that has the features of the layer in another dimension."""
    misfit = _misfit(facts)
    if misfit is None or len(misfit.x.shape) < 3:
        return None
    x = misfit.x
    takes = misfit.takes
    if x.shape[:-1].count(takes) != 1:
        return None
    place = x.shape.index(takes)
    return Suspect(
        "features_not_last",
        f"{x.name} has its {takes} features in dimension {place}; the layer expects them last.",
        (Fix.editing(x, transposed(place, -1), f"{x.name}.transpose({place}, -1)"),),
    )


def wrong_width(facts: Facts) -> Suspect | None:
    """Judge an input whose number of features does not fit its layer."""
    misfit = _misfit(facts)
    if misfit is None:
        return None
    x = misfit.x
    takes = misfit.takes
    weight = misfit.weight
    if weight is None:
        expects = f"the layer expects {takes} for {x.role} ({_SETTING_OF[x.role]})"
        layer_of_width = _attention_for_width(facts, x)
    else:
        expects = f"{weight.name} expects {takes}"
        layer_of_width = _layer_for_width(facts, weight, misfit.has)
    what = f"{x.name} has {misfit.has} features; {expects}."
    if not _keeps_tokens(facts, x):
        # After a wrong view or a forgotten step, the width is not what is wrong.
        return Suspect("wrong_width", what)
    input_of_width = Fix.editing(x, resized(-1, takes), f"give {x.name} {takes} features")
    if layer_of_width is None:
        return Suspect("wrong_width", what, (input_of_width,))
    return Suspect("wrong_width", what, (layer_of_width, input_of_width))


def _layer_for_width(facts: Facts, weight: Operand, width: int) -> Fix:
    """Return the fix to create a layer for another width, tried with zeros."""
    if facts.base == "layer_norm":

        def norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
            return nn.functional.layer_norm(x, (width,))

        return Fix(f"create the layer for {width}", function=norm)
    if facts.base == "linear":
        return Fix.editing(
            weight,
            of_shape((weight.shape[0], width)),
            f"create the layer with in_features {width}",
        )
    return Fix.editing(
        weight,
        of_shape((width, weight.shape[1])),
        f"create the layer for {width}",
    )


def _attention_for_width(facts: Facts, x: Operand) -> Fix | None:
    """Return the fix to create an nn.MultiheadAttention for other widths, tried with such a layer."""
    layer = facts.attention
    assert layer is not None
    sizes = {"embed_dim": layer.embed_dim, "kdim": layer.kdim, "vdim": layer.vdim}
    if x.role == "query":
        settings = {"embed_dim": x.shape[-1]}
        if layer._qkv_same_embed_dim:
            # Keys and values have the width of the queries, if nothing else was given.
            sizes = dict.fromkeys(sizes, x.shape[-1])
    else:
        settings = _settings_for_keys(facts, sizes)
    sizes.update(settings)
    try:
        layer_for_width = nn.utils.skip_init(  # type: ignore[no-untyped-call]  # draws no random numbers
            nn.MultiheadAttention,
            **sizes,
            num_heads=layer.num_heads,
            batch_first=layer.batch_first,
            device=x.given.value.device,
            dtype=layer.out_proj.weight.dtype,
        )
    except (AssertionError, ValueError):  # the heads do not divide that width
        return None
    written = ", ".join(f"{name}={size}" for name, size in settings.items())
    return Fix(f"create the layer with {written}", function=layer_for_width.forward)


def _settings_for_keys(facts: Facts, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the widths of keys and values that differ from those of the layer, by its settings."""
    settings = {}
    for role in ("key", "value"):
        setting = _SETTING_OF[role]
        operand = facts.given(role)
        if operand is not None and operand.shape[-1] != sizes[setting]:
            settings[setting] = operand.shape[-1]
    return settings


def _keeps_tokens(facts: Facts, x: Operand) -> bool:
    """Return whether an operand has one row for each token of an input of the module: `batch sequence features`."""
    rows = prod(x.shape[:-1])
    graph = facts.reached.graph
    sources = {tensor.id for tensor in behind_of(graph, x.given.tensor)}
    for named in graph.recording.inputs:
        if named.tensor.id not in sources:
            continue
        shape = named.tensor.shape
        # Token ids are `batch sequence`.
        if rows in (prod(shape), prod(shape[:-1])):
            return True
    return False
