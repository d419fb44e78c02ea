"""What kind of attention one is, from evidence: self or cross, causal, grouped.

Self is where query and key are of one tensor. Causal is where no query gives weight to a key behind its own position.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import inside
from ..record.catalog import axes_rule
from ..record.ops import TensorRef
from .named_run import NamedRun
from .visibility import is_causal_attention, masks_of

_LARGEST = 1 << 24
"""Elements of a mask up to which its content is looked at."""
_FAR = 60
"""Operations after which a walk gives up: a mask is made of less."""


def kinds_of(run: NamedRun) -> list[tuple[str, ...]]:
    """Return the kind of each attention of a run, in order."""
    kinds = []
    for attention, names in run.attentions:
        causal = "causal" if is_causal_attention(run.graph, attention, names) else ""
        grouped = "grouped" if names.num_kv_heads < names.num_heads else ""
        kinds.append(tuple(word for word in (_source(run, attention), causal, grouped) if word))
    return kinds


def mask_notes(run: NamedRun, leaves: Mapping[int, Tensor]) -> tuple[str, ...]:
    """Return a line where a mask of 0 and 1, one of the `leaves` or of a kept run, is added to the scores."""
    for attention, _ in run.attentions:
        for op in attention.masks:
            masks = [] if op.does("fills") else masks_of(run.graph, attention, op)
            if len(masks) == 1 and masks[0].dtype != "bool" and 1 < masks[0].numel <= _LARGEST:
                value = leaves.get(run.graph.before_moves(masks[0]).id)
                if value is None or value.is_meta:
                    continue
                if bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any()):
                    return (
                        "The mask is of the numbers 0 and 1 and is added to the scores: it bars no key. Give bool, or "
                        "-inf where a key is barred.",
                    )
    return ()


def _source(run: NamedRun, attention: Attention) -> str:
    """`self`, `cross`, or nothing where the recording does not show what the query and the key are made of."""
    stages, before = attention.stages, run.graph.before_moves
    query, key = stages.get("query", stages["q_heads"]), stages.get("key", stages["k_heads"])
    left, right = before(query), before(key)
    memory = {(side.storage, side.offset, side.shape, side.stride) for side in (left, right)}
    if left.id == right.id or len(memory) == 1 or _within(run, attention, query) & _within(run, attention, key):
        return "self"
    if "query" in stages and "key" in stages:
        return "cross"
    given = [run.graph.inputs_of(side) for side in (query, key)]
    # Heads that both came in may have been projected from one tensor.
    made = "query" in stages or "key" in stages or not any(own <= {left.id, right.id} for own in given)
    return "cross" if made and all(given) and given[0] != given[1] else ""


def _within(run: NamedRun, attention: Attention, side: TensorRef) -> set[int]:
    """Return the ids of what a query or a key is made of inside the attention's own module, position by position.

    Norms, projections down to something narrower, and what makes fewer positions, may stand before what is called its
    input.
    """
    ops = [attention.projections[name] for name in ("query", "key") if name in attention.projections]
    paths = zip(*(path.split(".") for path in (attention.module, *(op.module for op in ops))), strict=False)
    owner = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, paths))
    graph, reached, queue = run.graph, set[int](), [side]
    while queue and len(reached) < _FAR:
        tensor = queue.pop()
        if tensor.id in reached:
            continue
        if graph.comes_from_inputs(tensor):
            reached.add(tensor.id)
        op = run.recording.producer(tensor)
        if op is None or not inside(op.module, owner):
            continue
        if graph.is_projection(op):
            queue.append(graph.projected(op))
        elif op.does("pools") or axes_rule(op.base_name) == "reduce":
            queue.append(op.inputs[0])
        elif graph.moves(op) or op.pointwise or op.does("norms"):
            queue += [read for read in op.inputs if read.numel == tensor.numel or graph.moves(op)]
    return reached
