"""Folders of torch.distributed.checkpoint: refused with torch's own converter, whose file is read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


@pytest.mark.parametrize("ending", ["", "/.metadata"])
def test_the_converter_is_named_and_its_file_is_read(invoke, tmp_path: Path, ending: str) -> None:
    layer = nn.MultiheadAttention(24, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        distributed_checkpoint.save({"model": layer.state_dict()}, checkpoint_id=tmp_path / "saved")
    code, out, err = invoke("params", f"{tmp_path / 'saved'}{ending}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "torch.distributed.checkpoint.format_utils.dcp_to_torch_save" in err
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "model.pt")
    out = invoke("params", str(tmp_path / "model.pt"), "--num-heads", "3").out
    assert "W_q, W_k, W_v stacked: rows 0–23, 24–47, 48–71" in out
