"""What a user expects and what is not yet said, with the reason: nothing false may be said of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.checks.intent import Intent


@dataclass(frozen=True)
class NotYet:
    """A module, or two side by side, of which something is true that is not said."""

    make: Callable[[], nn.Module]
    given: Callable[[], tuple[Tensor, ...]]
    expected: str
    """What a user expects."""
    because: str
    """Why it is not yet so."""
    checks: frozenset[str] = frozenset()
    """Checks that are right to accuse it, once they do."""
    intent: Intent = Intent()  # noqa: RUF009 - it is frozen
    beside: Callable[[], nn.Module] | None = None
    """The other side of a diff."""
    attends: bool = True
    """Whether there is an attention in it, by whatever name."""


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class TwoPaths(nn.Module):
    """In training, if a dropout is set, weights are computed by hand, and the scale is left out."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout, self.query, self.key_value = dropout, nn.Linear(24, 24), nn.Linear(24, 48)
        self.merge = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            side.unflatten(-1, (3, 8)).transpose(1, 2) for side in (self.query(x), *self.key_value(x).chunk(2, -1))
        )
        if self.training and self.dropout:
            mixed = F.dropout((q @ k.mT).softmax(-1), self.dropout) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.merge(mixed.transpose(1, 2).flatten(2))


class Original(nn.Module):
    def __init__(self, value_bias: bool = True) -> None:
        super().__init__()
        self.value_bias = value_bias
        self.query, self.key, self.value, self.dense = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        v = self.value(x) if self.value_bias else F.linear(x, self.value.weight)
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in (self.query(x), self.key(x), v))
        return self.dense(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Whole(nn.Module):
    """All heads at once, or one at a time with its part of the output added up."""

    def __init__(self, by_head: bool = False) -> None:
        super().__init__()
        self.by_head = by_head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        if not self.by_head:
            q, k, v = (w(x).unflatten(-1, (4, 8)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        parts = []
        for start in range(0, 32, 8):
            rows = slice(start, start + 8)
            q, k, v = (F.linear(x, w.weight[rows]) for w in (self.wq, self.wk, self.wv))
            parts.append(F.linear((q @ k.mT / 8**0.5).softmax(-1) @ v, self.wo.weight[:, rows]))
        return sum(parts)


class Joint(nn.Module):
    """Attention of one packed matrix, whose scores, weights or key heads a function changes."""

    def __init__(self, change: Callable[..., Any], part: str = "scores", heads: int = 4) -> None:
        super().__init__()
        self.change, self.part, self.heads = change, part, heads
        self.joint, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        q, k, v = self.joint(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.part == "keys":
            k, v = self.change(k), self.change(v)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.part == "scores" and given is not None:
            scores = self.change(scores, given)
        weights = self.change(scores) if self.part == "weights" else scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def best(scores: Tensor) -> Tensor:
    """Return the softmax of the three best keys of each query."""
    kept = scores.topk(3, dim=-1)
    return torch.zeros_like(scores).scatter(-1, kept.indices, kept.values.softmax(-1))


class Retention(nn.Module):
    """No softmax, and a state that decays; what comes in is not decayed for the tokens of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.register_buffer("decay", 1 - 2.0 ** (-2 - torch.arange(2)))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        n = torch.arange(x.shape[1])
        far = n[:, None] - n
        keep = self.decay[:, None, None] ** far.clamp(min=0) * (far >= 0)
        y, state = (q @ k.mT * keep) @ v, torch.einsum("bhnk,bhnv,hn->bhkv", k, v, keep[:, -1])
        if memory is not None:
            y, state = y + q @ memory, state + memory * (self.decay ** x.shape[1])[:, None, None]
        return self.o(y.transpose(1, 2).flatten(2)), state


class Elementwise(nn.Module):
    """Queries times keys are never summed over the channels, so each channel attends alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(16, 16, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        k, v = (F.pad(t, [1, 1, 1, 1]).unfold(2, 3, 1).unfold(3, 3, 1).flatten(4) for t in (k, v))
        return torch.einsum("bchwk,bchwk->bchw", (q[..., None] * k).softmax(-1), v)


MARKS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2]])
NOT_YET = {
    "PathOfTraining": NotYet(
        TwoPaths,
        lambda: (floats(2, 7, 24),),
        "training: in train the scores are not scaled, at the line of the product",
        "a check sets the rate of dropout to 0, and the branch is never entered",
        frozenset({"training", "scale"}),
        Intent(scale="sqrt_head_dim"),
    ),
    "DifferenceOfOneVector": NotYet(
        lambda: Original(value_bias=False),
        lambda: (floats(2, 7, 24),),
        "the difference of v_proj is the same at every token: value.bias, which the left does not add",
        "a difference is named, and not fitted to what it can be made of",
        beside=Original,
    ),
    "SumOverTheHeads": NotYet(
        lambda: Whole(by_head=True),
        lambda: (floats(2, 7, 32),),
        "attentions 1-4 on the left are heads 0-3 of the attention on the right",
        "attentions are paired by their number",
        beside=Whole,
    ),
    "ArgumentWithoutEffect": NotYet(
        lambda: Joint(lambda s, marks: s.masked_fill(~(marks == marks)[:, None, None], -torch.inf)),
        lambda: (floats(2, 7, 24), MARKS),
        "the second argument has no effect: the mask that is made of it masks out nothing",
        "what each argument does is not measured",
        frozenset({"masking", "padding"}),
    ),
    "CacheWithoutSoftmax": NotYet(
        Retention,
        lambda: (floats(2, 7, 16),),
        "cache: calls with the memory differ from one call; causal: passed",
        "a check needs a softmax, and the laws of outputs do not",
        frozenset({"cache"}),
        Intent(causal=True, cache="memory"),
        attends=False,
    ),
    "MaskNobodyGave": NotYet(
        lambda: Joint(lambda s, keep: s.masked_fill(keep[:, None, None].bool(), -torch.inf)),
        lambda: (floats(2, 7, 24),),
        "given: True masks out a key; it was not given in this run",
        "an argument that nobody gave is not tried",
    ),
    "SparseWeights": NotYet(
        lambda: Joint(best, "weights"),
        lambda: (floats(2, 7, 24),),
        "each query sees its 3 best keys, and the weights of a query sum to 1",
        "weights that are scattered are not found",
        attends=False,
    ),
    "TwoOfFourKeyHeads": NotYet(
        lambda: Joint(lambda side: side[:, :2].repeat(1, 2, 1, 1), "keys"),
        lambda: (floats(2, 7, 24),),
        "only 2 of 4 key heads are read, in the order 0 1 0 1, and weights are copied so",
        "a key head that is read twice has no place among the rows",
        frozenset({"grouped", "parameters"}),
    ),
    "ElementwiseScores": NotYet(
        Elementwise,
        lambda: (floats(2, 16, 5, 5),),
        "queries times keys are never summed over the channels, so each channel attends alone",
        "scores are looked for where positions meet in a product that is summed",
        attends=False,
    ),
}
