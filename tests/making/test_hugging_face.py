"""Models of Hugging Face transformers: built as the library builds them, off the network; nothing run for a file."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.call.call import Call
from mha_inspect.call.inputs import Asked, make_call
from mha_inspect.errors import ExitCode, InputError, SpecError, UnsafeFileError
from mha_inspect.layers.spec import InputSpec
from mha_inspect.making import bounded
from mha_inspect.making.hugging_face import NetworkNeededError
from mha_inspect.making.target import Target, TargetSpec, load_target
from mha_inspect.making.vocabulary import Flags

from ..hf_sizes import settings_of

transformers = pytest.importorskip("transformers")

BERT = {"num_hidden_layers": "3", "hidden_size": "14", "num_attention_heads": "2", "vocab_size": "53"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of the network fails the test."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def load(text: str, settings: dict[str, str] | None = None, **spec: Any) -> Target:
    return load_target(text, settings or {}, TargetSpec(**spec))


def call(target: Target, **inputs: Any) -> Call:
    typed = frozenset(inputs)
    spec = InputSpec(**{"batch": 3, "seq_len": 5, **inputs})
    return make_call(target, Asked(spec, Flags({}, typed, typed)))


def runs(target: Target) -> None:
    """The model takes what it is called with, and gives numbers."""
    made = call(target)
    with torch.no_grad():
        assert torch.isfinite(target.module(*made.args, **made.kwargs)[0]).all()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(11)
    config = transformers.BertConfig(
        hidden_size=14, num_hidden_layers=3, num_attention_heads=2, intermediate_size=17, vocab_size=53
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_type_is_built_as_the_library_builds_it():
    target = load("hf:bert", BERT, seed=3)
    config = transformers.BertConfig(**{name: int(value) for name, value in BERT.items()})
    torch.manual_seed(3)
    expected = transformers.BertModel._from_config(config).state_dict()
    found = target.module.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not target.module.training
    assert target.passed == {name: int(value) for name, value in BERT.items()}


def test_a_directory_gives_its_own_weights(saved):
    target = load(f"hf:{saved}", seed=3)
    expected = transformers.BertModel.from_pretrained(saved, local_files_only=True).state_dict()
    assert all(torch.equal(tensor, target.module.state_dict()[name]) for name, tensor in expected.items())
    assert "with the weights of the directory" in target.notes[0]
    shorter = load(f"hf:{saved}", {"num_hidden_layers": "1"})
    assert len(shorter.module.encoder.layer) == 1
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(shorter.module.state_dict()[name], expected[name])
    for file in saved.glob("*.safetensors"):
        file.unlink()
    assert "random" in load(f"hf:{saved}").notes[0]
    assert load(f"hf:{saved / 'config.json'}").module.config.hidden_size == 14


SMALL = {"num_hidden_layers": "1", "hidden_size": "14", "num_attention_heads": "2", "intermediate_size": "17"}


@pytest.mark.parametrize(
    ("text", "settings", "shapes"),
    [
        ("hf:bert", BERT, {"input_ids": (3, 5)}),
        ("hf:vit", {**SMALL, "image_size": "32"}, {"pixel_values": (3, 3, 32, 32)}),
    ],
)
def test_inputs_are_what_the_model_takes(text, settings, shapes):
    target = load(text, settings)
    assert {name: tuple(tensor.shape) for name, tensor in call(target).kwargs.items()} == shapes
    runs(target)


def test_heads_are_compared_in_a_model_built_for_each_count(invoke):
    settings = ["--set", "hidden_size=14", "--set", "num_hidden_layers=1", "--set", "vocab_size=53"]
    code, out, err = invoke("compare-heads", "hf:bert", "--heads", "1,2,7", *settings, "--json")
    assert (code, [row["head_dim"] for row in json.loads(out)["counts"]]) == (0, [14, 7, 2]), err


_LAYERS = {"vision_config.num_hidden_layers": "1", "text_config.num_hidden_layers": "2"}


def test_parts_of_a_configuration():
    target = load("hf:clip", _LAYERS, device="meta")
    config = target.module.config
    assert (config.vision_config.num_hidden_layers, config.text_config.num_hidden_layers) == (1, 2)
    with pytest.raises(SpecError, match=r"text_config.num_hiden_layers.*Did you mean text_config.num_hidden_layers"):
        load("hf:clip", {"text_config.num_hiden_layers": "2"})


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_what_does_not_fit_is_refused_and_meta_is_not(invoke, monkeypatch):
    monkeypatch.setattr(bounded, "free_memory", lambda: 100 << 20)
    code, out, err = invoke("trace", "hf:llama")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "hf:llama has parameters of 24.6 GiB, and 100 MiB of memory are free. Make it smaller, e.g. --set" in err
    module = load("hf:llama", device="meta").module
    assert sum(parameter.numel() for parameter in module.parameters()) == 6_607_343_616


@pytest.mark.parametrize("kind", ["bart", "deepseek_v3", "jamba"])
def test_what_a_model_takes_is_what_runs(kind):
    runs(load(f"hf:{kind}", settings_of(kind)))


@pytest.mark.parametrize(
    ("text", "settings", "kind", "said"),
    [
        ("hf:brt", {}, InputError, "Did you mean bert?"),
        ("hf:bert", {"num_layer": "2"}, SpecError, "Did you mean num_hidden_layers?"),
        ("hf:bert", {"num_attention_heads": "5"}, InputError, "not a multiple"),
        ("hf:bert-base-uncased", {}, NetworkNeededError, "hf:bert."),
    ],
)
def test_what_cannot_be_built(text, settings, kind, said):
    with pytest.raises(kind) as refused:
        load(text, settings)
    assert said in str(refused.value)
    assert str(refused.value).isprintable()
    assert refused.value.exit_code == (ExitCode.REFUSED if kind is NetworkNeededError else ExitCode.USAGE)


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (None, InputError, "config.json not found"),
        ("{", InputError, "not valid JSON"),
        ('{"a": 1}', InputError, "model_type is missing"),
        ('{"model_type": "mine", "auto_map": {"AutoModel": "evil.Model"}}', UnsafeFileError, "never run"),
    ],
)
def test_configurations_that_are_none(tmp_path, monkeypatch, content, kind, said):
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')\n")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as refused:
        load(f"hf:{tmp_path}")
    assert said in str(refused.value)
    assert "evil" not in sys.modules


def test_code_that_a_configuration_names_is_not_run(saved):
    config = json.loads((saved / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "evil.py").write_text("raise SystemExit('it was run')\n")
    assert type(load(f"hf:{saved}").module).__name__ == "BertModel"
