"""The device that a layer runs on: is it there, and can it run this dtype?"""

from __future__ import annotations

import torch

from ..errors import DeviceError
from ..text import shown


def available() -> list[str]:
    """Return the names of the devices that are here: cpu, meta, and each accelerator."""
    names = ["cpu", "meta"]
    if torch.cuda.is_available():
        names += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def resolve(name: str, dtype: str) -> torch.device:
    """Return the device called `name` (`cuda` is the current CUDA device), known to run `dtype`.

    Raises:
        DeviceError: it is unknown or absent, or it cannot multiply in this dtype.
    """
    here = available()
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in here:
        cpu_alone = wanted.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None
        why = f": torch {torch.__version__} is built for the CPU alone" if cpu_alone else ""
        raise DeviceError(f"device {shown(repr(name))} is not here{why}. Devices that are here: {', '.join(here)}.")
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(wanted)
    _require_dtype(device, dtype)
    return device


def _require_dtype(device: torch.device, dtype: str) -> None:
    """Try a small product and softmax where it is not certain that they work."""
    if device.type == "meta" or (device.type == "cpu" and dtype in ("float32", "float64")):
        return
    try:
        probe = torch.ones(2, 2, device="cpu").to(device=device, dtype=getattr(torch, dtype))
        (probe @ probe).softmax(dim=-1).cpu()
    except (RuntimeError, TypeError, NotImplementedError):  # each backend refuses a dtype with another of these
        raise DeviceError(f"device {device} cannot run dtype {dtype}. Try --dtype float32 or --device cpu.") from None
