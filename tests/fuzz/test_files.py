"""Files that are damaged or hostile end in an answer or in a line that says what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from mha_inspect.checkpoints.diff import diff_of_checkpoints
from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.errors import MhaInspectError
from mha_inspect.files.tensors import read_tensors
from mha_inspect.layers.spec import Show
from mha_inspect.render.formats import to_text

from .contract import acts_on_a_terminal, in_time, require_answer, require_message
from .files import any_file


def shown(report):
    for format in ("plain", "json"):
        assert acts_on_a_terminal(to_text(report, format)) == []


def read(path):
    content = read_tensors(path)
    for tensor in content.values() if isinstance(content, dict) else [content]:
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert tensor.numel() > 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def of_checkpoint(path):
    shown(params_of_checkpoint(path, per_head=True, show=Show(stats=True)))


def difference(*paths):
    """Two files, of which each may be whole, damaged or hostile, against each other."""
    shown(diff_of_checkpoints(*paths))


@pytest.mark.parametrize(("look", "files", "number"), [(read, 1, 150), (of_checkpoint, 1, 50), (difference, 2, 40)])
def test_a_file_is_answered_or_refused(try_all, tmp_path, look, files, number):
    def check(case):
        paths = []
        for place, (suffix, data) in enumerate(case):
            paths.append(tmp_path / f"{place}{suffix}")
            paths[-1].write_bytes(data)
        try:
            with in_time():
                look(*paths)
        except MhaInspectError as error:
            require_message(error)

    try_all(check, st.tuples(*[any_file()] * files), number)


def test_through_the_commands(try_all, invoke, tmp_path):
    layer = ("--embed-dim", "7", "--num-heads", "1", "--batch", "2", "--seq-len", "5")

    def check(case):
        suffix, data = case
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        for flag in ("--input", "--attn-mask"):
            with in_time():
                require_answer(*invoke("trace", *layer, flag, str(path)))

    try_all(check, any_file(), 15)
