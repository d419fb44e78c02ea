"""The table of what torch's operations do, against what torch itself says of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed._functional_collectives  # defines an operation
from torch.utils.flop_counter import flop_registry

from mha_inspect.graph import labels, rules
from mha_inspect.record import catalog
from mha_inspect.record.catalog import Trait, axes_rule, traits
from mha_inspect.record.kernels import STEPS

OPERATIONS = catalog._OPERATIONS


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of an operation, and of the one that works in place."""
    spaces = (torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional)
    forms = [(space, form) for space in spaces for form in (name, f"{name}_")]
    packets = [getattr(space, form) for space, form in forms if hasattr(space, form)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def with_trait(trait: Trait) -> list[str]:
    return [name for name in OPERATIONS if trait in traits(name)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_one_of_torchs_with_a_known_rule_and_known_traits(name: str) -> None:
    assert overloads(name) or name in STEPS
    rule, of_name = OPERATIONS[name]
    assert rule in {"", *rules.RULES, *labels.RULES}
    assert of_name <= set(get_args(Trait))


@pytest.mark.parametrize("trait", ["scales", "bends"])
def test_what_works_element_by_element_is_tagged_so_by_torch(trait: Trait) -> None:
    untagged = {"leaky_relu"} if torch.__version__ < "2.11" else set()  # torch 2.10 forgot it
    for name in with_trait(trait):
        tagged = any(torch.Tag.pointwise in overload.tags for overload in overloads(name))
        assert tagged != (name in untagged), name


def test_what_draws_is_what_torch_calls_nondeterministic() -> None:
    for name in with_trait("draws"):
        assert any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads(name)), name


def test_torch_counts_the_products_of_matrices_that_it_runs() -> None:
    counted = {str(packet).rpartition(".")[2] for packet in flop_registry}
    assert {"mm", "bmm", "addmm", "baddbmm", "convolution"} <= counted
    assert all("product" in traits(name) for name in ("mm", "bmm", "addmm", "baddbmm"))
    assert not [name for name in counted if "attention" in name and "product" in traits(name)]
    assert "convolution" in traits("convolution")


def test_an_operation_in_place_does_what_the_other_does_and_an_unknown_one_nothing() -> None:
    assert "scales" in traits("mul_")
    assert "fills" in traits("copy_")
    assert axes_rule("transpose_") == "permute"
    assert not traits("a_kernel_of_tomorrow")
    assert axes_rule("a_kernel_of_tomorrow") == ""
