"""An input whose name says too little is tried in other forms; a guess that fails is never the module's fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha_inspect.__main__ import run

_HEAD = """
import torch
from tests.call.styles import Attention as Base


class Attention(Base):
    attend = Base.attended
"""

_FORMS = {
    "vectors": "def forward(self, tokens):\n        b, n, d = tokens.shape\n        return self.attend(tokens)",
    "channels last": "def forward(self, image):\n        b, h, w, d = image.shape\n"
    "        return self.attend(image.reshape(b, -1, d))",
    "channels first": "def forward(self, x):\n        b, d, n = x.shape\n        assert d == 12\n"
    "        return self.attend(x.mT)",
    "unbatched": "def forward(self, tokens):\n        n, d = tokens.shape\n        return self.attend(tokens[None])",
    "heads": "def forward(self, queries, keys, values):\n        b, h, n, d = queries.shape\n"
    "        return (queries @ keys.mT / d**0.5).softmax(-1) @ values",
    "rotations": "def forward(self, x, freqs_cis):\n"
    "        pairs = torch.view_as_complex(x.unflatten(-1, (3, -1, 2)))\n"
    "        return self.attend(torch.view_as_real(pairs * freqs_cis[:, None]).flatten(2))",
}
"""What an argument is to a forward whose name for it says something else, or nothing."""


def traced(tmp_path: Path, forward: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the page of an attention with this forward."""
    file = tmp_path / "attention.py"
    file.write_text(f"{_HEAD}\n    {forward}\n", encoding="utf-8")
    code = run(["trace", str(file)])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("form", _FORMS)
def test_an_input_is_given_in_the_form_that_the_forward_takes(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = traced(tmp_path, _FORMS[form], capsys)
    assert code == 0
    assert "\nattention: " in page
    assert ("was drawn without a batch: with one the forward raises." in page) == (form == "unbatched")


def test_a_guess_that_fails_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "def forward(self, queries):\n        b, h, w, t, d = queries.shape\n        return queries"
    line = traced(tmp_path, forward, capsys)[1].partition("\n")[0]
    assert "queries was guessed to be float32 [1, 12, 12]" in line
    assert "--input-shape queries=SIZES:float32" in line


@pytest.mark.parametrize("cut", ["[:, None, None]", ""])
def test_a_required_mask_is_made_in_a_form_that_hides_keys(
    cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = (
        "def forward(self, x, mask):\n        q, k, v = (x.unflatten(-1, (3, -1)).transpose(1, 2) for _ in 'qkv')\n"
    )
    forward += f"        scores = (q @ k.mT / 2).masked_fill(mask{cut} == 0, -1e9)\n"
    forward += "        return self.attend((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))"
    code, page = traced(tmp_path, forward, capsys)
    assert code == 0
    assert "mask is required, so" in page


def test_a_mask_that_was_not_given_is_not_the_lines_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "def forward(self, x, mask):\n        return self.attend(x) + mask.named_tuple"
    line = traced(tmp_path, forward, capsys)[1].partition("\n")[0]
    assert "mask was not given, so it is None" in line
    assert "--input-shape mask=SIZES:DTYPE" in line


@pytest.mark.parametrize("product", ["queries @ keys", "queries.mT @ keys"])
def test_inputs_of_one_form_clash_by_what_the_module_does(
    product: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = f"def forward(self, queries, keys, values):\n        return ({product}).softmax(-1) @ values"
    line = traced(tmp_path, forward, capsys)[1].partition("\n")[0]
    assert "nothing wrong" not in line
    assert "guessed" not in line


def test_a_table_of_positions_makes_no_image_of_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "def __init__(self):\n        super().__init__()\n        self.places = torch.nn.Embedding(8, 12)\n"
    forward += "    def forward(self, x):\n        return self.attend(x + self.places(torch.arange(x.shape[1])))"
    line = traced(tmp_path, forward, capsys)[1].partition("\n")[0]
    assert "numbers from 0 to 11" in line


def test_an_array_is_given_by_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "def forward(self, x):\n        return self.attend(torch.from_numpy(x))"
    assert "(module, (x,))" in traced(tmp_path, forward, capsys)[1].partition("\n")[0]


def test_height_and_width_of_a_sequence_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attention.py"
    file.write_text(f"{_HEAD}\n    def forward(self, x, H, W):\n        return self.attend(x)\n", encoding="utf-8")
    assert run(["trace", str(file)]) == 2
    assert "--set H=VALUE --set W=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["12x12", "1x12x1x12"])
def test_complex_inputs_of_a_given_shape_are_rotations(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = (
        "def __init__(self):\n"
        "        super().__init__()\n"
        "        self.q, self.k, self.v = (torch.nn.Linear(24, 24) for _ in range(3))\n"
        "    def forward(self, x, phases):\n"
        "        q, k, v = (p(x).unflatten(-1, (1, -1)) for p in (self.q, self.k, self.v))\n"
        "        phases = phases.reshape(x.shape[1], 1, -1)\n"
        "        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * phases).flatten(3)\n"
        "                for t in (q, k))\n"
        "        q, k, v = (t.transpose(1, 2) for t in (q, k, v))\n"
        "        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)"
    )
    file = tmp_path / "attention.py"
    file.write_text(f"{_HEAD}\n    {forward}\n", encoding="utf-8")
    assert run(["trace", str(file), "--input-shape", f"phases={shape}:complex64"]) == 0
    page = capsys.readouterr().out
    assert "\nattention: " in page
    assert "positions" not in page.partition("\n")[0]


def test_a_name_that_the_module_lacks_is_no_fault_of_a_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = traced(tmp_path, "def forward(self, x):\n        return self.attend(self.absent(x))", capsys)
    assert code == 1
    assert "guessed" not in page.partition("\n")[0]
