"""Try the ways out of an attention that takes the batch as positions: the same call with the two axes exchanged.

A way out is printed only if then no batch item changes another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..record.arguments import parts_of, with_parts
from .arguments import Source
from .evidence import Evidence, NotPossibleError

_BATCH_FIRST = "create the layer with batch_first=True"
_TRANSPOSED = "use transpose(0, 1) before and after the attention"


def way_out(evidence: Evidence, source: Source, token: int) -> str:
    """Return what makes batch items independent, as a sentence; empty if nothing that was tried does.

    `token` is the place of a token that changes other items.
    """
    ways = []
    settings = _with_batch_second(evidence.subject.module)
    if settings and _is_apart(evidence, source, token, lambda _: _set_batch_first(settings)):
        ways.append(_BATCH_FIRST)
    with _exchanging(_attention_modules(evidence)) as exchange:
        if _is_apart(evidence, source, token, exchange):
            ways.append(_TRANSPOSED)
    if not ways:
        return ""
    sentence = ", or ".join(ways)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _with_batch_second(module: nn.Module) -> list[nn.Module]:
    """Return the modules that have `batch_first=False`."""
    return [part for part in module.modules() if getattr(part, "batch_first", None) is False]


def _attention_modules(evidence: Evidence) -> list[nn.Module]:
    """Return the modules of the attentions, each once."""
    module = evidence.subject.module
    modules = dict[str, nn.Module]()
    for attention, _ in evidence.run.attentions:
        path = attention.module
        modules[path] = module.get_submodule(path) if path else module
    return list(modules.values())


def _set_batch_first(parts: list[nn.Module]) -> None:
    for part in parts:
        part.batch_first = True  # type: ignore[assignment]  # mypy takes attributes of a module for tensors or modules


def _is_apart(evidence: Evidence, source: Source, token: int, change: Callable[[nn.Module], object]) -> bool:
    """Return whether the changed module runs, and a token of batch item 0 changes no other item."""
    try:
        with evidence.runner.changed_by(change):
            base = evidence.output_with({})
            output = evidence.output_with(source.others(token))
            is_changed = evidence.differences(output, base) > 0  # batch position
    except NotPossibleError:
        return False
    if len(is_changed) != source.rows:
        return False
    return bool(is_changed[0].any()) and not bool(is_changed[1:].any())


@contextmanager
def _exchanging(parts: list[nn.Module]) -> Iterator[Callable[[nn.Module], object]]:
    """Give a change of a module that exchanges the first two axes of what these parts of it take and return."""
    handles: list[Any] = []

    def exchange(_: nn.Module) -> None:
        for part in parts:
            handles.append(part.register_forward_pre_hook(_before, with_kwargs=True))
            handles.append(part.register_forward_hook(_after))

    try:
        yield exchange
    finally:
        for handle in handles:
            handle.remove()


def _before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _exchanged(args), _exchanged(kwargs)


def _after(_: nn.Module, __: Any, returned: Any) -> Any:
    if isinstance(returned, tuple):
        return (_exchanged(returned[0]), *returned[1:])
    return _exchanged(returned)


def _exchanged(value: Any) -> Any:
    """Return a value with `batch positions features` in the tensors of three dimensions, and ids, turned."""
    if isinstance(value, Tensor):
        return value.transpose(0, 1) if _has_tokens(value) else value
    parts = parts_of(value)
    if not parts:
        return value
    return with_parts(value, [_exchanged(part) for _, part in parts])


def _has_tokens(value: Tensor) -> bool:
    """Return whether a tensor is `batch positions features`, or ids of `batch positions`."""
    if value.is_floating_point():
        return value.dim() == 3
    return value.dim() == 2 and value.dtype in (torch.int64, torch.int32)
