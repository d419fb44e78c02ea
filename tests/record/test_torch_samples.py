"""Sample inputs of torch for operations and modules: nothing raises, and results are bit for bit the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch

import mha_inspect
from mha_inspect.record.arguments import tensors_in

methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
modules = pytest.importorskip("torch.testing._internal.common_modules")

SAMPLES = 3
OPS = [op for op in methods.op_db if torch.float32 in op.supported_dtypes("cpu")]
DRAWS = {"empty", "rand", "bernoulli", "multinomial", "normal"}
"""Results that differ in each run by themselves: memory without content, and operations that samples give no seed."""
NAMED = ("masked.mean", "gather", "nn.functional.scaled_dot_product_attention", "softmax")
CHOSEN = [op for at, op in enumerate(OPS) if at % 60 == 0 or op.name in NAMED]
CHOSEN = [op for op in CHOSEN if not DRAWS & {*op.name.replace("nn.functional.", "").split("_")}]
OTHER_WAY = ("svdvals", "eigvalsh")
"""Ends of the names of operations that torch computes another way under any dispatch mode: the last digit differs."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(call: Callable[[], Any], *, bits: bool = True) -> None:
    """Run a call plainly and recorded; both have the same results, or raise the same type of error.

    Without `bits` the results are equal within rounding.
    """

    def outcome() -> Any:
        torch.manual_seed(0)
        try:
            return [tensor for _, tensor in tensors_in(call())]
        except Exception as error:
            return type(error)

    plain = outcome()
    with mha_inspect.recording() as seen:
        recorded = outcome()
    assert seen.trace.failure is None
    if isinstance(plain, type) or isinstance(recorded, type):
        assert plain is recorded
        return
    assert len(plain) == len(recorded)
    for left, right in zip(plain, recorded, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        if left.layout == torch.strided and bits:
            assert left.numel() == 0 or torch.equal(bytes_of(left), bytes_of(right))
        elif left.layout == torch.strided:
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("op", CHOSEN, ids=[f"{op.name}.{op.variant_test_name}".rstrip(".") for op in CHOSEN])
def test_an_operation_on_torchs_own_samples(op: Any) -> None:
    torch.manual_seed(0)
    samples = [*islice(op.sample_inputs("cpu", torch.float32), SAMPLES)]
    assert samples
    for sample in samples:
        same(
            lambda sample=sample: op(*copy.deepcopy((sample.input, *sample.args)), **copy.deepcopy(sample.kwargs)),
            bits=not op.name.endswith(OTHER_WAY),
        )


MODULES = [info for at, info in enumerate(modules.module_db) if at % 25 == 0 or "Attention" in info.name]
MODULES += [info for info in modules.module_db if info.name.startswith("nn.Transformer")]
MODULES = list({info.name: info for info in MODULES}.values())


@pytest.mark.parametrize("info", MODULES, ids=[info.name for info in MODULES])
def test_a_module_on_torchs_own_samples(info: Any) -> None:
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=False)
    for given in inputs[:SAMPLES]:
        if given.forward_input is None:
            continue
        kwargs = {"dtype": torch.float32, **given.constructor_input.kwargs}
        try:
            module = info.module_cls(*given.constructor_input.args, **kwargs).eval()
        except TypeError:  # it has no dtype
            module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).eval()
        call = given.forward_input
        same(lambda m=module, c=call: copy.deepcopy(m)(*copy.deepcopy(c.args), **copy.deepcopy(c.kwargs)))
