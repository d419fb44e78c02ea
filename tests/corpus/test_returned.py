"""What a forward may return that is no tensor of a number for each token: nobody is accused, and no command fails."""

from __future__ import annotations

import pytest
import torch

import mha_inspect

from .returning import COMPARED, NOTHING, Returning, Slots


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*COMPARED, *NOTHING])
def test_what_is_returned_accuses_nobody(name: str) -> None:
    module, x = Returning({**COMPARED, **NOTHING}[name]), torch.randn(2, 5, 8)
    report = mha_inspect.check(module, x)
    assert report.findings == ()
    reasons = {skipped.check: skipped.reason for skipped in report.left_out}
    assert (reasons.get("finite") == "the forward returns no tensor of numbers") == (name in NOTHING)


@pytest.mark.parametrize("name", ["a loss and ids", "sparse", "nested", "a dataclass"])
def test_what_is_returned_is_compared(name: str) -> None:
    module, changed, x = Returning(COMPARED[name]), Returning(COMPARED[name]), torch.randn(2, 5, 8)
    assert mha_inspect.diff(module, changed, x, same_weights=False).outcome == "differs"
    assert mha_inspect.diff(module, changed, x, same_weights=True).outcome == "same"


def test_an_imaginary_part_is_compared() -> None:
    x = torch.randn(2, 5, 8)
    once, again, twice = (Returning(lambda y, by=by: torch.complex(y.detach() * 0 + 1, by * y)) for by in (1, 1, 2))
    assert mha_inspect.diff(once, twice, x, same_weights=True).outcome == "differs"
    assert mha_inspect.diff(once, again, x, same_weights=True).outcome == "same"


def test_what_one_look_holds_for_several_tensors_is_held_for_each() -> None:
    report = mha_inspect.check(Slots(), torch.randn(2, 5, 8))
    assert report.findings == ()
    assert "softmax" in {passed.check for passed in report.passed}
