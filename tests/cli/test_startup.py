"""What needs no torch imports none, and in a pipe no Rich either."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW_IMPORTS = """
import sys
sys.argv = ["mha-inspect", *sys.argv[1:]]
from mha_inspect.__main__ import main
try:
    main()
except SystemExit:
    pass
print("imported:", *sorted(sys.modules), file=sys.stderr)
"""
COMPLETE = "_MHA_INSPECT_COMPLETE"


def told(err: str) -> set[str]:
    return set(err.rpartition("imported:")[2].split())


def imported(*args: str, env: dict[str, str]) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW_IMPORTS, *args],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=True,
    )
    return told(done.stderr)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("--help", {}),
        ("check --explain heads", {}),
        ("trace --embed-dim 10 --num-heads 3", {}),
    ],
)
def test_no_torch_and_no_rich(environment, line, env):
    modules = imported(*line.split(), env=environment(**env))
    assert "mha_inspect.cli.app" in modules
    assert modules & {"torch", "numpy", "rich", "pydantic", "einops"} == set()


TYPER_ALONE = "import sys, typer; print('imported:', *sorted(sys.modules), file=sys.stderr)"
HELP_IMPORTS = {
    *("gc", "dataclasses", "unicodedata"),
    *("__main__", "making", "making.vocabulary", "errors", "files", "files.memory", "layers", "layers.catalog", "text"),
    *(
        "cli",
        "cli.app",
        "cli.messages",
        "cli.help",
        "cli.target_text",
        "cli.options",
        "cli.output",
        "cli.process",
        "cli.ranks",
    ),
    *("render", "render.export", "render.screen"),
}
"""What the page of help may import beside what `import typer` does; names of the package without its own."""


def test_help_imports_these_modules_alone(environment):
    """A module such as unittest.mock brings asyncio and ssl: help took twice as long as `import typer`."""
    command = [sys.executable, "-c", TYPER_ALONE]
    typer = told(subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stderr)
    more = {name.removeprefix("mha_inspect.") for name in imported("--help", env=environment()) - typer}
    of_typer = {name for name in more if name.startswith("typer.")}
    assert more - of_typer - {"mha_inspect"} <= HELP_IMPORTS


SMALL = "--embed-dim 8 --num-heads 2"


@pytest.mark.parametrize(
    "line",
    [
        f"trace {SMALL} --values",
        f"check {SMALL}",
        "compare-heads --embed-dim 8 --heads 1,2 --steps 1 --focus",
    ],
)
def test_symbolic_shapes_which_take_a_second_are_not_imported(fork, line):
    """Neither by a run, nor by all modules of the program, which are imported where it starts."""
    modules = told(fork(SHOW_IMPORTS, *line.split()).err)
    assert {"torch", "mha_inspect.cli.compare_heads"} <= modules
    assert not modules & {"sympy", "torch._dynamo"}


def test_nothing_is_imported_of_what_was_not_asked_for(environment):
    modules = imported("trace", "--embed-dim", "8", "--num-heads", "2", env=environment())
    assert "torch" in modules
    unasked = (
        "mha_inspect.pictures",
        "matplotlib",
        "transformers",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
    )
    assert not {name for name in modules if name.startswith(unasked)}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mha-inspect ", {"trace", "params", "compare-heads", "diff", "check", "fix", "layers", "help"}),
        ("mha-inspect trace --dtype ", {"float32", "float64", "bfloat16", "float16"}),
        ("mha-inspect diff torch na", {"narrow"}),
    ],
)
def test_completion(program, words, offered):
    env = {COMPLETE: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code, out, err = program(env=env)
    assert (code, err) == (0, "")
    assert set(out.split()) == offered
