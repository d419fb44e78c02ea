"""What is found out about a forward: which axis is the batch, what nobody can guess, and what a function returns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.__main__ import run
from mha_inspect.call.call import TargetFailedError, explaining
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.call.load import subject_of
from mha_inspect.call.part import with_the_same
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.making.arguments import parse_shapes
from mha_inspect.making.target import Target, TargetSpec, load_target
from mha_inspect.making.vocabulary import Flags

FILE = str(Path(__file__).parent / "masked.py")


def loaded(name: str, settings: dict[str, str] | None = None, shapes: tuple[str, ...] = (), **inputs: Any):
    target = load_target(f"{FILE}:{name}", settings or {}, TargetSpec())
    given = frozenset({"batch_first"} & set(inputs))
    flags = Flags({"batch_first": inputs.pop("batch_first", True)}, given, frozenset(inputs))
    asked = Asked(InputSpec(**{"batch": 2, "seq_len": 5, **inputs}), flags, parse_shapes(shapes))
    return target, make_call(target, asked)


# -- which axis is the batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("Keeps", (2, 5, 12), None),
        ("Words", (5, 2, 12), "x is `seq batch embed`: the forward unpacks x.shape as length, bsz. Use --batch-first"),
        (
            "Wraps",
            (5, 2, 12),
            "x is `seq batch embed`: the MultiheadAttention inside takes .*--batch-first",
        ),
        ("WrapsTurned", (2, 5, 12), None),
        (
            "WrapsPooled",
            (2, 5, 12),
            "x is `batch seq embed`: the forward does not say, .* --seq-first",
        ),
    ],
)
def test_the_layout_is_what_the_forward_says(name: str, shape: tuple[int, ...], said: str | None) -> None:
    _, call = loaded(name)
    assert tuple(call.kwargs["x"].shape) == shape
    assert len(call.said) == (said is not None)
    assert said is None or re.match(said, call.said[0])


@pytest.mark.parametrize(("name", "first"), [("Keeps", False), ("Wraps", False), ("Words", True)])
def test_a_layout_that_is_given_is_taken(name: str, first: bool) -> None:
    _, call = loaded(name, batch_first=first)
    assert tuple(call.kwargs["x"].shape) == ((2, 5, 12) if first else (5, 2, 12))
    assert call.said == ()


# -- how often it is run -----------------------------------------------------------------------------------------------


def test_a_forward_is_run_once_to_know_its_inputs_and_once_to_be_seen(capsys: pytest.CaptureFixture[str]) -> None:
    kind = type(loaded("Calls", batch=1)[0].module)
    assert kind.calls == 1
    assert run(["trace", f"{FILE}:Calls", "--batch", "2", "--seq-len", "5"]) == 0
    assert "weights " in capsys.readouterr().out
    assert kind.calls == 3


# -- a width that no weight shows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["NoWeights", "OfSetting"])
def test_a_width_that_was_drawn_is_replaced_by_one_with_which_the_forward_runs(name: str) -> None:
    target, call = loaded(name)
    assert [tuple(tensor.shape) for tensor in call.kwargs.values()] == [(2, 5, 12)] * 2
    target.module(**call.kwargs)
    _, call = loaded(name, {"num_hidden": "24"})
    assert [tuple(tensor.shape) for tensor in call.kwargs.values()] == [(2, 5, 24)] * 2
    _, call = loaded(name, shapes=("q=2x5x21", "k=2x5x21"))
    assert [tuple(tensor.shape) for tensor in call.kwargs.values()] == [(2, 5, 21)] * 2


def test_a_width_that_was_drawn_is_not_the_mistake_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", f"{FILE}:OfNoWidth"]) == 1
    output = capsys.readouterr().out
    assert "The width 37 was chosen by mha-inspect: nothing in the module shows it." in output
    assert "Give the width: --input-shape q=" in output
    assert "Use a head count" not in output


# -- what nobody can guess ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "arguments"),
    [
        ("Scaled", "Scaled.forward needs angles, .*--input-shape angles", "x=torch.randn(2, 12, 12), angles=..."),
        ("Lengths", "Lengths.forward needs seq_lens, ", "x=torch.randn(2, 12, 12), seq_lens=..."),
        ("Dictionary", "Dictionary.forward takes several tensors in batch", "batch=..."),
        ("Annotated", "Annotated.forward takes several tensors in pair", "pair=..."),
        ("Named", r"Named.forward takes several tensors in \*\*kwargs", "kwargs=..."),
    ],
)
def test_what_nobody_can_guess_is_refused_with_the_function_to_write(name: str, said: str, arguments: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        loaded(name)
    code = f"def attention():\n    module = {name}()\n    return module, (), dict({arguments})"
    assert str(refused.value).endswith(f"a function that returns it with the module:\n{code}")
    compile(code, "", "exec")


def test_what_runs_in_training_mode_alone_says_so() -> None:
    target, call = loaded("Trains")
    subject = subject_of(target, call, 0)
    with (
        pytest.raises(TargetFailedError, match=r"The forward succeeds in training mode. Use --train\.$"),
        explaining(subject),
    ):
        subject.plain()
    assert not target.module.training
    target.module.train()
    subject.plain()


def test_a_lazy_module_gets_a_width_or_is_refused() -> None:
    target, call = loaded("Lazy")
    assert tuple(call.kwargs["x"].shape) == (2, 5, 12)
    assert call.said == ("The lazy layers take any width and were given 12. Use --input-shape for another.",)
    # What was found out by running a copy leaves the module itself as it was.
    assert isinstance(target.module.first.weight, torch.nn.UninitializedParameter)
    with pytest.raises(InputError, match=r"LazyImage has lazy layers \(LazyConv1d\).*--input-shape x="):
        loaded("LazyImage")
    _, call = loaded("LazyImage", shapes=("x=2x5x12",))
    assert tuple(call.kwargs["x"].shape) == (2, 5, 12)


# -- a function that returns a module and its arguments ----------------------------------------------------------------


def test_a_function_returns_what_the_forward_is_called_with() -> None:
    target, call = loaded("scaled")
    assert target.name == "Scaled"
    assert torch.equal(call.kwargs["angles"], torch.ones(5, 12))
    assert call.notes == ("Called with x float32 [2, 5, 12], angles float32 [5, 12], returned with the module.",)
    target, call = loaded("in_dictionary")
    assert call.drawn == ("batch.x",)
    target.module(**call.kwargs)
    target, call = loaded("both")
    assert call.kwargs["need_weights"] is False
    assert not call.batch_first


def test_two_that_return_their_arguments_get_the_same() -> None:
    (target, call), (second, second_call) = loaded("scaled"), loaded("scaled", {"width": "13"})
    same = with_the_same(second_call, second.module, call, target.module)
    assert not torch.equal(second_call.kwargs["x"], call.kwargs["x"])
    assert all(torch.equal(same.kwargs[name], call.kwargs[name]) for name in ("x", "angles"))
    (target, call), (second, second_call) = loaded("in_dictionary"), loaded("in_dictionary")
    same = with_the_same(second_call, second.module, call, target.module)
    assert torch.equal(same.kwargs["batch"]["x"], call.kwargs["batch"]["x"])


def test_what_is_returned_must_be_arguments() -> None:
    with pytest.raises(InputError, match=r"without_arguments\(\) returned a module and .*\(module, args, kwargs\)"):
        loaded("without_arguments")
    with pytest.raises(SpecError, match=r"scaled returns its own inputs, so --padding does not apply"):
        loaded("scaled", padding=(1,))
    assert loaded("scaled", causal=True)[1].said[0].startswith("--causal made no mask")


class NamedOperands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24, 8))

    def forward(self, x):
        return torch.matmul(input=x, other=self.weight)


def test_a_product_whose_operands_are_passed_by_name_shows_the_width():
    call = make_call(Target(NamedOperands(), "NamedOperands", {}), Asked(InputSpec(batch=2, seq_len=5)))
    assert call.kwargs["x"].shape == (2, 5, 24)


def test_returned_arguments_are_moved_with_the_module() -> None:
    target = load_target(f"{FILE}:scaled", {}, TargetSpec(dtype="float64", device="meta"))
    call = make_call(target, Asked(InputSpec()))
    assert {(tensor.dtype, tensor.device.type) for tensor in call.kwargs.values()} == {(torch.float64, "meta")}
