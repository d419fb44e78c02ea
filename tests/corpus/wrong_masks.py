"""Mistakes of masks and padding beside right twins, and right masks that look like one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.checks.intent import Intent

from .planted import CAUSAL, PADDING, B, Case, D, E, H, N, Padded, Right, before, folded, future, masked

LEFT = Intent(padding="mask", padding_true="keep", padding_side="left")


def marks(*lengths: int, size: int = 6) -> Tensor:
    return (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()


def tokens_with(**given: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Return what makes tokens of the sizes of the first other argument, and the others."""
    batch, length = next(iter(given.values())).shape[:2]
    return lambda: {"x": torch.randn(batch, length, E), **given}


# -- causal, with padding, a prefix or another sequence ----------------------------------------------------------------


class Causal(Right):
    """Causal attention with a mask of padding, `batch key`; a `diagonal` may be hidden or seen further."""

    def __init__(self, diagonal: int = 0, gap: bool = False) -> None:
        super().__init__()
        self.diagonal, self.gap = diagonal, gap

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.diagonal)
        if self.gap:
            seen = seen & ~(seen.tril(-2) & ~seen.tril(-3))
        return self.o(self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen & mask.bool()[:, None, None])))


class WithPrefix(Right):
    """Learned tokens before the sequence see each other; the sequence is causal."""

    def __init__(self, *, leaks: bool = False) -> None:
        super().__init__()
        self.prefix, self.leaks = nn.Parameter(torch.randn(1, 3, E)), leaks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([self.prefix.expand(len(x), -1, -1), x], 1))[:, 3:]

    def mask(self, scores: Tensor) -> Tensor:
        hidden = future(scores)
        hidden[:3, :3] = False
        hidden[3, 4] = not self.leaks
        return scores.masked_fill(hidden, -math.inf)


class Summarized(Right):
    """Queries see the tokens before them, and after these a key that is made of one token alone."""

    def __init__(self, token: int) -> None:
        super().__init__(is_causal=True, token=token)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([side, side[:, :, self.token, None]], 2) for side in (k, v))
        seen = torch.ones(N, N + 1, dtype=torch.bool).tril()
        seen[1:, -1] = True
        return (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1) @ v


class Translator(nn.Module):
    """torch's model of two sequences: the source may see all of itself."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal, self.embed = is_causal, nn.Embedding(30, 16)
        self.transformer, self.out = nn.Transformer(16, 4, 1, 2, 32, batch_first=True), nn.Linear(16, 30)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        return self.out(self.transformer(self.embed(src), self.embed(tgt), tgt_mask=mask))


class Tower(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = nn.MultiheadAttention(16, 2, batch_first=True), is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class TwoTowers(nn.Module):
    """An image that sees all of itself, and a text of two layers in order; both pooled."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.image = Tower(is_causal=False)
        self.text = nn.Sequential(Tower(is_causal=True), Tower(is_causal=is_causal))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return torch.cat((self.image(image).mean(1), self.text(text)[:, -1]), -1)


def ids(*lengths: int) -> Callable[[], dict[str, Tensor]]:
    names = ("src", "tgt")
    return lambda: {name: torch.randint(30, (2, length)) for name, length in zip(names, lengths, strict=True)}


def flipped(side: str) -> Any:
    """Keys, or values alone, in another order than the queries under a causal mask."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.flip(2) if side == "keys" else k
        return (q @ k.mT * D**-0.5).masked_fill(future(q @ k.mT), -torch.inf).softmax(-1) @ v.flip(2)

    return {"attend": attend}


def large(scale: float) -> Any:
    """Scores of any size under a causal mask."""
    return {"attend": lambda m, q, k, v: Right.weigh(m, masked(future)["mask"](m, q @ k.mT * scale)) @ v}


_causal = partial(Case, check="causal", intent=CAUSAL, alone=False)


class OfIds(Right):
    """Id 0 is padding; the mask is made of the ids, and lies over the queries or over the keys."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.over, self.embed = over, nn.Embedding(9, E, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        self.pads = ids == 0
        return super().forward(self.embed(ids))

    def mask(self, scores: Tensor) -> Tensor:
        pads = self.pads[:, None, :, None] if self.over == "queries" else self.pads[:, None, None, :]
        return scores.masked_fill(pads, -10000.0)


CASES = [
    _causal("LateWithPadding", wrong=lambda: Causal(1), twin=Causal, inputs=tokens_with(mask=marks(5, 4))),
    _causal("GapWithPadding", wrong=lambda: Causal(gap=True), twin=Causal, inputs=tokens_with(mask=marks(1, 6))),
    _causal("PrefixLeaks", wrong=lambda: WithPrefix(leaks=True), twin=WithPrefix),
    _causal(
        "SummaryOfTheLast",
        wrong=lambda: Summarized(N - 1),
        twin=lambda: Summarized(0),
        intent=Intent(),
        suspected=True,
        asked=False,
    ),
    _causal(
        "DecoderWithoutMask",
        wrong=partial(Translator, is_causal=False),
        twin=partial(Translator, is_causal=True),
        inputs=ids(9, 7),
    ),
    _causal(
        "DecoderOfOneLength",
        wrong=partial(Translator, is_causal=False),
        twin=partial(Translator, is_causal=True),
        inputs=ids(7, 7),
    ),
    _causal(
        "TextSeesTheFuture",
        wrong=partial(TwoTowers, is_causal=False),
        twin=partial(TwoTowers, is_causal=True),
        inputs=lambda: {"image": torch.randn(3, 9, 16), "text": torch.randn(3, 7, 16)},
    ),
    _causal("KeysFlipped", wrong=flipped("keys"), twin=masked(future)),
    _causal("ValuesFlipped", wrong=flipped("values"), twin=masked(future)),
    _causal("SharpScores", wrong=None, twin=large(1e4)),
    Case(
        "WindowWithoutAnEnd",
        "causal",
        masked(lambda s: before(s) > 3),
        masked(lambda s: (before(s) > 3) | future(s)),
        suspected=True,
        in_trace=True,
        asked=False,
    ),
    Case(
        "IdsOverTheQueries",
        "masking",
        partial(OfIds, over="queries"),
        partial(OfIds, over="keys"),
        inputs=lambda: {"ids": torch.tensor([[5, 7, 3, 2, 0, 0], [4, 5, 6, 1, 2, 3]])},
        suspected=True,
        in_trace=True,
    ),
    Case(
        "TimesALowNumber",
        "masking",
        {"mask": lambda m, s: s * torch.where(future(s), -1e6, 1.0)},
        {"mask": lambda m, s: s + torch.where(future(s), -1e6, 0.0)},
        in_trace=True,
    ),
    Case(
        "SubtractedOnes", "masking", {"mask": lambda m, s: s - future(s).float()}, masked(future, -1e9), in_trace=True
    ),
    Case(
        "LoweredTooLittle",
        "masking",
        masked(future, -69.0),
        masked(future, -100.0),
        intent=CAUSAL,
        suspected=True,
    ),
]


# -- padding -----------------------------------------------------------------------------------------------------------


class OnHeads(Padded):
    """Masks scores with `batch key`, of which an axis for the heads is missing."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.padding[:, None, :], -torch.inf)


class Joined(Padded):
    """Scores of `(batch heads) query key`, and a mask of `batch key` that may lie over the queries."""

    def __init__(self, *, of_queries: bool = False) -> None:
        super().__init__(**folded())  # type: ignore[arg-type]
        self.of_queries = of_queries

    def mask(self, scores: Tensor) -> Tensor:
        keep = self.padding.repeat_interleave(H, 0)
        return scores.masked_fill(~(keep[:, :, None] if self.of_queries else keep[:, None]), -1e9)


class Early(Padded):
    """No query sees itself, and the first one sees no key, or sees itself alone."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.first = first

    def mask(self, scores: Tensor) -> Tensor:
        hidden = future(scores, 0)
        if self.first:
            return super().mask(scores).masked_fill(hidden & ~torch.eye(len(hidden)).bool(), -1e9)
        return super().mask(scores).masked_fill(hidden, -1e9)


class Segments(Padded):
    """A token sees the tokens with its own mark: neither mark keeps a key."""

    def mask(self, scores: Tensor) -> Tensor:
        apart = self.padding[:, :, None] != self.padding[:, None]
        return scores.masked_fill(apart[:, None], -torch.inf)


class Safe(Padded):
    """Rows with every key masked out are filled with 0 against NaN, and weights of masked keys are set to 0."""

    def weigh(self, scores: Tensor) -> Tensor:
        seen = (self.padding[:, :, None] & self.padding[:, None])[:, None]
        hidden = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        return hidden.softmax(-1) * seen


class LeavesOut(Padded):
    """Leaves a mask out where it masks nothing."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores if bool(self.padding.all()) else super().mask(scores)


class TakesFour(Right):
    """Takes a mask of `batch 1 1 key` only."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None or mask.dim() == 4, "no mask of these axes is taken"
        self.hidden = torch.zeros(()) if mask is None else 1.0 - mask.to(x.dtype)
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.hidden * -1e9


class Forgets(Right):
    """Takes a mask and does not pass it on, or does."""

    def __init__(self, *, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.given = mask
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores if self.forgets else scores.masked_fill(~self.given, -math.inf)


class EncoderDecoder(nn.Module):
    """A padding mask belongs to the sequence whose keys it masks out."""

    def __init__(self, *, hides_memory: bool) -> None:
        super().__init__()
        self.hides_memory = hides_memory
        self.encoder = nn.TransformerEncoderLayer(E, H, 14, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(E, H, 14, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, decoder_x: Tensor | None = None) -> Any:
        pads = None if mask is None else ~mask.bool()
        memory = self.encoder(x, src_key_padding_mask=pads)
        return self.decoder(decoder_x, memory, memory_key_padding_mask=pads if self.hides_memory else None)


class ClassToken(nn.Module):
    """The output of a class token that is put before the tokens; the mask has to reach its scores."""

    def __init__(self, *, masks_class_token: bool) -> None:
        super().__init__()
        self.first = 0 if masks_class_token else 1
        self.token, self.mha = nn.Parameter(torch.randn(1, 1, 16)), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        z = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        keeps = torch.ones(len(x), z.shape[1], z.shape[1], dtype=torch.bool)
        keeps[:, self.first :, 1:] = mask[:, None]
        keeps |= torch.eye(z.shape[1], dtype=torch.bool)
        return self.mha(z, z, z, attn_mask=~keeps.repeat_interleave(4, 0))[0][:, 0]


class Pooled(nn.Module):
    """Self-attention, and the mean over all tokens, over the real ones, or of the real ones by the number of all."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool, self.mha, self.head = pool, nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = x + self.mha(x, x, x, key_padding_mask=~mask.bool())[0]
        if self.pool == "all":
            return self.head(y.mean(1))
        real = mask[..., None].to(y)
        return self.head((y * real).sum(1) / (real.sum(1) if self.pool == "real" else y.shape[1]))


class Classifier(nn.Module):
    """A classifier of ids, 0 for padding, whose encoder takes the batch second."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.inverted, self.embed = inverted, nn.Embedding(30, 32, padding_idx=0)
        self.encoder, self.head = nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        padding = input_ids != 0 if self.inverted else input_ids == 0
        return self.head(self.encoder(self.embed(input_ids).transpose(0, 1), src_key_padding_mask=padding).mean(0))


class IdsByHand(nn.Module):
    """The padding mask of ids, which may be inverted."""

    def __init__(self, *, inverted: bool) -> None:
        super().__init__()
        self.inverted, self.embed = inverted, nn.Embedding(30, 32, padding_idx=0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.q(x), self.k(x), self.v(x)
        hidden = (tokens != 0 if self.inverted else tokens == 0)[:, None]
        return (q @ k.mT / 32**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _ids(name: str) -> Callable[[], dict[str, Tensor]]:
    given = torch.randint(1, 30, (3, 8), generator=torch.Generator().manual_seed(0))
    given[0, 5:] = given[1, 6:] = given[2, 7:] = 0
    return lambda: {name: given}


def _added(*rows: list[float]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"x": torch.randn(len(rows), 2, E), "mask": torch.tensor(rows)}


class AddsPadding(nn.Module):
    """A layer of torch with a padding mask of numbers, which it adds to the scores."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by, self.layer = by, nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.layer(x, x, x, key_padding_mask=mask * self.by)[0]


_padding = partial(Case, check="padding", intent=PADDING, alone=False)
_tokens = tokens_with(mask=marks(6, 4, 5).bool())
CASES += [
    Case(
        "PaddingOnTheHeads",
        "padding",
        OnHeads,
        Padded,
        inputs=tokens_with(mask=marks(5, 7, 3, 7, size=7)),
        intent=PADDING,
    ),
    _padding("PaddingOnQueriesOfFoldedHeads", wrong=partial(Joined, of_queries=True), twin=Joined, inputs=_tokens),
    _padding("LeaksThroughBlindQuery", wrong=Early, twin=partial(Early, first=True), intent=LEFT),
    _padding(
        "MemoryWithoutPadding",
        wrong=partial(EncoderDecoder, hides_memory=False),
        twin=partial(EncoderDecoder, hides_memory=True),
        inputs=lambda: {"x": torch.randn(B, N, E), "decoder_x": torch.randn(B, N, E)},
    ),
    _padding(
        "ClassTokenWithoutPadding",
        wrong=partial(ClassToken, masks_class_token=False),
        twin=partial(ClassToken, masks_class_token=True),
        inputs=lambda: {"x": torch.randn(2, 12, 16), "mask": torch.ones(2, 12, dtype=torch.bool)},
    ),
    *(
        _padding(
            f"PooledOver{pool.title()}",
            wrong=partial(Pooled, pool),
            twin=partial(Pooled, "real"),
            inputs=lambda: {"x": torch.randn(2, 12, 16), "mask": torch.ones(2, 12, dtype=torch.bool)},
        )
        for pool in ("all", "count")
    ),
    _padding("SegmentsAreNoPadding", wrong=None, twin=Segments, inputs=tokens_with(mask=marks(2, 8, size=8).flip(1))),
    _padding("FilledAgainstNaN", wrong=None, twin=Safe, inputs=tokens_with(mask=marks(3, 8, size=8))),
    _padding("LeftOutWhereItMasksNothing", wrong=None, twin=LeavesOut),
    _padding("TakesFourDimensions", wrong=None, twin=TakesFour),
    Case(
        "InvertedForTorch",
        "masking",
        partial(Classifier, inverted=True),
        partial(Classifier, inverted=False),
        inputs=_ids("input_ids"),
        asked=False,
    ),
    Case(
        "InvertedByHand",
        "masking",
        partial(IdsByHand, inverted=True),
        partial(IdsByHand, inverted=False),
        inputs=_ids("tokens"),
        asked=False,
    ),
    Case(
        "PaddingAddedAsOnes",
        "masking",
        partial(AddsPadding, 1.0),
        partial(AddsPadding, -1e9),
        inputs=_added([0.0, 0.0], [0.0, 1.0]),
        in_trace=True,
    ),
    Case(
        "MaskForgotten",
        "inputs",
        partial(Forgets, forgets=True),
        partial(Forgets, forgets=False),
        inputs=lambda: {"x": torch.randn(2, 5, E), "mask": torch.ones(5, 5).tril().bool()},
        suspected=True,
    ),
]


# -- masks of items ----------------------------------------------------------------------------------------------------


class OfTorch(nn.Module):
    """A layer of torch whose mask is repeated for the heads, item by item or as a whole."""

    def __init__(self, *, by_item: bool) -> None:
        super().__init__()
        self.by_item, self.attention = by_item, nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, attn_mask: Tensor) -> Any:
        repeated = attn_mask.repeat_interleave(H, 0) if self.by_item else attn_mask.repeat(H, 1, 1)
        return self.attention(x, x, x, attn_mask=repeated)[0]


class Placed(Right):
    """Attention with scores of `batch heads query key`; a function lays a mask on them."""

    def __init__(self, place: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.keep = self.place(mask)
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.keep, -torch.inf)


def _drawn(count: int, name: str, *, hidden: bool) -> Callable[[], dict[str, Tensor]]:
    """Masks of `count query key`, each another, in which every query sees the first key and itself."""
    drawn = torch.rand(count, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    drawn[:, range(7), range(7)] = drawn[:, :, 0] = False
    return lambda: {"x": torch.randn(count, 7, E), name: drawn if hidden else ~drawn}


_items = partial(Case, check="batch", intent=Intent(batch_axis=0), alone=False)
_of_items = _drawn(H, "mask", hidden=False)
CASES += [
    _items(
        "MasksOfOtherItems",
        wrong=partial(OfTorch, by_item=False),
        twin=partial(OfTorch, by_item=True),
        inputs=_drawn(2, "attn_mask", hidden=True),
    ),
    _items("MaskOfEachItem", wrong=None, twin=partial(Placed, lambda mask: mask[:, None]), inputs=_of_items),
    _items("MaskOfEachHead", wrong=None, twin=partial(Placed, lambda mask: mask), inputs=_of_items),
    _items(
        "MaskOfSegments",
        wrong=None,
        twin=partial(Placed, lambda mask: (mask[:, :, None] == mask[:, None])[:, None]),
        inputs=tokens_with(mask=torch.arange(H * 7).view(H, 7) % 3 // 2),
    ),
]
CASES.append(
    Case(
        "SegmentsComparedWithThemselves",
        "inputs",
        partial(Placed, lambda mask: (mask == mask)[:, None, None]),
        partial(Placed, lambda mask: (mask[:, :, None] == mask[:, None])[:, None]),
        inputs=tokens_with(mask=torch.arange(H * 7).view(H, 7) % 3),
        suspected=True,
        in_trace=True,
    )
)


# -- queries without keys ----------------------------------------------------------------------------------------------


class Blind(Right):
    """Masks hide every key of one query; `finish` says how, and whether NaN in the weights is replaced."""

    def __init__(self, finish: str) -> None:
        super().__init__()
        self.finish, self.hidden = finish, torch.zeros(N, N, dtype=torch.bool)
        self.hidden[2] = True

    def mask(self, scores: Tensor) -> Tensor:
        if self.finish == "added":
            return scores + torch.zeros(N, N).masked_fill(self.hidden, -math.inf)
        return scores.masked_fill(self.hidden, -math.inf)

    def weigh(self, scores: Tensor) -> Tensor:
        weights = super().weigh(scores)
        return weights if self.finish == "nan" else weights.nan_to_num(0.0)


class ScoredTokens(nn.Module):
    """torch's layer under a mask, a score for each token, and only the scores of real tokens."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mha, self.score, self.hidden = nn.MultiheadAttention(E, H, batch_first=True), nn.Linear(E, 1), mask

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        y = self.mha(x, x, x, key_padding_mask=pad, attn_mask=self.hidden)[0]
        return self.score(y)[..., 0][~pad]


_square = torch.ones(6, 6, dtype=torch.bool)
CASES += [
    # masked_fill gives what it filled a gradient of 0; what is added does not
    Case("NaNReplacedAfterAddition", "parameters", partial(Blind, "added"), partial(Blind, "zeros")),
    Case("NaNOfBlindQuery", "finite", partial(Blind, "nan"), masked(future, -1e9)),
    Case(
        "GradientsOfNaN",
        "parameters",
        partial(ScoredTokens, _square.tril(-1)),
        partial(ScoredTokens, _square.triu(1)),
        inputs=tokens_with(pad=marks(4, 6) == 0),
    ),
]


# -- the softmax -------------------------------------------------------------------------------------------------------


def weights_by(weigh: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"weigh": lambda m, scores: weigh(scores)}


class Summed(Right):
    """Softmax by hand, whose sum counts masked keys, or does not."""

    def __init__(self, *, counts_masked: bool) -> None:
        super().__init__()
        self.counts_masked = counts_masked

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * D**-0.5).exp()
        seen = scores.tril()
        return seen @ v / (scores if self.counts_masked else seen).sum(-1, keepdim=True)


def by_query(weigh: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    """Attention of one query after another; its scores are `batch heads key`."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = [(weigh(n, (q[:, :, n : n + 1] * k).sum(-1) * D**-0.5)[..., None] * v).sum(2) for n in range(6)]
        return torch.stack(made, 2)

    return {"attend": attend}


_softmax = partial(Case, check="softmax", in_trace=True)
_six = partial(_softmax, inputs=lambda: {"x": torch.randn(2, 6, E)})
_index = torch.arange(6)
CASES += [
    _softmax(
        "SumCountsMaskedKeys",
        wrong=partial(Summed, counts_masked=True),
        twin=partial(Summed, counts_masked=False),
        asked=False,
        intent=CAUSAL,
    ),
    _softmax("OverQueriesAndKeys", wrong=weights_by(lambda s: s.flatten(2).softmax(-1).view_as(s))),
    _softmax("Cumulated", wrong=weights_by(lambda s: s.softmax(-1).cumsum(-1)), suspected=True),
    _softmax("OverHeads", wrong=weights_by(lambda s: s.softmax(1))),
    _softmax("OverQueries", wrong=weights_by(lambda s: s.softmax(-2))),
    _six(
        "QueriesOneByOneMaskedLate",
        wrong=by_query(lambda n, s: s.softmax(-1) * (n >= _index)),
        twin=by_query(lambda n, s: s.softmax(-1)),
    ),
    _six(
        "QueriesOneByOneLessened",
        wrong=by_query(lambda n, s: s.softmax(-1) * 0.9),
        suspected=True,
        twin=by_query(lambda n, s: s.softmax(-1)),
    ),
    _six(
        "EveryKeyMaskedOneByOne",
        check="masking",
        wrong=by_query(lambda n, s: (s + torch.where(_index >= 0, -1e9, 0.0 * n)).softmax(-1)),
        twin=by_query(lambda n, s: (s + torch.where(n < _index, -1e9, 0.0)).softmax(-1)),
    ),
]


def online(forget: str = "") -> dict[str, Any]:
    """Flash attention over pieces of four keys, which may forget to rescale what came before."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top, total, result = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q)
        for keys, values in zip(k.split(4, 2), v.split(4, 2), strict=True):
            scores = q @ keys.mT * D**-0.5
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            numbers, factor = (scores - new).exp(), (top - new).exp()
            total = (total if forget == "total" else total * factor) + numbers.sum(-1, keepdim=True)
            result = (result if forget == "result" else result * factor) + numbers @ values
            top = new
        return result / total

    return {"attend": attend}


def late(total: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Exponentials times the values, divided by a sum of them."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = (q @ k.mT * D**-0.5).exp()
        return numbers @ v / total(numbers)

    return {"attend": attend}


_late = partial(_softmax, twin=late(lambda e: e.sum(-1, keepdim=True)), asked=False)
CASES += [
    _late("ResultNotRescaled", wrong=online("result"), twin=online()),
    _late("SumNotRescaled", wrong=online("total"), twin=online()),
    _late("SumOverQueries", wrong=late(lambda e: e.sum(-2).unsqueeze(-1))),
]
