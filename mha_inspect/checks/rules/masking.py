"""Find masks that leave weight on masked keys, or that mask out every key."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...compare.replay import LostError, again
from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...record.arguments import tensors_in
from ...record.ops import Op
from ...reports.check import Finding
from ...text import spans
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..inverted import inverted_padding
from ..lab import NotPossibleError
from ..ladders import slopes_off, slopes_upside_down
from ..laid_over import MASK_THE_KEYS, laid_over
from ..registry import rule
from ..seen_keys import SeenKeys

_WEAK = 1.0
"""A mask that fills in a constant of at most this size has no effect."""
_LEAST = 1e-4
"""A weight above this can become smaller."""
_STRONG = 1e3
"""A mask that adds a constant of at least this size decides which keys have all of the weight."""


@rule()
def masking(evidence: Evidence) -> Iterator[Finding]:
    """Masked keys get weight 0, and the mask is applied before the softmax.

    Nothing is changed: the scores of one run are compared before and after the mask, together with the
    weights that follow. A masked key needs a score of -inf, or a very low number. A score of 0, as
    here, still gets weight. If a causal mask leaks, the loss in training is too low and generation
    fails. If a padding mask leaks, each output depends on the padding.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT / 8**0.5) * ~future
            weights = scores.softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        scores = (q @ k.mT / 8**0.5) * ~future
    +        scores = (q @ k.mT / 8**0.5).masked_fill(future, float("-inf"))
    ```
    """
    faults = [*_masks(evidence), *slopes_off(evidence), *slopes_upside_down(evidence)]
    yield from faults
    is_any_masked = any(attention.masks for attention, _ in evidence.run.attentions)
    # A function of each score alone, e.g. relu, gives zeros without a mask.
    has_zeros = any(sight.has_zeros and not sight.attention.weighing for sight in evidence.sights)
    if not faults and not is_any_masked and not has_zeros:
        raise NotPossibleError("nothing is added to the scores, and no weight is set to zero", "none here")


def _masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield masks that leave weight on masked keys: scores multiplied by a mask, or filled with a small number."""
    masked = _masked_throughout(evidence)
    if not masked:
        yield from inverted_padding(evidence)
        yield from _over_queries(evidence)
        yield from weak_masks(evidence)
        yield from _finite_masks(evidence)
        return
    pairs = sum(sight.seen.numel() for sight in masked[0])
    yield masked[0][0].finding(
        "masking",
        "The mask masks out every key for every query: the weights ignore the scores, or are NaN.",
        f"With the given mask, all {pairs} pairs of a query and a key are masked out.",
        "Invert the mask where it is applied, or pass the inverted mask.",
    )


def _over_queries(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first mask that takes every key from some queries, and whose other queries see all keys.

    What a mask does that is an argument, `padding` learns from other runs.
    """
    is_given = len(list(tensors_in(evidence.values))) > 1
    if is_given and not evidence.once:
        return
    for sight in evidence.sights:
        if not sight.masked or not sight.knows_own or sight.queries != sight.keys:
            continue
        sees_any = sight.seen.any(-1)  # batch query
        is_open = (sight.seen | ~sees_any[:, :, None]).all()
        if not bool(is_open) or bool(sees_any.all()) or not bool(sees_any.any()):
            continue
        item = int((~sees_any).any(-1).nonzero()[0])
        blind = (~sees_any[item]).nonzero().flatten().tolist()
        is_at_an_end = blind[-1] - blind[0] == len(blind) - 1 and (blind[0] == 0 or blind[-1] == sight.queries - 1)
        if not is_at_an_end:  # padding is
            continue
        finding = sight.finding(
            "masking",
            "The mask is applied to the queries: masked ones see no key, and others see the masked tokens.",
            f"In batch item {item}, {_queries(blind)} no key, and each other query sees all keys.",
            laid_over(MASK_THE_KEYS, sight.layout),
        )
        yield replace(finding, sure=False)
        return


def _queries(places: Sequence[int]) -> str:
    """Return queries as the subject of a sentence: `query 3 sees`, `queries 3–4 see`."""
    return f"query {places[0]} sees" if len(places) == 1 else f"queries {spans(places)} see"


def _finite_masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first mask of a finite number that leaves masked keys a weight, although one too small for a sum."""
    for sight in evidence.sights:
        # Smaller ones are no longer normal numbers, e.g. with -100 in float32, the mask of Swin.
        if sight.faint > 1e-37:
            finding = sight.finding(
                "masking",
                f"The mask is a finite number, and leaves masked keys a weight of up to {sight.faint:.2g}.",
                "This weight is too small to change a sum in this dtype. Larger scores or another dtype may show it.",
                "Use masked_fill(mask, float('-inf')).",
            )
            yield replace(finding, sure=False)
            return


def masks_everything(evidence: Evidence) -> bool:
    """Return whether a mask masks out every key for every query of an attention."""
    return bool(_masked_throughout(evidence))


def _masked_throughout(evidence: Evidence) -> list[list[SeenKeys]]:
    """Return the sights of each attention whose mask masks out every key for every query.

    A loop that computes one query at a time has a sight for each: all of them are one attention.
    """
    groups: dict[object, list[SeenKeys]] = defaultdict(list)
    for place, sight in enumerate(evidence.sights):
        stages = sight.attention.stages
        sources = [stages[name].storage for name in ("query", "q_proj", "key", "k_proj") if name in stages]
        groups[tuple(sources) or place].append(sight)
    return [sights for sights in groups.values() if all(_sees_nothing(sight) for sight in sights)]


def _sees_nothing(sight: SeenKeys) -> bool:
    return sight.masked and not bool(sight.seen.any())


# -- masks that are too weak ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeakMask:
    """What is wrong with a mask that leaves weight on masked keys."""

    sentence: str
    proof: str
    fix: str = ""

    def finding(self, op: Op) -> Finding:
        """Return the finding at the operation that masks."""
        return Finding("masking", self.sentence, self.proof, source=op.source, fix=self.fix)


@partial(of_each_kind, "")
def weak_masks(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield masks that leave weight on masked keys."""
    weights = _without_padding(_final_weights(evidence, attention), evidence.padded)
    is_weak = False
    for op in (*attention.masks, *_factors(evidence, attention)):
        values = [evidence.content(tensor) for tensor in op.inputs]
        fault = weak_mask(op, values, weights)
        if fault is not None and _is_of_scores(evidence, attention, op):
            is_weak = True
            yield fault.finding(op)
    if is_weak:  # a mask that is too weak is masked out by no step after it
        return
    for op in attention.masks:
        fault = _undone(evidence, attention, op)
        if fault is not None:
            yield fault.finding(op)


def _is_of_scores(evidence: Evidence, attention: Attention, op: Op) -> bool:
    """Return whether a lower number where a mask changed one gives a smaller weight there; True if it is unknown.

    What is subtracted from the scores later is no mask of them (selective attention).
    """
    weights = attention.softmax.output
    before, content = evidence.content(weights), evidence.content(op.output)
    given = evidence.content(op.inputs[0])
    if before is None or content is None or given is None:
        return True
    if content.numel() != before.numel():
        return False  # e.g. of one head
    if not before.shape == content.shape == given.shape:
        return True
    places = ((content != given) & (before > _LEAST) & (before < 1)).nonzero()
    if not len(places):
        return True
    place = tuple(places[0].tolist())
    lowered = content.clone()
    lowered[place] = content[place] - content[place].abs() - 8
    try:
        after = again(evidence, op.output, lowered, weights)
    except LostError:
        return True
    return bool(after[place] < before[place])


def _factors(evidence: Evidence, attention: Attention) -> list[Op]:
    """Return the products with a tensor between the scores and the softmax, without those that are masks already."""
    scores, last = attention.score_product.op.output, attention.softmax.inputs[0]
    steps = between(evidence.run.recording, {scores.id}, last)
    products = [op for op in steps if op.base_name.rstrip("_") == "mul" and op.inputs[-1].numel > 1]
    return [op for op in products if op not in attention.masks]


def _final_weights(evidence: Evidence, attention: Attention) -> Tensor | None:
    """Return the weights that meet the values, if they are laid out as those of the softmax; else those."""
    product = attention.value_product
    final = evidence.content(product.right if attention.value_first else product.left)
    weights = evidence.content(attention.softmax.output)
    if final is None or weights is None or final.numel() != weights.numel():
        return weights
    return final.reshape(weights.shape) if final.shape[-2:] == weights.shape[-2:] else weights


def _without_padding(weights: Tensor | None, padded: Tensor | None) -> Tensor | None:
    """Return weights, `batch heads query key`, with zeros for queries of padding, which may see anything."""
    if weights is None or padded is None or weights.dim() != 4 or weights.shape[::2] != padded.shape:
        return weights
    return weights.masked_fill(padded[:, None, :, None].to(weights.device), 0.0)


def _undone(evidence: Evidence, attention: Attention, op: Op) -> WeakMask | None:
    """Return the fault that a later step, e.g. a tanh that caps the scores, undoes a mask; else None.

    What the mask did is read from the scores after it, whether it fills in a number or adds one.
    """
    filled, scores = evidence.content(op.output), evidence.content(attention.softmax.inputs[0])
    if filled is None or scores is None or filled.shape != scores.shape or not filled.is_floating_point():
        return None
    masked = filled <= -_STRONG
    # A query without another key, e.g. the first one where each hides itself (Reformer), has no weights of a meaning.
    has_another = (~masked & (scores > -_STRONG)).any(-1, keepdim=True)
    undone = masked & (scores > -_STRONG) & has_another
    if not undone.any() or not _weighs(_final_weights(evidence, attention), undone):
        return None
    return WeakMask(
        "A step between the mask and the softmax undoes the mask: a masked key gets weight.",
        f"The mask makes a score {float(filled[undone].max()):.3g}, and the softmax gets "
        f"{float(scores[undone].max()):.3g} there.",
        "Apply the mask last, just before the softmax.",
    )


def weak_mask(op: Op, values: Sequence[Tensor | None], weights: Tensor | None) -> WeakMask | None:
    """Return the fault that a mask leaves weight on masked keys; else None. `values` are the inputs of `op`."""
    name = op.base_name.rstrip("_")
    if op.does("fills_where"):
        return _weak_fill(op, values, weights)
    if name == "mul":
        return _multiplied(values, weights)
    if name == "attention_mask":  # of a kernel: a boolean masks out, and integers say where packed sequences start
        added = [value for value in values if value is not None and value.is_floating_point()]
        return _weak_sum(added, weights, is_subtracted=False)
    if name in ("add", "sub"):
        return _weak_sum(values, weights, is_subtracted=name == "sub")
    return None


def _weak_fill(op: Op, values: Sequence[Tensor | None], weights: Tensor | None) -> WeakMask | None:
    """Return the fault that a mask fills in a number that is not far below the scores."""
    number = _filled_number(op, values)
    masked = _filled_places(op, values)
    if masked is not None and weights is not None:
        masked = _with_other_keys(masked, weights)
    if number is None or not _weighs(weights, masked):
        return None
    if number >= _STRONG:
        return _bonus(f"fills in {number:.3g}")
    if abs(number) > _WEAK:
        return None
    return WeakMask(
        f"The mask fills in {number:.3g}, which has no effect: a masked key gets weight like any other.",
        f"exp({number:.3g}) is {torch.tensor(number).exp():.3g}. A mask needs -inf or -1e9.",
        "Use masked_fill(mask, float('-inf')).",
    )


def _filled_number(op: Op, values: Sequence[Tensor | None]) -> float | None:
    """Return the constant that a mask fills in; None if it is not a constant."""
    single = [value for value in values if value is not None and value.numel() == 1 and value.dtype != torch.bool]
    if single:
        return float(single[-1])
    numbers = [argument for argument in op.args[1:] if type(argument) in (int, float)]
    return float(numbers[-1]) if numbers else None


def _filled_places(op: Op, values: Sequence[Tensor | None]) -> Tensor | None:
    """Return where a mask fills in its number; None if it is unknown."""
    for value in values:
        if value is not None and value.dtype == torch.bool:
            fills_the_rest = op.base_name.rstrip("_") == "where" and op.inputs[-1].numel == 1
            return ~value if fills_the_rest else value
    return None


def _with_other_keys(masked: Tensor, weights: Tensor) -> Tensor:
    """Return a mask without the queries of which it masks every key, e.g. padding: their weights have no meaning."""
    try:
        whole = masked.expand(weights.shape)
    except RuntimeError:  # laid out otherwise
        return masked
    return whole & ~whole.all(-1, keepdim=True)


def _multiplied(values: Sequence[Tensor | None], weights: Tensor | None) -> WeakMask | None:
    """Return the fault that scores are multiplied by a mask: of zeros and ones, or of ones and a number that is low."""
    for mask in values:
        low = _low_beside_one(mask)
        if mask is not None and low is not None and _weighs(weights, mask == low):
            return WeakMask(
                f"The scores are multiplied by {low:.3g} for a masked key: a negative score becomes large.",
                f"Of {mask.numel()} factors {int((mask == low).sum())} are {low:.3g}, the others 1.",
                f"Add {low:.3g} to the scores of masked keys instead, or use masked_fill(mask, float('-inf')).",
            )
        if mask is None or not is_zero_one(mask):
            continue
        if bool((mask == 1).all()) or not _weighs(weights, mask == 0):
            return None
        return WeakMask(
            "The scores are multiplied by the mask: a masked key has score 0 instead of -inf, so it gets weight.",
            f"{int((mask == 0).sum())} of {mask.numel()} factors are 0 before the softmax.",
            "Use masked_fill(mask == 0, float('-inf')).",
        )
    return None


def _low_beside_one(value: Tensor | None) -> float | None:
    """Return the other number of a tensor of ones and one very low number; None if it is not that."""
    if value is None or value.numel() < 2:
        return None
    numbers = torch.unique(value.float()).tolist()
    is_low = len(numbers) == 2 and numbers[0] <= -_STRONG and numbers[1] == 1
    return numbers[0] if is_low else None


def is_zero_one(value: Tensor | None) -> bool:
    """Return whether several numbers are all zeros and ones."""
    return value is not None and value.numel() > 1 and bool(((value == 0) | (value == 1)).all())


def _weak_sum(values: Sequence[Tensor | None], weights: Tensor | None, *, is_subtracted: bool) -> WeakMask | None:
    """Return the fault that a mask of zeros and one other number is added, and the number is not far below zero."""
    for value in values:
        number = _number_beside_zero(value)
        if value is None or number is None:
            continue
        bonus = -number if is_subtracted else number
        if _STRONG <= bonus < math.inf and _weighs(weights, value != 0):
            return _bonus(f"adds {bonus:.3g}")
        if number == 1:
            return _of_zeros_and_ones(is_subtracted=is_subtracted)
        if 0 < abs(number) < 1e-3:
            sentence = f"The mask adds {number:.3g}, which has no effect on the weights."
            return WeakMask(sentence, "The mask is added before the softmax.")
    return None


def _number_beside_zero(value: Tensor | None) -> float | None:
    """Return the other number of a tensor with zeros and one other number; None if it has not two."""
    if value is None or value.numel() < 2:
        return None
    numbers = torch.unique(value.float()).tolist()
    return sum(numbers) if len(numbers) == 2 and 0.0 in numbers else None


def _of_zeros_and_ones(*, is_subtracted: bool) -> WeakMask:
    fix = "Add -inf where a key is masked out and 0 elsewhere, or give torch a boolean mask."
    if is_subtracted:
        sentence = "The mask is subtracted as zeros and ones: it masks out no key, and keys with 1 lose weight."
        return WeakMask(sentence, "A score that is lower by 1 changes a weight by a factor of at most e.", fix)
    sentence = "The mask is added as zeros and ones: it masks out no key, and keys with 1 gain weight."
    return WeakMask(sentence, "A score that is higher by 1 changes a weight by a factor of at most e.", fix)


def _bonus(does: str) -> WeakMask:
    return WeakMask(
        f"The mask {does}: the masked keys get all of the weight.",
        "The sign raises the score of a masked key. A mask needs -inf or -1e9.",
        "Use masked_fill(mask, float('-inf')).",
    )


def _weighs(weights: Tensor | None, masked: Tensor | None) -> bool:
    """Return whether a masked key gets weight; True if it is unknown."""
    if masked is None or weights is None:
        return True
    with suppress(RuntimeError):  # shapes do not match
        return not bool((weights * masked).amax() <= 1e-6)  # NaN is no weight of zero
    return True
