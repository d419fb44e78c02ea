"""Change the package, an operator at a time, and print the changes that the corpus does not see. No part of the suite.

    python -m tests.mutate                        # 60 changes, drawn with seed 1, in two processes
    python -m tests.mutate --seed 2 --count 20 --room record

Each change is made in one function of a process of its own, and the tests that reach its line are run until one fails.
Which tests those are is measured before, in a run of all of them, and kept until the package or the corpus change.
A survivor is a missing case of the corpus, or a line that nobody needs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mha_inspect"
ROOMS = ("record", "graph", "naming", "compare", "failures", "checks", "checkpoints", "questions")
CORPUS = "tests/corpus"
"""The tests that count: the corpus with its properties."""
PAGES = "tests/corpus/test_pages.py"
"""The snapshots, which hold words and do not count: whether one changes is said of a survivor."""
LEAVING = {
    "graph": "axis dimensions pieces rules summed_outputs turns whole written_out",
    "naming": "roles",
    "compare": """continuation diff_reasons mask_reasons norm_reasons rank_differences replay row_orders same_tokens
        stage_reasons""",
    "checks": """alike arguments batch_items cache_loop each_kind evidence exchanged_axes inverted masked_runs
        one_position padded_runs same seen_keys sight""",
    "checkpoints": "*",
}
"""Files that the plan of the rebuild takes out: mutants of them count for nothing."""
WORDS = {"naming": "parameter_words", "compare": "head_sentences side_words", "failures": "facts report"}
"""Files that write sentences, which the snapshots hold."""
SECONDS = 200
"""The time that the tests of one change may take: one that never ends is seen."""
MOST, MOST_SECONDS = 300, 50.0
"""Of the tests that reach a line, how many are run, and how long they took when that was measured."""
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a file."""

    file: str
    node: int
    """Number of the node in the order of `ast.walk`."""
    operator: str
    line: int
    lines: tuple[int, int]
    """The first and the last line of what is changed."""
    function: tuple[int, str]
    """First line and name of the outermost function around it."""

    def __str__(self) -> str:
        text = (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return f"{self.file}:{self.line} {self.operator}: {text}"


# -- what may be changed -----------------------------------------------------------------------------------------------


def staying(rooms: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of rooms that the rebuild keeps, and that write no sentences."""
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            folder = str(path.parent.relative_to(PACKAGE))
            left_out = f"{LEAVING.get(folder, '')} {WORDS.get(folder, '')}".split()
            if path.stem not in (*left_out, "__init__") and "*" not in left_out:
                yield path


def operators_of(node: ast.AST) -> list[str]:
    """Return the changes that may be made to a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        return ["compare"]
    if isinstance(node, ast.BoolOp):
        return ["and or"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["without not"]
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return ["negate"]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ["plus one", "minus one"]
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ["other bool"]
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not is_text(node.left) and not is_text(node.right):
        return ["compute"]
    if isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        return ["return None"]
    if isinstance(node, (ast.AugAssign, ast.Continue, ast.Raise)) or is_call(node):
        return ["delete"]
    return []


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def changed(tree: ast.Module, mutant: Mutant) -> ast.Module:
    """Return the tree with one change."""
    tree = copy.deepcopy(tree)
    nodes = list(ast.walk(tree))
    node: Any = nodes[mutant.node]
    if mutant.operator == "compare":
        node.ops = [COMPARED[type(node.ops[0])]()]
    elif mutant.operator == "and or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif mutant.operator == "negate":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif mutant.operator in ("plus one", "minus one"):
        node.value += 1 if mutant.operator == "plus one" else -1
    elif mutant.operator == "other bool":
        node.value = not node.value
    elif mutant.operator == "compute":
        node.op = COMPUTED[type(node.op)]()
    elif mutant.operator == "return None":
        node.value = ast.Constant(None)
    else:
        replace_child(nodes, node, node.operand if mutant.operator == "without not" else ast.Pass())
    return ast.fix_missing_locations(tree)


def replace_child(nodes: list[ast.AST], old: ast.AST, new: ast.AST) -> None:
    ast.copy_location(new, old)
    for parent in nodes:
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                setattr(parent, name, [new if item is old else item for item in value])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the changes inside of functions, but for those of text, which the snapshots hold."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: dict[ast.AST, tuple[int, str]] = {}
    of_text = {part for node in ast.walk(tree) if is_text(node) for part in ast.walk(node)}
    of_text |= {node for node in ast.walk(tree) if isinstance(node, ast.AugAssign) and is_text(node.value)}
    for function in outermost_functions(tree):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        for statement in function.body:
            for node in ast.walk(statement):
                inside[node] = (first, function.name)
    for number, node in enumerate(ast.walk(tree)):
        for operator in operators_of(node) if node in inside and node not in of_text else ():
            part: Any = getattr(node, "test", node) if operator == "negate" else node
            lines = part.lineno, part.end_lineno
            yield Mutant(str(path.relative_to(ROOT)), number, operator, part.lineno, lines, inside[node])


def outermost_functions(tree: ast.Module) -> Iterator[Any]:
    """Yield functions and methods, and not those inside of them."""
    for node in tree.body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield part


# -- the change of a running function ----------------------------------------------------------------------------------


def code_in(code: CodeType, function: tuple[int, str]) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if (constant.co_firstlineno, constant.co_name) == function:
                return constant
            found = code_in(constant, function)
            if found is not None:
                return found
    return None


def install(mutant: Mutant) -> bool:
    """Give the function of a mutant its changed code, wherever it was imported to; False if it is not there."""
    path = ROOT / mutant.file
    importlib.import_module(".".join(Path(mutant.file).with_suffix("").parts))  # which a test may do later
    tree = changed(ast.parse(path.read_text(encoding="utf-8")), mutant)
    code = code_in(compile(tree, str(path), "exec", dont_inherit=True), mutant.function)
    if code is None:
        return False
    found = False
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(path):
            is_it = (thing.__code__.co_firstlineno, thing.__code__.co_name) == mutant.function
            thing.__code__ = code if is_it else thing.__code__
            found = found or is_it
    return found


# -- runs of the tests -------------------------------------------------------------------------------------------------


Map = dict[str, dict[str, float]]
"""A mutant to the tests that reach it with their seconds, the quickest first."""


class Session:
    """Runs tests of one collection in forked processes."""

    def __init__(self, main: Callable[[Session], None]) -> None:
        self.main, self.items = main, list[pytest.Item]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        gc.unfreeze()
        self.main(self)
        return True

    def passes(self, items: list[pytest.Item]) -> bool:
        """Run tests until one fails."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            for report in pytest_runner().runtestprotocol(item, log=False, nextitem=after):
                if report.failed:
                    return False
        return True


def pytest_runner() -> Any:
    from _pytest import runner

    return runner


def reached_by(session: Session, mutants: list[Mutant], part: int, parts: int) -> dict[str, Any]:
    """Run a part of all tests, and return which mutants each reaches, and how long it took."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(str(ROOT / mutant.file), []).append(mutant)
    watched: dict[CodeType, dict[int, list[str]]] = {}
    reached = set[str]()

    def lines_of(code: CodeType) -> dict[int, list[str]]:
        """Return the lines of a function where a mutant is."""
        own = {line for _, _, line in code.co_lines() if line is not None}
        result: dict[int, list[str]] = {}
        for mutant in by_file.get(code.co_filename, ()):
            for line in own & {*range(mutant.lines[0], mutant.lines[1] + 1)}:
                result.setdefault(line, []).append(str(mutant))
        return result

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in by_file:
            return None
        if code not in watched:
            watched[code] = lines_of(code)
        return on_line if watched[code] else None

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        reached.update(watched[frame.f_code].get(frame.f_lineno, ()))
        return on_line

    result: dict[str, Any] = {}
    for item in session.items[part::parts]:
        reached.clear()
        start = time.perf_counter()
        sys.settrace(on_call)
        try:
            passed = session.passes([item])
        finally:
            sys.settrace(None)
        if passed:
            result[item.nodeid] = [time.perf_counter() - start, sorted(reached)]
    return result


def state_of(mutants: list[Mutant]) -> str:
    """Return a hash of the package, of the corpus and of what is changed."""
    hashed = hashlib.sha256("\n".join(map(str, mutants)).encode())
    for path in sorted((*PACKAGE.rglob("*.py"), *(ROOT / "tests" / "corpus").rglob("*.py"))):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def map_of(session: Session, mutants: list[Mutant], processes: int) -> Map:
    """Return the tests that reach each mutant: from a file, or from a run of all of them."""
    kept = Path(tempfile.gettempdir()) / f"mha-inspect-reached-{state_of(mutants)}.json"
    if not kept.exists():
        print(f"Which of {len(session.items)} tests reach what: a run of all of them", flush=True)
        files = [kept.with_suffix(f".{part}") for part in range(processes)]
        started = []
        for part, file in enumerate(files):
            child = os.fork()
            if not child:
                silence()
                file.write_text(json.dumps(reached_by(session, mutants, part, processes)))
                os._exit(0)
            started.append(child)
        for child in started:
            os.waitpid(child, 0)
        merged: dict[str, Any] = {}
        for file in files:
            merged |= json.loads(file.read_text())
            file.unlink()
        kept.write_text(json.dumps(merged))
    tests = json.loads(kept.read_text())
    of_case: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: tests[test][0]):
        of_case.setdefault(case_of(test), []).append(test)
    by_mutant: Map = {}
    for test, (_, reached) in sorted(tests.items(), key=lambda row: row[1][0]):
        for mutant in reached:
            by_mutant.setdefault(mutant, {}).update({other: tests[other][0] for other in of_case[case_of(test)]})
    return by_mutant


def case_of(test: str) -> str:
    """Return the case that a test asks about: its tests share one run, and the first alone reaches what it does."""
    _, bracket, name = test.partition("[")
    return name if bracket else test


def silence() -> None:
    """Print nothing more in this process."""
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def chosen(tests: dict[str, float]) -> list[str]:
    """Return the tests that are run for a change: the quickest of each test function, and then others in any order.

    The quick ones are much alike; a line that few modules reach is reached by some of the others.
    """
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault(test.partition("[")[0], []).append(test)
    firsts, others = [], []
    for group in groups.values():
        firsts.append(group[0])
        others += group[1:]
    random.Random(len(tests)).shuffle(others)
    result = [*firsts, *others][:MOST]
    seconds = list(itertools.accumulate(tests[test] for test in result))
    return [test for test, needed in zip(result, seconds, strict=True) if needed <= MOST_SECONDS or test in firsts]


def survives(session: Session, mutant: Mutant, tests: list[str]) -> bool:
    """Return whether all tests pass in a process with a change; one that never ends, or ends at once, is seen."""
    if not tests:
        return True
    by_name = {item.nodeid: item for item in session.items}
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        silence()
        code = 1
        try:
            code = 0 if not install(mutant) or session.passes([by_name[test] for test in tests]) else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0


def mutate(session: Session, asked: argparse.Namespace) -> None:
    rooms = tuple(asked.room or ROOMS)
    every = [mutant for path in staying(rooms) for mutant in mutants_of(path)]
    drawn = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    if asked.at:
        drawn = [mutant for mutant in every if f"{mutant.file}:{mutant.line}" in asked.at]
    print(f"{len(drawn)} of {len(every)} changes in {len(list(staying(rooms)))} files, seed {asked.seed}", flush=True)
    reached = map_of(session, drawn, asked.processes)
    started = []
    for part in range(asked.processes):
        child = os.fork()
        if not child:
            killed = 0
            for mutant in drawn[part :: asked.processes]:
                found = reached.get(str(mutant), {})
                tests = chosen({test: found[test] for test in found if not test.startswith(PAGES)})
                start, lives = time.perf_counter(), survives(session, mutant, tests)
                killed += not lives
                if lives or asked.all:
                    word = "SURVIVES" if lives else "killed"
                    pages = chosen({test: found[test] for test in found if test.startswith(PAGES)})
                    if lives and not survives(session, mutant, pages):
                        word = "SURVIVES, and a page changes"
                    print(f"{word} ({len(tests)} tests, {time.perf_counter() - start:.0f} s) {mutant}", flush=True)
            os._exit(killed)
        started.append(child)
    seen = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started)
    print(f"{seen} of {len(drawn)} are seen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--room", action="append", choices=ROOMS)
    parser.add_argument("--at", action="append", metavar="FILE:LINE", help="every change of a line, and no others")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="print the changes that are seen too")
    asked = parser.parse_args()
    os.chdir(ROOT)
    session = Session(lambda session: mutate(session, asked))
    pytest.main([CORPUS, "-n0", "-q", "-s", "-p", "no:cacheprovider"], plugins=[session])


if __name__ == "__main__":
    main()
