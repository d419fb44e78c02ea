"""Faults of parameters: unused projections, projections used twice, missing gradients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...record.ops import Op
from ...reports.check import Finding, SkippedCheck
from ...text import shortened, spans
from .adapters import factors_elsewhere
from .each_kind import of_each_kind
from .evidence import Evidence, NotPossibleError
from .gradients import without_gradient
from .masking import masks_everything
from .readers import Readers, weight_of
from .replay import SIDES


def parameters(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """Yield projections that are used twice, are unused, or get no gradient."""
    if not evidence.run.recording.outputs:
        raise NotPossibleError("the forward returns no tensor, so the effect of its parameters is unknown")
    readers = Readers(evidence)
    twice = list(_twice(evidence, readers))
    yield from twice
    if not twice:
        yield from _copied_heads(evidence)
    yield from factors_elsewhere(evidence)
    for attention, _, _ in evidence.kinds:
        yield from _unused(readers, attention)
        yield from _unread_features(evidence, readers, attention)
    if evidence.on_meta:
        yield SkippedCheck("parameters", "gradients cannot be computed on meta; use --device cpu")
    elif evidence.once:
        yield SkippedCheck("parameters", "gradients need another run")
    elif not masks_everything(evidence):
        yield from without_gradient(evidence, readers)


# -- used twice -------------------------------------------------------------------------------------------------------


def _twice(evidence: Evidence, readers: Readers) -> Iterator[Finding]:
    """Yield parameters that are used twice while a sibling of the same shape is unused."""
    turns: list[Attention] = []
    for attention, _ in evidence.run.attentions:
        turns += (attention, *attention.branches)
    projected = _projected_sides(evidence, turns)
    for name, ops in readers.ops.items():
        sides = projected.get(name, {})
        if len(ops) < 2 and len(sides) < 2:
            continue
        if not sides and not _is_inside(name, turns):
            continue
        siblings = _unread_siblings(readers, name)
        if siblings:
            readers.mentioned.update(siblings.values())
            yield _used_twice(name, ops, sides, [*siblings])


def _is_inside(name: str, turns: Sequence[Attention]) -> bool:
    """Return whether a parameter belongs to the module of an attention, or to a module inside it."""
    return any(not turn.module or name.startswith(f"{turn.module}.") for turn in turns)


def _projected_sides(evidence: Evidence, turns: Sequence[Attention]) -> dict[str, dict[str, Op]]:
    """Return for each whole weight the sides that it projects, with the first projection of each."""
    projected: dict[str, dict[str, Op]] = defaultdict(dict)
    for turn in turns:
        for side, op in turn.projections.items():
            weight = weight_of(evidence, op)
            if weight is not None and weight.is_whole:
                projected[weight.name].setdefault(side, op)
    return projected


def _unread_siblings(readers: Readers, name: str) -> dict[str, str]:
    """Return unused parameters of the same shape in a module beside that of a parameter, with that module."""
    siblings = {}
    for unread in readers.unread():
        module = _beside(unread, name)
        if module and readers.shapes[unread] == readers.shapes[name]:
            siblings[unread] = module
    return siblings


def _beside(name: str, neighbour: str) -> str:
    """Return the module of a parameter if another parameter is in a sibling module; else empty.

    >>> _beside("k_norm.weight", "q_norm.weight")
    'k_norm'
    >>> _beside("heads.1.key.weight", "heads.0.key.weight")
    'heads.1'
    """
    left, right = name.split("."), neighbour.split(".")
    if len(left) != len(right):
        return ""
    unlike = [place for place, word in enumerate(left) if word != right[place]]
    if len(unlike) != 1:
        return ""
    place = unlike[0]
    is_same_module = place == len(left) - 1 and len(left) > 1
    if is_same_module:
        return ""
    return ".".join(left[: place + 1])


def _used_twice(name: str, ops: Sequence[Op], sides: dict[str, Op], siblings: Sequence[str]) -> Finding:
    """Return the fault that a parameter is used in the place of its siblings."""
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
def _copied_heads(_: Evidence, attention: Attention, __: AxisNames) -> Iterator[Finding]:
    """Yield two heads of a loop that read the same weights."""
    first_turns: dict[tuple[object, ...], int] = {}
    for place, turn in enumerate(attention.branches):
        memory = _memory_of(turn)
        first = first_turns.setdefault(memory, place)
        if first == place or len(memory) < 2 * len(SIDES):
            continue
        if _is_projected_anew(attention.branches[first], turn):
            yield _same_head(turn, first, place)
            return


def _same_head(turn: Attention, first: int, second: int) -> Finding:
    return Finding(
        "parameters",
        f"Heads {first} and {second} are the same head: they share their weights.",
        "W_q, W_k and W_v of both heads are in the same memory.",
        source=turn.score_product.op.source,
        fix="Create each head separately: [Head() for _ in range(heads)] instead of [Head()] * heads.",
    )


def _memory_of(turn: Attention) -> tuple[object, ...]:
    """Return where the inputs of the projections of a head are in memory, and where its piece of each begins."""
    memory: list[object] = []
    for side in SIDES:
        if side not in turn.projections:
            continue
        start = turn.stages[f"{side[0]}_heads"].offset
        for tensor in turn.projections[side].inputs:
            memory.append((side, tensor.storage, tensor.offset, tensor.shape, start))
    return tuple(memory)


def _is_projected_anew(first: Attention, second: Attention) -> bool:
    """Return whether no projection of two heads is one operation."""
    return all(first.projections.get(side) is not second.projections.get(side) for side in SIDES)


# -- unused -----------------------------------------------------------------------------------------------------------


def _unused(readers: Readers, attention: Attention) -> Iterator[Finding]:
    """Yield the parameters of an attention that no operation reads; a matrix as wide as concat is a missed W_o."""
    # `self_attn.q_proj.weight` belongs to the module `self_attn`, and so does `self_attn.sinks`.
    unread = [name for name in readers.unread() if attention.module in readers.owners(name)]
    readers.mentioned.update(unread)
    spare = _without_biases_of_layers(unread)
    missed = [name for name in spare if _may_be_output(readers, attention, name)]
    others = [name for name in spare if name not in missed]
    if missed:
        yield _unused_finding(attention, missed, is_output=len(missed) == 1)
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
    """Return whether a parameter is a matrix that fits concat, which nothing projects."""
    if "output" in attention.projections or "concat" not in attention.stages:
        return False
    shape = readers.shapes[name]
    return len(shape) > 1 and attention.stages["concat"].shape[-1] in shape


def _unused_finding(attention: Attention, names: Sequence[str], *, is_output: bool) -> Finding:
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
    """Yield packed projections with unread features: one of q, k and v uses the part of another."""
    if attention.branches:
        return
    for side, op in _packed_projections(attention).items():
        weight = weight_of(evidence, op)
        name = "" if weight is None else weight.name
        unread = readers.unread_features(op)
        for reader in readers.ops.get(name, ()):
            if evidence.run.graph.is_projection(reader):
                unread &= readers.unread_features(reader)
        head_dim = attention.stages[f"{side[0]}_heads"].shape[-1]
        features = op.output.shape[-1]
        if head_dim <= len(unread) < features:
            readers.mentioned.add(name)
            yield _unread_part(attention, op, name, unread)


def _packed_projections(attention: Attention) -> dict[str, Op]:
    """Return each projection that makes several of query, key and value, with the first of these."""
    counts = Counter(op.index for side, op in attention.projections.items() if side in SIDES)
    packed: dict[str, Op] = {}
    for side in SIDES:
        op = attention.projections.get(side)
        # Its count is removed, so that further sides of one operation are skipped.
        if op is not None and counts.pop(op.index, 0) > 1:
            packed[side] = op
    return packed


def _unread_part(attention: Attention, op: Op, name: str, unread: set[int]) -> Finding:
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
