"""Where no known mistake explains a failing call, an edit of an operand does: each fix is run here in the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import trace
from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Cause, Failure

X = torch.randn(3, 12, 32)


class Run(nn.Module):
    def __init__(self, code: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.code, self.parts = code, nn.ModuleDict(parts)

    def forward(self, x: Tensor, m: Tensor | None = None) -> Tensor:
        return self.code(x, m, **self.parts)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def failure_of(module: nn.Module, *args: Any) -> Failure:
    with pytest.raises(ForwardError) as caught:
        trace(module.eval(), *args)
    failure = caught.value.trace.failure
    assert failure is not None
    return failure


def cause_of(module: nn.Module, *args: Any) -> Cause:
    cause = failure_of(module, *args).cause
    assert cause is not None
    return cause


def grouped(index: tuple[Any, ...]) -> Callable[..., Tensor]:
    def code(x: Tensor, m: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
        scores = heads(q(x), 8).unflatten(1, (2, 4)) @ heads(k(x), 2)[:, :, None].mT
        return scores.masked_fill(~m[index], -1e9).softmax(-1)

    return code


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_without_the_axis_of_groups(rows: int) -> None:
    parts = {"q": nn.Linear(32, 32), "k": nn.Linear(32, 8)}
    mask = torch.ones(3, rows, 12, 12, dtype=torch.bool)
    cause = cause_of(Run(grouped((...,)), **parts), X, mask)
    assert cause.name == "lacks_an_axis"
    index = (slice(None), None) if rows == 1 else (slice(None), slice(None), None)
    assert f"[{':, ' * (len(index) - 1)}None], which gives [3, 2, 4, 12, 12]" in cause.fix
    assert Run(grouped(index), **parts)(X, mask).shape == (3, 2, 4, 12, 12)


def test_a_view_that_takes_one_size_twice() -> None:
    def code(x: Tensor, m: Tensor, q: nn.Module) -> Tensor:
        return m.reshape(3, 1, m.shape[1], m.shape[1])

    cause = cause_of(Run(code, q=nn.Linear(32, 32)), X, torch.ones(3, 9, 12, dtype=torch.bool))
    assert (cause.name, cause.fix) == ("view_sizes", "m.reshape(3, 1, 9, 12).")


def test_a_table_for_more_features_than_are_turned() -> None:
    def code(x: Tensor, m: None, q: nn.Module) -> Tensor:
        return heads(q(x), 4)[..., :6] * torch.outer(torch.arange(12.0), torch.ones(8)).cos()

    cause = cause_of(Run(code, q=nn.Linear(32, 32)), X)
    assert cause.name == "table_size"
    assert "for 6 features" in cause.fix
    assert "[..., :6]" in cause.fix


def test_three_equal_parts_of_few_keys_and_many_queries() -> None:
    def code(x: Tensor, m: None, qkv: nn.Module, norm: nn.Module) -> Tensor:
        return heads(norm(qkv(x).chunk(3, -1)[0]), 8)

    def split(x: Tensor, m: None, qkv: nn.Module, norm: nn.Module) -> Tensor:
        return heads(norm(qkv(x).split([32, 8, 8], -1)[0]), 8)

    parts = {"qkv": nn.Linear(32, 48), "norm": nn.RMSNorm(32)}
    cause = cause_of(Run(code, **parts), X)
    assert (cause.name, cause.fix.startswith("split([32, 8, 8], -1)")) == ("unequal_parts", True)
    assert Run(split, **parts)(X).shape == (3, 8, 12, 4)


def test_an_output_projection_as_wide_as_the_keys() -> None:
    def code(x: Tensor, m: None, rows: int, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
        weights = (heads(q(x), 6) @ heads(k(x), 6).mT).softmax(-1)
        return torch.mm((weights @ heads(v(x), 6)).transpose(1, 2).reshape(-1, 12), torch.ones(rows, 12))

    parts = {"q": nn.Linear(32, 60), "k": nn.Linear(32, 60), "v": nn.Linear(32, 12)}
    cause = cause_of(Run(lambda x, m, **kw: code(x, m, 60, **kw), **parts), X)
    assert cause.name == "output_rows"
    assert "[12, 12]" in cause.fix
    assert Run(lambda x, m, **kw: code(x, m, 12, **kw), **parts)(X).shape == (36, 12)


UNKNOWN = {
    "two activations": lambda x, m, q: q(x)[:, :5] * q(x)[:, :7],
    "no axis fits": lambda x, m, q: q(x).unflatten(-1, (4, 8)) + torch.ones(5, 4, 8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_edit_mends_has_no_fix(name: str) -> None:
    failure = failure_of(Run(UNKNOWN[name], q=nn.Linear(32, 32)), X)
    assert failure.cause is None or not failure.cause.fix


# -- a norm of all heads, and a table with positions in the place of the batch -----------------------------------------


class OwnNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


@pytest.mark.parametrize(("norm", "is_transposed"), [(nn.RMSNorm, False), (OwnNorm, True)])
def test_a_norm_of_the_whole_projection_gets_heads(norm: Callable[[int], nn.Module], is_transposed: bool) -> None:
    def code(x: Tensor, m: None, q: nn.Module, q_norm: nn.Module) -> Tensor:
        split = q(x).unflatten(-1, (4, 8))
        return q_norm(split.transpose(1, 2) if is_transposed else split)

    def mended(x: Tensor, m: None, q: nn.Module, q_norm: nn.Module) -> Tensor:
        return q_norm(q(x)).unflatten(-1, (4, 8))

    parts = {"q": nn.Linear(32, 32), "q_norm": norm(32)}
    cause = cause_of(Run(code, **parts), X)
    assert cause.name == "norm_of_whole"
    assert "q_norm.weight has 32 features = 4 heads · 8, for the whole projection" in cause.explanation
    assert re.match(r"Apply [\w.]*q_norm before the heads are split, or create it for 8 features if", cause.fix)
    assert Run(mended, **parts)(X).shape == (3, 12, 4, 8)
    parts["q_norm"] = norm(8)
    assert Run(code, **parts)(X).numel() == 3 * 12 * 32


def test_a_norm_of_another_width_is_not_of_all_heads() -> None:
    def code(x: Tensor, m: None, q: nn.Module, q_norm: nn.Module) -> Tensor:
        return q_norm(q(x).unflatten(-1, (4, 8)))

    cause = failure_of(Run(code, q=nn.Linear(32, 32), q_norm=nn.RMSNorm(48)), X).cause
    assert cause is None or cause.name != "norm_of_whole"


class Positions(nn.Module):
    def __init__(self, code: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.code = code
        self.register_buffer("pe", torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x, self.pe)


def test_a_table_of_positions_is_cut_along_its_dimension_of_size_1() -> None:
    cause = cause_of(Positions(lambda x, pe: x + pe[:, : x.shape[1]], 50, 1, 32), X)
    assert cause.name == "table_transposed"
    assert "the 50 positions meet dimension 0 of x" in cause.explanation
    assert cause.fix == "pe[:12].transpose(0, 1), which gives [1, 12, 32]."
    assert Positions(lambda x, pe: x + pe[:12].transpose(0, 1), 50, 1, 32)(X).shape == X.shape


def test_a_table_of_positions_that_is_not_cut_has_two_readings() -> None:
    cause = cause_of(Positions(lambda x, pe: x + pe, 50, 1, 32), X)
    assert cause.name == "table_transposed"
    assert "pe[:12].transpose(0, 1) if x is `batch sequence embed`" in cause.fix
    assert "pe[:3] if it is `sequence batch embed`" in cause.fix
    cause = cause_of(Positions(lambda x, pe: pe + x, 1, 50, 32), X)
    assert "pe[:, :3].transpose(0, 1) if x is `sequence batch embed`" in cause.fix
    assert "pe[:, :12] if it is `batch sequence embed`" in cause.fix


# -- the numbers of an assert -----------------------------------------------------------------------------------------


class Asserts(nn.Module):
    """An assert of each form; no code in it may run a second time."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.heads, self.reads = form, 4, 0

    @property
    def counted(self) -> int:
        self.reads += 1
        return 5

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        if self.form == "size":
            assert mask.size(0) == batch
            assert mask.size(1) == length
        if self.form == "shape":
            assert mask.shape == (batch, length), "the mask must be batch key"
        if self.form == "arithmetic":
            assert width % 3 == 0
        if self.form == "and":
            assert mask.dim() == 2 and len(mask) == self.heads  # noqa: PT018
        if self.form == "code":
            assert self.counted == length
        return x


@pytest.mark.parametrize(
    ("form", "clash"),
    [
        ("size", "mask.size(1) is 11 and length is 12 (dimension 1 of x)."),
        ("shape", "mask.shape is [3, 11] and (batch, length) is [3, 12]."),
        ("arithmetic", "width % 3 is 2 and 0 is expected."),
        ("and", "len(mask) is 3 (dimension 0 of x) and self.heads is 4."),
        ("code", ""),
    ],
)
def test_an_assert_shows_the_numbers_that_it_compares(form: str, clash: str) -> None:
    module = Asserts(form)
    assert failure_of(module, X, torch.ones(3, 11)).clash == clash
    assert module.reads == (1 if form == "code" else 0)  # a run starts from the same attributes


def test_the_words_of_an_assert_stay_before_its_numbers() -> None:
    def code(x: Tensor, m: None, q: nn.Module) -> Tensor:
        y = q(x)
        assert y.shape[-1] % 7 == 0, "width must be a multiple of 7"
        return y

    with pytest.raises(ForwardError) as caught:
        trace(Run(code, q=nn.Linear(32, 32)).eval(), X)
    assert "width must be a multiple of 7: y.shape[-1] % 7 is 4 and 0 is expected" in caught.value.trace.verdict


def test_a_number_that_half_precision_lacks() -> None:
    def code(x: Tensor, m: Tensor | None, q: nn.Module) -> Tensor:
        assert m is not None
        scores = heads(q(x), 4) @ heads(q(x), 4).mT
        return scores.masked_fill(m == 0, -1e10).softmax(-1)

    failure = failure_of(Run(code, q=nn.Linear(32, 32)).half(), X.half(), torch.ones(3, 1, 1, 12))
    assert failure.cause is not None
    assert failure.cause.name == "number_too_large"
    assert failure.cause.explanation == ("scores is float16, and its smallest number is -65,504: -1e+10 does not fit.")
    assert failure.cause.fix == "torch.finfo(scores.dtype).min in place of -1e+10."
    # The oracle: with the number of the fix the same module runs.
    scores = torch.randn(3, 4, 12, 12).half()
    assert bool(scores.masked_fill(torch.ones(3, 1, 1, 12) == 0, torch.finfo(scores.dtype).min).isfinite().all())
