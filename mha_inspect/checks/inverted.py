"""A padding mask that is the wrong way round: it hides the real tokens and shows the padding.

    encoder(embed(tokens), src_key_padding_mask=tokens != 0)        # torch hides where it is True

An embedding with a `padding_idx` says which tokens are padding, and the weights which keys are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compare.replay import LostError, again, content_of
from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, sizes_in
from ..record.ops import TensorRef
from ..reports.check import Finding
from .evidence import Evidence
from .seen_keys import SeenKeys


@dataclass(frozen=True, eq=False)
class _Padding:
    """Which tokens of a run are padding."""

    tokens: Tensor
    """`batch token`: True where the token is padding."""
    number: int
    """The id of a padding token."""
    embedding: str
    """The path of the embedding that has this `padding_idx`."""


def inverted_padding(evidence: Evidence) -> Iterator[Finding]:
    """Yield a mask that leaves exactly the padding visible, in every batch item that has any."""
    padding = _padding_of(evidence)
    if padding is None:
        return
    items = padding.tokens.any(1) & ~padding.tokens.all(1)
    for sight in evidence.sights:
        seen = sight.seen.any(1)  # batch key
        if not sight.masked or seen.shape != padding.tokens.shape or not bool(items.any()):
            continue
        if not torch.equal(seen[items], padding.tokens[items]):
            continue
        tried = _sees_tokens_alone(evidence, sight, padding, items)
        fix = _fix(evidence, sight, padding) if tried else ""
        more = " With the mask inverted, every query of these items sees the real tokens alone." if tried else ""
        yield sight.finding(
            "masking",
            f"The padding mask is inverted: the visible keys are exactly the tokens with id {padding.number}, the "
            f"padding_idx of {padding.embedding}.",
            f"In {int(items.sum())} of {len(items)} batch items with padding, no query sees a real token.{more}",
            fix,
        )
        return


def _fix(evidence: Evidence, sight: SeenKeys, padding: _Padding) -> str:
    layer = evidence.subject.module.get_submodule(sight.module) if sight.module else evidence.subject.module
    if not isinstance(layer, nn.MultiheadAttention):
        return "Invert the mask where it is passed."
    padded = f"{evidence.source.names[0]} == {padding.number}"
    return f"Invert the mask where it is passed, e.g. {padded}: torch hides what is True."


def _sees_tokens_alone(evidence: Evidence, sight: SeenKeys, padding: _Padding, items: Tensor) -> bool:
    """Return whether the attention sees exactly the tokens that are no padding, if its mask is inverted.

    The mask is a recorded tensor, `batch key`, that is True for the padding or for the other tokens. What is computed
    from it is computed again, up to the weights.
    """
    attention = sight.attention
    names = _names_of(evidence, attention)
    target = attention.stages.get("weights")
    if names is None or target is None:
        return False
    for mask in _masks(evidence, padding):
        try:
            weights = again(evidence, mask, ~content_of(evidence, mask), target)
        except LostError:
            continue
        sizes = sizes_in(attention, names, "weights")
        content = canonical(weights, "weights", names.of_stage("weights"), sizes, names.head_order)
        if content is None:
            continue
        seen = (content.nan_to_num(0.0) > 0).any(2).any(1).cpu()
        if torch.equal(seen[items], ~padding.tokens[items]):
            return True
    return False


def _names_of(evidence: Evidence, attention: Attention) -> AxisNames | None:
    for candidate, names in evidence.run.attentions:
        if candidate is attention:
            return names
    return None


def _masks(evidence: Evidence, padding: _Padding) -> Iterator[TensorRef]:
    """Yield the recorded booleans, `batch key`, that are True for the padding or for the other tokens, in order."""
    recording = evidence.run.recording
    tensors = [named.tensor for named in recording.inputs]
    for op in recording.ops:
        tensors += op.outputs
    for tensor in tensors:
        if tensor.dtype != "bool" or tensor.shape != tuple(padding.tokens.shape):
            continue
        content = evidence.content(tensor)
        if content is None:
            continue
        is_padding = torch.equal(content.cpu(), padding.tokens)
        if is_padding or torch.equal(content.cpu(), ~padding.tokens):
            yield tensor


def _padding_of(evidence: Evidence) -> _Padding | None:
    """Return the padding among the token ids of the run; None without ids, or without an embedding that names it."""
    source, recording, graph = evidence.source, evidence.run.recording, evidence.run.graph
    ids = source.value
    if ids.is_floating_point() or ids.dim() != 2 or ids.is_meta:
        return None
    given = {named.tensor.id for named in recording.inputs if named.name in source.names}
    names = recording.parameter_names
    for op in recording.ops:
        if op.base_name != "embedding" or len(op.inputs) < 2:
            continue
        weight = names.get(op.inputs[0].id, "")
        if graph.before_moves(op.inputs[1]).id not in given or not weight:
            continue
        path = weight.rpartition(".")[0]
        embedding = evidence.subject.module.get_submodule(path)
        number = getattr(embedding, "padding_idx", None)
        if number is not None:
            return _Padding((ids == number).cpu(), number, path)
    return None
