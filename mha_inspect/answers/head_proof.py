"""Proving on a run that one big projection then split equals one small matrix per head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.walk import Graph
from ..measure.weights import Weights, as_matrix, weights_of
from ..naming.axes import AxisNames
from ..naming.canonical import contents_of
from ..naming.subject import Run, Subject
from ..record.ops import TensorRef
from ..record.rounding import STEP, judge, max_difference
from ..reports.common import Verdict
from ..reports.params import PerHeadProof
from ..text import plural

_SAID: dict[Verdict, str] = {
    "same": "give the same output within rounding",
    "differs": "give different outputs",
    "inconclusive": "give outputs too close to tell apart from rounding",
}
_SIDES = {"q": "query", "k": "key", "v": "value"}


def prove(subject: Subject, run: Run) -> PerHeadProof | None:
    """Compute each attention of a run again with one small matrix per head, and compare with what the run gave.

    The run must have been recorded with its tensors kept. None where there are no numbers, or in no attention do the
    heads come from such matrices alone: where they are rotated or normed, or more is done to scores than to mask them.
    The worst of several attentions is told.
    """
    proofs = []
    for (found, names), weights in zip(run.attentions, weights_of(run, subject.module), strict=True):
        measured = _measured(run, found, names, weights)
        if measured is not None:
            proofs.append((*judge(*measured), *measured, names))
    if not proofs:
        return None
    _, verdict, difference, floor, names = max(proofs, key=lambda proof: (proof[0], proof[2]))
    several = f" in each of {len(proofs)} attentions" if len(proofs) > 1 else ""
    heads, width = plural(names.num_heads, "head"), names.head_dim
    sentence = (
        f"One projection to {names.num_heads * width} features split into {heads} of {width}, and one small matrix of "
        f"{width} rows per head, {_SAID[verdict]}{several}."
    )
    return PerHeadProof(max_abs_difference=difference, noise_floor=floor, verdict=verdict, sentence=sentence)


def _measured(run: Run, found: Attention, names: AxisNames, weights: Weights) -> tuple[float, float] | None:
    """Return how far what was recorded is from the heads' own computation in float64, and how far that is rounded."""
    plain = found.divided is None and found.softcap is None and found.sinks is None and not found.key_first
    changed = any(op.base_name != "expand" and op.kind == "compute" for op in found.weights_path)
    mixed = found.mixed_scores or found.mixed_weights or changed or found.weighing
    last = "output" if "W_o" in weights.projections else "concat"
    if not plain or mixed or found.scale is None or last not in found.stages or weights.missing:
        return None
    if not {"W_q", "W_k", "W_v"} <= weights.projections.keys() or not _heads_are_projections(run.graph, found):
        return None
    contents = contents_of(run, found, names)
    if not {*_SIDES.values(), "weights", last} <= contents.keys() or contents[last].is_meta:
        return None
    if any(contents[side].shape[-1] != weights.shapes[f"W_{letter}"][-1] for letter, side in _SIDES.items()):
        return None
    numbers = weights.read()
    double = contents[last].dtype == torch.float64

    def by_head(dtype: torch.dtype) -> Tensor:
        given = [{name: tensor.to(dtype) for name, tensor in own.items()} for own in (numbers, contents)]
        return output_by_head(given[0], weights.users(), given[1], float(found.scale or 1))

    try:
        rounded, exact = by_head(torch.float32 if double else contents[last].dtype), by_head(torch.float64)
    except RuntimeError:  # sizes that do not fit: what comes in was cut or padded on the way
        return None
    if exact.shape != contents[last].shape:
        return None
    return max_difference(exact, contents[last]), max_difference(rounded, exact) * (STEP if double else 1.0)


def _heads_are_projections(graph: Graph, found: Attention) -> bool:
    """Whether heads are what the projections give, moved, scaled and biased at most."""
    return all(
        _only_moved(graph, turn.stages[f"{letter}_heads"], turn.projections[side].index)
        for turn in found.branches or (found,)
        for letter, side in _SIDES.items()
        if side in turn.projections
    )


def _only_moved(graph: Graph, tensor: TensorRef, projection: int) -> bool:
    op = graph.recording.producer(tensor)
    if op is None or op.index <= projection or not graph.comes_from_inputs(tensor):
        return True
    sources = [source for source in op.inputs if not graph.is_weight(source)]
    added = op.base_name.rstrip("_") == "add" and len(op.inputs) == 2 and len(sources) == 1
    if op.kind == "compute" and not (graph.is_scale(op) or added or op.base_name in ("repeat", "constant_pad_nd")):
        return False
    return all(_only_moved(graph, source, projection) for source in sources)


def output_by_head(
    numbers: Mapping[str, Tensor], users: list[int], contents: Mapping[str, Tensor], scale: float
) -> Tensor:
    """Concat(head_1 … head_h) W_o with head_i = Attention(Q W_q_i, K W_k_i, V W_v_i), one head at a time.

    "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.2, read literally: no matrix here is wider than a
    head. What was added to the scores for a mask is taken from the recorded stages.

    Args:
        numbers: the weights in canonical form.
        users: for each head, which of the key/value heads it uses.
        contents: the stages `query`, `key`, `value`, `weights`, and `scores` and `masked_scores` where there is a mask,
            in canonical axes.
        scale: of the scores.

    Returns:
        `batch query embed`, or `batch query (heads head_dim)` without W_o.
    """
    mask, keys = _mask(contents), contents["weights"].shape[-1]
    contexts = []
    for head, shared in enumerate(users):
        q = _project(contents["query"], numbers, "q", head)
        k = _project(contents["key"], numbers, "k", shared)
        v = _project(contents["value"], numbers, "v", shared)
        k, v = (_append(one, numbers.get(f"bias_{name}"), shared, keys) for one, name in ((k, "k"), (v, "v")))
        scores = q @ k.mT * scale
        if mask is not None:
            scores = scores + mask[:, head]
        contexts.append(scores.softmax(dim=-1) @ v)
    concat = torch.cat(contexts, dim=-1)
    if "W_o" not in numbers:
        return concat
    output = concat @ as_matrix("W_o", numbers["W_o"]).T
    return output + numbers["b_o"] if "b_o" in numbers else output


def _mask(contents: Mapping[str, Tensor]) -> Tensor | None:
    """`batch heads query key`: what was added to the scores; None where nothing was."""
    if "scores" not in contents or "masked_scores" not in contents:
        return None
    scores, masked = contents["scores"], contents["masked_scores"]
    return torch.where(masked.isfinite(), masked - scores, masked).to(scores.dtype)


def _project(x: Tensor, numbers: Mapping[str, Tensor], letter: str, head: int) -> Tensor:
    """x W_hᵀ + b_h: `batch seq width` to `batch seq head_dim`."""
    projected = x @ numbers[f"W_{letter}"][head].T
    return projected + numbers[f"b_{letter}"][head] if f"b_{letter}" in numbers else projected


def _append(x: Tensor, learned: Tensor | None, head: int, keys: int) -> Tensor:
    """`batch key head_dim` with the learned key or value after it, and with zeros up to the number of keys."""
    if learned is not None:
        x = torch.cat([x, learned[head].expand(*x.shape[:-2], 1, -1)], dim=-2)
    return torch.nn.functional.pad(x, (0, 0, 0, max(keys - x.shape[-2], 0)))
