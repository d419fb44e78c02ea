"""What a forward's arguments are, found by small runs of it with guesses in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .drawer import Drawer
from .drawing import Plan
from .guesses import Guesses
from .holders import MOST_KEYS, Entries, Holder
from .probe import Evidence, Probed, probe

_MOST_STARS = 4
"""Tensors that `*args` is tried with, at most."""


@dataclass
class Finder:
    """Runs a forward with guesses until one fits."""

    guesses: Guesses
    drawer: Drawer
    given: Mapping[str, Any]
    """Arguments that are there."""
    said: Mapping[str, Plan]
    """Plans of which somebody said the shape, or a configuration tells it."""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    """What the best run showed."""
    raises: bool = False
    """Whether that run raised all the same."""

    def probe(self, plans: Mapping[str, Plan], *, whole: bool, asks: Mapping[str, Holder] | None = None) -> Probed:
        """Run the forward once with these plans beside what is given and said."""
        forward = self.guesses.forward
        values = forward.with_none(self.drawer.tried({**self.said, **plans}, self.given))
        call = forward.call(values, asks)
        return probe(forward.module, call.args, call.kwargs, {name: values[name] for name in plans}, whole=whole)

    def find(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        """Return the plans, corrected by what the forward does with them.

        Raises `InputError` where it needs something that nothing tells.
        """
        forward, others = self.guesses.forward, self.said or self.given
        for owner in [name for name in plans if name in forward.holders]:
            plans |= self._entries(owner, {n: p for n, p in plans.items() if n != owner}, sure=True)
            del plans[owner]
        # An argument of an unknown name that stands behind others may be let out, or is one that somebody must give.
        extra = [n for n in plans if forward.kind(n) in ("unknown", "lengths") and (len(plans) > 1 or others)]
        extra = [n for n in extra if n != next(iter(forward.parameters), n) and "." not in n]
        best: tuple[int, dict[str, Plan], Probed] | None = None
        for attempt in self._attempts(plans, extra):
            probed = self.probe(attempt, whole=bool(extra) or forward.open_ended)
            missing = probed.error.args[0] if isinstance(probed.error, KeyError) and probed.error.args else None
            known_names = (*plans, *self.said, *self.given, *forward.lacking)
            if forward.open_ended and isinstance(missing, str) and missing not in known_names:
                if forward.kind(missing) != "mask":
                    return self.find({**plans, missing: self.guesses.of(missing)})
                forward.lacking.append(missing)
            for owner in filter(None, (probed.holder, probed.maybe)):
                rest = {n: plan for n, plan in plans.items() if n != owner}
                held = self._entries(owner, rest, sure=owner == probed.holder)
                if held:
                    return self.find({**rest, **held})
            known = len(probed.evidence) if probed.error is not None else len(plans) + 1
            if best is None or known > best[0]:
                best = (known, attempt, probed)
            if known >= len(plans):
                break
        assert best is not None
        _, chosen, probed = best
        self.raises, self.evidence = probed.error is not None, probed.evidence
        firm = {n for n, evidence in probed.evidence.items() if evidence.firm}
        doubtful = [n for n in extra if forward.kind(n) == "unknown" and n not in firm]
        untold = [n for n in doubtful if (n in chosen or probed.error is not None)]
        for name in untold or (plans if isinstance(probed.error, TypeError) else ()):
            rest = {n: plan for n, plan in plans.items() if n != name}
            if held := self._entries(name, rest, sure=False):
                return self.find({**rest, **held})
        if untold:
            raise InputError(
                f"{forward.label} needs {untold[0]}, and nothing tells what that is. Give it: --input-shape "
                f"{untold[0]}=2x10x512:float32 with its own sizes, or --input FILE with {untold[0]} in it."
            )
        return {n: self.guesses.corrected(n, plan, probed.evidence.get(n)) for n, plan in chosen.items()}

    def _attempts(self, plans: dict[str, Plan], extra: list[str]) -> list[dict[str, Plan]]:
        """What to try, the likeliest first: without what may be let out, and with ids or images for vectors."""
        certain = {name: plan for name, plan in plans.items() if name not in extra}
        attempts = [certain, plans] if extra else [plans]
        loose = [name for name, plan in plans.items() if plan.kind in ("hidden", "unknown", "query")]
        others: tuple[Callable[[str], Plan], ...] = (self.guesses.ids, lambda _: self.guesses.image())
        for other in others if loose else ():
            attempts += [
                {**attempt, **{n: other(n) for n in loose if n in attempt}} for attempt in attempts[: 1 + bool(extra)]
            ]
        return attempts

    def _entries(self, owner: str, plans: Mapping[str, Plan], *, sure: bool) -> dict[str, Plan]:
        """Plans for what an argument holds: the entries that the forward asks it for, or two where it joins them.

        Empty where it does not run with them, unless it is `sure` that it holds any.

        Raises `InputError` where it is sure, and nothing tells what it holds.
        """
        forward = self.guesses.forward
        if forward.is_star(owner):
            return self._starred(owner, plans)
        holder = forward.holders.get(owner, Holder())
        found = self._guessed(owner, holder.keys)
        while len(found) < MOST_KEYS:
            wanted = self.probe({**plans, **found}, whole=True, asks={owner: holder}).wanted
            keys = [] if wanted is None else [key for key in wanted.keys if key not in holder.keys]
            if wanted is None or not keys:
                break
            kind = wanted.kind if holder.kind is Entries else holder.kind
            holder = Holder(kind, (*holder.keys, *keys), wanted.words or holder.words)
            forward.holders[owner] = holder
            found |= self._guessed(owner, keys)
        runs = sure and bool(holder.keys)
        if not holder.keys:  # it asks for none by name or place: what joins tensors takes any number of them
            forward.holders[owner] = Holder(list, ("0", "1"))
            found = self._guessed(owner, ("0", "1"))
        for attempt in () if runs else (found, {name: self.guesses.ids(name) for name in found}):
            if self.probe({**plans, **attempt}, whole=True).error is None:
                found, runs = attempt, True
                break
        if sure and not (found and runs):
            raise InputError(
                f"{forward.label} takes several tensors in {owner}, and nothing tells what is in it. Give each entry: "
                f"--input-shape {owner}.KEY=2x10x512:float32 with its own sizes."
            )
        if not (found and runs):
            forward.holders.pop(owner, None)
            return {}
        forward.entered.append(owner)
        return found

    def _guessed(self, owner: str, keys: Iterable[str]) -> dict[str, Plan]:
        names = [f"{owner}.{key}" for key in keys]
        return {name: self.guesses.of(name) for name in names if self.guesses.forward.kind(name) != "mask"}

    def _starred(self, owner: str, plans: Mapping[str, Plan]) -> dict[str, Plan]:
        """Plans for `*args`: as few as make it run, or one where none do."""
        forward = self.guesses.forward
        for count in (*range(1, _MOST_STARS + 1), 1):
            forward.holders[owner] = Holder(tuple, tuple(map(str, range(count))))
            found = self._guessed(owner, forward.holders[owner].keys)
            if self.probe({**plans, **found}, whole=True).error is None:
                break
        if len(found) > 1:
            forward.entered.append(owner)
        return found
