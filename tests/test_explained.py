"""Every field of a public dataclass is explained where `help()` shows it."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules

import pytest

import mha_inspect
from mha_inspect import reports
from mha_inspect.explained import field_docs

MODULES = [f"mha_inspect.reports.{found.name}" for found in iter_modules(reports.__path__)]
MODULES += ["mha_inspect.layers.spec", "mha_inspect.checks.intent", "mha_inspect.notebook"]
CLASSES = [
    cls
    for module in map(import_module, MODULES)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls) and cls.__module__ == module.__name__
]


def public(cls: type) -> list[str]:
    return [field.name for field in fields(cls) if not field.name.startswith("_")]  # type: ignore[arg-type]


def test_the_classes_are_found() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert {"Intent", "AttentionSpec", "Trace", "AttentionReport", "Stage", "CheckReport", "Finding"} <= names
    assert {"DiffReport", "CompareHeadsReport", "ParamsReport", "LiveTrace", "LayersReport"} <= names
    specs = [getattr(mha_inspect, name) for name in mha_inspect.__all__]
    assert {cls for cls in specs if isinstance(cls, type) and is_dataclass(cls)} <= set(CLASSES)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_field_is_explained(cls: type) -> None:
    docs = field_docs(cls)
    assert list(docs) == public(cls)
    assert [name for name, text in docs.items() if not text] == []
    shown = pydoc.plain(pydoc.render_doc(cls))
    assert [name for name in docs if f" |      {name}: " not in shown] == []


def test_help_begins_with_what_the_class_is_and_a_base_explains_what_it_defines() -> None:
    from mha_inspect.notebook import LiveStage
    from mha_inspect.reports.common import Difference
    from mha_inspect.reports.compare_heads import HeadCount

    text = str(mha_inspect.Intent.__doc__)
    assert text.startswith("The declared behaviour of a module.")
    assert "\n    window: How many positions each position attends to, including its own" in text
    assert "_tensor" not in str(LiveStage.__doc__)
    assert field_docs(HeadCount)["noise_floor"] == field_docs(Difference)["noise_floor"]
    assert mha_inspect.Intent().__doc__ == mha_inspect.Intent.__doc__


def test_an_import_reads_no_source() -> None:
    script = (
        "import linecache, mha_inspect.reports.trace, mha_inspect.layers.spec\n"
        "print([name for name in linecache.cache if 'mha_inspect' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
