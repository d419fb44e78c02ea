"""--export: refused before any work when it cannot be, whole or not at all, and what was there is kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mha_inspect.errors import ExportError
from mha_inspect.render import export
from mha_inspect.render.export import Destination

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")
# Large enough to be more than one buffer of any size.
TEXT = "stage scores √256\n" * 20_000

WRITE_WITH_LITTLE_ROOM = """
import resource, sys
from pathlib import Path
from mha_inspect.errors import ExportError
from mha_inspect.render.export import Destination
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    Destination.of(Path(sys.argv[1])).write("x" * 100_000)
except ExportError as error:
    sys.exit(f"refused: {error}")
"""


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_ending_says_the_format(tmp_path):
    endings = {"a.txt": "plain", "a.png": "png", "a.html": "html", "a.b.JSON": "json"}
    assert {name: Destination.of(tmp_path / name).format for name in endings} == endings


@posix
def test_a_new_file_gets_the_users_umask(tmp_path):
    before = os.umask(0o027)
    try:
        Destination.of(tmp_path / "a.txt").write(TEXT)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


@posix
def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "a.txt"
    real.write_text("before")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    Destination.of(link).write(TEXT)
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == TEXT
    assert files(tmp_path / "real") == {"a.txt"}


@posix
def test_a_full_disk_leaves_no_file_behind(environment, tmp_path):
    target = tmp_path / "a.txt"
    done = subprocess.run(
        [sys.executable, "-c", WRITE_WITH_LITTLE_ROOM, str(target)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.startswith(f"refused: {target} could not be written: File too large.")
    assert files(tmp_path) == set()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_at_any_step_keeps_what_was_there(tmp_path, monkeypatch, step):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "a.txt"
    target.write_text("before")
    checked = Destination.of(target)
    monkeypatch.setattr(export.os, step, fail)
    with pytest.raises(ExportError, match="No space left on device"):
        checked.write(TEXT)
    monkeypatch.undo()
    assert target.read_text() == "before"
    assert files(tmp_path) == {"a.txt"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_is_written_to_and_never_replaced(tmp_path):
    link = tmp_path / "a.txt"
    link.symlink_to("/dev/full")
    with pytest.raises(ExportError, match="No space left on device"):
        Destination.of(link).write(TEXT)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent/a.txt", "absent does not exist"),
        ("a.txt/a.txt", "a.txt is not a folder"),
        ("folder.txt", "is a folder"),
        ("a.pdf", "ends in .pdf"),
        ("a", "has no ending"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(invoke, monkeypatch, tmp_path, name, said):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "a.txt").write_text("before")
    # Whatever would do the work is not to be had.
    for module in ("tracing", "parameters", "heads"):
        monkeypatch.setitem(sys.modules, f"mha_inspect.{module}", None)
    code, out, err = invoke("trace", "--export", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert (tmp_path / "a.txt").read_text() == "before"


def test_a_forward_that_raised_has_no_picture(invoke, tmp_path):
    module = tmp_path / "raises.py"
    module.write_text(
        "from torch import nn\n\n\n"
        "class Raises(nn.MultiheadAttention):\n"
        "    def forward(self, query, key, value):\n"
        "        attended, _ = super().forward(query, key, value)\n"
        "        return attended @ attended\n"
    )
    picture = tmp_path / "a.png"
    code, out, err = invoke(
        *("trace", f"{module}:Raises", "--embed-dim", "16", "--num-heads", "2", "--seq-len", "5"),
        *("--picture", "weights", "--export", str(picture)),
    )
    assert code == 1
    assert "failed" in out
    assert "a.png was not written, because the forward raised before it ended." in err
    assert not picture.exists()
