"""Files that are damaged or hostile end in an answer or in a line that says what is wrong with them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from mha_inspect.answers.checkpoint.diff import diff_of_checkpoints
from mha_inspect.answers.checkpoint.params import params_of_checkpoint
from mha_inspect.errors import MhaInspectError
from mha_inspect.files.tensors import read_tensors
from mha_inspect.layers.spec import Show
from mha_inspect.render import to_text

from .contract import acts_on_a_terminal, in_time, require_answer, require_message
from .files import any_file


def test_reading(try_all, tmp_path):
    def check(case):
        suffix, data = case
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        try:
            with in_time():
                content = read_tensors(path)
        except MhaInspectError as error:
            require_message(error)
            return
        tensors = content.values() if isinstance(content, dict) else [content]
        for tensor in tensors:
            assert type(tensor) is torch.Tensor
            assert tensor.is_contiguous()
            assert tensor.numel() > 0
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

    try_all(check, any_file(), 500)


def test_checkpoints(try_all, tmp_path):
    def check(case):
        suffix, data = case
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        try:
            with in_time():
                report = params_of_checkpoint(path, per_head=True, show=Show(stats=True), norms=True)
                for format in ("plain", "json"):
                    assert acts_on_a_terminal(to_text(report, format)) == []
        except MhaInspectError as error:
            require_message(error)

    try_all(check, any_file(), 150)


def test_differences(try_all, tmp_path):
    """Two files, of which each may be whole, damaged or hostile, against each other."""

    def check(case):
        paths = []
        for name, (suffix, data) in zip(("left", "right"), case, strict=True):
            paths.append(tmp_path / f"{name}{suffix}")
            paths[-1].write_bytes(data)
        try:
            with in_time():
                report = diff_of_checkpoints(*paths)
                for format in ("plain", "json"):
                    assert acts_on_a_terminal(to_text(report, format)) == []
        except MhaInspectError as error:
            require_message(error)

    try_all(check, st.tuples(any_file(), any_file()), 100)


def test_through_the_commands(try_all, invoke, tmp_path):
    layer = ("--embed-dim", "7", "--num-heads", "1", "--batch", "2", "--seq-len", "5")

    def check(case):
        suffix, data = case
        path = tmp_path / f"x{suffix}"
        path.write_bytes(data)
        for flag in ("--input", "--attn-mask"):
            with in_time():
                require_answer(*invoke("trace", *layer, flag, str(path)))

    try_all(check, any_file(), 60)
