"""Devices: those that are here are found, and the others are answered with those that are."""

from __future__ import annotations

import pytest
import torch

from mha_inspect.build.target import available, resolve
from mha_inspect.errors import DeviceError


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_every_machine_has_these(name: str, dtype: str) -> None:
    assert resolve(name, dtype) == torch.device(name)


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "", "CPU", "cpu:7"])
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_is_the_current_device() -> None:
    assert resolve("cuda", "float64") == torch.device("cuda", torch.cuda.current_device())
