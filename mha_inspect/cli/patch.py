"""A patch of the file that a target names: how it is built anew, and what is found beside a page."""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from ..checks.intent import Intent
from ..errors import InputError
from ..text import shown
from .expected import loaded_for
from .options import Options

if TYPE_CHECKING:
    from ..fixes.trial import Target
    from ..running.subject import Subject


_LEAST = 3.0
"""Seconds that a search beside a page may always take: else what is found for a small module depends on the load."""


def module_of(target: str) -> ModuleType:
    """Return the module that a target names. Raises `InputError` for a target of an installed package."""
    from ..fixes.loading import is_own
    from ..making.importing import imported, is_file_alone, split_target

    where = target if is_file_alone(target) else split_target(target)[0]
    module = imported(where)
    if not is_own(module):
        raise InputError(f"{shown(target)} is not in a file of your own, so nothing is edited.")
    return module


def patch_beside(target: str | None, options: Options, intent: Intent, began: float) -> str | None:
    """Return a patch of the target's own file that is found in the time that a page took, or in a few seconds.

    None without one. The page has been made, so the file is imported. Files of installed packages have none.
    """
    from ..making.importing import file_of

    if target is None or not file_of(target):
        return None
    from ..fixes.trial import Deadline
    from ..questions.fix import patch_in_time

    now = time.perf_counter()
    again = copy.copy(options)
    if "batch" not in options.given and not options.unbatched:
        again.batch = 2
    made = target_of(target, again, intent)
    try:
        module = module_of(target)
    except InputError:
        return None
    time_left = max(now - began, _LEAST)
    return patch_in_time(replace(made, module=module, deadline=Deadline(now + time_left)))


def target_of(target: str, options: Options, intent: Intent) -> Target:
    """Return how to build a target of a file that was imported, or will be."""
    from ..fixes.trial import Target

    def make(offset: int) -> Subject:
        again = copy.copy(options)
        again.seed = options.seed + offset
        return loaded_for(target, again, intent.padding, intent.padding_true)

    return Target(sys.modules[__name__], make, lambda: intent)
