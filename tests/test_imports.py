"""Imports point one way, and torch is imported by what needs it: read from the sources, not from what is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import mha_inspect

ROOT = Path(mha_inspect.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in ROOT.rglob("*.py")
}
"""Module below the package, to its file: `layers.catalog`; the package itself is empty."""

BEFORE_TORCH = (
    "errors",
    "layers.spec",
    "record.ops",
    "record.catalog",
    "naming.pattern",
    "layers.catalog",
    "__main__",
    "",
)
"""With cli, render and reports: what an answer without torch goes through."""


def nodes(tree: ast.AST, *, at_import: bool, typed: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements; with `at_import` those alone that run when the module is imported.

    Those that only a type checker reads are left out where they are not `typed` for.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
            continue
        if isinstance(node, ast.expr) or (at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            continue
        for_types = not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if for_types:
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from nodes(other, at_import=at_import, typed=typed)
            continue
        yield from nodes(node, at_import=at_import, typed=typed)


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


@cache
def imports(module: str, *, at_import: bool = False, typed: bool = False) -> frozenset[str]:
    """What a module imports: `torch`, `rich.table`; of the package itself with a point in front: `.errors`."""
    found: set[str] = set()
    for node in nodes(tree(module), at_import=at_import, typed=typed):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
            continue
        if not node.level:
            found |= {f"{node.module}"} | {f"{node.module}.{name.name}" for name in node.names}
            continue
        here = module.split(".") if module else []
        package = here if FILES[module].name == "__init__.py" else here[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
        for name in node.names:
            inner = f"{base}.{name.name}".lstrip(".")
            found.add("." + (inner if inner in FILES else base))
    return frozenset(found)


def own(module: str, *, at_import: bool = False, typed: bool = False) -> set[str]:
    found = imports(module, at_import=at_import, typed=typed)
    return {name[1:] for name in found if name.startswith(".") and name != "."}


def inside(module: str, *places: str) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Neither when it is imported, nor in a function, nor for a type checker."""
    order = list(TopologicalSorter({module: own(module, typed=True) for module in FILES}).static_order())
    assert set(order) | {""} == set(FILES)


BELOW = {
    "explained": (),
    "text": (),
    "errors": ("text",),
    "reports": ("errors", "text", "explained"),
    "layers": ("reports", "errors", "text", "explained"),
    "record": ("reports", "errors", "text"),
    "graph": ("record",),
    "naming": ("graph", "record", "layers", "reports"),
    "running": ("naming", "graph", "record", "layers", "reports", "errors", "text"),
    "measure": ("running", "naming", "graph", "record", "layers", "reports", "errors", "text"),
    "files": ("record", "layers", "reports", "errors", "text"),
    "making": ("files", "running", "naming", "record", "layers", "reports", "errors", "text"),
    "call": ("making", "files", "running", "naming", "record", "layers", "reports", "errors", "text"),
    "compare": ("measure", "running", "naming", "graph", "record", "layers", "reports", "errors", "text"),
    "failures": ("measure", "running", "naming", "graph", "record", "layers", "reports", "errors", "text"),
    "checks": (
        *("failures", "compare", "call", "measure", "running", "naming", "graph", "record", "layers", "reports"),
        *("errors", "text", "explained"),
    ),
    "fixes": (
        *("checks", "failures", "making", "measure", "running", "naming", "record", "layers", "reports", "errors"),
        "text",
    ),
    "checkpoints": ("files", "measure", "running", "naming", "record", "layers", "reports", "errors", "text"),
    "questions": (
        *("checkpoints", "fixes", "checks", "failures", "compare", "call", "making", "files", "measure", "running"),
        *("naming", "graph", "record", "layers", "reports", "errors", "text", "explained"),
    ),
    "render": ("reports", "errors", "text"),
    "pictures": ("render", "naming", "reports", "errors", "text"),
    "notebook": ("pictures", "render", "running", "naming", "reports", "errors", "text", "explained"),
    "cli": (
        *(
            "questions",
            "checkpoints",
            "fixes",
            "checks",
            "failures",
            "compare",
            "pictures",
            "render",
            "call",
            "making",
            "files",
        ),
        *("measure", "running", "naming", "layers", "reports", "errors", "text"),
    ),
}
"""What each package imports of the others, from below to above: a name stands behind all that it imports."""


def test_packages_import_those_that_are_below_and_so_form_no_circle() -> None:
    names = list(BELOW)
    assert {module.split(".")[0] for module in FILES} - {"", "__main__", "api", "testing", "pytest_plugin"} == set(
        names
    )
    for module in FILES:
        package = module.split(".")[0]
        if package in BELOW:
            used = {name for name in own(module) if not inside(name, package)}
            assert used <= {name for name in used if inside(name, *BELOW[package])}, module
    for package, below in BELOW.items():
        assert {names.index(name) for name in below} <= set(range(names.index(package))), package


def test_nothing_imports_the_command_line() -> None:
    users = {module for module in FILES if any(inside(name, "cli") for name in own(module))}
    assert {module for module in users if not inside(module, "cli")} == {"__main__"}


def test_what_answers_without_torch_does_not_import_it() -> None:
    heavy = ("torch", "numpy", "einops", "rich", "safetensors")
    for module in FILES:
        if inside(module, "cli", "render", "reports") or module in BEFORE_TORCH:
            allowed = ("rich",) if module == "render.terminal" else ()
            found = {name for name in imports(module, at_import=True) if inside(name, *heavy)}
            assert not [name for name in found if not inside(name, *allowed)], module


def test_no_other_module_knows_torchs_modes_and_rich() -> None:
    modes = {module for module in FILES if any("_python_dispatch" in name for name in imports(module))}
    assert modes == {"record.site", "record.recorder"}
    rich = {module for module in FILES if any(inside(name, "rich") for name in imports(module))}
    assert rich == {"render.screen", "render.terminal"}


def test_importing_the_package_or_its_command_line_imports_no_torch() -> None:
    script = (
        "import sys, mha_inspect, mha_inspect.cli, mha_inspect.cli.app, mha_inspect.reports.trace, mha_inspect.render\n"
        "mha_inspect.AttentionSpec, mha_inspect.__version__, dir(mha_inspect)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT.parent, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "mha_inspect" in loaded
    assert not loaded & {"torch", "numpy", "rich", "einops", "safetensors", "pydantic"}
