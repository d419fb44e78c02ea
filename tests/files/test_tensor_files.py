"""Files of tensors: what is read, and what is refused before it can do harm."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from mha_inspect.errors import DoesNotFitError, ExitCode, InputError, UnsafeFileError
from mha_inspect.files.tensors import content_of, read_tensors

from ..fuzz.files import saved


class Touches:
    """Pickled so that opening it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("dtype", "new"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.complex64, False),
    ],
)
def test_what_torch_saves_is_read_as_torch_reads_it(dtype: torch.dtype, new: bool, tmp_path: Path) -> None:
    whole = (torch.arange(60).reshape(3, 4, 5) % 7).to(dtype)
    views = {
        "a": whole,
        "b": whole[1:, ::2].transpose(0, 2),
        "c": whole[:1, :1, :1].expand(2, 3, 4),
        "d": whole[2, 3, 4],
    }
    views["e"] = torch.nn.Parameter(whole, requires_grad=dtype.is_floating_point)
    torch.save(views, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    tensors = read_tensors(tmp_path / "x.pt")
    assert list(tensors) == list(views)
    for name, expected in torch.load(tmp_path / "x.pt", weights_only=True).items():
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected)
        assert not tensors[name].requires_grad


def test_a_library_of_safetensors_reads_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    names = ("float32", "float16", "bfloat16", "int8", "bool", "float8_e4m3fn", "uint32", "int64")
    tensors = {name: (torch.arange(6).reshape(2, 3) % 2).to(getattr(torch, name)) for name in names}
    library.save_file(tensors, tmp_path / "x.safetensors")
    for name, tensor in read_tensors(tmp_path / "x.safetensors").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor.float(), tensors[name].float())
    assert list(content_of(tmp_path / "x.safetensors", (".safetensors",))["int8"].shape) == [2, 3]


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Touches(trap)))
    torch.save(Touches(trap), tmp_path / "zipped.pt")
    with pytest.raises(UnsafeFileError) as caught:
        read_tensors(tmp_path / "zipped.pt")
    assert caught.value.exit_code == ExitCode.REFUSED
    assert str(caught.value).count("\n") == 0
    with pytest.raises((UnsafeFileError, InputError)):
        read_tensors(tmp_path / "plain.pt")
    assert not trap.exists()


def test_the_environment_cannot_turn_safe_loading_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(Touches(tmp_path / "trap"), tmp_path / "x.pt")
    with pytest.raises(UnsafeFileError):
        read_tensors(tmp_path / "x.pt")
    assert not (tmp_path / "trap").exists()


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1000), tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as stored,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for entry in stored.namelist():
            deflated.writestr(entry, stored.read(entry))
    with pytest.raises(UnsafeFileError, match="unpacked size is unlimited"):
        read_tensors(tmp_path / "small.pt")


def test_a_tensor_that_claims_more_than_there_is_memory_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(1).expand(2**50), tmp_path / "x.pt")
    with pytest.raises(DoesNotFitError):
        read_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_cut_short(name: str, tmp_path: Path) -> None:
    torch.save(torch.zeros(1000), tmp_path / "x.pt")
    saved(tmp_path / "x.safetensors", {"a": torch.zeros(3)})
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-8])
    with pytest.raises(InputError, match="truncated"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.pt", None, "was not found"),
        ("x.txt", b"1 2 3", "does not end in .pt"),
        ("x.pt", b"", "empty"),
        ("x.pt", b"not a tensor at all", "torch.save"),
        ("x.safetensors", b"\xff" * 20, "safetensors"),
    ],
)
def test_a_file_that_is_no_tensor(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_tensors(tmp_path / name)
    assert str(caught.value).count("\n") <= 1
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "list"),
        ({"a": 3}, "'a'.* an int"),
        ({3: torch.zeros(1)}, "has the key 3, expected tensor names"),
        (torch.zeros(3, device="meta"), "on device meta"),
        (torch.zeros(0, 7), r"\[0, 7\]"),
        (torch.zeros(3, 7).to_sparse(), "to_dense"),
    ],
)
def test_a_torch_file_that_holds_something_else(content: object, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match=words):
        read_tensors(tmp_path / "x.pt")


def test_a_folder_and_words_for_a_terminal(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a file"):
        read_tensors(tmp_path)
    with pytest.raises(InputError) as caught:
        read_tensors(tmp_path / "\x1b[31mred.pt")
    assert "\x1b" not in str(caught.value)
