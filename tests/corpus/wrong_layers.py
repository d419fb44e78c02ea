"""Mistakes of heads, batch, parameters and training beside right twins, and right modules that look like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .planted import CAUSAL, SCALE, B, Case, D, E, H, N, Right, Steps, before, fused, future, halves, repeated, scaled

# -- heads -------------------------------------------------------------------------------------------------------------

NEVER = {"split": lambda m, x: x.unflatten(-1, (H, D)), "join": lambda m, x: x.flatten(2)}
"""Heads that were never transposed: `batch seq heads head_dim`."""


def _by_view(x: Tensor) -> Tensor:
    return x.view(len(x), H, x.shape[1], D)


def tokens(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(batch, length, E)}


_heads = partial(Case, check="heads", in_trace=True)
CASES = [
    _heads("NeverTransposed", wrong=NEVER, inputs=tokens(2, 7)),
    _heads("NeverTransposedFused", wrong={**NEVER, **fused()}, twin=fused(), inputs=tokens(2, H)),
    _heads("MergedByViewAsManyTokens", wrong={"join": lambda m, x: x.reshape(len(x), -1, E)}, inputs=tokens(2, H)),
    _heads(
        "QueryByView",
        wrong={"heads": lambda m, x: (_by_view(m.q(x)), m.split(m.k(x)), m.split(m.v(x)))},
        inputs=tokens(2, 9),
        in_trace=False,
    ),
    _heads("OneToken", wrong=None, inputs=tokens(3, 1), asked=False),
]


# -- key heads ---------------------------------------------------------------------------------------------------------


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


_grouped = partial(Case, check="grouped", inputs=tokens(2, 7), alone=False)
CASES += [
    _grouped("SequenceRepeated", wrong=repeated(lambda k: _twice(k.repeat(1, 1, 2, 1))), twin=repeated(_twice)),
    _grouped(
        "SequenceRepeatedBeforeTransposing",
        wrong=repeated(lambda k: _twice(_twice(k.transpose(1, 2)).transpose(1, 2))),
        twin=repeated(_twice),
    ),
    _grouped("FurtherKeys", wrong=None, twin=repeated(lambda k: _twice(torch.cat([k, k[:, :, :3]], 2)))),
    _grouped("EqualTokens", wrong=None, twin=repeated(_twice), inputs=lambda: {"x": torch.ones(2, 8, E)}),
]


# -- batch -------------------------------------------------------------------------------------------------------------


class Encoded(nn.Module):
    """A pooled classifier of tokens around torch's layer, which may take the first dimension as positions."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 32), nn.Linear(32, 8)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


class OverFirst(nn.Module):
    """Attention over the first axis, between transpositions or not."""

    def __init__(self, *, transposes: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(32, 32) for _ in range(4))
        self.transposes = transposes

    def forward(self, x: Tensor) -> Tensor:
        sides = (side(x) for side in (self.q, self.k, self.v))
        q, k, v = (side if self.transposes else side.transpose(0, 1) for side in sides)
        y = (q @ k.mT / 32**0.5).softmax(-1) @ v
        return self.head((y if self.transposes else y.transpose(0, 1)).mean(1))


class Similarities(Right):
    """One number for each pair of batch items, as a contrastive loss takes them."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        pooled = super().forward(x - x.mean(0, keepdim=True) if self.mixes else x).mean(1)
        pooled = F.normalize(pooled, dim=-1)
        return pooled @ pooled.T


class RowsOfAlignments(Right):
    """Items of one alignment have one weight matrix: the batch is divided, and scores are summed over items."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.leaks = leaks

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(0, (-1, 2)) for side in self.heads(x))
        q = q - q.mean((0, 1), keepdim=True) if self.leaks else q
        weights = (torch.einsum("arhqd,arhkd->ahqk", q, k) / (2 * D) ** 0.5).softmax(-1)
        return self.o(self.join((weights[:, None] @ v).flatten(0, 1)))


class SharesMemory(Right):
    """Keys of the whole batch stand beside each row's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((side, side.mean((0, 2), keepdim=True).expand(B, H, 1, D)), 2) for side in (k, v))
        return super().attend(q, k, v)


class PaddedEncoder(nn.Module):
    """torch's encoder, which drops padded tokens in eval; something may be added to its outputs."""

    def __init__(self, more: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda m, x, y: y) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.more, self.encoder = more, nn.TransformerEncoder(layer, 1)
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        y = self.encoder(self.embed(x), src_key_padding_mask=src_key_padding_mask)
        return self.head(self.more(self, x, y))


def pads(*lengths: int) -> Callable[[], dict[str, Tensor]]:
    mask = torch.arange(8)[None] >= torch.tensor(lengths)[:, None]
    return lambda: {"x": torch.randn(*mask.shape, 16), "src_key_padding_mask": mask}


CASES += [
    Case(
        "EncoderOverTheBatch",
        "batch",
        partial(Encoded, batch_first=False),
        partial(Encoded, batch_first=True),
        inputs=lambda: {"tokens": torch.randint(30, (4, 9))},
    ),
    Case(
        "AttendsOverTheBatch",
        "batch",
        partial(OverFirst, transposes=False),
        partial(OverFirst, transposes=True),
        inputs=lambda: {"x": torch.randn(4, 9, 32)},
    ),
    Case("SimilaritiesOfMixedItems", "batch", partial(Similarities, mixes=True), Similarities),
    Case("MemoryOfTheBatch", "batch", SharesMemory, {}, suspected=True),
    Case("AlignmentsShareScores", "batch", RowsOfAlignments, {}, inputs=tokens(6, N), suspected=True),
    Case("AlignmentsLeak", "batch", partial(RowsOfAlignments, leaks=True), {}, inputs=tokens(6, N)),
    Case(
        "PaddedItemsMixed",
        "batch",
        partial(PaddedEncoder, lambda m, x, y: y + 0.1 * y.roll(1, 0)),
        PaddedEncoder,
        inputs=pads(8, 5, 6),
    ),
    Case(
        "PaddedMeanInTraining",
        "training",
        partial(PaddedEncoder, lambda m, x, y: y + x.mean(1, keepdim=True) if m.training else y),
        PaddedEncoder,
        inputs=pads(8, 5, 6),
    ),
    Case("PaddedTokensAreNoOutputs", "training", None, PaddedEncoder, inputs=pads(1, 8, 3)),
]


# -- training ----------------------------------------------------------------------------------------------------------


def in_training(other: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """Values by another function in training alone."""
    return {"heads": lambda m, x: (*Right.heads(m, x)[:2], other(m, Right.heads(m, x)[2]))}


CASES += [
    Case(
        "NotScaledInTraining",
        "training",
        {"mask": lambda m, s: s * D**0.5 if m.training else s},
        {"mask": lambda m, s: s * 1},
    ),
    Case("DoubledInTraining", "training", in_training(lambda m, v: 2 * v if m.training else v)),
    Case("RolledInTraining", "training", in_training(lambda m, v: v + v.roll(1, 2).sin() if m.training else v)),
    Case(
        "WeightsDroppedInEval",
        "repeat",
        {"weigh": lambda m, s: F.dropout(s.softmax(-1), 0.5)},
        {"weigh": lambda m, s: F.dropout(s.softmax(-1), 0.5, m.training)},
        in_trace=False,
    ),
]


# -- scores of other queries -------------------------------------------------------------------------------------------


def divided_by(largest: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Scores that are divided by the largest of some of them."""
    return {"weigh": lambda m, s: (s / largest(s.abs())).softmax(-1)}


CASES += [
    Case(
        "ScaledByOtherQueries",
        "softmax",
        divided_by(lambda s: s.amax((-2, -1), keepdim=True)),
        divided_by(lambda s: s.amax(-1, keepdim=True)),
        suspected=True,
        in_trace=True,
    ),
    # only a shift, which no weight shows
    Case("LargestScoreSubtracted", "softmax", None, {"weigh": lambda m, s: (s - s.max()).softmax(-1)}),
]


# -- outputs at other places -------------------------------------------------------------------------------------------


class Windows(nn.Module):
    """Attention in windows of four tokens, which `back` puts back; `batch window token embed`."""

    def __init__(self, back: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.attention, self.back = nn.MultiheadAttention(E, H, batch_first=True), back

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
        attended = self.attention(windows, windows, windows, need_weights=False)[0]
        return x + self.back(attended.unflatten(0, (len(x), -1))).flatten(1, 2)


class Halves(nn.Module):
    """Two sequences side by side, each of which attends to the other alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return x + torch.cat((self.attention(left, right, right)[0], self.attention(right, left, left)[0]), 1)


def twelve() -> dict[str, Tensor]:
    return {"x": torch.randn(B, 12, E)}


CASES += [
    Case(
        "WindowsPutBackElsewhere",
        "mixing",
        lambda: Windows(lambda x: x.transpose(1, 2)),
        lambda: Windows(),
        inputs=twelve,
        suspected=True,
    ),
    Case("WindowsSwapped", "mixing", lambda: Windows(lambda x: x[:, [0, 2, 1]]), Halves, inputs=twelve, suspected=True),
]


# -- parameters --------------------------------------------------------------------------------------------------------


class Sinks(Right):
    """Attention with a sink for each head, a gain of the queries and a list of gates; `unread` leaves one out."""

    def __init__(self, unread: str = "") -> None:
        super().__init__()
        self.unread, self.sinks, self.norm = unread, nn.Parameter(torch.randn(H)), nn.RMSNorm(D)
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(E)) for _ in range(2)])

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return q if self.unread == "norm" else self.norm(q), k, v

    def weigh(self, scores: Tensor) -> Tensor:
        if self.unread == "sinks":
            return scores.softmax(-1)
        sinks = self.sinks.view(1, H, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def leave(self, x: Tensor) -> Tensor:
        x = x * self.gates[0].sigmoid()
        return self.o(x if self.unread == "gate" else x * self.gates[1].sigmoid())


class Gated(Right):
    """The gate is zero before training, as in Flamingo."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * super().forward(x)


class Codes(Right):
    """Each token is replaced by the nearest row of a table, as in a codec: no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, E)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.cdist(super().forward(x), self.table.weight).argmin(-1))


class Doubled(torch.autograd.Function):
    """Runs a module without autograd, and computes its gradients in a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Right) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x + Right.forward(module, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (given + Right.forward(ctx.module, given)).backward(*gradients)
        assert given.grad is not None
        return given.grad, None


class Reversible(Right):
    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(x + 0 * self.o.bias, self)


class OfSmallMatrices(Right):
    """One small matrix a head, in a list that the module knows or not; a frozen teacher is kept in another."""

    def __init__(self, hold: Callable[[list[nn.Linear]], Any]) -> None:
        super().__init__()
        for side in "qkv":
            delattr(self, side)
            setattr(self, side, hold([nn.Linear(E, D) for _ in range(H)]))
        self.teacher = [nn.Linear(E, E).requires_grad_(False)]

    def heads(self, x: Tensor) -> Any:
        x = x + 0 * self.teacher[0](x)
        return [torch.stack([matrix(x) for matrix in getattr(self, side)], 1) for side in "qkv"]


def _first_head(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"join": lambda m, x: Right.join(m, torch.cat([change(x[:, :1]), x[:, 1:]], 1))}


CASES += [
    *(
        Case(f"Unread{unread.title()}", "parameters", partial(Sinks, unread), Sinks, suspected=True)
        for unread in ("sinks", "norm", "gate")
    ),
    Case(
        "HeadsInAPlainList",
        "parameters",
        partial(OfSmallMatrices, list),
        partial(OfSmallMatrices, nn.ModuleList),
        in_trace=True,
    ),
    Case("FirstHeadDetached", "parameters", _first_head(Tensor.detach)),
    Case("FirstHeadOfZeros", "parameters", _first_head(lambda head: head * 0), suspected=True),
    Case("GateOfZero", "parameters", None, Gated, asked=False),
    Case("NearestCodes", "parameters", None, Codes, asked=False),
    Case("BackwardOfItsOwn", "parameters", None, Reversible),
]


# -- positions that mix, finite numbers, scale -------------------------------------------------------------------------


class Hides(Right):
    """A mask hides two keys from every query; the result may be thrown away."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def mask(self, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor((N // 2, N - 1)), -math.inf)

    def join(self, x: Tensor) -> Tensor:
        return super().join(x) * self.factor


class Mixes(Right):
    """Neighbours are mixed before, and heads after, attention with a bias for distance: all of it on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.talk = nn.Conv1d(E, E, 3), nn.Linear(H, H, bias=False)

    def enter(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (2, 0))).mT

    def mask(self, scores: Tensor) -> Tensor:
        return (scores - 0.3 * before(scores)).masked_fill(future(scores), -1e9)

    def weigh(self, scores: Tensor) -> Tensor:
        return self.talk(scores.softmax(-1).movedim(1, -1)).movedim(-1, 1)


class MergesTokens(Right):
    """Every two tokens become one key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.unflatten(2, (-1, 2)).mean(3), v.unflatten(2, (-1, 2)).mean(3))


class ByWidth(Right):
    """8 heads of 6 features, of an input of 24 features; scaled by the width of a head, or of heads of 3."""

    def __init__(self, *, of_input: bool) -> None:
        super().__init__(8)
        self.q, self.o = nn.Linear(E, 48), nn.Linear(48, E)
        self.width = E // 8 if of_input else D

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / self.width**0.5).softmax(-1) @ v


CASES += [
    Case("ResultThrownAway", "mixing", partial(Hides, 0.0), Hides),
    Case("MixesOnPurpose", "causal", None, Mixes, intent=CAUSAL),
    Case("MergesTokens", "mixing", None, MergesTokens),
    Case(
        "ScaleOfAnotherWidth",
        "scale",
        partial(ByWidth, of_input=True),
        partial(ByWidth, of_input=False),
        SCALE,
        alone=False,
    ),
    Case(
        "DistancesAreNoMask",
        "masking",
        None,
        {"attend": lambda m, q, k, v: (-(q.unsqueeze(3) - k.unsqueeze(2)).pow(2).sum(-1) * 2).softmax(-1) @ v},
        asked=False,
    ),
]


# -- without a softmax -------------------------------------------------------------------------------------------------


def linear_attention(total: Callable[[Tensor], Tensor]) -> Steps:
    """Causal linear attention; a function of the features of the keys, `batch heads key feature`, is divided by."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return (q.unsqueeze(-2) @ state).squeeze(-2) / (q * total(k)).sum(-1, keepdim=True)

    return {"attend": attend}


CASES.append(
    Case(
        "DividedByTheSumOfHeads",
        "softmax",
        linear_attention(lambda k: k.cumsum(1)),
        linear_attention(lambda k: k.cumsum(2)),
        suspected=True,
        in_trace=True,
        asked=False,
    )
)


class Pools(nn.Module):
    """One vector of all tokens, weighted by a score of each."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.over, self.score = over, nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).tanh().softmax(self.over) * x).sum(1)


CASES += [
    Case("LogarithmsForWeights", "softmax", {"weigh": lambda m, s: s.log_softmax(-1)}, {}, in_trace=True),
    Case(
        "ScaledBeforeTheKernelToo",
        "scale",
        {"attend": lambda m, q, k, v: F.scaled_dot_product_attention(q / D**0.5, k, v)},
        {"attend": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v)},
        suspected=True,
        in_trace=True,
        asked=False,
    ),
    Case(
        "NegativeScale",
        "scale",
        scaled(lambda q, k: q @ k.mT / -(D**0.5)),
        scaled(lambda q, k: q @ k.mT * D**-0.5),
        suspected=True,
        in_trace=True,
        asked=False,
    ),
    Case("SoftmaxOfOneScore", "softmax", partial(Pools, -1), partial(Pools, 1), in_trace=True, asked=False),
    Case("MeanOfItemsSubtracted", "batch", {"leave": lambda m, x: m.o(x - x.mean(0, keepdim=True))}),
]


# -- tables of relative places -----------------------------------------------------------------------------------------


class OfWindows(Right):
    """Tokens of a window of 3 x 4 with a bias for each relative place."""

    def __init__(self, *, columns: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5 * 7, H))
        row, column = torch.arange(12) // 4, torch.arange(12) % 4
        rows, steps = row[:, None] - row + 2, column[:, None] - column + 3
        self.register_buffer("index", rows * columns + steps)

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.table[self.index].permute(2, 0, 1)


CASES.append(
    Case(
        "PlacesCollide",
        "parameters",
        partial(OfWindows, columns=4),
        partial(OfWindows, columns=7),
        inputs=tokens(B, 12),
        suspected=True,
        in_trace=True,
    )
)


# -- reshaped maps ----------------------------------------------------------------------------------------------------


class OfFrames(Right):
    """Each frame of a video, `batch channel time pixel`, attends to its own pixels."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, times, pixels = x.shape
        frames = x.transpose(1, 2) if self.turned else x
        made = super().forward(frames.reshape(batch * times, channels, pixels).mT)
        return made.mT.reshape(batch, times, channels, pixels).transpose(1, 2)


class ToAMap(Right):
    """Each pixel of a map is a token; returns the map of the contexts, with heads and features for channels."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned = turned

    def join(self, x: Tensor) -> Tensor:
        sizes = (*x.shape[:2], D, 2, -1)
        return x.mT.reshape(sizes) if self.turned else x.reshape(sizes)

    def enter(self, x: Tensor) -> Tensor:
        return self.o(x)

    def leave(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)


CASES += [
    Case(
        "FramesByView",
        "reshape",
        partial(OfFrames, turned=False),
        partial(OfFrames, turned=True),
        inputs=lambda: {"x": torch.randn(B, E, 5, 7)},
        suspected=True,
        in_trace=True,
    ),
    Case(
        "MapByView",
        "reshape",
        partial(ToAMap, turned=False),
        partial(ToAMap, turned=True),
        inputs=tokens(B, 14),
        suspected=True,
        in_trace=True,
    ),
]


# -- positions ---------------------------------------------------------------------------------------------------------


class Learned(Right):
    """Rows of a table are added to the tokens: a function of the table and the length says which."""

    def __init__(self, rows: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.rows, self.table = rows, nn.Parameter(torch.randn(1, 50, E))

    def enter(self, x: Tensor) -> Tensor:
        return x + self.rows(self.table, x.shape[1])


def _each(table: Tensor, length: int) -> Tensor:
    return table[:, :length]


_mixing = partial(Case, check="mixing", twin=partial(Learned, _each), inputs=tokens(2, 9), suspected=True)
CASES += [
    _mixing("OneRowForAllTokens", wrong=partial(Learned, lambda table, length: table[:, length])),
    _mixing("LastRowForAllTokens", wrong=partial(Learned, lambda t, length: t[0, length - 1].expand(length, -1))),
    _mixing(
        "SameRowAtAnyLength", wrong=None, twin=partial(Learned, lambda table, length: table[:, 9]), suspected=False
    ),
    _mixing(
        "RowOfTheLength", wrong=None, suspected=False, twin=partial(Learned, lambda t, n: t[:, :n] + t[:, n, None])
    ),
]


def sloped(slopes: Tensor) -> dict[str, Any]:
    """Causal attention with a slope for each head."""

    def mask(m: Any, scores: Tensor) -> Tensor:
        return (scores - slopes[:, None, None] * before(scores)).masked_fill(future(scores), -torch.inf)

    return {"mask": mask}


def turned_by(frequencies: Tensor) -> dict[str, Any]:
    """Attention that is rotated by frequencies, in halves."""

    def turn(x: Tensor) -> Tensor:
        angles, (a, b) = torch.outer(torch.arange(x.shape[2]).float(), frequencies), x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    return {"attend": lambda m, q, k, v: Right.attend(m, turn(q), turn(k), v)}


def ladder(first: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(first, first + H) / H)


def frequencies(first: int) -> Tensor:
    return 10000.0 ** (-torch.arange(first, first + D // 2) / (D // 2))


_slopes = partial(Case, check="masking", twin=sloped(ladder(1)), intent=CAUSAL, suspected=True)
_turns = partial(Case, check="rotary", wrong=None)
CASES += [
    _slopes("SlopesFromZero", wrong=sloped(ladder(0))),
    _slopes("SlopesFromTwo", wrong=sloped(ladder(2))),
    _slopes("SlopesOfTheOtherSign", wrong=sloped(-ladder(1))),
    _slopes("OneSlope", wrong=None, twin=sloped(torch.full((H,), 0.5)), suspected=False),
    _slopes(
        "SlopesOfAnotherHeight", wrong=None, twin=sloped(2.0 ** (-4 * torch.arange(1, H + 1) / H)), suspected=False
    ),
    Case("FrequenciesFromOne", "rotary", turned_by(frequencies(1)), turned_by(frequencies(0)), suspected=True),
    _turns("FrequenciesOfLongerSequences", twin=turned_by(frequencies(0) / 4)),
    _turns("FrequenciesOfAnImage", twin=turned_by(torch.linspace(1, 3, D // 2))),
    _turns("FrequenciesScaledInParts", twin=turned_by(frequencies(0) * torch.tensor([1.0, 1.0, 0.5]))),
]


class Rotated(Right):
    """Queries and keys are rotated by the angles of a table; heads may lie beside the batch, pairs may be complex."""

    def __init__(self, table: Callable[[Tensor], Tensor] = lambda x: angles(x.shape[-2]), form: str = "") -> None:
        super().__init__()
        self.table, self.form = table, form

    def split(self, x: Tensor) -> Tensor:
        if self.form != "heads first":
            return super().split(x)
        return x.unflatten(-1, (H, D)).permute(2, 0, 1, 3).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        if self.form != "heads first":
            return super().join(x)
        return x.unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)

    def turn(self, x: Tensor) -> Tensor:
        table = self.table(x)
        if self.form == "complex":
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(table), table)).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * table.cos() - b * table.sin(), b * table.cos() + a * table.sin()], -1)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.turn(q), self.turn(k), v


def angles(n: int, start: int = 0) -> Tensor:
    return torch.outer(torch.arange(start, start + n).float(), 10.0 ** -torch.arange(0, D, 2).float())


class PaddedWindows(nn.Module):
    """Rotary attention in windows with the window before, of a sequence that is padded to whole windows."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.qkv, self.o = window, nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        q, k, v = F.pad(heads, (0, 0, 0, -x.shape[1] % self.window)).unflatten(-2, (-1, self.window))
        k, v = (torch.cat((F.pad(side, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], side), -2) for side in (k, v))
        turns = torch.arange(2 * self.window)[:, None] * 100.0 ** (-torch.arange(6) / 6).repeat(2)
        q, k = self.rotated(q, turns[self.window :]), self.rotated(k, turns)
        query, key = torch.arange(self.window)[:, None] + self.window, torch.arange(2 * self.window)
        hidden = (key > query).expand(q.shape[2], -1, -1).clone()
        hidden[0, :, : self.window] = True  # the first window has none before it
        context = (q @ k.mT / 12**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.o(context.flatten(2, 3)[:, :, : x.shape[1]].transpose(1, 2).flatten(2))

    def rotated(self, side: Tensor, turn: Tensor) -> Tensor:
        return side * turn.cos() + torch.cat((-side[..., 6:], side[..., :6]), -1) * turn.sin()


_rotary = partial(Case, check="rotary", twin=Rotated)
_by_item = partial(Rotated, lambda x: angles(len(x))[:, None, None])
_of_pairs = partial(Rotated, lambda x: angles(len(x) // H).repeat(H, 1)[:, None], "heads first")
CASES += [
    _rotary("TurnedByItem", wrong=_by_item, inputs=tokens(4, 4)),
    _rotary("TurnedByItemAlone", wrong=_by_item, inputs=tokens(1, 7)),
    _rotary("TurnedByItemBesideHeads", wrong=_of_pairs, twin=partial(Rotated, form="heads first"), inputs=tokens(3, 5)),
    _rotary("TurnedByHead", wrong=partial(Rotated, lambda x: angles(H)[:, None]), inputs=tokens(2, 7)),
    _rotary("TurnedByNothing", wrong=partial(Rotated, lambda x: angles(1)), inputs=tokens(2, 7)),
    _rotary("TurnedAsOnePosition", wrong=partial(Rotated, lambda x: angles(1, 5)), inputs=tokens(2, 7)),
    _rotary("TurnedAsComplex", wrong=None, twin=partial(Rotated, form="complex"), inputs=tokens(4, 3)),
    _rotary("TurnedBesideHeads", wrong=None, twin=partial(Rotated, form="heads first"), inputs=tokens(2, 2)),
    _rotary("TurnedOneToken", wrong=None, inputs=tokens(1, 1), asked=False),
    _rotary("TurnedInPaddedWindows", wrong=None, twin=partial(PaddedWindows, 4), inputs=tokens(2, 7), asked=False),
    _rotary(
        "OnesAndZeros",
        wrong=None,
        asked=False,
        twin={"attend": lambda m, q, k, v: Right.attend(m, q * torch.ones(N, 1) + q * torch.zeros(N, 1), k, v)},
    ),
    _rotary(
        "TurnedBeforeAKernel",
        wrong=None,
        twin={"attend": lambda m, q, k, v: F.scaled_dot_product_attention(halves(q).to(v), halves(k).to(v), v)},
    ),
]


# -- what is left behind by a call -------------------------------------------------------------------------------------


class Keeping(Right):
    """Causal attention to the keys of earlier calls too; it may begin from the last output of the call before."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.leaks, self.seen, self.last = leaks, 0, torch.zeros(())
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, *new = self.heads(x + self.last)
        self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, new, strict=True)] if self.kept else new
        self.seen += x.shape[1]
        k, v = self.kept
        hidden = torch.ones(self.seen, self.seen, dtype=torch.bool).triu(1)[self.seen - x.shape[1] :]
        weights = (q @ k.mT / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        output = self.o(self.join(weights @ v))
        self.last = output[:, -1:].detach() if self.leaks else self.last
        return output


class TwoInPlace(nn.Module):
    """Each layer adds its result to the argument, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.layers = in_place, nn.ModuleList(Right() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.in_place else x.clone()
        for layer in self.layers:
            x += layer(x)
        return x


CASES += [
    Case("BeginsFromTheLastOutput", "repeat", partial(Keeping, leaks=True), Keeping, asked=False),
    Case("AddsToItsInput", "inputs", partial(TwoInPlace, in_place=True), partial(TwoInPlace, in_place=False)),
]
