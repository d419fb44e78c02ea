"""Causes in the width of an input: `batch sequence embed` where a layer takes another number of features."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from .facts import HEADS, Facts, Operand
from .reached import behind_of
from .suspect import Suspect
from .tried import Fix, of_shape, resized

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


def _misfit(facts: Facts) -> _Misfit | None:
    """Return the first input of the failing call with another width than its layer takes; None without one."""
    layer = facts.attention
    if layer is not None:
        for role, takes in (("query", layer.embed_dim), ("key", layer.kdim), ("value", layer.vdim)):
            x = facts.given(role)
            if x is not None and x.shape and takes and x.shape[-1] != takes:
                return _Misfit(x, takes, None)
        return None
    weighted = _weighted(facts)
    if weighted is None or not weighted.x.shape or not weighted.takes or weighted.has == weighted.takes:
        return None
    return weighted


def _weighted(facts: Facts) -> _Misfit | None:
    """Return the input of a layer and its weight, whether it fits or not; None for other calls."""
    if facts.base == "linear" and len(facts.operands) >= 2 and facts.given("input") is not None:
        weight = facts.operands[1]
        return _Misfit(facts.operands[0], weight.shape[-1] if weight.shape else 0, weight)
    if facts.base == "layer_norm" and len(facts.operands) >= 2 and facts.given("input") is not None:
        weight = facts.operands[-1]
        return _Misfit(facts.operands[0], weight.shape[-1] if weight.shape else 0, weight)
    if facts.pair is None:
        return None
    x, weight = facts.pair
    if not weight.is_parameter or len(weight.shape) != 2:
        return None
    return _Misfit(x, weight.shape[0], weight)


def heads_without_name(facts: Facts) -> Suspect | None:
    """Judge an input that ends in two dimensions whose product the layer takes."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None:
        return None
    x, takes = misfit.x, misfit.takes
    if x.place(*HEADS) is not None or len(x.shape) < 4 or x.shape[-1] * x.shape[-2] != takes:
        return None
    way = "use torch.cat(heads, dim=-1), or .flatten(-2) with the heads just before their features"
    what = f"{x.name} ends in {x.axis(-2)} and {x.axis(-1)}; the layer expects one dimension of {takes}."
    joined = Fix(way, [(x, lambda tensor: tensor.transpose(-2, -1).flatten(-2))])
    return Suspect("heads_not_joined", what, (joined,))


def heads_not_joined(facts: Facts) -> Suspect | None:
    """Judge an input whose heads would fit the layer if they were concatenated."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None:
        return None
    x, takes = misfit.x, misfit.takes
    heads, features = x.place(*HEADS), x.place("head_dim")
    if heads is None or features is None or heads == features or x.shape[heads] * x.shape[features] != takes:
        return None
    is_behind = heads == len(x.shape) - 2
    swap = "" if is_behind else ".transpose(1, 2)"

    def joined(tensor: Tensor) -> Tensor:
        """Return `batch sequence (heads head_dim)` of the operand."""
        return (tensor if is_behind else tensor.transpose(1, 2)).flatten(-2)

    way = f"{x.name}{swap}.flatten(-2): move heads after the sequence, then merge them with their features"
    return Suspect(
        "heads_not_joined",
        f"{x.name} still has {x.shape[heads]} heads of {x.shape[features]}; the layer expects them concatenated, "
        f"{x.shape[heads]}·{x.shape[features]} = {takes}.",
        (Fix(way, [(x, joined)]),) if is_behind or heads == 1 else (),
    )


def weight_not_transposed(facts: Facts) -> Suspect | None:
    """Judge a product with a weight whose columns are the features of the input: `x @ weight` for nn.Linear's."""
    misfit = _misfit(facts)
    if misfit is None or misfit.weight is None or facts.pair is None or misfit.weight.shape[-1] != misfit.has:
        return None
    x, weight = misfit.x, misfit.weight
    return Suspect(
        "weight_not_transposed",
        f"{weight.is_shape}, (out_features, in_features) as in nn.Linear; {x.name} has {misfit.has} features.",
        (Fix(f"{x.name} @ {weight.name}.T, or call the layer", [(weight, lambda tensor: tensor.T)]),),
    )


def features_not_last(facts: Facts) -> Suspect | None:
    """Judge an input that has the features of the layer in another dimension."""
    misfit = _misfit(facts)
    if misfit is None or len(misfit.x.shape) < 3:
        return None
    x, takes = misfit.x, misfit.takes
    if x.shape[:-1].count(takes) != 1:
        return None
    place = x.shape.index(takes)
    return Suspect(
        "features_not_last",
        f"{x.name} has its {takes} features in dimension {place}; the layer expects them last.",
        (Fix(f"{x.name}.transpose({place}, -1)", [(x, lambda tensor: tensor.transpose(place, -1))]),),
    )


def wrong_width(facts: Facts) -> Suspect | None:
    """Judge an input whose number of features does not fit its layer."""
    misfit = _misfit(facts)
    if misfit is None:
        return None
    x, takes, weight = misfit.x, misfit.takes, misfit.weight
    if weight is None:
        expects = f"the layer expects {takes} for {x.role} ({_SETTING_OF[x.role]})"
        other_layer = _attention_for_width(facts, x)
    else:
        expects = f"{weight.name} expects {takes}"
        other_layer = _layer_for_width(facts, weight, misfit.has)
    fixes = [Fix(f"give {x.name} {takes} features", [(x, resized(-1, takes))])]
    if other_layer is not None:
        fixes.insert(0, other_layer)
    # After a wrong view or a forgotten step, the width is not what is wrong.
    shown = tuple(fixes) if _keeps_tokens(facts, x) else ()
    return Suspect("wrong_width", f"{x.name} has {misfit.has} features; {expects}.", shown)


def _layer_for_width(facts: Facts, weight: Operand, width: int) -> Fix:
    """Return the fix to create a layer for another width, tried with zeros."""
    if facts.base == "layer_norm":
        way = f"create the layer for {width}"
        return Fix(way, function=lambda x, *args, **kwargs: nn.functional.layer_norm(x, (width,)))
    if facts.base == "linear":
        zeros = of_shape((weight.shape[0], width))
        return Fix(f"create the layer with in_features {width}", [(weight, zeros)])
    return Fix(f"create the layer for {width}", [(weight, of_shape((width, weight.shape[1])))])


def _attention_for_width(facts: Facts, x: Operand) -> Fix | None:
    """Return the fix to create an nn.MultiheadAttention for other widths, tried with such a layer."""
    layer = facts.attention
    assert layer is not None
    sizes = {"embed_dim": layer.embed_dim, "kdim": layer.kdim, "vdim": layer.vdim}
    settings: dict[str, int] = {}
    if x.role == "query":
        settings["embed_dim"] = x.shape[-1]
        # Keys and values have the width of the queries, if nothing else was given.
        follow = tuple(sizes) if layer._qkv_same_embed_dim else ("embed_dim",)
        sizes.update(dict.fromkeys(follow, x.shape[-1]))
    else:
        for role in ("key", "value"):
            given, setting = facts.given(role), _SETTING_OF[role]
            if given is not None and given.shape[-1] != sizes[setting]:
                settings[setting] = given.shape[-1]
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


def _keeps_tokens(facts: Facts, x: Operand) -> bool:
    """Return whether an operand has one row for each token of an input of the module: `batch sequence features`."""
    rows = prod(x.shape[:-1])
    graph = facts.reached.graph
    behind = {tensor.id for tensor in behind_of(graph, x.given.tensor)}
    for named in graph.recording.inputs:
        shape = named.tensor.shape
        # Token ids are `batch sequence`.
        if named.tensor.id in behind and rows in (prod(shape), prod(shape[:-1])):
            return True
    return False
