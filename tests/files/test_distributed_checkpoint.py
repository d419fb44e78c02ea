"""Directories of torch.distributed.checkpoint: what is read of their metadata, and what is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn

import mha_inspect
from mha_inspect.errors import ExitCode, InputError, UnsafeFileError
from mha_inspect.files.checkpoint import read_checkpoint

from .test_tensor_files import Touches


def save(content: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        distributed_checkpoint.save(content, checkpoint_id=folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer = nn.MultiheadAttention(24, 3)
    moments = {name: torch.zeros_like(parameter) for name, parameter in layer.named_parameters()}
    content = {"model": layer.state_dict(), "optimizer": {"state": moments}, "step": 7}
    return save(content, tmp_path_factory.mktemp("saved") / "step-7")


def test_names_shapes_and_dtypes_are_those_that_were_saved(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
    tensors = {str(dtype).removeprefix("torch."): torch.zeros(3, 5, dtype=torch.float32).to(dtype) for dtype in dtypes}
    tensors["number"] = torch.tensor(2.0)
    read = read_checkpoint(save(dict(tensors), tmp_path / "x")).tensors
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].shape == tuple(tensor.shape)
        assert f"torch.{read[name].dtype}" == str(tensor.dtype)
        assert read[name].nbytes == tensor.nbytes
        assert not read[name].has_numbers


def test_a_member_of_an_enum_may_be_written_as_getattr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Python 3.11.0 to 3.11.3 do.
    format_of_memory = distributed_checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(format_of_memory, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
    folder = save({"weight": torch.zeros(3, 5)}, tmp_path / "x")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_checkpoint(folder).tensors["weight"].shape == (3, 5)


@pytest.mark.parametrize("ending", ["", "/.metadata"])
def test_params_lists_the_model_by_head_without_the_optimizer(folder: Path, ending: str) -> None:
    report = mha_inspect.params(f"{folder}{ending}", num_heads=3, per_head=True)
    layer = nn.MultiheadAttention(24, 3)
    assert {p.name: p.shape for p in report.parameters} == {n: tuple(p.shape) for n, p in layer.named_parameters()}
    weight = next(p for p in report.parameters if p.name == "in_proj_weight")
    assert weight.role == "W_q, W_k, W_v stacked: rows 0–23, 24–47, 48–71"
    assert [piece.rows for piece in weight.heads or () if piece.part == "W_k"] == [(24, 32), (32, 40), (40, 48)]
    assert any("'model'" in note for note in report.notes)


def test_the_command_reads_a_directory_without_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mha_inspect.files.checkpoint import read_checkpoint\n"
        f"print(len(read_checkpoint(Path({str(folder)!r})).tensors), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "False"]


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(content)
    return folder


class Imports:
    """Pickled so that opening it with a class of torch's runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return torch.serialization.os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", [Touches, Imports])
def test_code_in_the_metadata_is_refused_and_not_run(kind: type, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with pytest.raises((UnsafeFileError, InputError)) as caught:
        read_checkpoint(write(tmp_path / "x", pickle.dumps({"state_dict_metadata": kind(trap)})))
    assert str(caught.value).count("\n") == 0
    assert not trap.exists()
    if kind is Imports:
        assert caught.value.exit_code == ExitCode.REFUSED


def test_a_name_of_torchs_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    call = b"ctorch.serialization\nos.system\n(Vtouch " + str(trap).encode() + b"\ntR."
    with pytest.raises(InputError, match=r"torch\.distributed\.checkpoint"):
        read_checkpoint(write(tmp_path / "x", call))
    assert not trap.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-20],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"not a pickle",
        lambda content: pickle.dumps([1, 2]),
        lambda content: pickle.dumps({"state_dict_metadata": {"a": 1}}),
        lambda content: b"\x80\x04N" + b"r" + (2**31 - 1).to_bytes(4, "little") + b".",  # a memo of 32 GB
        lambda content: b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b".",  # a text of 1 TB
        lambda content: b"(" * 100_000,
        lambda content: b"]" + b"]a" * 50_000 + b".",
        lambda content: content.replace(b"float32", b"strange"),
    ],
)
def test_damaged_metadata_is_refused_in_one_line(change: Any, folder: Path, tmp_path: Path) -> None:
    damaged = change((folder / ".metadata").read_bytes())
    with pytest.raises(InputError) as caught:
        read_checkpoint(write(tmp_path / "x", damaged))
    assert str(caught.value).count("\n") == 0
    assert ".metadata" in str(caught.value)


@pytest.mark.parametrize("size", [(-1,), (2**63,), ("a",), (1.5,), tuple(range(65))])
def test_a_shape_that_is_none_is_refused(size: tuple[Any, ...], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    entry = TensorStorageMetadata(TensorProperties(torch.float32), size, [])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="truncated"):
        read_checkpoint(write(tmp_path / "x", pickle.dumps(Metadata({"a": entry}))))


def test_the_metadata_is_read_before_a_pickle_beside_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes((folder / ".metadata").read_bytes())
    torch.save({"w": torch.zeros(2)}, tmp_path / "rng.pt")
    assert "in_proj_weight" in read_checkpoint(tmp_path).tensors
