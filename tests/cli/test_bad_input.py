"""Input that cannot be used: exit code 2, what was asked with its numbers, the rule, and a way out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mha_inspect.cli.app import COMMANDS as ALL_COMMANDS

COMMANDS = [command for command in ALL_COMMANDS if command != "layers"]
"""Those that build a layer."""

# Distinct primes wherever sizes are independent; embed_dim is num_heads times a prime.
SIZES = ("--embed-dim", "14", "--batch", "3", "--seq-len", "5")
LAYER = (*SIZES, "--num-heads", "2")


def refused(answer: tuple[int, str, str], *said: str) -> None:
    code, out, err = answer
    assert (code, out) == (2, ""), err
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") <= 2
    assert [part for part in said if part not in err] == []


@pytest.mark.parametrize("command", ["trace", "params"])
def test_embed_dim_that_the_heads_do_not_divide(invoke, command):
    refused(
        invoke(command, "--embed-dim", "10", "--num-heads", "3"),
        "embed_dim 10",
        "num_heads 3",
        "divide 10: 1, 2, 5, 10.",
    )


def test_head_counts_that_do_not_divide(invoke):
    refused(invoke("compare-heads", "--embed-dim", "10", "--heads", "1,3"), "num_heads 3", "1, 2, 5, 10.")
    refused(invoke("params", "--embed-dim", "10", "--num-heads", "1,2,4"), "num_heads 4", "1, 2, 5, 10.")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--embed-dim", "--kdim", "--vdim", "--batch", "--seq-len", "--key-len"])
@pytest.mark.parametrize("size", ["0", "-7"])
def test_zero_and_negative_sizes(invoke, command, flag, size):
    refused(invoke(command, flag, size), f"{flag.removeprefix('--').replace('-', '_')} {size}", "must be 1 or more")


@pytest.mark.parametrize("command", ["trace", "params"])
@pytest.mark.parametrize("count", ["0", "-7"])
def test_zero_and_negative_head_counts(invoke, command, count):
    refused(invoke(command, "--num-heads", count), f"num_heads {count}", "must be 1 or more")
    refused(invoke("compare-heads", "--heads", f"1,{count}"), f"num_heads {count}", "must be 1 or more")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--padding", "6"), ["padding 6", "0 to 5"]),
        (("--padding", "1,2"), ["2 numbers for batch 3"]),
        (("--padding", "-1"), ["padding -1", "0 to 5"]),
        (("--dropout", "1.5"), ["dropout 1.5"]),
        (("--dropout", "nan"), ["dropout nan"]),
        (("--unbatched",), ["batch 3 contradicts unbatched"]),
    ],
)
def test_settings_that_contradict_each_other(invoke, flags, said):
    refused(invoke("trace", *LAYER, *flags), *said)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("device", ["cdua", "cuda:97", "", "cuda:x"])
def test_a_device_that_is_not_here(invoke, command, device):
    refused(invoke(command, "--embed-dim", "16", f"--device={device}"), "cpu", "meta")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dtype_that_the_device_cannot_run(invoke, monkeypatch, command):
    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("\"softmax_lastdim_kernel_impl\" not implemented for 'BFloat16'")

    # Every dtype runs on today's CPUs: this one does not.
    monkeypatch.setattr(torch.Tensor, "softmax", cannot)
    refused(invoke(command, "--embed-dim", "16", "--dtype", "bfloat16"), "cpu", "bfloat16", "float32")


def test_a_setting_that_the_layer_has_no_use_for(invoke):
    refused(invoke("trace", "--layer", "bert", "--kdim", "3"), "layer bert", "kdim 3", "torch")


@pytest.fixture
def saved(tmp_path):
    def save(name: str, content: object) -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".npy":
            np.save(path, content)
        else:
            torch.save(content, path)
        return str(path)

    return save


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.pt", torch.zeros(5, 7, dtype=torch.bool), ["[5, 7]", "`query key` [5, 5]", "[6, 5, 5]"]),
        ("heads.npy", np.zeros((2, 5, 5), dtype=bool), ["[2, 5, 5]", "`(batch heads) query key` [6, 5, 5]"]),
        (
            "numbers.pt",
            torch.ones(5, 5, dtype=torch.int64),
            ["int64", "booleans are meant", "mask.bool()"],
        ),
        ("text.pt", b"not a tensor", ["text.pt", "torch.save"]),
        ("empty.npy", b"", ["empty.npy", "empty"]),
    ],
)
def test_a_mask_that_does_not_fit(invoke, saved, name, content, said):
    refused(invoke("trace", *LAYER, "--attn-mask", saved(name, content)), *said)


@pytest.mark.parametrize("flag", ["--input", "--attn-mask"])
def test_a_file_that_is_absent(invoke, tmp_path, flag):
    refused(invoke("trace", *LAYER, flag, str(tmp_path / "absent.pt")), "absent.pt is not there")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("list.pt", [1, 2], ["list", "not a tensor"]),
        ("wide.pt", torch.zeros(3, 5, 13), ["[3, 5, 13]", "embed_dim 14", "--embed-dim 13"]),
        ("flat.npy", np.zeros((5, 14), dtype=np.float32), ["[5, 14]", "`batch query embed`", "--unbatched"]),
        ("number.npy", np.array(3.0), ["[]", "`batch query embed`", "3 dimensions"]),
        ("whole.pt", torch.zeros(3, 5, 14, dtype=torch.int32), ["int32", "floating-point"]),
        ("names.pt", {"q": torch.zeros(3, 5, 14), "k": torch.zeros(3, 5, 14)}, ["'q'", "query, key and value"]),
    ],
)
@pytest.mark.parametrize("command", ["trace", "compare-heads"])
def test_an_input_file_that_does_not_fit(invoke, saved, command, name, content, said):
    heads = ("--num-heads", "2") if command == "trace" else ("--heads", "1,2")
    refused(invoke(command, *SIZES, *heads, "--input", saved(name, content)), *said)


def test_what_cannot_fit_in_memory_is_refused(invoke):
    """As `trace` is, through the installed program."""
    code, out, err = invoke("compare-heads", "--seq-len", "100000000")
    assert (code, out) == (3, "")
    assert "seq_len" in err or "--seq-len" in err
    assert err.count("\n") <= 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trace --embed-dim 10 --num-heads 3", "embed_dim 10"),
        ("params --embed-dim 0", "embed_dim 0"),
        ("compare-heads --heads 8", "nothing to compare"),
        ("trace --device cdua", "cpu"),
    ],
)
def test_through_the_installed_program(program, line, said):
    refused(program(*line.split()), said)
