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
