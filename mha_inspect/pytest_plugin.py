"""The pytest plugin: the fixture `attention`, and `--mha-check`, which checks the modules that tests call.

Where neither is used nothing is imported: this file asks for torch only in the functions that need it.

    def test_scores(attention):
        trace = attention(MyAttention(64, 8).eval(), x)
        assert trace.attentions[0].scores.shape == (2, 8, 9, 9)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from .notebook import LiveTrace

_FLAG = "--mha-check"
_OUTPUT = "mha_check"
"""The key under which a worker of pytest-xdist hands over its answers."""


@pytest.fixture
def attention() -> Callable[..., LiveTrace]:
    """Return `mha_inspect.trace`: `attention(module, *args)` is the trace of one call."""
    from .api import trace

    return trace


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("mha-inspect")
    help = "check the attention of each torch module that a test calls, once a class, and report after the tests"
    group.addoption(_FLAG, action="store_true", default=False, help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Start watching, where that was asked for."""
    if config.getoption(_FLAG):
        config.pluginmanager.register(_Checks(config), "mha-inspect-checks")


@dataclass(frozen=True)
class Answer:
    """What a check of one class came to."""

    name: str
    """The class: `model.Attention`."""
    test: str
    """The test that called it first."""
    is_right: bool
    """False for a sure fault."""
    lines: tuple[str, ...]
    """The verdict, and each finding with its fix; empty for a class without attention."""


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Checks:
    """Notes the outermost modules that a test calls, and checks each class once, after the test that called it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._depth = 0
        self._started = perf_counter()
        self._searched = 0.0
        """The seconds that searches for patches took."""
        self._calls: dict[type, _Call] = {}
        """The classes that the running test called first."""
        self._seen: set[type] = set()
        self._answers: list[Answer] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run a test, and check what it called."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._calls, self._depth = {}, 0
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
        for kind, call in self._calls.items():
            began = perf_counter()
            # Searches for patches take no more time than all else.
            seconds = began - self._started - 2 * self._searched
            self._answers.append(_answer(kind, call, item.nodeid, seconds))
            if not self._answers[-1].is_right:
                self._searched += perf_counter() - began
        self._calls = {}

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        kind = type(module)
        if self._depth > 0 or kind in self._seen:
            return
        self._seen.add(kind)
        self._calls[kind] = _Call(module, args, kwargs)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the answers of a worker over, and fail the session if a check found a fault."""
        handed = getattr(self._config, "workeroutput", None)
        if handed is not None:
            handed[_OUTPUT] = [asdict(answer) for answer in self._answers]
            return
        is_right = all(answer.is_right for answer in self._answers)
        if not is_right and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the answers of a worker of pytest-xdist."""
        names = {answer.name for answer in self._answers}
        for fields in getattr(node, "workeroutput", {}).get(_OUTPUT, ()):
            if fields["name"] not in names:
                self._answers.append(Answer(**fields | {"lines": tuple(fields["lines"])}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what was found, class by class."""
        attending = [answer for answer in self._answers if answer.lines]
        terminalreporter.section("attention")
        for answer in attending:
            first, *further = answer.lines
            terminalreporter.write_line(f"{answer.name} ({answer.test}): {first}")
            for line in further:
                terminalreporter.write_line(f"    {line}")
        without = len(self._answers) - len(attending)
        terminalreporter.write_line(f"{len(attending)} classes with attention checked, {without} without attention")


def _answer(kind: type, call: _Call, test: str, seconds: float) -> Answer:
    """Check one module, and look for a patch in this time.

    What cannot be checked, e.g. since it has no attention, has no lines.
    """
    from .api import check
    from .errors import MhaInspectError

    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        report = check(call.module, *call.args, **call.kwargs)
    except (MhaInspectError, TypeError):
        return Answer(name, test, True, ())
    except Exception as error:  # the user's forward may raise where its input is changed
        return Answer(name, test, True, (f"not checked: {type(error).__name__}: {error}",))
    patch = None if report.ok else _patch(call, seconds)
    lines = [report.verdict or ""]
    for finding in report.findings:
        where = f" ({finding.source})" if finding.source else ""
        fix = f" Fix: {finding.fix}" if finding.fix else ""
        lines.append(f"{finding.check}: {finding.sentence}{where}{fix}")
    if patch is not None:
        lines += ["fix: a patch that was run: no check fails with it", *patch.splitlines()]
    return Answer(name, test, report.ok, tuple(lines))


def _patch(call: _Call, seconds: float) -> str | None:
    """Return a patch of the file of a module that is found in this time; None without one."""
    from .fixes.live import live_target
    from .questions.fix import patch_in_time

    target = live_target(call.module, call.args, call.kwargs, perf_counter() + seconds)
    return None if target is None else patch_in_time(target)
