"""The order of steps between a projection and its heads, and what else the heads are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import params, trace
from mha_inspect.reports.trace import AttentionReport

B, N, HEADS, HEAD_DIM = 2, 7, 3, 6
WIDTH = HEADS * HEAD_DIM


def turned(x: Tensor) -> Tensor:
    """Rotate heads by position, in halves."""
    angles = torch.outer(torch.arange(x.shape[-2]), 100.0 ** -(torch.arange(HEAD_DIM // 2) / HEAD_DIM))
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()), -1)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (HEAD_DIM,))


class Attend(nn.Module):
    """Attention whose heads of queries and keys a function changes."""

    def __init__(self, change: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.change = change or (lambda x: x)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k(x)), self.split(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.split(self.q(x)), self.keys(x)
        weights = (self.change(q) @ self.change(k).mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def told(module: nn.Module, *args: Tensor) -> tuple[AttentionReport, dict[str, str]]:
    torch.manual_seed(0)
    (one,) = trace(module.eval(), *(args or (torch.randn(B, N, WIDTH),))).attentions
    return one, {stage.name: stage.formula for stage in one.stages}


ORDERS = {
    "rms_norm(rotary(q_proj in heads))": lambda x: normed(turned(x)),  # nanochat
    "rotary(rms_norm(q_proj in heads))": lambda x: turned(normed(x)),  # Qwen3
    "rotary(q_proj in heads, then mul)": lambda x: turned(x * 0.5),  # ESM
    "rotary(q_proj in heads), then tanh": lambda x: turned(x).tanh(),
    "rms_norm(q_proj in heads, then tanh)": lambda x: normed(x.tanh()),
}


@pytest.mark.parametrize("formula", ORDERS)
def test_steps_have_the_order_of_the_code(formula: str) -> None:
    assert told(Attend(ORDERS[formula]))[1]["q_heads"] == formula


class NormedValues(Attend):
    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k(x)), normed(self.split(self.v(x)))


def test_a_norm_of_values_is_called_that() -> None:
    one, formulas = told(NormedValues())
    assert (formulas["v_heads"], one.qk_norm) == ("rms_norm(v_proj in heads)", None)


class Shorter(Attend):
    """Linformer: a matrix makes 4 keys and values of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.shorter = nn.Parameter(torch.randn(N, 4))

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (torch.einsum("bnd,nk->bkd", project(x), self.shorter) for project in (self.k, self.v))
        return self.split(k), self.split(v)


class WithToken(Attend):
    """The keys are those of a learned token too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys(torch.cat((self.token.expand(len(x), -1, -1), x), 1))


class WithMemory(Attend):
    """Three learned keys and values for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList(torch.randn(HEADS, 3, HEAD_DIM) for _ in range(2))

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (
            torch.cat((m.expand(len(x), -1, -1, -1), t), 2) for m, t in zip(self.more, super().keys(x), strict=True)
        )
        return k, v


def test_keys_that_a_matrix_makes_of_positions_are_computed() -> None:
    one, formulas = told(Shorter())
    assert (one.k_heads.shape, formulas["k_heads"]) == ((B, HEADS, 4, HEAD_DIM), "k_proj in heads, then bmm")


def test_keys_of_a_learned_token_too_are_self_attention() -> None:
    assert told(WithToken())[0].kind == ("self",)


def test_learned_keys_are_not_counted_as_one() -> None:
    assert told(WithMemory())[1]["k_heads"].endswith(", plus 3 prepended keys")
    roles = {row.name: row.role for row in params(WithMemory(), torch.randn(B, N, WIDTH)).parameters}
    assert roles["more.0"] == "learned, and prepended to the keys"


class Streams(Attend):
    """Flux and Stable Diffusion 3: the heads of an image and of a text, each with projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        *others, output = self.text
        heads = zip(others, (self.q, self.k, self.v), strict=True)
        q, k, v = (torch.cat((self.split(a(text)), self.split(b(x))), 2) for a, b in heads)
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.o(context[:, text.shape[1] :]), output(context[:, : text.shape[1]])


class TextKeys(Streams):
    """The keys of an image prompt beside those of the image."""

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        own = zip(super().keys(x), self.text[1:3], strict=True)
        k, v = (torch.cat((heads, self.split(project(self.prompt))), 2) for heads, project in own)
        return k, v

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        self.prompt = text
        return Attend.forward(self, x)


@pytest.mark.parametrize(("kind", "joined"), [(Streams, "qkv"), (TextKeys, "kv"), (WithMemory, ""), (WithToken, "")])
def test_heads_of_several_projections_are_told(kind: type[Attend], joined: str) -> None:
    args = (torch.randn(B, N, WIDTH), torch.randn(B, 5, WIDTH))[: 1 + issubclass(kind, Streams)]
    one, formulas = told(kind(), *args)
    ends = [side for side in "qkv" if formulas[f"{side}_heads"].endswith(", joined with those of another projection")]
    assert "".join(ends) == joined
    assert any("Several projections give the queries" in note for note in one.notes) == ("q" in joined)
    if kind is Streams:
        assert one.scores.shape == (B, HEADS, N + 5, N + 5)
