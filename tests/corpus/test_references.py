"""A reference gets the weights of the checked module: by name, else by head; else nothing is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport

from .planted import B, E, N, Right
from .references import Elsewhere, Fused, Grouped, Unscaled

X = torch.randn(B, N, E, generator=torch.Generator().manual_seed(0))


def against(module: nn.Module, reference: nn.Module) -> CheckReport:
    return mha_inspect.check(module, X, intent=Intent(reference=reference), only=["reference"])


def drawn(kind: Callable[..., nn.Module], seed: int, *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    return kind(*args, **kwargs)


@pytest.mark.parametrize(("kind", "trusted_kind"), [(Right, Right), (Fused, Right)])
def test_a_reference_with_other_random_weights_gets_those_of_the_module(
    kind: type[nn.Module], trusted_kind: type[nn.Module]
) -> None:
    module, trusted = drawn(kind, 1), drawn(trusted_kind, 2)
    before = copy.deepcopy(trusted.state_dict()), copy.deepcopy(module.state_dict())
    report = against(module, trusted)
    assert (report.findings, [passed.check for passed in report.passed]) == ((), ["reference"])
    for part, state in zip((trusted, module), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in part.state_dict().items())


def test_a_mistake_is_found_with_weights_that_are_copied_by_head() -> None:
    module, trusted = drawn(Unscaled, 1), drawn(Right, 2)
    (finding,) = against(module, trusted).findings
    assert (finding.check, finding.sure, "scores of attention 1" in finding.sentence) == ("reference", True, True)
    # By hand: the same numbers in both, and the largest difference of their outputs.
    with torch.no_grad():
        for part, rows in zip((trusted.q, trusted.k, trusted.v), range(3), strict=True):
            part.weight.copy_(module.qkv.weight[rows * E : (rows + 1) * E])
            part.bias.copy_(module.qkv.bias[rows * E : (rows + 1) * E])
        trusted.o.load_state_dict(module.out.state_dict())
        assert f"by {float((module(X) - trusted(X)).abs().max()):.3g};" in finding.sentence


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (lambda: Grouped(2), r"W_k is \[24, 24\] in Right and \[12, 24\] in the reference Grouped"),
        (lambda: Fused(norm=True), r"the reference Fused: not copied, outside the projections: norm\.weight"),
        (lambda: nn.Sequential(nn.Linear(E, E)), "no attention was found"),
    ],
)
def test_weights_that_cannot_be_copied_are_not_compared(reference: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(InputError, match=rf"could not be copied.*{why}.*Give a reference with .*--skip reference"):
        against(drawn(Right, 1), drawn(reference, 1))


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (lambda: nn.Linear(14, 14), r"RuntimeError: .*mat1 and mat2 shapes cannot be multiplied \(30x24 and"),
        (lambda: Right(o=partial(nn.Linear, 10, 10)), r"o\.weight is \[24, 24\], and \[10, 10\] in the reference"),
    ],
)
def test_a_reference_of_other_sizes_is_declined_with_both_shapes(reference: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(InputError, match=rf"the reference raises on these arguments: {why}.*Give a reference with"):
        against(drawn(Right, 1), drawn(reference, 1))


def test_another_output_shape_needs_no_weights() -> None:
    (finding,) = against(drawn(Right, 1), Elsewhere()).findings
    assert "Expected output shape [3, 1, 24]" in finding.sentence
