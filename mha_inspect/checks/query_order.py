"""The position of each query, where the code picks the queries by an index, e.g. in the order of a topk (Informer).

scores = q[:, :, rows] @ k.transpose(-2, -1)        # query i is token rows[i]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.rerun import between, results_of
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, sizes_in
from ..record.ops import Op, TensorRef
from ..running.subject import Run

_PICKS = ("index", "index_select", "gather")
"""Operations that pick entries of their first tensor."""


def picks_queries(run: Run, attention: Attention) -> Op | None:
    """Return the last operation that picks queries by an index, and no keys with them; None without one."""
    queries, keys = attention.stages.get("q_heads"), attention.stages.get("k_heads")
    if queries is None or keys is None:
        return None
    of_keys = {op.index for op in _from_inputs(run, keys)}
    picks = None
    for op in _from_inputs(run, queries):
        if op.base_name in _PICKS and op.index not in of_keys and _stage_of(attention, op):
            picks = op
    return picks


def _from_inputs(run: Run, tensor: TensorRef) -> Iterator[Op]:
    """Yield the operations between the inputs of the run and a tensor that read tokens first, in order."""
    inputs = run.graph.inputs_of(tensor)
    of_tokens = set(inputs)
    for op in between(run.recording, inputs, tensor):
        if op.inputs and op.inputs[0].id in of_tokens:
            yield op
        of_tokens.update(result.id for result in op.outputs)


def _stage_of(attention: Attention, op: Op) -> str:
    """Return the stage of the queries that the result of an operation has the sizes of; empty if of none."""
    for stage in ("q_heads", "q_proj"):
        tensor = attention.stages.get(stage)
        if tensor is not None and tensor.shape == op.output.shape:
            return stage
    return ""


def positions_of(run: Run, attention: Attention, names: AxisNames, picks: Op) -> Tensor | None:
    """Return the position of each query, `batch heads query`, from what picks them; None if it is unknown.

    The operation is run again on numbers that count the tokens, along each dimension that they may lie in.
    """
    stage = _stage_of(attention, picks)
    places = [place for place, words in enumerate(names.of_stage(stage).split()) if words == "query"]
    source = picks.inputs[0]
    if len(places) != 1 or len(source.shape) != len(picks.output.shape):
        return None
    (place,) = places
    try:
        picked = _picked_places(run, picks, place)
    except (RuntimeError, ValueError, LookupError):
        return None
    content = canonical(picked, stage, names.of_stage(stage), sizes_in(attention, names, stage), names.head_order)
    if content is None:
        return None
    if content.dim() == 3:  # `batch query features`, the heads side by side
        content = content[:, None]
    positions = content[..., :1]
    return positions[..., 0] if bool((content == positions).all()) else None


def _picked_places(run: Run, picks: Op, place: int) -> Tensor:
    """Return for each element that is picked where along a dimension it was. Raise `LookupError` if it is unknown."""
    source = picks.inputs[0]
    shape = [1] * len(source.shape)
    shape[place] = -1
    numbers = torch.arange(source.shape[place]).reshape(shape).expand(source.shape)

    def content(tensor: TensorRef) -> Tensor:
        if tensor.id == source.id:
            return numbers
        value: Tensor | None = run.recording.values.get(tensor.id)
        if value is None:
            raise LookupError
        return value.detach().cpu()

    (picked,) = results_of(picks, content)
    return picked
