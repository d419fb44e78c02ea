"""Targets: what is imported, what is built with which arguments, and what is said where that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.errors import DeviceError, InputError, MhaInspectError, SpecError
from mha_inspect.making.importing import stdout_for_the_answer
from mha_inspect.making.target import Target, TargetSpec, available, load_target, resolve
from mha_inspect.making.vocabulary import Flags

STYLES = str(Path(__file__).parents[1] / "call" / "styles.py")
SIZES = {"embed_dim": 14, "num_heads": 2, "dropout": 0.0, "bias": True, "seq_len": 5}


def flags(**typed: Any) -> Flags:
    return Flags({**SIZES, **typed}, frozenset(typed), frozenset(typed))


def load(name: str, settings: dict[str, str] | None = None, **given: Any) -> Target:
    typed = given.pop("flags", flags())
    return load_target(f"{STYLES}:{name}", settings or {}, TargetSpec(flags=typed, **given))


def styles() -> Any:
    return sys.modules[type(load("Matrices").module).__module__]


def same(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_class_is_built_from_flags_and_seed():
    target = load("Tutorial", seed=3)
    kind = type(target.module)
    torch.manual_seed(3)
    assert same(target.module, kind(14, 2, dropout=0.1))
    assert target.passed == {"d_model": 14, "h": 2}
    assert not target.module.training
    assert load("Tutorial", training=True).module.training
    assert not same(load("Tutorial", seed=4).module, target.module)
    assert "d_model=14 (--embed-dim)" in target.notes[0]


def test_optional_arguments_are_left_alone_unless_asked_for():
    assert load("Tutorial").passed.keys() == {"d_model", "h"}
    assert load("Tutorial", flags=flags(dropout=0.25)).passed["dropout"] == 0.25
    assert load("Cross", {"query_dim": "3"}).passed == {"query_dim": 3}
    assert load("Cross", {"query_dim": "3"}, flags=flags(num_heads=7)).passed == {"query_dim": 3, "heads": 7}
    assert load("Cross", {"query_dim": "3"}, flags=flags(kdim=5)).module.kv.in_features == 5


@pytest.mark.parametrize(
    ("name", "settings", "width", "heads"),
    [
        ("Configured", {}, 14, 2),
        ("Configured", {"config.n_embd": "6"}, 6, 2),
        ("make", {"depth": "3"}, 14, 2),
    ],
)
def test_configs_are_built_too(name, settings, width, heads):
    module = load(name, settings).module
    inner = module if name == "Configured" else module[-1]
    assert (inner.qkv.in_features, inner.num_heads) == (width, heads)
    assert name != "make" or len(module) == 3


def test_flags_and_settings_reach_a_dictionary_of_the_file_that_stays_as_it_is():
    before = dict(styles().SETTINGS)
    assert load("FromDict", flags=flags(num_heads=2)).module.num_heads == 2
    assert load("FromDict", {"cfg.n_head": "10"}).module.num_heads == 10
    assert before == styles().SETTINGS
    assert load("FromDict", {"cfg": "SETTINGS"}).module.num_heads == styles().SETTINGS["n_head"]


def test_a_module_that_its_file_has_made():
    assert load("ready").module is styles().ready
    with pytest.raises(SpecError, match="--embed-dim cannot change it"):
        load("ready", flags=flags(embed_dim=3))


def test_dtype_and_device():
    assert load("Matrices", dtype="float64").module.wq.dtype == torch.float64
    assert load("Matrices", device="meta").module.wq.is_meta


def test_by_name_of_package(monkeypatch, tmp_path):
    package = tmp_path / "somebodys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("WIDTH = 11\n")
    (package / "layer.py").write_text(
        "from torch import nn\nfrom .sizes import WIDTH\n\n"
        "class Layer(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = nn.Linear(WIDTH, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert load_target("somebodys.layer:Layer", {}, TargetSpec()).module.linear.in_features == 11
    # A file of a package is imported as a part of it: its relative imports work.
    assert load_target("somebodys/layer.py:Layer", {}, TargetSpec()).module.linear.in_features == 11
    assert load_target("torch.nn:MultiheadAttention", {}, TargetSpec(flags=flags())).passed == {
        "embed_dim": 14,
        "num_heads": 2,
    }


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Nope", {}, ["no Nope", "Configured"]),
        ("make_nothing", {}, ["returned an int", "torch.nn.Module"]),
        ("attention", {}, ["query, key, value", "forward of a torch.nn.Module"]),
        ("Refusing", {"dim": "5", "heads": "2"}, ["Refusing(dim=5, heads=2)", "AssertionError", "dim % heads"]),
        ("Tutorial", {"d_modle": "3"}, ["d_modle", "d_model, h, dropout", "Did you mean d_model?"]),
        ("Tutorial", {"h": "two"}, ["--set h=two", "a whole number"]),
    ],
)
def test_what_cannot_be_built(name, settings, said):
    with pytest.raises(MhaInspectError) as refused:
        load(name, settings)
    assert [part for part in said if part not in str(refused.value)] == []
    assert str(refused.value).isprintable()


def test_a_flag_that_nothing_takes():
    with pytest.raises(SpecError, match=r"no argument for --num-kv-heads. Arguments: d_model, h, dropout"):
        load("Tutorial", flags=flags(num_kv_heads=3))
    # A variable that is set for every command is not a demand.
    quiet = Flags({**SIZES, "num_kv_heads": 3}, frozenset({"num_kv_heads"}), frozenset())
    assert load("Tutorial", flags=quiet).passed == {"d_model": 14, "h": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\ndef f(:\n", ["SyntaxError", "broken.py:2"]),
        ("x = 1\n\nassert x == 2, 'x must be 2'\n", ["AssertionError: x must be 2", "broken.py:3"]),
    ],
)
def test_one_line_of_an_import_that_fails(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken.py"
    file.write_text(content)
    with pytest.raises(InputError, match=r"cannot be imported") as refused:
        load_target(f"{file}:X", {}, TargetSpec())
    assert [part for part in said if part not in str(refused.value)] == []
    assert str(refused.value).isprintable()
    assert "broken" not in sys.modules


def test_what_a_target_prints_does_not_reach_stdout(capfd):
    import os

    with stdout_for_the_answer():
        print("from python")
        os.write(1, b"from a library\n")
    print("the answer")
    out, err = capfd.readouterr()
    assert out == "the answer\n"
    assert "from python" in err


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "cpu:7"])
def test_what_is_not_here_is_answered_with_what_is(name: str) -> None:
    with pytest.raises(DeviceError) as caught:
        resolve(name, "float32")
    assert repr(name) in str(caught.value)
    assert all(here in str(caught.value) for here in available())


def test_a_machine_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, **_: tensor)
    assert resolve("cuda", "float32") == torch.device("cuda:1")
    assert resolve("cuda:0", "float32") == torch.device("cuda:0")
    with pytest.raises(DeviceError, match="cuda:0, cuda:1"):
        resolve("cuda:2", "float32")


def test_a_dtype_that_the_device_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nand a page of text")

    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    with pytest.raises(DeviceError, match="cpu cannot run dtype float16") as caught:
        resolve("cpu", "float16")
    assert "page" not in str(caught.value)
