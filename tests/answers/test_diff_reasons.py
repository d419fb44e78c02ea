"""Two modules that differ are told why: a reason was tried, and nothing else differs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from mha_inspect import Intent, check, diff
from mha_inspect.reports.diff import DiffReport

WIDTH, H, D, N = 64, 8, 8, 12


class Attention(nn.Module):
    """Three projections in one, `[q | k | v]`, of heads that are not shared."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in packed.chunk(3, -1))
        return q, k, v

    def turn(self, x: Tensor) -> Tensor:
        return x

    def scale(self) -> float:
        return 1 / math.sqrt(D)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x))
        scores = self.mask(self.turn(q) @ self.turn(k).mT * self.scale())
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ByHead(Attention):
    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.unflatten(-1, (H, 3 * D)).transpose(1, 2).chunk(3, -1)
        return q, k, v


def angles(length: int) -> Tensor:
    return torch.outer(torch.arange(length).float(), 100.0 ** (-torch.arange(D // 2) / (D // 2)))


class Halves(Attention):
    def turn(self, x: Tensor) -> Tensor:
        turns = angles(x.shape[2])
        a, b = x.chunk(2, -1)
        return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


class Pairs(Attention):
    def turn(self, x: Tensor) -> Tensor:
        turns = angles(x.shape[2])
        a, b = x[..., ::2], x[..., 1::2]
        turned = a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()
        return torch.stack(turned, -1).flatten(-2)


class NotScaled(Attention):
    def scale(self) -> float:
        return 1.0


class NotCausal(Attention):
    def mask(self, scores: Tensor) -> Tensor:
        return scores


class Window(Attention):
    def mask(self, scores: Tensor) -> Tensor:
        far = torch.ones(scores.shape[-2:]).tril(-4).bool()
        return super().mask(scores).masked_fill(far, -math.inf)


class Shared(nn.Module):
    """Eight query heads for two key heads."""

    tiled = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * D), nn.Linear(WIDTH, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.tiled:
            k, v = k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)
        else:
            k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tiled(Shared):
    tiled = True


class Gelu(Attention):
    """Something after the attention that no weight explains."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


def compared(left: nn.Module, right: nn.Module) -> DiffReport:
    torch.manual_seed(0)
    report = diff(left.eval(), right.eval(), torch.randn(2, N, WIDTH))
    assert isinstance(report, DiffReport)
    return report


def test_rows_that_are_read_in_another_order() -> None:
    report = compared(Attention(), ByHead())
    (reason,) = report.reasons
    assert reason.kind == "order"
    assert "(qkv heads head_dim) on the left and as (heads qkv head_dim) on the right" in reason.sentence
    assert "W_q of head 1 is rows 8–15 on the left and rows 24–31 on the right" in reason.sentence
    # The line, run: with its rows the other module returns the same.
    left, right = Attention().eval(), ByHead().eval()
    weight = left.qkv.weight.detach()
    names = {"rearrange": rearrange, "weight": weight}
    bias = rearrange(left.qkv.bias.detach(), "(qkv heads head_dim) -> (heads qkv head_dim)", qkv=3, heads=H)
    right.load_state_dict({**left.state_dict(), "qkv.weight": eval(reason.line, names), "qkv.bias": bias})
    x = torch.randn(2, N, WIDTH)
    assert torch.allclose(left(x), right(x), atol=1e-6)


def test_rotations_of_other_features() -> None:
    (reason,) = compared(Halves(), Pairs()).reasons
    assert reason.kind == "rotation"
    assert "in the order 0 4 1 5 2 6 3 7" in reason.sentence


def test_another_scale() -> None:
    (reason,) = compared(Attention(), NotScaled()).reasons
    assert reason.kind == "scale"
    assert "divided by √8" in reason.sentence
    assert "not scaled" in reason.sentence


@pytest.mark.parametrize(("left", "right"), [(Tiled, Shared), (Shared, Tiled)])
def test_keys_that_are_shared_in_another_order(left: type[nn.Module], right: type[nn.Module]) -> None:
    (reason,) = compared(left(), right()).reasons
    assert reason.kind == "shared heads"
    assert (
        "repeat against repeat_interleave" in reason.sentence or "repeat_interleave against repeat" in reason.sentence
    )


def test_other_masks() -> None:
    (reason,) = compared(Attention(), Window()).reasons
    assert reason.kind == "mask"
    assert "query 4 sees keys 0–4 on the left and keys 1–4 on the right" in reason.sentence
    (reason,) = compared(Attention(), NotCausal()).reasons
    assert "query 0 sees key 0 on the left and keys 0–11 on the right" in reason.sentence


def test_what_no_candidate_explains_has_no_reason() -> None:
    assert compared(Attention(), Gelu()).reasons == ()
    assert compared(Attention(), Attention()).reasons == ()


def test_the_weights_are_as_before() -> None:
    left, right = Halves(), Pairs()
    right.load_state_dict(left.state_dict())
    before = {name: tensor.clone() for name, tensor in right.state_dict().items()}
    compared(left, right)
    assert all(torch.equal(tensor, before[name]) for name, tensor in right.state_dict().items())


def test_a_reference_is_explained_alike() -> None:
    torch.manual_seed(0)
    report = check(Attention().eval(), torch.randn(2, N, WIDTH), intent=Intent(reference=ByHead().eval()))
    (finding,) = [finding for finding in report.findings if finding.check == "reference"]
    assert "(qkv heads head_dim) here and as (heads qkv head_dim) in the reference" in finding.sentence


class Returns(Attention):
    """Returns a second tensor too, as a tuple or by name."""

    factor, by_name = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        second = output.mean(1) * self.factor
        return {"hidden": output, "pooled": second} if self.by_name else (output, second)  # type: ignore[return-value]


@pytest.mark.parametrize("by_name", [False, True])
def test_every_returned_tensor_is_compared(by_name: bool) -> None:
    left = type("Left", (Returns,), {"by_name": by_name})
    right = type("Right", (Returns,), {"by_name": by_name, "factor": 3.0})
    report = compared(left(), right())
    assert report.outcome == "differs"
    assert f"the first output is the same, and output {'pooled' if by_name else '1'} differs by 200" in report.answer[0]
    assert compared(left(), left()).outcome == "same"
    torch.manual_seed(0)
    checked = check(left().eval(), torch.randn(2, N, WIDTH), intent=Intent(reference=right().eval()))
    assert any("the first output is the same" in finding.sentence for finding in checked.findings)


class Slopes(Attention):
    """ALiBi: slopes 2^(-8h/H), counted from a first head."""

    first = 1

    def mask(self, scores: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** (-8 * (head + self.first) / H) for head in range(H)])
        places = torch.arange(scores.shape[-1])
        return super().mask(scores + slopes[:, None, None] * (places - places[:, None]))


class FromZero(Slopes):
    first = 0


def test_slopes_that_are_one_step_off() -> None:
    (reason,) = compared(FromZero(), Slopes()).reasons
    assert reason.kind == "mask"
    assert "are 1, 0.5, 0.25, " in reason.sentence
    assert "Head 1 on the left has the slope of head 0 on the right: the slopes are off by one head." in reason.sentence
    (reason,) = compared(Slopes(), FromZero()).reasons
    assert "Head 1 on the right has the slope of head 0 on the left" in reason.sentence


class Rising(Slopes):
    """The bias of ALiBi with the other sign."""

    def mask(self, scores: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** (-8 * (head + self.first) / H) for head in range(H)])
        places = torch.arange(scores.shape[-1])
        return Attention.mask(self, scores - slopes[:, None, None] * (places - places[:, None]))


def test_slopes_of_opposite_signs_are_not_said_to_be_two_ladders() -> None:
    (reason,) = compared(Rising(), Slopes()).reasons
    assert "with opposite signs" in reason.sentence
    assert reason.sentence.endswith("higher scores on the left and lower ones on the right.")


class Exchanged(Attention):
    """Keys and values are taken in the other order."""

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, v, k = super().split(packed)
        return q, k, v


def test_the_example_is_of_a_part_that_is_elsewhere() -> None:
    (reason,) = compared(Attention(), Exchanged()).reasons
    assert reason.kind == "order"
    assert "W_k of head 1 is rows 72–79 on the left and rows 136–143 on the right" in reason.sentence


class Padded(Attention):
    """What it returns for padding is its own choice."""

    fill = 0.0

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).masked_fill(attention_mask[..., None] == 0, self.fill)


def test_outputs_that_differ_at_padding_alone() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, N, WIDTH), torch.ones(2, N, dtype=torch.long)
    mask[1, 8:] = 0
    report = diff(Padded().eval(), type("Ones", (Padded,), {"fill": 1.0})().eval(), x, attention_mask=mask)
    (reason,) = report.reasons
    assert reason.kind == "padding"
    assert "only at the 4 tokens of 24 where attention_mask is 0" in reason.sentence


class Drawn(Shared):
    """Its layers are made in an order of its own."""

    order = "qkv"

    def __init__(self) -> None:
        nn.Module.__init__(self)
        for name in self.order:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_weights_that_were_drawn_in_another_order_are_told() -> None:
    sides = []
    for order in ("qkv", "kqv"):
        torch.manual_seed(0)
        sides.append(type("Drawn", (Drawn,), {"order": order})())
    report = compared(*sides)
    assert report.outcome == "same"
    assert "Before the copy, k.weight of the right equalled q.weight of the left" in report.weights.sentence


class Einsum(nn.Module):
    """Projections by an equation, which reads its weights as `in out` where a linear layer has `out in`."""

    def __init__(self) -> None:
        super().__init__()
        self.w_query, self.w_key, self.w_value = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in "qkv")
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected = (torch.einsum("bnd,di->bni", x, w) for w in (self.w_query, self.w_key, self.w_value))
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in projected)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_weights_that_were_copied_transposed_are_said() -> None:
    report = compared(Einsum(), Drawn())
    assert report.outcome == "same"
    assert report.answer[1] == (
        "Transposed copies: w_query in q.weight, w_key in k.weight, w_value in v.weight. Loaded as it is, the file of "
        "one side is wrong on the other, and square shapes do not show it."
    )
    assert not any("Transposed" in sentence for sentence in compared(Drawn(), Drawn()).answer)


class Normed(Attention):
    """Queries and keys are normalized in each head, over all heads, or not; the weights of the norm are ones."""

    over = ""

    def turn(self, x: Tensor) -> Tensor:
        if self.over == "head":
            return F.rms_norm(x, x.shape[-1:])
        if self.over == "all":
            return x * x.square().mean((1, 3), keepdim=True).add(1e-6).rsqrt()
        return x


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ("", "head", "The queries are of different lengths on the left and normalized in each head on the right."),
        ("all", "head", "The queries are normalized over all heads together on the left and normalized in each head "),
    ],
)
def test_queries_that_are_normalized_in_other_ways(left: str, right: str, said: str) -> None:
    sides = (type("Side", (Normed,), {"over": over})() for over in (left, right))
    (reason,) = compared(*sides).reasons
    assert reason.kind == "norm"
    assert reason.sentence.startswith(said)


class TurnedPairs(nn.Module):
    """Features are turned in halves or in pairs, and the scores have one of two scales."""

    in_pairs, scale = False, 0.5

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
        first, second = (x[..., ::2], x[..., 1::2]) if self.in_pairs else x.chunk(2, -1)
        both = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.stack(both, -1).flatten(-2) if self.in_pairs else torch.cat(both, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (self.turn(q) @ self.turn(k).mT * self.scale).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_of_two_reasons_neither_is_called_the_only_one() -> None:
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    right = type("Side", (TurnedPairs,), {"in_pairs": True, "scale": 0.1})()
    reasons = diff(TurnedPairs(), right, x).reasons
    assert [reason.kind for reason in reasons] == ["scale", "rotation"]
    assert not any("Nothing else differs" in reason.sentence for reason in reasons)
    assert reasons[-1].sentence.endswith("With all of these changes, the right returns the same.")


class Capped(nn.Module):
    cap = 5.0

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = 3 * self.q(x) @ self.k(x).mT
        return (torch.tanh(scores / self.cap) * self.cap).softmax(-1) @ self.v(x)


def test_a_soft_cap_is_not_called_a_bias() -> None:
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    assert not diff(Capped(), type("Side", (Capped,), {"cap": 9.0})(), x).reasons


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_copies_in_another_order_are_told() -> None:
    report = compared(ByHead(), Renamed())
    assert report.outcome == "same"
    assert "(heads qkv head_dim) -> (qkv heads head_dim)" in " ".join(report.answer)
