"""Each call that raises is shown at its line with its cause; a printed fix mends it, and others get no guess."""

from __future__ import annotations

import re
import traceback
from functools import cache

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import ForwardError
from mha_inspect.failures.causes import CAUSES
from mha_inspect.naming.pattern import STAGES
from mha_inspect.reports.trace import Failure

from .failing import FAILING, Failing


def called(case: Failing) -> nn.Module:
    torch.manual_seed(0)
    return case.make().eval()


@cache
def failure_of(name: str) -> Failure:
    case = FAILING[name]
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(called(case), *case.given(), **case.masks())
    assert caught.value.trace.failure is not None
    return caught.value.trace.failure


@pytest.mark.parametrize("name", FAILING)
def test_the_failure_is_that_of_a_plain_call(name: str) -> None:
    """The oracle is a run without the program: its error, and the last line of its traceback outside of libraries."""
    case, failure = FAILING[name], failure_of(name)
    with pytest.raises(Exception) as plain:  # noqa: PT011 - any that the call raises
        called(case)(*case.given(), **case.masks())
    assert failure.error == type(plain.value).__name__
    assert (failure.message.splitlines() or [""])[0] in str(plain.value)
    frames = [frame for frame in traceback.extract_tb(plain.tb) if "/tests/" in frame.filename]
    assert failure.source.endswith(f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}")


@pytest.mark.parametrize("name", FAILING)
def test_the_cause_is_named(name: str) -> None:
    case, failure = FAILING[name], failure_of(name)
    cause = "" if failure.cause is None else failure.cause.name
    if case.cause:
        assert cause == case.cause
        assert cause in CAUSES
    elif case.without_fix or "fewer keys" in name:
        assert failure.cause is None or not failure.cause.fix
    else:
        assert not cause
    assert [part for part in case.clash if part not in failure.clash] == []
    if case.operands:
        assert tuple(operand.name for operand in failure.operands) == case.operands
    if case.completed:
        assert {*case.completed} <= {stage.name for stage in failure.completed}
        assert "weights" not in {stage.name for stage in failure.completed} - {*case.completed}


@pytest.mark.parametrize("name", [name for name, case in FAILING.items() if case.cause or case.without_fix])
def test_a_fix_mends_it(name: str) -> None:
    case, failure = FAILING[name], failure_of(name)
    fix = "" if failure.cause is None else failure.cause.fix
    assert [part for part in case.fix if part not in fix] == []
    assert bool(fix) != case.without_fix
    if case.mended is not None:
        case.mended()(*case.given(), **case.masks())


@pytest.mark.parametrize("name", [name for name, case in FAILING.items() if case.never])
def test_what_is_false_is_never_said(name: str) -> None:
    case, failure = FAILING[name], failure_of(name)
    said = failure.clash
    if failure.cause is not None:
        said = f"{said} {failure.cause.explanation} {failure.cause.fix}"
    assert [part for part in case.never if part.lower() in said.lower()] == []


@pytest.mark.parametrize("name", [name for name, case in FAILING.items() if case.argument])
def test_printed_code_for_a_mask_runs_and_masks_what_was_meant(name: str) -> None:
    case, failure = FAILING[name], failure_of(name)
    assert failure.cause is not None
    code = re.split(r" if 0 means masked out|\.$", failure.cause.fix)[0]
    ((argument, mask),), (x,) = case.masks().items(), case.given()
    module = called(case)
    weights = module.attn(x, x, x, **{case.argument: eval(code, {argument: mask})}, average_attn_weights=False)[1]
    hidden = mask if mask.dtype == torch.bool else mask == 0
    meant = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(hidden, float("-inf"))
    meant = meant[:, None, None] if argument == "key_padding_mask" else meant[:, None] if meant.dim() == 3 else meant
    q, k, _ = module.attn.in_proj_weight.chunk(3)
    q, k = ((x @ w.T).unflatten(-1, (3, 8)).transpose(1, 2) for w in (q, k))
    torch.testing.assert_close(weights, (q @ k.mT / 8**0.5 + meant).softmax(-1))


DIFFERING = {
    "batch_differs": {"batch"},
    "lengths_differ": {"key"},
    "head_dim_differs": {"head_dim"},
    "heads_differ": {"head_dim"},
    "wrong_width": {"embed"},
    "wrong_head_dim": {"query", "key"},
}
"""Of each cause, the axes that are what is wrong: they have two sizes in what was completed."""


@pytest.mark.parametrize("name", FAILING)
def test_an_axis_has_one_size_in_what_was_completed(name: str) -> None:
    failure, sizes = failure_of(name), dict[str, set[int]]()
    completed = [stage for stage in failure.completed if stage.name and "(" not in stage.axes]
    for stage in completed:
        for axis, size in zip(stage.axes.split(), stage.shape, strict=True):
            if not axis.isdigit():
                sizes.setdefault(axis, set()).add(size)
    differing = {axis for axis, found in sizes.items() if len(found) > 1}
    assert differing <= DIFFERING.get("" if failure.cause is None else failure.cause.name, set())
    order = [STAGES.index(stage.name) for stage in completed if stage.name in STAGES]
    assert order == sorted(order)


NAMES_OF_ONE = ["key_not_transposed", "no_key_transpose", "key_not_split", "concat_forgotten"]


@pytest.mark.parametrize("name", NAMES_OF_ONE)
def test_a_batch_of_one_is_named_as_one_of_two(name: str) -> None:
    case = FAILING[name]
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(called(case), *(argument[:1] for argument in case.given()))
    failures = caught.value.trace.failure, failure_of(name)
    told = [
        (failure.cause.name, [(s.name, s.axes) for s in failure.completed], [o.axes for o in failure.operands])
        for failure in failures
    ]
    assert told[0] == told[1]


def test_code_in_an_assert_runs_no_second_time() -> None:
    module = FAILING["assert: code that counts"].make()
    with pytest.raises(ForwardError):
        mha_inspect.trace(module, *FAILING["assert: code that counts"].given())
    assert module.reads == 1  # a run starts from the same attributes


def test_a_trial_leaves_the_module_and_the_random_numbers_as_they_were() -> None:
    module, state = FAILING["a buffer of slots"].make(), torch.get_rng_state()
    with pytest.raises(ForwardError):
        mha_inspect.trace(module, *FAILING["a buffer of slots"].given())
    assert not module.slots.any()
    assert torch.equal(torch.get_rng_state(), state)
