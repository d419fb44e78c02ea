"""Find faults of parameters: some are used twice, others are unused or get no gradient.

A parameter is unused if no operation that the output depends on reads it. A loop over heads has one turn for each head:
an `Attention` in the `branches` of the attention of all heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...record.ops import Op
from ...reports.check import Finding, SkippedCheck
from ...text import shortened, spans
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..factors import SIDES
from ..gradients import without_gradient
from ..lab import NotPossibleError
from ..readers import Readers, weight_of
from ..registry import rule
from ..unread_rows import unread_rows
from ..unregistered import unregistered
from .masking import masks_everything


@rule(on_meta="every projection is used once")
def parameters(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """No projection was found to be unused or without a gradient.

    The gradient of each projection is computed from a random weighted sum of the output, and the
    operations that read each weight are found. A weight that is unused or detached keeps its initial
    values, so the model learns with fewer parameters than it has. DistributedDataParallel raises an
    error for unused weights.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
            self.v, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            parts = self.q(x), self.k(x), self.k(x)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in parts)
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        parts = self.q(x), self.k(x), self.k(x)
    +        parts = self.q(x), self.k(x), self.v(x)
    ```
    """
    if not evidence.run.recording.outputs:
        raise NotPossibleError("the forward returns no tensor, so the effect of its parameters is unknown")
    unknown = list(unregistered(evidence))
    if unknown:
        yield from unknown
        return
    readers = Readers(evidence)
    twice = list(_used_for_siblings(evidence, readers))
    yield from twice
    if not twice:
        # Heads that share their weights because one name is written twice were found above.
        yield from _heads_with_same_weights(evidence)
    for attention, _, _ in evidence.kinds:
        yield from _unused(readers, attention)
        yield from _unread_features(evidence, readers, attention)
    yield from unread_rows(evidence)
    if evidence.on_meta:
        yield SkippedCheck("parameters", "gradients cannot be computed on meta; use --device cpu")
    elif evidence.once:
        yield SkippedCheck("parameters", "gradients need another run")
    elif masks_everything(evidence):
        yield SkippedCheck(
            "parameters", "a mask that masks out every key cuts off the gradients", "until masking passes"
        )
    else:
        yield from without_gradient(evidence, readers)


# -- used twice -------------------------------------------------------------------------------------------------------


def _used_for_siblings(evidence: Evidence, readers: Readers) -> Iterator[Finding]:
    """Yield parameters that are used twice while a parameter of the same shape in a sibling module is unused."""
    attentions: list[Attention] = []
    for attention, _ in evidence.run.attentions:
        attentions += (attention, *attention.branches)
    projected = _projected_sides(evidence, attentions)
    for name, ops in readers.ops.items():
        sides = projected.get(name, {})
        if len(ops) < 2 and len(sides) < 2:
            continue
        if not sides and not _is_inside(name, attentions):
            continue
        siblings = _unused_siblings(readers, name)
        if siblings:
            readers.mentioned.update(siblings.values())
            yield _used_twice(name, ops, sides, list(siblings))


def _is_inside(name: str, attentions: Sequence[Attention]) -> bool:
    """Return whether a parameter belongs to the module of an attention, or to a module inside it."""
    for attention in attentions:
        is_whole_model = not attention.module
        if is_whole_model or name.startswith(f"{attention.module}."):
            return True
    return False


def _projected_sides(evidence: Evidence, attentions: Sequence[Attention]) -> dict[str, dict[str, Op]]:
    """Return the sides that each weight projects, by its name, with the first projection of each side.

    The sides are `query`, `key`, `value` and `output`. Those of a packed weight are left out: each has rows of its own.
    """
    projected: dict[str, dict[str, Op]] = defaultdict(dict)
    for attention in attentions:
        for side, op in attention.projections.items():
            weight = weight_of(evidence, op)
            heads = attention.stages.get(f"{side[0]}_heads")
            is_packed = heads is not None and heads.numel < op.output.numel
            if weight is not None and weight.is_whole and not is_packed:
                projected[weight.name].setdefault(side, op)
    return projected


def _unused_siblings(readers: Readers, name: str) -> dict[str, str]:
    """Return the unused parameters of the same shape in siblings of a parameter's module: name to sibling module."""
    siblings = {}
    for unused in readers.unread():
        module = _sibling_module(unused, name)
        if module and readers.shapes[unused] == readers.shapes[name]:
            siblings[unused] = module
    return siblings


def _sibling_module(name: str, used: str) -> str:
    """Return the path of a parameter up to the only word that differs from the path of a used one; else empty.

    Parameters of one module are no siblings: empty too, except for those of the outermost module.

    >>> _sibling_module("k_norm.weight", "q_norm.weight")
    'k_norm'
    >>> _sibling_module("heads.1.key.weight", "heads.0.key.weight")
    'heads.1'
    >>> _sibling_module("norm.weight", "norm.bias")
    ''
    >>> _sibling_module("w_k", "w_q")
    'w_k'
    """
    words, used_words = name.split("."), used.split(".")
    if len(words) != len(used_words):
        return ""
    unlike = [place for place, word in enumerate(words) if word != used_words[place]]
    if len(unlike) != 1:
        return ""
    place = unlike[0]
    is_same_module = place == len(words) - 1 and len(words) > 1
    if is_same_module:
        return ""
    return ".".join(words[: place + 1])


def _used_twice(name: str, ops: Sequence[Op], sides: dict[str, Op], siblings: Sequence[str]) -> Finding:
    """Return the fault that a parameter is used in the place of its siblings, at the last of its uses.

    `ops` read the parameter; `sides` are those that it projects, with their projections.
    """
    uses = f"projects the {' and the '.join(sides)}" if len(sides) > 1 else f"is used {len(ops)} times"
    more = " and more" if len(siblings) > 2 else ""
    are = "is" if len(siblings) == 1 else "are"
    uses_in_order = [*ops, *sides.values()]
    return Finding(
        "parameters",
        f"{name} {uses}, and {', '.join(siblings[:2])}{more} {are} unused.",
        "The unused parameter has the same shape and gets no gradient.",
        source=uses_in_order[-1].source,
        module=ops[-1].module if ops else "",
        fix=f"Use {siblings[0]} where it belongs.",
    )


@partial(of_each_kind, "")
def _heads_with_same_weights(_: Evidence, attention: Attention, __: AxisNames) -> Iterator[Finding]:
    """Yield the first head of a loop whose query, key and value weights are all those of an earlier head."""
    first_with: dict[tuple[object, ...], int] = {}
    for number, turn in enumerate(attention.branches):
        memory = _memory_of(turn)
        first = first_with.setdefault(memory, number)
        if first == number:
            continue
        # Three projections read at least a source and a weight each. With fewer tensors one of them is missing.
        if len(memory) < 2 * len(SIDES):
            continue
        if _shares_no_projection(attention.branches[first], turn):
            yield _same_head(turn, first, number)
            return


def _same_head(head: Attention, first: int, second: int) -> Finding:
    """Return the fault that two heads of a loop, by their numbers, are one; `head` is the second."""
    return Finding(
        "parameters",
        f"Heads {first} and {second} are the same head: they share their weights.",
        "W_q, W_k and W_v of both heads are in the same memory.",
        source=head.score_product.op.source,
        fix="Create each head separately: [Head() for _ in range(heads)] instead of [Head()] * heads.",
    )


def _memory_of(head: Attention) -> tuple[object, ...]:
    """Return where a head of a loop reads its projections from: equal for two heads that compute the same.

    One entry for each tensor that a projection reads, with the place of the head in the result: heads that cut
    different features out of equal results are different heads.
    """
    memory: list[object] = []
    for side in SIDES:
        if side not in head.projections:
            continue
        start = head.stages[f"{side[0]}_heads"].offset
        for tensor in head.projections[side].inputs:
            memory.append((side, tensor.storage, tensor.offset, tensor.shape, start))
    return tuple(memory)


def _shares_no_projection(first: Attention, second: Attention) -> bool:
    """Return whether each of two heads computes its own projections: results that both read are shared on purpose."""
    return all(first.projections.get(side) is not second.projections.get(side) for side in SIDES)


# -- unused -----------------------------------------------------------------------------------------------------------


def _unused(readers: Readers, attention: Attention) -> Iterator[Finding]:
    """Yield the unused parameters of an attention; a single one that may be W_o is a fault, others may be intended."""
    # `self_attn.q_proj.weight` belongs to the module `self_attn`, and so does `self_attn.sinks`.
    unused = [name for name in readers.unread() if attention.module in readers.owners(name)]
    readers.mentioned.update(unused)
    named = _without_biases_of_layers(unused)
    may_be_output = [name for name in named if _may_be_output(readers, attention, name)]
    others = [name for name in named if name not in may_be_output]
    if may_be_output:
        # Of several matrices that fit, at most one is W_o, and nothing shows which.
        yield _unused_finding(attention, may_be_output, is_output=len(may_be_output) == 1)
    if others:
        yield _unused_finding(attention, others, is_output=False)


def _without_biases_of_layers(names: Sequence[str]) -> list[str]:
    """Return parameters without the biases of layers whose weights are among them.

    >>> _without_biases_of_layers(["out.weight", "out.bias", "k.bias"])
    ['out.weight', 'k.bias']
    """
    layers = {name.removesuffix("weight") for name in names}
    return [name for name in names if not name.endswith("bias") or name.removesuffix("bias") not in layers]


def _may_be_output(readers: Readers, attention: Attention, name: str) -> bool:
    """Return whether a parameter may be a W_o that the forward leaves out: a matrix that fits concat.

    One side of the matrix has as many features as concat, `batch query (heads head_dim)`, and nothing projects concat.
    """
    if "output" in attention.projections or "concat" not in attention.stages:
        return False
    shape = readers.shapes[name]
    return len(shape) > 1 and attention.stages["concat"].shape[-1] in shape


def _unused_finding(attention: Attention, names: Sequence[str], *, is_output: bool) -> Finding:
    """Return the finding that parameters are unused; it is sure if the only one is the output projection."""
    more = " and more" if len(names) > 3 else ""
    are = "is" if len(names) == 1 else "are"
    end = ": the concatenated heads are never projected." if is_output else "."
    return Finding(
        "parameters",
        f"{', '.join(names[:3])}{more} {are} unused{end}",
        "The output does not depend on any operation that reads it.",
        sure=is_output,
        module=attention.module,
    )


def _unread_features(evidence: Evidence, readers: Readers, attention: Attention) -> Iterator[Finding]:
    """Yield projections with unread features: one of q, k and v uses the part of another, or what is no projection."""
    if attention.branches:
        yield from _unread_heads(readers, attention)
        return
    for side, op in _projections_once(attention).items():
        weight = weight_of(evidence, op)
        name = "" if weight is None else weight.name
        unread = readers.unread_features(op)
        for reader in readers.ops.get(name, ()):
            # Another projection by the same weight may use the features that this one leaves unread.
            if evidence.run.graph.is_projection(reader):
                unread &= readers.unread_features(reader)
        head_dim = attention.stages[f"{side[0]}_heads"].shape[-1]
        features = op.output.shape[-1]
        # A part is at least one head. If all features are unread, the whole weight is unused.
        if head_dim <= len(unread) < features:
            readers.mentioned.add(name)
            yield _unread_part(attention, op, name, unread)


def _unread_heads(readers: Readers, attention: Attention) -> Iterator[Finding]:
    """Yield the keys or values of heads that no turn of a loop over heads reads, if all turns share the projection."""
    for side in ("key", "value"):
        ops = {turn.projections[side].index for turn in attention.branches if side in turn.projections}
        head_dim = attention.stages[f"{side[0]}_heads"].shape[-1]
        op = attention.projections.get(side)
        if op is None or len(ops) != 1:
            continue
        unread = readers.unread_features(op)
        features = op.output.shape[-1]
        if not head_dim <= len(unread) < features or features % head_dim:
            continue
        heads, used = features // head_dim, (features - len(unread)) // head_dim
        yield Finding(
            "parameters",
            f"The projection of the {side}s makes {heads} heads of {head_dim}, and the loop reads {used} of them.",
            f"No operation reads features {spans(sorted(unread))} of {features}.",
            sure=False,
            source=op.source,
            module=attention.module,
            fix="Take key head `head // (num_heads // num_kv_heads)` for each query head.",
        )


def _projections_once(attention: Attention) -> dict[str, Op]:
    """Return the projections of query, key and value, each by the first side that it makes.

    Example: `query` for one projection to `[q | k | v]`; `key` for one to `[k | v]`.
    """
    sides: dict[int, str] = {}
    for side in SIDES:
        op = attention.projections.get(side)
        if op is not None:
            sides.setdefault(op.index, side)
    return {side: attention.projections[side] for side in sides.values()}


def _unread_part(attention: Attention, op: Op, name: str, unread: set[int]) -> Finding:
    """Return the fault of a packed projection with unread output features, with the name of its weight or empty."""
    projection = name or "the projection"
    return Finding(
        "parameters",
        f"{len(unread)} of the {op.output.shape[-1]} output features of {projection} are unused: query, key and value "
        "do not use three separate parts.",
        f"The output does not depend on features {shortened(spans(unread), 60)}.",
        source=op.source,
        module=attention.module,
        fix="Take query, key and value from separate parts.",
    )
