"""Public reports of attention that raises or computes something else, rebuilt, each beside a mended twin.

They are held out: nothing was ever fitted to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD_DIM = 11, 3, 5
"""Features of a token, heads, and features of a head."""
BATCH, QUERIES, KEYS = 2, 7, 13

State = dict[str, Tensor]
Given = Mapping[str, Any]


def called(module: nn.Module, given: Given) -> Any:
    return module(**given)


@dataclass(frozen=True)
class Report:
    """What somebody wrote about a module, and what is the matter with it."""

    name: str
    address: str
    kind: Literal["raises", "wrong", "differs", "files"]
    """Whether the call raises, one module computes something else than is meant, or two modules or files differ."""
    sees: str
    """What the reporter sees."""
    wrong: Callable[[], Any]
    """Make the module as it was reported; what the reporter has on the left, if two differ."""
    right: Callable[[], Any]
    """Make it with the mend; what the reporter compares with, if two differ."""
    cause: str
    place: str
    """The role of the line that is to be mended."""
    mend: str
    """Code that mends it."""
    never: str
    """What would be false to say."""
    given: Callable[[], Given] = dict
    meant: str = ""
    """What the reporter would say of the intent, where it is not seen in the code."""
    run: Callable[[nn.Module, Given], Any] = called
    """What is done with the module and the arguments: it may be called step by step."""
    second: bool = False
    """Whether it belongs to the ten that are tried after the others."""

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a module in eval mode; the twin that has the same parameters has the same numbers."""
        torch.manual_seed(0)
        return make().eval()


REPORTS: list[Report] = []


def report(**facts: Any) -> None:
    REPORTS.append(Report(**facts))


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(**others: Any) -> Callable[[], Given]:
    return lambda: {"x": floats(BATCH, QUERIES, WIDTH), **others}


def real(*lengths: int, size: int = QUERIES) -> Tensor:
    """Return a mask of `batch key`, True where there is a token."""
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def past(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


class Heads(nn.Module):
    """Projections, a split into heads, and their joining; a report adds what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD_DIM) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.scale = HEAD_DIM**-0.5

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, HEAD_DIM).transpose(1, 2)

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def join(self, context: Tensor) -> Tensor:
        return self.o(context.transpose(1, 2).flatten(2))


# -- scale and softmax -------------------------------------------------------------------------------------------------


class DividesByItsScale(Heads):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / self.scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return self.join(self.score(q, k).softmax(-1) @ v)


class TimesItsScale(DividesByItsScale):
    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * self.scale


report(
    name="DividesByItsScale",
    address="https://github.com/esceptico/perceiver-io/issues/9",
    kind="wrong",
    sees="The scores are divided by `self.scale`, which is head_dim ** -0.5 already.",
    wrong=DividesByItsScale,
    right=TimesItsScale,
    given=tokens(),
    cause="The scores are multiplied by √head_dim, not by 1/√head_dim: the scale is an inverse already.",
    place="the product of queries and keys, with its scale",
    mend="* self.scale",
    never="That the scores are not scaled, or that the softmax, the mask or the split is wrong.",
    meant="scale 1/√head_dim",
)


class ScalesTheWeights(Heads):
    def weigh(self, energy: Tensor) -> Tensor:
        return energy.softmax(dim=-1) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        energy = torch.einsum("bhqd,bhkd->bhqk", q, k)
        return self.join(torch.einsum("bhal,bhlv->bhav", self.weigh(energy), v))


class ScalesTheScores(ScalesTheWeights):
    def weigh(self, energy: Tensor) -> Tensor:
        return (energy * self.scale).softmax(dim=-1)


report(
    name="ScalesTheWeights",
    address="https://github.com/FrancescoSaverioZuppichini/ViT/issues/2",
    kind="wrong",
    sees="The scale is applied after the softmax, not before it.",
    wrong=ScalesTheWeights,
    right=ScalesTheScores,
    given=tokens(),
    cause="The weights are scaled after the softmax, and the scores are not: the weights of a query sum to 0.45.",
    place="the softmax",
    mend="(energy * self.scale).softmax(dim=-1)",
    never="That there is no softmax, that the scale is right, or that weights do not sum to 1 because of a mask.",
    meant="scale 1/√head_dim",
)


class MaskAfterSoftmax(Heads):
    def weigh(self, scores: Tensor, hidden: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        return weights.masked_fill(hidden, -math.inf)

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        hidden = attn_mask.logical_not()[:, None, None]
        return self.join(self.weigh(q @ k.mT * self.scale, hidden) @ v)


class MaskBeforeSoftmax(MaskAfterSoftmax):
    def weigh(self, scores: Tensor, hidden: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(hidden, -math.inf), -1)


report(
    name="MaskAfterSoftmax",
    address="https://github.com/huggingface/pytorch-image-models/pull/2236",
    kind="wrong",
    sees="With a mask the outputs are not finite: the mask fills with -inf after the softmax.",
    wrong=MaskAfterSoftmax,
    right=MaskBeforeSoftmax,
    given=tokens(attn_mask=real(7, 4)),
    cause="The weights of masked keys are set to -inf after the softmax; the mask belongs before it.",
    place="the mask, after the softmax",
    mend="mask the scores, then softmax",
    never="That a query has every key masked out, that True hides a key, or that numbers overflow.",
    meant="attn_mask: True keeps a key",
)


class SoftmaxOfRows(nn.Module):
    """Luong's attention of a decoder's steps to a context, both `batch position width`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.softmax = nn.Softmax(dim=0)

    def forward(self, query: Tensor, context: Tensor) -> Tensor:
        batch, steps, width = query.shape
        scores = torch.bmm(query, context.transpose(1, 2).contiguous())
        weights = self.softmax(scores.view(batch * steps, -1)).view(batch, steps, -1)
        mix = torch.bmm(weights, context)
        return self.out(torch.cat((mix, query), dim=2).view(batch * steps, 2 * width)).tanh().view(batch, steps, width)


class SoftmaxOfKeys(SoftmaxOfRows):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)


report(
    name="SoftmaxOfRows",
    address="https://github.com/PetrochukM/PyTorch-NLP/issues/2",
    kind="wrong",
    sees="With one query in the batch, every weight is 1.",
    wrong=SoftmaxOfRows,
    right=SoftmaxOfKeys,
    given=lambda: {"query": floats(BATCH, QUERIES, WIDTH), "context": floats(BATCH, KEYS, WIDTH, seed=1)},
    cause="The softmax runs over the rows `(batch query)`, not over the keys; items of the batch change each other.",
    place="the softmax, which is made in __init__",
    mend="nn.Softmax(dim=-1)",
    never="That the view before it mixes items, or that attention is over the batch on purpose.",
)


# -- masks -------------------------------------------------------------------------------------------------------------


class MultipliesTheMask(Heads):
    """Nodes of several graphs in one row, `node width`; `ptr` says where each graph begins."""

    def weigh(self, scores: Tensor, own: Tensor) -> Tensor:
        return (scores * torch.where(own, 1.0, -1e6)).softmax(dim=-1)

    def forward(self, x: Tensor, ptr: Tensor) -> Tensor:
        graph = torch.bucketize(torch.arange(len(x)), ptr[1:], right=True)
        q, k, v = self.sides(x[None])
        weights = self.weigh(q @ k.transpose(-2, -1) * self.scale, graph[:, None] == graph)
        return self.join(weights @ v)[0]


class AddsTheMask(MultipliesTheMask):
    def weigh(self, scores: Tensor, own: Tensor) -> Tensor:
        return (scores + torch.where(own, 0.0, -1e6)).softmax(dim=-1)


report(
    name="MultipliesTheMask",
    address="https://github.com/leffff/graphormer-pyg/issues/14",
    kind="wrong",
    sees="Nodes of different graphs attend to each other, although scores of other graphs are multiplied by -1e6.",
    wrong=MultipliesTheMask,
    right=AddsTheMask,
    given=lambda: {"x": floats(QUERIES, WIDTH), "ptr": torch.tensor([0, 3, 7])},
    cause="The mask is multiplied into the scores: a negative score of another graph becomes a very large one.",
    place="the mask before the softmax",
    mend="scores + torch.where(own, 0.0, -1e6)",
    never="That nodes of a graph are a window, that the graphs are masked apart, or that the scores overflow.",
    meant="a node sees the nodes of its own graph",
)


class FilledWhileBool(Heads):
    def additive(self, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(1).unsqueeze(1)
        return mask.masked_fill(mask == 0, -9e15)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = q @ k.transpose(-2, -1) * self.scale + self.additive(attention_mask)
        return self.join(scores.softmax(dim=-1) @ v)


class FilledAsFloat(FilledWhileBool):
    def additive(self, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(1).unsqueeze(1)
        return torch.zeros(mask.shape).masked_fill(mask == 0, -9e15)


report(
    name="FilledWhileBool",
    address="https://github.com/open-mmlab/mmdetection/issues/11803",
    kind="wrong",
    sees="The text mask changes nothing: every score gets 1 added, with the mask or without it.",
    wrong=FilledWhileBool,
    right=FilledAsFloat,
    given=tokens(attention_mask=real(7, 4)),
    cause="A bool mask that is filled with -9e15 is True everywhere; added to the scores it is 1 for each key.",
    place="the fill of the mask",
    mend="torch.zeros(mask.shape).masked_fill(mask == 0, -9e15)",
    never="That the padding is masked out, or that attention_mask is never read.",
    meant="attention_mask: True keeps a key",
)


class CausalWithAMaskOnly(Heads):
    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def bars(self, scores: Tensor, att_mask: Tensor | None) -> Tensor | None:
        if att_mask is not None and self.causal:
            return ~(att_mask & past(*scores.shape[-2:]))
        return None if att_mask is None else ~att_mask

    def forward(self, x: Tensor, att_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.sides(x)
        scores = q @ k.transpose(-2, -1) * self.scale
        bars = self.bars(scores, att_mask)
        if bars is not None:
            scores = scores.masked_fill(bars, float("-inf"))
        return self.join(scores.softmax(dim=-1) @ v)


class CausalWithout(CausalWithAMaskOnly):
    def bars(self, scores: Tensor, att_mask: Tensor | None) -> Tensor | None:
        if self.causal:
            seen = past(*scores.shape[-2:])
            return ~(seen if att_mask is None else att_mask & seen)
        return None if att_mask is None else ~att_mask


report(
    name="CausalWithAMaskOnly",
    address="https://github.com/facebookresearch/xformers/issues/103",
    kind="wrong",
    sees="An attention that was made with causal=True sees the future where no mask is passed.",
    wrong=CausalWithAMaskOnly,
    right=CausalWithout,
    given=tokens(),
    cause="The causal mask is applied only where another mask is given; without one it is skipped.",
    place="the condition before the causal mask",
    mend="if self.causal: build the triangle, whether att_mask is given or not",
    never="That the module is causal, or that it can never be.",
    meant="causal",
)


class WeightsLoseTheMask(Heads):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return (scores if mask is None else scores + mask).softmax(-1)

    def forward(self, x: Tensor, output_attentions: bool = False) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.sides(x)
        mask = None  # no token is padding, so that the kernel makes its own causal mask
        if not output_attentions:
            fused = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            return self.join(fused), None
        weights = self.weigh(q @ k.transpose(-2, -1) * self.scale, mask)
        return self.join(weights @ v), weights


class WeightsKeepTheMask(WeightsLoseTheMask):
    def weigh(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.masked_fill(~past(*scores.shape[-2:]), float("-inf")).softmax(-1)


report(
    name="WeightsLoseTheMask",
    address="https://github.com/huggingface/transformers/pull/30652",
    kind="wrong",
    sees="With output_attentions=True the outputs are others, and tokens see the future.",
    wrong=WeightsLoseTheMask,
    right=WeightsKeepTheMask,
    given=tokens(output_attentions=True),
    cause="The path that returns weights gets no mask, because the kernel's path makes the causal one for itself.",
    place="the softmax of the path that returns weights",
    mend="mask the future before the softmax of that path too",
    never="That the kernel's path is not causal, or that the difference is rounding.",
    meant="causal",
)


class MaskOfSums(nn.Module):
    """Padding is id 0, whose embedding is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, WIDTH, padding_idx=0)
        self.places = nn.Embedding(31, WIDTH)
        self.layer = Heads()

    def keep(self, ids: Tensor, x: Tensor) -> Tensor:
        return x.sum(-1).abs().sign().bool()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.layer.sides(x)
        scores = q @ k.transpose(-2, -1) * self.layer.scale
        scores = scores.masked_fill(~self.keep(ids, x)[:, None, None, :], -(2.0**32))
        return self.layer.join(scores.softmax(-1) @ v)


class MaskOfIds(MaskOfSums):
    def keep(self, ids: Tensor, x: Tensor) -> Tensor:
        return ids != 0


report(
    name="MaskOfSums",
    address="https://github.com/Kyubyong/transformer/pull/69",
    kind="wrong",
    sees="The key mask, which is made of embeddings that are all zeros, masks nothing.",
    wrong=MaskOfSums,
    right=MaskOfIds,
    given=lambda: {"ids": torch.tensor([[3, 5, 8, 2, 16, 4, 9], [7, 1, 6, 0, 0, 0, 0]])},
    cause="Positions are added before the mask is made of the embeddings: no embedding of padding is zero any more.",
    place="the mask that is made of the embeddings",
    mend="ids != 0",
    never="That padding is masked out, or that the mask lies over the queries.",
    meant="id 0 is padding",
)


class TriangleNotTurned(Heads):
    """1 in the mask keeps a key."""

    def triangle(self, size: int) -> Tensor:
        return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.int)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)
        scores.masked_fill_(self.triangle(x.shape[1]) == 0, -1e9)
        return self.join(scores.softmax(dim=-1) @ v)


class TriangleTurned(TriangleNotTurned):
    def triangle(self, size: int) -> Tensor:
        return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.int) == 0


report(
    name="TriangleNotTurned",
    address="https://github.com/hkproj/pytorch-transformer/issues/19",
    kind="wrong",
    sees="The mask of translation keeps the upper triangle, that of training the lower one; translations are bad.",
    wrong=TriangleNotTurned,
    right=TriangleTurned,
    given=tokens(),
    cause="The causal mask is inverted: each token sees only later tokens, and the last one has every key masked out.",
    place="the triangle that the mask is made of",
    mend="torch.triu(torch.ones(1, size, size), diagonal=1) == 0",
    never="That there is no mask, or that only the diagonal is off by one.",
    meant="causal",
    second=True,
)


class WindowWithoutEnd(Heads):
    """A window that is given as tokens to the left and to the right."""

    left, right = 3, 0

    def seen(self, before: Tensor) -> Tensor:
        return before <= self.left

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        places = torch.arange(x.shape[1])
        seen = self.seen(places[:, None] - places)
        return self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


class WindowWithEnd(WindowWithoutEnd):
    def seen(self, before: Tensor) -> Tensor:
        return (before <= self.left) & (before >= -self.right)


report(
    name="WindowWithoutEnd",
    address="https://github.com/jax-ml/jax/pull/39576",
    kind="wrong",
    sees="A window of (3, 0) without the causal flag attends to the whole future, without an error.",
    wrong=WindowWithoutEnd,
    right=WindowWithEnd,
    given=tokens(),
    cause="Only the left end of the window is applied: each token sees three tokens before it and all after it.",
    place="the mask of the window",
    mend="(before <= self.left) & (before >= -self.right)",
    never="That the window is one too wide, or that it has no left end.",
    meant="a window of 3 tokens before and none after",
    second=True,
)


# -- positions ---------------------------------------------------------------------------------------------------------


def sines(positions: Tensor) -> Tensor:
    """Return a table of `position width`."""
    angles = positions[:, None] / 10000 ** (torch.arange(WIDTH) // 2 * 2 / WIDTH)
    return torch.where(torch.arange(WIDTH) % 2 == 0, angles.sin(), angles.cos())


class Positioned(nn.Module):
    """Adds a table before an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pe", self.table())
        self.layer = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def table(self) -> Tensor:
        return sines(torch.arange(31))[None]

    def place(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.place(x)
        return self.layer(x, x, x, need_weights=False)[0]


class PositionsOfItems(Positioned):
    def table(self) -> Tensor:
        return sines(torch.arange(31))[:, None]

    def place(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.size(0)]


class PositionsOfTokens(PositionsOfItems):
    def place(self, x: Tensor) -> Tensor:
        return x + self.pe[: x.size(1)].transpose(0, 1)


report(
    name="PositionsOfItems",
    address="https://github.com/tanjimin/C.Origami/issues/42",
    kind="wrong",
    sees="x is `batch seq embed`, but the table is cut and added as for `seq batch embed`.",
    wrong=PositionsOfItems,
    right=PositionsOfTokens,
    given=tokens(),
    cause="The table's positions run along the batch: all tokens of an item get one row, each item another.",
    place="the positions that are added to the tokens",
    mend="self.pe[: x.size(1)].transpose(0, 1)",
    never="That attention itself runs over the batch, or that batch_first is wrong.",
)


class ShiftedWithoutMask(Heads):
    """Scores by content and by distance, as in Transformer-XL, in an encoder that sees both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)

    def distances(self, length: int) -> Tensor:
        return torch.arange(length - 1, -1, -1)

    def shift(self, scores: Tensor) -> Tensor:
        *rest, rows, columns = scores.shape
        padded = torch.cat((scores.new_zeros(*rest, rows, 1), scores), -1).view(*rest, columns + 1, rows)
        return padded[..., 1:, :].view_as(scores)[..., :rows]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        table = sines(self.distances(x.shape[1]))
        by_distance = self.shift(q @ self.split(self.place(table)[None]).transpose(-2, -1))
        return self.join(((q @ k.transpose(-2, -1) + by_distance) * self.scale).softmax(-1) @ v)


class ShiftedOfBothSides(ShiftedWithoutMask):
    def distances(self, length: int) -> Tensor:
        return torch.arange(length - 1, -length, -1)


report(
    name="ShiftedWithoutMask",
    address="https://github.com/ZhengkunTian/OpenTransformer/issues/25",
    kind="wrong",
    sees="In an encoder, the shift of Transformer-XL gives keys after the query the distances of another query.",
    wrong=ShiftedWithoutMask,
    right=ShiftedOfBothSides,
    given=tokens(),
    cause="The table has the distances 0 to n-1 alone: the shift gives later keys a zero and scores of the next query.",
    place="the distances that the table is made of",
    mend="torch.arange(length - 1, -length, -1)",
    never="That the scores are masked, that attention is causal, or that the content's scores are wrong.",
    meant="each token sees all",
)


class Collides(nn.Module):
    """Windows of 2 x 3 x 5 tokens with a bias for each relative place."""

    window = 2, 3, 5

    def __init__(self) -> None:
        super().__init__()
        self.layer = Heads()
        self.bias = nn.Parameter(torch.randn(math.prod(2 * size - 1 for size in self.window), HEADS))
        grid = torch.stack(torch.meshgrid(*map(torch.arange, self.window), indexing="ij")).flatten(1)
        relative = (grid[:, :, None] - grid[:, None]).permute(1, 2, 0) + torch.tensor(self.window) - 1
        self.register_buffer("index", (relative * torch.tensor(self.strides())).sum(-1))

    def strides(self) -> tuple[int, int, int]:
        return 3 * self.window[1] - 1, 2 * self.window[1] - 1, 1

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer.sides(x)
        scores = q @ k.transpose(-2, -1) * self.layer.scale + self.bias[self.index].permute(2, 0, 1)
        return self.layer.join(scores.softmax(-1) @ v)


class Apart(Collides):
    def strides(self) -> tuple[int, int, int]:
        rows, columns = 2 * self.window[1] - 1, 2 * self.window[2] - 1
        return rows * columns, columns, 1


report(
    name="Collides",
    address="https://github.com/282857341/nnFormer/pull/88",
    kind="wrong",
    sees="The index into the table of relative places multiplies depth and rows by numbers that are too small.",
    wrong=Collides,
    right=Apart,
    given=lambda: {"x": floats(BATCH, 30, WIDTH)},
    cause="Different relative places share a row of the table, and two thirds of its rows are never read.",
    place="the index of relative places",
    mend="(2 * rows - 1) * (2 * columns - 1), 2 * columns - 1, 1",
    never="That the bias is a mask, or that the table has the wrong size.",
    meant="a bias of its own for each relative place",
    second=True,
)


# -- layouts -----------------------------------------------------------------------------------------------------------


class MapNotTransposed(nn.Module):
    """Self-attention of a GAN over the pixels of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.query_conv, self.key_conv = nn.Conv2d(WIDTH, 7, 1), nn.Conv2d(WIDTH, 7, 1)
        self.value_conv = nn.Conv2d(WIDTH, WIDTH, 1)
        self.gamma = nn.Parameter(torch.ones(1))

    def turned(self, attention: Tensor) -> Tensor:
        return attention.permute(0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, width, height = x.size()
        query = self.query_conv(x).view(batch, -1, width * height).permute(0, 2, 1)
        key = self.key_conv(x).view(batch, -1, width * height)
        attention = torch.bmm(query, key).softmax(dim=-1)
        value = self.value_conv(x).view(batch, -1, width * height)
        return self.gamma * torch.bmm(value, self.turned(attention)).view(batch, channels, width, height) + x


class MapTransposed(MapNotTransposed):
    def turned(self, attention: Tensor) -> Tensor:
        return attention.permute(0, 2, 1)


report(
    name="MapNotTransposed",
    address="https://github.com/heykeetae/Self-Attention-GAN/issues/11",
    kind="wrong",
    sees="`attention.permute(0, 1, 2)` changes nothing, where a transposition is meant.",
    wrong=MapNotTransposed,
    right=MapTransposed,
    given=lambda: {"x": floats(BATCH, WIDTH, 3, 5)},
    cause="The values are summed over the queries: the softmax ran over the keys, and the map is not transposed.",
    place="the product of values and weights",
    mend="attention.permute(0, 2, 1)",
    never="That the softmax has to run over another axis than the keys, or that the view mixes pixels.",
)


class ColumnsByView(nn.Module):
    """Attention among the rows of a map: each row is one token."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.gamma = nn.Parameter(torch.ones(1))

    def rows_last(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        view = x.shape[0], -1, x.shape[2]
        query = self.rows_last(self.query(x)).reshape(*view).permute(0, 2, 1)
        key, value = (self.rows_last(side(x)).reshape(*view) for side in (self.key, self.value))
        attention = torch.bmm(query, key).softmax(dim=-1)
        out = torch.bmm(value, attention.permute(0, 2, 1))
        return self.gamma * self.rows_last(out.view(self.rows_last(x).shape)) + x


class ColumnsTransposed(ColumnsByView):
    def rows_last(self, x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 2)


report(
    name="ColumnsByView",
    address="https://github.com/plemeri/UACANet/issues/8",
    kind="wrong",
    sees="Along the height, the view is taken without a permutation before it, so that columns are not collected.",
    wrong=ColumnsByView,
    right=ColumnsTransposed,
    given=lambda: {"x": floats(BATCH, WIDTH, 3, 5)},
    cause="The view to `batch features row` cuts a map whose last axis is the column: a token mixes rows and columns.",
    place="the view before the products, along the height",
    mend=".permute(0, 1, 3, 2) before the view, and back after it",
    never="That attention along the width is wrong, or that there is no attention.",
    meant="each row of the map attends to the rows",
)


class MapByView(nn.Module):
    """Attention over the pixels of a map, which gives a map of `(heads head_dim)` channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, 3 * HEADS * HEAD_DIM, 1)

    def mapped(self, context: Tensor, height: int, width: int) -> Tensor:
        return context.reshape(-1, HEADS, HEAD_DIM, height, width)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, HEAD_DIM)).flatten(4).unbind(1)
        weights = (q.transpose(2, 3) * HEAD_DIM**-0.5 @ k).softmax(dim=-1)
        return self.mapped(weights @ v.transpose(2, 3), height, width).flatten(1, 2)


class MapTurned(MapByView):
    def mapped(self, context: Tensor, height: int, width: int) -> Tensor:
        return context.permute(0, 1, 3, 2).reshape(-1, HEADS, HEAD_DIM, height, width)


report(
    name="MapByView",
    address="https://github.com/leaderj1001/Attention-Augmented-Conv2d/issues/21",
    kind="wrong",
    sees="The context `batch heads pixel head_dim` is reshaped to `batch heads head_dim height width`.",
    wrong=MapByView,
    right=MapTurned,
    given=lambda: {"x": floats(BATCH, WIDTH, 3, 7)},
    cause="A reshape stands where a transposition belongs: features of a pixel become pixels of a feature.",
    place="the reshape of the context to a map",
    mend="context.permute(0, 1, 3, 2).reshape(...)",
    never="That the heads are merged in the wrong order, or that the scores are wrong.",
    second=True,
)


class FramesByView(nn.Module):
    """Attention over the pixels of each frame of a video, `batch channel time height width`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv3d(WIDTH, WIDTH, 1) for _ in range(4))

    def frames(self, x: Tensor) -> Tensor:
        batch, channels, time, height, width = x.shape
        return x.reshape(batch * time, channels, height * width)

    def whole(self, frames: Tensor, shape: tuple[int, ...]) -> Tensor:
        return frames.reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.frames(side(x)) for side in (self.q, self.k, self.v))
        weights = (torch.bmm(q.permute(0, 2, 1), k) * WIDTH**-0.5).softmax(dim=2)
        return x + self.o(self.whole(torch.bmm(v, weights.permute(0, 2, 1)), x.shape))


class FramesTurned(FramesByView):
    def frames(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(2)

    def whole(self, frames: Tensor, shape: tuple[int, ...]) -> Tensor:
        batch, channels, time, height, width = shape
        return frames.reshape(batch, time, channels, height, width).permute(0, 2, 1, 3, 4)


report(
    name="FramesByView",
    address="https://github.com/PKU-YuanGroup/Open-Sora-Plan/issues/171",
    kind="wrong",
    sees="`b c t h w` is reshaped to `(b t) c (h w)` without moving time before the channels.",
    wrong=FramesByView,
    right=FramesTurned,
    given=lambda: {"x": floats(BATCH, WIDTH, 3, 2, 7)},
    cause="A reshape stands where a permutation belongs: what is taken for a frame mixes channels and times.",
    place="the reshape of a video to frames",
    mend="x.permute(0, 2, 1, 3, 4) before the reshape",
    never="That items of the batch are mixed, or that attention runs over time on purpose.",
    meant="each frame attends to itself alone",
    second=True,
)


class ReturnsItsInput(nn.Module):
    """A layer of graph attention, `node width`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(WIDTH, WIDTH, bias=False)
        self.source, self.target = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def answer(self, h: Tensor, mixed: Tensor) -> Tensor:
        return h

    def forward(self, h: Tensor, adjacency: Tensor) -> Tensor:
        projected = self.w(h)
        scores = F.leaky_relu(self.source(projected) + self.target(projected).mT, 0.2)
        attention = torch.where(adjacency > 0, scores, -9e15).softmax(dim=1)
        return self.answer(h, attention @ projected)


class ReturnsTheMix(ReturnsItsInput):
    def answer(self, h: Tensor, mixed: Tensor) -> Tensor:
        return mixed


report(
    name="ReturnsItsInput",
    address="https://github.com/recolyce/HistoCell/issues/3",
    kind="wrong",
    sees="The last layer, which does not concatenate heads, returns h in the place of h_prime.",
    wrong=ReturnsItsInput,
    right=ReturnsTheMix,
    given=lambda: {"h": floats(QUERIES, WIDTH), "adjacency": torch.eye(QUERIES) + torch.eye(QUERIES).roll(1, 0)},
    cause="The layer returns its input: what attention computes is thrown away.",
    place="what is returned",
    mend="return the mixed values",
    never="That the output depends on the adjacency, or that tokens cannot see each other because of the mask.",
)


class AsksTheMemory(Heads):
    """A decoder's attention to the outputs of an encoder."""

    def order(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return memory, x

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        asking, asked = self.order(x, memory)
        q, k, v = self.split(self.q(asking)), self.split(self.k(asked)), self.split(self.v(asked))
        return self.join((q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v)


class AsksTheDecoder(AsksTheMemory):
    def order(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x, memory


report(
    name="AsksTheMemory",
    address="https://github.com/rexrex9/nlp_torchtext/pull/2",
    kind="wrong",
    sees="In the decoder, queries are made of the encoder's outputs; keys and values should be.",
    wrong=AsksTheMemory,
    right=AsksTheDecoder,
    given=lambda: {"x": floats(BATCH, QUERIES, WIDTH), "memory": floats(BATCH, KEYS, WIDTH, seed=1)},
    cause="Query and memory are exchanged: the output has a row for each token of the memory.",
    place="what the queries are projected from",
    mend="queries of x, keys and values of memory",
    never="That W_q, W_k or W_v are exchanged, or that it is self-attention.",
    meant="x attends to memory",
    second=True,
)


class KeyHeadsByTheirNumber(nn.Module):
    """Eight query heads share four key heads; each takes its own in a loop."""

    heads, kv_heads = 8, 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 8 * HEAD_DIM), nn.Linear(8 * HEAD_DIM, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4 * HEAD_DIM), nn.Linear(WIDTH, 4 * HEAD_DIM)

    def key_head(self, head: int) -> int:
        return head // self.kv_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).split(HEAD_DIM, dim=-1) for side in (self.q, self.k, self.v))
        mixed = []
        for head in range(self.heads):
            shared = self.key_head(head)
            weights = (q[head] @ k[shared].transpose(1, 2) * HEAD_DIM**-0.5).softmax(-1)
            mixed.append(weights @ v[shared])
        return self.o(torch.cat(mixed, dim=-1))


class KeyHeadsByGroups(KeyHeadsByTheirNumber):
    def key_head(self, head: int) -> int:
        return head // (self.heads // self.kv_heads)


report(
    name="KeyHeadsByTheirNumber",
    address="https://github.com/PSAL-POSTECH/ONNXim/pull/34",
    kind="wrong",
    sees="With 32 query heads and 8 key heads, half of the key heads are never read.",
    wrong=KeyHeadsByTheirNumber,
    right=KeyHeadsByGroups,
    given=tokens(),
    cause="The key head is the query head divided by the number of key heads, not by that of query heads in a group.",
    place="the index of the key head",
    mend="head // (self.heads // self.kv_heads)",
    never="That there are two key heads and nothing is wrong, or that key heads are tiled.",
    meant="two query heads share each of four key heads",
)


# -- without a softmax -------------------------------------------------------------------------------------------------


class SumOverTheHeads(Heads):
    """Linear attention of `batch position heads head_dim`, which is causal."""

    def sums(self, k: Tensor) -> Tensor:
        return k.cumsum(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (HEADS, HEAD_DIM)) for side in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        mixed = torch.einsum("bthd,bthde->bthe", q, state)
        return self.o((mixed / ((q * self.sums(k)).sum(-1, keepdim=True) + 1e-10)).flatten(2))


class SumOverThePast(SumOverTheHeads):
    def sums(self, k: Tensor) -> Tensor:
        return k.cumsum(1)


report(
    name="SumOverTheHeads",
    address="https://github.com/fla-org/flash-linear-attention/pull/594",
    kind="wrong",
    sees="The normalizer takes cumsum(-2) of a tensor `batch position heads head_dim`.",
    wrong=SumOverTheHeads,
    right=SumOverThePast,
    given=tokens(),
    cause="The sum of the denominator runs over the heads, not over the past tokens: weights do not sum to 1.",
    place="the sum of the keys in the denominator",
    mend="k.cumsum(1)",
    never="That tokens see the future, or that the module has no attention.",
    meant="causal, weights that sum to 1",
)


class PaddingInTheSum(Heads):
    """Linear attention whose mask sets values of padding to zero; it may stand on the left."""

    def masked(self, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return k, v * mask

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        k, v = self.masked(k, v, attention_mask[:, None, :, None])
        mixed = (q @ k.transpose(-2, -1)).tril() @ v
        return self.join(mixed / ((q * k.cumsum(-2)).sum(-1, keepdim=True) + 1e-10))


class PaddingInNeither(PaddingInTheSum):
    def masked(self, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return k * mask, v * mask


report(
    name="PaddingInTheSum",
    address="https://github.com/fla-org/flash-linear-attention/issues/1263",
    kind="wrong",
    sees="Padding on the left changes the outputs of real tokens.",
    wrong=PaddingInTheSum,
    right=PaddingInNeither,
    given=tokens(attention_mask=real(7, 4).flip(1).float()),
    cause="Values of padding are zeroed, but its keys stay in the sum of the denominator.",
    place="where the mask is multiplied into the values alone",
    mend="k * mask, v * mask",
    never="That the mask has no effect, or that tokens see the future.",
    meant="causal; attention_mask: 1 keeps a key, padding on the left",
)


class FeaturesApart(Heads):
    """Random features in place of a softmax; their matrices are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_queries", torch.randn(17, HEAD_DIM))
        self.register_buffer("of_keys", torch.randn(17, HEAD_DIM))

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.of_queries, self.of_keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        sides = zip((q, k), self.matrices(), strict=True)
        q, k = ((y @ m.T / HEAD_DIM**0.25 - y.square().sum(-1, True) / 2 / HEAD_DIM**0.5).exp() for y, m in sides)
        mixed, total = q @ (k.transpose(-2, -1) @ v), q @ k.sum(-2)[..., None]
        return self.join(mixed / total)


class FeaturesShared(FeaturesApart):
    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.of_queries, self.of_queries


report(
    name="FeaturesApart",
    address="https://github.com/facebookresearch/xformers/pull/183",
    kind="wrong",
    sees="Queries and keys have a feature map of their own each, which were drawn apart.",
    wrong=FeaturesApart,
    right=FeaturesShared,
    given=tokens(),
    cause="Queries and keys are mapped by different random matrices: their product does not come near exp(q · k).",
    place="the feature map of the keys",
    mend="one map for both",
    never="That weights do not sum to 1, or that it is a softmax.",
    meant="near softmax attention",
    second=True,
)


# -- caches ------------------------------------------------------------------------------------------------------------

Cache = tuple[Tensor, Tensor]


def in_two(module: nn.Module, given: Given) -> Tensor:
    """Call with five tokens, then with the others and what was returned as a cache."""
    x = given["x"]
    first, cache = module(x[:, :5])
    rest, _ = module(x[:, 5:], cache)
    return torch.cat((first, rest), 1)


class FirstCallKeepsNothing(Heads):
    def kept(self, given: Cache | None, joined: Cache) -> Cache | None:
        return None if given is None else joined

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache | None]:
        q, k, v = self.sides(x)
        if cache is not None:
            past_k, past_v = cache
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        scores = (q @ k.transpose(-2, -1) * self.scale).masked_fill(~past(x.shape[1], k.shape[2]), -math.inf)
        return self.join(scores.softmax(-1) @ v), self.kept(cache, (k, v))


class FirstCallKeeps(FirstCallKeepsNothing):
    def kept(self, given: Cache | None, joined: Cache) -> Cache | None:
        return joined


report(
    name="FirstCallKeepsNothing",
    address="https://github.com/jingtian11/EasyOffer/issues/2",
    kind="wrong",
    sees="The cache is assigned inside `if cache is not None`, so that it stays None for ever.",
    wrong=FirstCallKeepsNothing,
    right=FirstCallKeeps,
    given=tokens(),
    cause="The first call, which is given no cache, returns none: later calls do not see the tokens before.",
    place="what is returned as the cache",
    mend="cache = (k, v) outside the condition",
    never="That positions or the mask of a later call are wrong, or that the cache is joined along the wrong axis.",
    meant="causal, with a cache",
    run=in_two,
)


class CacheOfTheDefault(Heads):
    """A model in bfloat16; the cache begins without tokens."""

    def begin(self, k: Tensor) -> Tensor:
        return torch.zeros(k.shape[0], HEADS, 0, HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        keys, values = torch.cat([self.begin(k), k], dim=2), torch.cat([self.begin(v), v], dim=2)
        scores = q @ keys.transpose(-2, -1) * self.scale
        return self.join(scores.softmax(-1) @ values)


class CacheOfTheModel(CacheOfTheDefault):
    def begin(self, k: Tensor) -> Tensor:
        return torch.zeros(k.shape[0], HEADS, 0, HEAD_DIM, dtype=k.dtype)


report(
    name="CacheOfTheDefault",
    address="https://github.com/TransformerLensOrg/TransformerLens/pull/1260",
    kind="raises",
    sees="In half precision, generation with a cache raises: expected one dtype, found another, in q @ k.",
    wrong=lambda: CacheOfTheDefault().bfloat16(),
    right=lambda: CacheOfTheModel().bfloat16(),
    given=lambda: {"x": floats(BATCH, QUERIES, WIDTH).bfloat16()},
    cause="The empty cache is made in the default dtype: joined to it, keys and values become float32.",
    place="where the cache is made, before the line that raises",
    mend="dtype=k.dtype",
    never="That the projections of keys are float32, that x has to be float32, or that keys are not transposed.",
)


# -- shapes and dtypes that clash --------------------------------------------------------------------------------------


class MaskOfItems(nn.Module):
    """Graph attention with heads beside the batch, `(batch heads) node head_dim`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def spread(self, mask: Tensor) -> Tensor:
        return mask[:, :, None] & mask[:, None, :]

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        batch, count, _ = nodes.shape
        sides = self.qkv(nodes).view(batch, count, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        q, k, v = sides.reshape(3, batch * HEADS, count, HEAD_DIM)
        sim = torch.einsum("bid,bjd->bij", q, k) * HEAD_DIM**-0.5
        sim = sim.masked_fill(~self.spread(mask), -torch.finfo(sim.dtype).max)
        context = torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), v)
        return self.out(context.view(batch, HEADS, count, HEAD_DIM).transpose(1, 2).flatten(2))


class MaskOfHeads(MaskOfItems):
    def spread(self, mask: Tensor) -> Tensor:
        return (mask[:, :, None] & mask[:, None, :]).repeat_interleave(HEADS, dim=0)


report(
    name="MaskOfItems",
    address="https://github.com/lucidrains/graph-transformer-pytorch/pull/2",
    kind="raises",
    sees="With a mask it works for a batch of 1 alone; otherwise sizes clash in dimension 0.",
    wrong=MaskOfItems,
    right=MaskOfHeads,
    given=lambda: {"nodes": floats(BATCH, QUERIES, WIDTH), "mask": real(7, 4)},
    cause="The scores have `(batch heads)` first, the mask the batch alone: it has to be repeated for each head.",
    place="the mask over the scores",
    mend=".repeat_interleave(HEADS, dim=0)",
    never="That .repeat(HEADS, 1, 1) mends it (it exchanges the masks of items), or that the mask has a wrong length.",
    meant="mask: True keeps a node",
)


class DistancesOfTheQueries(Heads):
    """Cross-attention with an embedding of each distance, as BERT has for `relative_key`."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = nn.Embedding(61, HEAD_DIM)

    def key_places(self, queries: int, keys: int) -> Tensor:
        return torch.arange(queries).view(1, -1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = torch.matmul(q, k.transpose(-1, -2))
        left, right = torch.arange(x.shape[1]).view(-1, 1), self.key_places(x.shape[1], memory.shape[1])
        embedded = self.distance(left - right + 30)
        scores = scores + torch.einsum("bhld,lrd->bhlr", q, embedded)
        return self.join((scores * self.scale).softmax(-1) @ v)


class DistancesOfBoth(DistancesOfTheQueries):
    def key_places(self, queries: int, keys: int) -> Tensor:
        return torch.arange(keys).view(1, -1)


report(
    name="DistancesOfTheQueries",
    address="https://github.com/huggingface/transformers/issues/14010",
    kind="raises",
    sees="With relative positions, an encoder-decoder raises in its cross-attention: sizes clash in dimension 3.",
    wrong=DistancesOfTheQueries,
    right=DistancesOfBoth,
    given=lambda: {"x": floats(BATCH, QUERIES, WIDTH), "memory": floats(BATCH, KEYS, WIDTH, seed=1)},
    cause="Distances are made of the number of queries for both sides; keys come from a longer sequence.",
    place="the places of the keys that distances are made of",
    mend="torch.arange(memory.shape[1])",
    never="That what is added is a mask, or that memory has to be cut to the length of x.",
)


class OneMinusMask(Heads):
    def bias(self, mask: Tensor) -> Tensor:
        return (1 - mask[:, None, None, :]) * -10000.0

    def forward(self, x: Tensor, input_mask: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        scores = q @ k.transpose(-2, -1) * self.scale + self.bias(input_mask)
        return self.join(scores.softmax(dim=-1) @ v)


class NotMask(OneMinusMask):
    def bias(self, mask: Tensor) -> Tensor:
        return ~mask[:, None, None, :] * -10000.0


report(
    name="OneMinusMask",
    address="https://github.com/deepspeedai/DeepSpeed/issues/3319",
    kind="raises",
    sees="Subtraction with a bool tensor is not supported, in `1 - input_mask`.",
    wrong=OneMinusMask,
    right=NotMask,
    given=tokens(input_mask=real(7, 4)),
    cause="The mask is bool, and 1 - mask is not defined for it.",
    place="the mask that is turned into numbers to add",
    mend="~input_mask",
    never="That the mask has a wrong shape, or that True has to hide a key.",
    meant="input_mask: True keeps a key",
)


class ValuesStayHalf(Heads):
    """Scores are computed in float32, the layer is in bfloat16."""

    def upcast(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.float(), k.float(), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.upcast(*self.sides(x))
        return self.join(F.scaled_dot_product_attention(q, k, v).to(x.dtype))


class ValuesUpcast(ValuesStayHalf):
    def upcast(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.float(), k.float(), v.float()


report(
    name="ValuesStayHalf",
    address="https://github.com/AUTOMATIC1111/stable-diffusion-webui/pull/11066",
    kind="raises",
    sees="Query, key and value are expected to have one dtype, but the value's is half, once upcasting is enabled.",
    wrong=lambda: ValuesStayHalf().bfloat16(),
    right=lambda: ValuesUpcast().bfloat16(),
    given=lambda: {"x": floats(BATCH, QUERIES, WIDTH).bfloat16()},
    cause="Queries and keys are cast to float32, and the values are not.",
    place="the casts before the kernel",
    mend="v.float()",
    never="That x or the weights have the wrong dtype, or that heads are not transposed.",
)


class NormOfAllHeads(nn.Module):
    """Six query heads share two key heads; queries and keys are normalized."""

    norm_over: tuple[int, ...] = (6, HEAD_DIM)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, 6 * HEAD_DIM), nn.Linear(6 * HEAD_DIM, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * HEAD_DIM), nn.Linear(WIDTH, 2 * HEAD_DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(self.norm_over), nn.LayerNorm(self.norm_over)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (-1, HEAD_DIM)) for side in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))
        return self.o(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


class NormOfEachHead(NormOfAllHeads):
    norm_over = (HEAD_DIM,)


report(
    name="NormOfAllHeads",
    address="https://github.com/EleutherAI/gpt-neox/pull/1367",
    kind="raises",
    sees="With fewer key heads, the norm of queries and keys does not fit the keys.",
    wrong=NormOfAllHeads,
    right=NormOfEachHead,
    given=tokens(),
    cause="The norm of the keys is made over the number of query heads and head_dim; there are two key heads.",
    place="the size of the norm of the keys, in __init__",
    mend="nn.LayerNorm(head_dim), or a norm over the key heads",
    never="That keys have to be repeated before the norm, or that head_dim is wrong.",
)


class MemoryAmongTheQueries(nn.Module):
    """Queries serve as keys; learned memories stand behind them, and the result is `batch token width`."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False), nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.memory, self.out = nn.Parameter(torch.randn(1, 3, WIDTH)), nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def queries(self, qk: Tensor, count: int) -> Tensor:
        return qk

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        both = torch.cat((x, self.memory.expand(batch, -1, -1)), dim=1)
        qk, v = (side(both).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.qk, self.v))
        dots = torch.einsum("bhie,bhje->bhij", self.queries(qk, count), F.normalize(qk, dim=-1)) * HEAD_DIM**-0.5
        out = torch.einsum("bhij,bhje->bhie", dots.softmax(dim=-1), v)
        return self.out(out.transpose(1, 2).reshape(batch, count, HEADS * HEAD_DIM))


class MemoryAmongTheKeys(MemoryAmongTheQueries):
    def queries(self, qk: Tensor, count: int) -> Tensor:
        return qk[:, :, :count]


report(
    name="MemoryAmongTheQueries",
    address="https://github.com/lucidrains/reformer-pytorch/issues/88",
    kind="raises",
    sees="With memory keys, the reshape of the output is invalid for its size.",
    wrong=MemoryAmongTheQueries,
    right=MemoryAmongTheKeys,
    given=tokens(),
    cause="The memories stand among the queries too: the context has ten tokens where seven are expected.",
    place="what serves as queries, before the reshape that raises",
    mend="qk[:, :, :count]",
    never="That heads are merged wrongly, or that a width does not divide.",
)


class FramesOfTheConfig(Heads):
    """Attention over time of tokens `batch (patch frame) width`, seven patches in each frame."""

    frames, patches = 5, 7

    def count(self, x: Tensor) -> int:
        return self.frames

    def forward(self, x: Tensor) -> Tensor:
        frames = self.count(x)
        patches = x.shape[1] // frames
        by_patch = x.reshape(x.shape[0], patches, frames, x.shape[2]).flatten(0, 1)
        q, k, v = self.sides(by_patch)
        mixed = self.join(F.scaled_dot_product_attention(q, k, v))
        return x + mixed.reshape(x.shape)


class FramesOfTheInput(FramesOfTheConfig):
    def count(self, x: Tensor) -> int:
        return x.shape[1] // self.patches


report(
    name="FramesOfTheConfig",
    address="https://github.com/huggingface/transformers/issues/38027",
    kind="raises",
    sees="With another number of frames than in the config, a reshape in the layers is invalid.",
    wrong=FramesOfTheConfig,
    right=FramesOfTheInput,
    given=lambda: {"x": floats(BATCH, 21, WIDTH)},
    cause="The layer divides the tokens by the frames of its config; this input has three frames.",
    place="the number of frames, before the reshape that raises",
    mend="x.shape[1] // self.patches",
    never="That heads do not divide, or that the width of x is wrong.",
    second=True,
)


class OddWidth(nn.Module):
    """Sines in even features and cosines in odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def cosines(self, angles: Tensor) -> Tensor:
        return angles.cos()

    def forward(self, x: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        angles = torch.arange(x.shape[1])[:, None] * rates
        places = torch.zeros(1, x.shape[1], WIDTH)
        places[0, :, 0::2] = angles.sin()
        places[0, :, 1::2] = self.cosines(angles)
        x = x + places
        return self.layer(x, x, x, need_weights=False)[0]


class AnyWidth(OddWidth):
    def cosines(self, angles: Tensor) -> Tensor:
        return angles[:, : WIDTH // 2].cos()


report(
    name="OddWidth",
    address="https://github.com/gc-os-ai/pyaptamer/issues/607",
    kind="raises",
    sees="With an odd width, the cosines do not fit into the odd features of the table.",
    wrong=OddWidth,
    right=AnyWidth,
    given=tokens(),
    cause="Of 11 features 6 are even and 5 odd; there are 6 rates, one too many for the cosines.",
    place="the assignment of the cosines",
    mend="angles[:, : WIDTH // 2].cos()",
    never="That a cache is full, that there are too many tokens, or that the input has the wrong width.",
    second=True,
)


# -- two that differ ---------------------------------------------------------------------------------------------------


class SlopesOfAnyNumber(nn.Module):
    """A bias that falls with the distance, by a slope for each of six heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 18 * HEAD_DIM), nn.Linear(6 * HEAD_DIM, WIDTH)

    def slopes(self) -> Tensor:
        return 2.0 ** (-8 / 6 * torch.arange(1, 7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 6, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        bias = -(places[:, None] - places).abs() * self.slopes()[:, None, None]
        scores = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class SlopesOfPowersOfTwo(SlopesOfAnyNumber):
    def slopes(self) -> Tensor:
        of_four, of_eight = 2.0 ** (-2.0 * torch.arange(1, 5)), 2.0 ** (-1.0 * torch.arange(1, 9))
        return torch.cat((of_four, of_eight[0::2][:2]))


report(
    name="SlopesOfAnyNumber",
    address="https://github.com/ml-explore/mlx/issues/343",
    kind="differs",
    sees="ALiBi differs from the reference where the number of heads is no power of two.",
    wrong=SlopesOfAnyNumber,
    right=SlopesOfPowersOfTwo,
    given=tokens(),
    cause="The slopes of the heads differ: one geometric sequence for six, or that of four and every second of eight.",
    place="the slopes",
    mend="the slopes of 4 heads, then those of heads 1 and 3 of 8",
    never="That the weights of the projections, the scale or the distances differ, or that a mask does.",
)


class ScalesTheBias(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, QUERIES, QUERIES))

    def score(self, products: Tensor) -> Tensor:
        return (products + self.bias) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return self.join(self.score(q @ k.transpose(-2, -1)).softmax(-1) @ v)


class ScalesTheProduct(ScalesTheBias):
    def score(self, products: Tensor) -> Tensor:
        return products * self.scale + self.bias


report(
    name="ScalesTheBias",
    address="https://github.com/tenstorrent/tt-metal/pull/56406",
    kind="differs",
    sees="A bias of -10 has the effect of -10/√head_dim, compared with PyTorch.",
    wrong=ScalesTheBias,
    right=ScalesTheProduct,
    given=tokens(),
    cause="The bias is added before the scale and is scaled with the products.",
    place="where the bias is added",
    mend="products * self.scale + self.bias",
    never="That the scale of the products differs, or that the bias parameters do.",
)


class Adapted(Heads):
    """An adapter of rank 2 beside the output's projection; it may be merged into it."""

    rank, alpha = 2, 1.5

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(HEADS * HEAD_DIM, self.rank, bias=False), nn.Linear(self.rank, WIDTH)
        self.merged = False

    def join(self, context: Tensor) -> Tensor:
        context = context.transpose(1, 2).flatten(2)
        return self.o(context) if self.merged else self.o(context) + self.alpha * self.upper(self.lower(context))

    def merge(self, *, times: int = 1, bias_scale: float = alpha) -> Adapted:
        with torch.no_grad():
            self.o.weight += times * self.alpha * self.upper.weight @ self.lower.weight
            self.o.bias += bias_scale * self.upper.bias
        self.merged = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.sides(x)))


report(
    name="MergedTwice",
    address="https://github.com/huggingface/peft/pull/3774",
    kind="differs",
    sees="A merged adapter of the output's projection gives other outputs than the one that is not merged.",
    wrong=lambda: Adapted().merge(times=2),
    right=Adapted,
    given=tokens(),
    cause="The adapter's matrix is added twice: the output weight is W + 2·ΔW, a difference of rank 2.",
    place="the weight of the output's projection",
    mend="merge once",
    never="That anything before the output's projection differs, or that the whole matrix is another.",
)
report(
    name="MergedBiasNotScaled",
    address="https://github.com/huggingface/peft/pull/2489",
    kind="differs",
    sees="With a bias in the adapter and a scale that is not 1, merging changes the outputs.",
    wrong=lambda: Adapted().merge(bias_scale=1.0),
    right=Adapted,
    given=tokens(),
    cause="The adapter's bias is merged without its scale: all tokens differ by the same vector, half of that bias.",
    place="the bias of the output's projection",
    mend="self.alpha * self.upper.bias",
    never="That a weight matrix differs, or anything before the output's projection.",
    second=True,
)


class DeltaInBlocks(nn.Module):
    """One matrix with the rows of head after head, `(heads qkv head_dim)`, and an adapter of W_q and W_v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.lower, self.upper = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * HEADS * HEAD_DIM, bias=False)

    def padded(self, q: Tensor, v: Tensor) -> Tensor:
        return torch.cat((q, torch.zeros_like(q), v), -1)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x) + self.padded(*self.upper(self.lower(x)).chunk(2, -1))
        q, k, v = packed.unflatten(-1, (HEADS, 3, HEAD_DIM)).permute(3, 0, 2, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DeltaByHead(DeltaInBlocks):
    def padded(self, q: Tensor, v: Tensor) -> Tensor:
        sides = [side.unflatten(-1, (HEADS, HEAD_DIM)) for side in (q, torch.zeros_like(q), v)]
        return torch.stack(sides, -2).flatten(-3)


report(
    name="DeltaInBlocks",
    address="https://github.com/Lightning-AI/litgpt/issues/891",
    kind="differs",
    sees="The adapter of W_q and W_v is padded to `[q, 0, v]`, but the packed rows lie head after head.",
    wrong=DeltaInBlocks,
    right=DeltaByHead,
    given=tokens(),
    cause="What the adapter adds is not in the order of the packed rows: all of heads 0 and 2 gets it, head 1 nothing.",
    place="the padding of what the adapter adds",
    mend="put the three sides beside each other by head",
    never="That the packed weight itself is in another order, or that two parts are exchanged.",
)


def weights(seed: int) -> State:
    """Return two layers of 3 heads of 5 features."""
    torch.manual_seed(seed)
    inner = HEADS * HEAD_DIM
    shapes = {f"{side}_proj": (inner, WIDTH) for side in "qkv"} | {"o_proj": (WIDTH, inner)}
    names = [f"model.layers.{layer}.self_attn.{part}.weight" for layer in range(2) for part in shapes]
    return {name: torch.randn(shapes[name.split(".")[-2]]) for name in names}


def without_keys() -> State:
    state = weights(0)
    return {name: torch.zeros_like(w) if "k_proj" in name or "v_proj" in name else w for name, w in state.items()}


report(
    name="KeysOfZeros",
    address="https://github.com/TransformerLensOrg/TransformerLens/issues/1620",
    kind="files",
    sees="A converted model returns wrong logits without an error; keys were missing and filled in.",
    wrong=without_keys,
    right=lambda: weights(0),
    cause="W_k and W_v of every layer are all zeros in the converted file; W_q and W_o are the same.",
    place="W_k and W_v of both layers",
    mend="write W_k and W_v under the names that the module reads",
    never="That rows are in another order, that the model was trained further, or that the files are the same.",
)
