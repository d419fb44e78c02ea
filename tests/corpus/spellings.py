"""One exact softmax and one product around the same four matrices, in every way that a person can write them.

Each function is one spelling: of the scores, of the weights, of the average, or of all of it. What it means is data
(`Meaning`), and `plain` computes that in float64, as a textbook does: no spelling is right because it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import einops
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 5, 3, 4
WIDTH = HEADS * HEAD_DIM
HALF = HEAD_DIM**-0.5
"""The usual scale: 0.5."""


@dataclass(frozen=True)
class Meaning:
    """What a spelling computes: softmax(cap(scale · q·kᵀ) + bias) · v."""

    scale: float | tuple[float, ...] = HALF
    """The factor of q·kᵀ; by head, if each has its own."""
    causal: bool = False
    bias: Literal["", "alibi", "table", "keys"] = ""
    """Finite numbers that are added to the scores: a name in `bias_of`. A number for each query changes no weight."""
    cap: float | None = None
    """The number that scores come near to: cap · tanh(scores / cap)."""
    over: Literal["key", "query"] = "key"
    """The axis along which weights sum to one."""
    unit: bool = False
    """Whether queries and keys are divided by their length."""
    sinks: bool = False
    """Whether a learned number for each head takes a part of the weight, and has no value."""


class Spelled(nn.Module):
    """Four matrices around one spelling, and the parameter that its meaning needs."""

    def __init__(self, write: Callable[[Any, Tensor], Tensor], meaning: Meaning) -> None:
        super().__init__()
        self.write = write
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if meaning.unit:
            self.tau = nn.Parameter(torch.tensor(1.7))
        if isinstance(meaning.scale, tuple):
            self.taus = nn.Parameter(torch.tensor(meaning.scale).view(HEADS, 1, 1))
        if meaning.bias == "table":
            self.table = nn.Parameter(torch.randn(HEADS, 2 * TOKENS - 1))
        if meaning.sinks:
            self.sink = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: `batch heads token head_dim`."""
        return split(self.q(x)), split(self.k(x)), split(self.v(x))

    def leave(self, context: Tensor) -> Tensor:
        """Return the output of a context `batch heads query head_dim`."""
        return self.o(context.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Spelling:
    name: str
    meaning: Meaning
    write: Callable[[Any, Tensor], Tensor]
    """The forward, with the module before its input."""

    def made(self) -> Spelled:
        """Return the module, with the same weights in each spelling."""
        torch.manual_seed(3)
        return Spelled(self.write, self.meaning).eval()


SPELLINGS: dict[str, Spelling] = {}


def given() -> Tensor:
    """Return the input of each spelling: `batch token embed`."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))


@dataclass(frozen=True)
class Reference:
    """What a spelling means, in float64."""

    weights: Tensor
    """`batch heads query key`."""
    context: Tensor
    """`batch heads query head_dim`."""
    output: Tensor
    """`batch query embed`."""


@torch.no_grad()
def plain(spelling: Spelling) -> Reference:
    """Compute what a spelling means as a textbook does."""
    module, meaning = spelling.made().double(), spelling.meaning
    q, k, v = module.heads(given().double())
    if meaning.unit:
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    scores = q @ k.transpose(2, 3) * torch.tensor(meaning.scale, dtype=torch.float64).view(-1, 1, 1)
    if meaning.cap is not None:
        scores = meaning.cap * torch.tanh(scores / meaning.cap)
    scores = scores + bias_of(module, meaning.bias)
    if meaning.causal:
        scores = scores.masked_fill(future(), -math.inf)
    if meaning.sinks:
        taken = module.sink.view(1, HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)
        weights = torch.cat((scores, taken), 3).softmax(3)[..., :TOKENS]
    else:
        weights = scores.softmax(3 if meaning.over == "key" else 2)
    return Reference(weights, weights @ v, module.leave(weights @ v))


def bias_of(module: Any, name: str) -> Any:
    """Return a bias: `heads query key`, `key`, or the number 0 without one."""
    apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    if name == "alibi":
        return -slopes() * apart.abs()
    if name == "table":
        return module.table[:, apart + TOKENS - 1]
    if name == "keys":
        return torch.linspace(-1, 2, TOKENS)
    return 0


def slopes() -> Tensor:
    return torch.tensor([0.5, 0.25, 0.125]).view(HEADS, 1, 1)


def future() -> Tensor:
    """Return where a key comes after its query: `query key`."""
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def split(x: Tensor) -> Tensor:
    return x.view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def one(e: Tensor) -> Tensor:
    """Divide exponentials by their sum."""
    return e / total(e)


Step = Callable[..., Tensor]


def _add(step: Step, meaning: dict[str, Any], write: Callable[[Any, Tensor], Tensor]) -> Step:
    name = step.__name__
    assert name not in SPELLINGS
    SPELLINGS[name] = Spelling(name, Meaning(**meaning), write)
    return step


def scores(**meaning: Any) -> Callable[[Step], Step]:
    """Register what makes scores of queries and keys; the softmax and the average are as usual."""

    def write(step: Step, m: Any, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        return m.leave(step(m, q, k).softmax(-1) @ v)

    return lambda step: _add(step, meaning, lambda m, x: write(step, m, x))


def weights(**meaning: Any) -> Callable[[Step], Step]:
    """Register what makes weights of q·kᵀ, which is not scaled yet."""

    def write(step: Step, m: Any, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        return m.leave(step(m, q @ k.transpose(2, 3)) @ v)

    return lambda step: _add(step, meaning, lambda m, x: write(step, m, x))


def average(**meaning: Any) -> Callable[[Step], Step]:
    """Register what makes a context of weights and values."""

    def write(step: Step, m: Any, x: Tensor) -> Tensor:
        q, k, v = m.heads(x)
        return m.leave(step(m, (q @ k.transpose(2, 3) / 2).softmax(-1), v))

    return lambda step: _add(step, meaning, lambda m, x: write(step, m, x))


def context(**meaning: Any) -> Callable[[Step], Step]:
    """Register what makes a context of queries, keys and values."""
    return lambda step: _add(step, meaning, lambda m, x: m.leave(step(m, *m.heads(x))))


def whole(**meaning: Any) -> Callable[[Step], Step]:
    """Register a whole forward."""
    return lambda step: _add(step, meaning, step)


# -- weights: one softmax ----------------------------------------------------------------------------------------------


@weights()
def softmax_divided(m: Any, s: Tensor) -> Tensor:
    return (s / math.sqrt(HEAD_DIM)).softmax(-1)


@weights()
def softmax_of_sorted_scores(m: Any, s: Tensor) -> Tensor:
    ordered = (s / 2).sort(-1, descending=True)
    return torch.zeros_like(s).scatter(-1, ordered.indices, ordered.values.softmax(-1))


@weights()
def softmax_of_flipped_keys(m: Any, s: Tensor) -> Tensor:
    return (s.flip(-1) / 2).softmax(-1).flip(-1)


@weights()
def softmax_shifted_by_mean(m: Any, s: Tensor) -> Tensor:
    return ((s - s.mean(-1, keepdim=True)) / 2).softmax(-1)


@weights()
def softmax_of_a_distribution(m: Any, s: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=s / 2).probs


@weights()
def softmin_of_a_module(m: Any, s: Tensor) -> Tensor:
    return nn.Softmin(-1)(s * -0.5)


@weights()
def log_softmax_of_a_module(m: Any, s: Tensor) -> Tensor:
    return torch.exp(nn.LogSoftmax(-1)(s / 2))


@weights()
def softmax_as_a_gradient(m: Any, s: Tensor) -> Tensor:
    energy = torch.func.grad(lambda row: row.logsumexp(-1).sum())
    return energy(s / 2)


# -- weights: exponentials and their sum -------------------------------------------------------------------------------


@weights()
def exp_minus_detached_max(m: Any, s: Tensor) -> Tensor:
    s = s * HALF
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return e * total(e).reciprocal()


@weights()
def exp_in_place(m: Any, s: Tensor) -> Tensor:
    e = s.div_(2).sub_(s.amax(-1, keepdim=True)).exp_()
    return e.div_(e.sum(-1, keepdim=True))


@weights()
def exp_minus_logaddexp_chain(m: Any, s: Tensor) -> Tensor:
    s = s / 2
    return (s - reduce(torch.logaddexp, s.unbind(-1))[..., None]).exp()


@weights()
def exp2_over_sum(m: Any, s: Tensor) -> Tensor:
    return one(torch.exp2(s * (HALF * math.log2(math.e))))


@weights()
def expm1_plus_one(m: Any, s: Tensor) -> Tensor:
    return one(torch.expm1(s / 2) + 1)


@weights()
def hyperbolic(m: Any, s: Tensor) -> Tensor:
    return one(torch.cosh(s / 2) + torch.sinh(s / 2))


@weights()
def complex_exponentials(m: Any, s: Tensor) -> Tensor:
    return one(torch.exp(torch.complex(s / 2, torch.zeros_like(s))).real)


@weights()
def normalize_p1(m: Any, s: Tensor) -> Tensor:
    return F.normalize((s / 2).exp(), p=1, dim=-1)


@weights()
def over_vector_norm(m: Any, s: Tensor) -> Tensor:
    e = (s / 2).exp()
    return e / torch.linalg.vector_norm(e, 1, -1, keepdim=True)


# -- weights: the scale ------------------------------------------------------------------------------------------------


@weights()
def scale_of_a_tensor(m: Any, s: Tensor) -> Tensor:
    return (s / torch.sqrt(torch.tensor(float(HEAD_DIM)))).softmax(-1)


@weights()
def scale_by_lerp(m: Any, s: Tensor) -> Tensor:
    return torch.lerp(torch.zeros_like(s), s, HALF).softmax(-1)


@weights()
def scale_behind_the_shift(m: Any, s: Tensor) -> Tensor:
    return ((s - s.amax(-1, keepdim=True)) * HALF).softmax(-1)


@weights(scale=1.0)
def scale_of_one(m: Any, s: Tensor) -> Tensor:
    return s.softmax(-1)


@weights(scale=(0.3, 0.7, 1.1))
def scale_of_each_head(m: Any, s: Tensor) -> Tensor:
    return (s * m.taus).softmax(-1)


@scores(scale=1.7, unit=True)
def scale_of_unit_heads(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.tau


@scores(scale=1.7, unit=True)
def scale_of_cosine_similarity(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1) * m.tau


# -- weights: masks ----------------------------------------------------------------------------------------------------


@weights(causal=True)
def causal_filled(m: Any, s: Tensor) -> Tensor:
    return (s / 2).masked_fill(future(), float("-inf")).softmax(-1)


@weights(causal=True)
def causal_added(m: Any, s: Tensor) -> Tensor:
    return (s / 2 + torch.full((TOKENS, TOKENS), -math.inf).triu(1)).softmax(-1)


@weights(causal=True)
def causal_where(m: Any, s: Tensor) -> Tensor:
    return torch.where(future(), torch.finfo(s.dtype).min, s / 2).softmax(-1)


@weights(causal=True)
def causal_index_filled(m: Any, s: Tensor) -> Tensor:
    rows = [
        row.index_fill(-1, torch.arange(query + 1, TOKENS), -math.inf) for query, row in enumerate((s / 2).unbind(2))
    ]
    return torch.stack(rows, 2).softmax(-1)


@weights(causal=True)
def causal_assigned(m: Any, s: Tensor) -> Tensor:
    s = s / 2
    s[..., future()] = -math.inf
    return s.softmax(-1)


@weights(causal=True)
def causal_exponentials_multiplied(m: Any, s: Tensor) -> Tensor:
    return one((s / 2).exp() * torch.ones(TOKENS, TOKENS).tril())


@weights(causal=True)
def causal_minus_cumulated_logsumexp(m: Any, s: Tensor) -> Tensor:
    """The sum up to a query's own key is on the diagonal of the cumulated sums."""
    s = s / 2
    return (s - s.logcumsumexp(-1).diagonal(dim1=-2, dim2=-1)[..., None]).exp().tril()


# -- weights: caps, biases, sinks, other axes --------------------------------------------------------------------------


@weights(cap=1.5)
def cap(m: Any, s: Tensor) -> Tensor:
    return (1.5 * torch.tanh(s / 2 / 1.5)).softmax(-1)


@weights(cap=1.5)
def cap_as_a_sigmoid(m: Any, s: Tensor) -> Tensor:
    return (3 * torch.sigmoid(s / 1.5) - 1.5).softmax(-1)


@weights(bias="alibi", causal=True)
def alibi(m: Any, s: Tensor) -> Tensor:
    places = torch.arange(TOKENS)
    s = s / 2 + slopes() * -(places[:, None] - places).abs()
    return s.masked_fill(future(), -math.inf).softmax(-1)


@weights(bias="table")
def relative_bias(m: Any, s: Tensor) -> Tensor:
    places = torch.arange(TOKENS)
    return (s / 2 + m.table[:, places[:, None] - places + TOKENS - 1]).softmax(-1)


@weights(bias="keys")
def bias_of_each_key_on_the_weights(m: Any, s: Tensor) -> Tensor:
    return one((s / 2).softmax(-1) * torch.linspace(-1, 2, TOKENS).exp())


@weights(sinks=True)
def sinks(m: Any, s: Tensor) -> Tensor:
    sink = m.sink.view(1, HEADS, 1, 1).expand(len(s), -1, TOKENS, 1)
    return torch.cat((s / 2, sink), -1).softmax(-1)[..., :-1]


@weights(sinks=True)
def sinks_in_the_sum(m: Any, s: Tensor) -> Tensor:
    e = (s / 2).exp()
    return e / (total(e) + m.sink.exp().view(HEADS, 1, 1))


@weights(sinks=True)
def sinks_before_the_scale(m: Any, s: Tensor) -> Tensor:
    joined = torch.cat((s, 2 * m.sink.view(1, HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)), -1)
    return (joined / 2).softmax(-1)[..., :-1]


@weights(over="query")
def over_queries(m: Any, s: Tensor) -> Tensor:
    return (s / 2).softmax(-2)


# -- scores ------------------------------------------------------------------------------------------------------------


@scores()
def scores_einsum(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bhqk", q, k) * HALF


@scores()
def scores_einops(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return einops.einsum(q, k, "b h i d, b h j d -> b h i j") / 2


@scores()
def scores_baddbmm(m: Any, q: Tensor, k: Tensor) -> Tensor:
    empty = torch.empty(len(q) * HEADS, TOKENS, TOKENS)
    return torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=HALF).unflatten(0, (-1, HEADS))


@scores()
def scores_addmm_by_head(m: Any, q: Tensor, k: Tensor) -> Tensor:
    made = [
        torch.addmm(torch.zeros(TOKENS, TOKENS), left, right.T, beta=1, alpha=HALF)
        for left, right in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)
    ]
    return torch.stack(made).unflatten(0, (-1, HEADS))


@scores()
def scores_complex(m: Any, q: Tensor, k: Tensor) -> Tensor:
    q, k = (torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) for t in (q, k))
    return (q @ k.mH).real / 2


@scores()
def scores_of_distances(m: Any, q: Tensor, k: Tensor) -> Tensor:
    """q·k = (|q|² + |k|² - |q - k|²) / 2."""
    squares = total(q.square()) + total(k.square()).mT
    return (squares - torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square()) / 2 * HALF


@scores()
def scores_dot_by_dot(m: Any, q: Tensor, k: Tensor) -> Tensor:
    of_query = torch.func.vmap(torch.dot, (None, 0))
    of_head = torch.func.vmap(of_query, (0, None))
    return torch.func.vmap(torch.func.vmap(of_head))(q, k) * HALF


# -- the average -------------------------------------------------------------------------------------------------------


@average()
def average_baddbmm(m: Any, w: Tensor, v: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(1, 1, 1), w.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (-1, HEADS))


@average()
def average_addcmul_chain(m: Any, w: Tensor, v: Tensor) -> Tensor:
    made = torch.zeros_like(v)
    for key in range(TOKENS):
        made = torch.addcmul(made, w[..., key, None], v[:, :, key, None])
    return made


@average()
def average_tensordot_by_item(m: Any, w: Tensor, v: Tensor) -> Tensor:
    pairs = zip(w.flatten(0, 1), v.flatten(0, 1), strict=True)
    return torch.stack([torch.tensordot(left, right, dims=1) for left, right in pairs]).unflatten(0, (-1, HEADS))


@average()
def average_of_two_halves_of_the_keys(m: Any, w: Tensor, v: Tensor) -> Tensor:
    return w[..., :2] @ v[:, :, :2] + w[..., 2:] @ v[:, :, 2:]


# -- the whole: dividing later -----------------------------------------------------------------------------------------


@context()
def divided_later(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT / 2).exp()
    return (e @ v) / total(e)


@context()
def divided_by_a_column_of_ones(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made = (q @ k.mT / 2).exp() @ torch.cat((v, torch.ones_like(v[..., :1])), -1)
    return made[..., :-1] / made[..., -1:]


# -- the whole: loops --------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v


@context()
def heads_stacked(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([attend(q[:, h], k[:, h], v[:, h]) for h in range(HEADS)], 1)


@whole()
def heads_concatenated(m: Any, x: Tensor) -> Tensor:
    made = []
    for h in range(HEADS):
        q, k, v = (t[..., h * HEAD_DIM : (h + 1) * HEAD_DIM] for t in (m.q(x), m.k(x), m.v(x)))
        made.append(attend(q, k, v))
    return m.o(torch.cat(made, -1))


@context()
def heads_in_a_buffer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    made = torch.empty_like(q)
    for h in range(HEADS):
        made[:, h] = attend(q[:, h], k[:, h], v[:, h])
    return made


@whole()
def heads_of_sliced_weights(m: Any, x: Tensor) -> Tensor:
    """Each head multiplies by its rows of each matrix."""
    made = []
    for rows in torch.arange(WIDTH).chunk(HEADS):
        q, k, v = (F.linear(x, p.weight[rows], p.bias[rows]) for p in (m.q, m.k, m.v))
        made.append(attend(q, k, v))
    return m.o(torch.cat(made, -1))


@whole()
def heads_added_after_their_output(m: Any, x: Tensor) -> Tensor:
    """Each head multiplies by its columns of W_o, and their results are added."""
    q, k, v = m.heads(x)
    columns = m.o.weight.split(HEAD_DIM, 1)
    return m.o.bias + sum(attend(q[:, h], k[:, h], v[:, h]) @ columns[h].T for h in range(HEADS))


@context()
def chunks_of_queries(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attend(part, k, v) for part in q.split([2, 3], 2)], 2)


@context()
def chunks_of_keys_concatenated(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q @ part.mT / 2 for part in k.split(2, 2)], -1).softmax(-1) @ v


@context()
def chunks_of_keys_summed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above, below = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
        e = (q @ keys.mT / 2).exp()
        above, below = above + e @ values, below + total(e)
    return above / below


@context()
def chunks_of_keys_online(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Online softmax: what is summed is scaled down when a larger score comes."""
    highest, above, below = torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for keys, values in zip(k.split(2, 2), v.split(2, 2), strict=True):
        s = q @ keys.mT / 2
        higher = torch.maximum(highest, s.amax(-1, keepdim=True))
        e, shrink = (s - higher).exp(), (highest - higher).exp()
        above, below, highest = above * shrink + e @ values, below * shrink + total(e), higher
    return above / below


@context()
def chunks_of_keys_merged_by_logsumexp(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each piece of the keys, averaged by the sums of their exponentials."""
    parts, sums = [], []
    for keys, values in zip(k.split([2, 3], 2), v.split([2, 3], 2), strict=True):
        s = q @ keys.mT / 2
        parts.append(s.softmax(-1) @ values)
        sums.append(s.logsumexp(-1))
    shares = torch.stack(sums).softmax(0)
    return (shares[..., None] * torch.stack(parts)).sum(0)


# -- the whole: layouts ------------------------------------------------------------------------------------------------


@whole()
def sequence_first(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    q, k, v = (p(x).reshape(TOKENS, BATCH * HEADS, HEAD_DIM).transpose(0, 1) for p in (m.q, m.k, m.v))
    made = attend(q, k, v).transpose(0, 1).reshape(TOKENS, BATCH, WIDTH)
    return m.o(made).transpose(0, 1)


# -- the whole: torch's own --------------------------------------------------------------------------------------------


@context()
def fused(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@context(causal=True)
def fused_causal(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@context(bias="table")
def fused_with_a_bias(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias_of(m, "table")[None])


@context()
def fused_head_by_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one_head = F.scaled_dot_product_attention
    return torch.cat([one_head(*(t[:, h : h + 1] for t in (q, k, v))) for h in range(HEADS)], 1)


def _torchs_function(m: Any, x: Tensor, **settings: Any) -> Tensor:
    weight = torch.cat([p.weight for p in (m.q, m.k, m.v)])
    bias = torch.cat([p.bias for p in (m.q, m.k, m.v)])
    x = x.transpose(0, 1)
    made, _ = F.multi_head_attention_forward(
        *(x, x, x, WIDTH, HEADS, weight, bias, None, None, False, 0.0, m.o.weight, m.o.bias), training=False, **settings
    )
    return made.transpose(0, 1)


@whole()
def torchs_function(m: Any, x: Tensor) -> Tensor:
    return _torchs_function(m, x)


@context()
def flex(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)


@context(causal=True)
def flex_with_a_block_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, TOKENS, TOKENS, device="cpu")
    return flex_attention(q, k, v, block_mask=mask)
