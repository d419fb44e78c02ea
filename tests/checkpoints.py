"""Checkpoints written by hand, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .fuzz.files import safetensors

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def saved(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write a .safetensors file, and the config.json of its folder where one is given."""
    path.parent.mkdir(exist_ok=True, parents=True)
    header, data = {}, b""
    for name, tensor in tensors.items():
        own = tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        kind = _NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    path.write_bytes(safetensors(header, data))
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(dict(config)))
    return path
