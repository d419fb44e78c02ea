"""What a forward's arguments are: guesses by their names and the target's sizes, and small runs of it with those.

Each tensor is drawn by its plan, one for several arguments where nothing tells them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..build.target import Target
from ..build.values import InputShape
from ..build.vocabulary import ALIASES, Kind, plain
from ..errors import InputError
from ..layers.spec import AttentionSpec, InputSpec
from .drawing import Plan, draw, generator_of
from .forward import Forward
from .holders import MOST_KEYS, Entries, Holder
from .probe import Evidence, Probed

_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""Kinds that may be the tensor of an earlier one are drawn after it."""


_UNUSUAL = 37
"""A width that nothing has: whatever takes it, does not look at it."""
_VOCABULARY = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")


@dataclass(frozen=True)
class Guesses:
    """Plans for the arguments of a target's forward, and what is drawn by plans."""

    target: Target
    forward: Forward
    inputs: InputSpec
    spec: AttentionSpec | None
    """The sizes of a layer that are known before it runs; None for any other."""
    seed: int
    shaped: Collection[str]
    """Arguments of which somebody said the shape: each is drawn for itself."""

    def drawn(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is given, and tensors: query, key and value are one where nothing tells them apart.

        As often as it is called, they are the same.
        """
        forward, values, generator = self.forward, dict(given), generator_of(self.seed)
        apart, has_key = self.inputs.key_len is not None, "key" in forward.kinds.values()
        for name, plan in sorted(plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
            like: Kind | None = "key" if plan.kind == "value" and has_key else "query"
            if plan.kind not in ("key", "value") or name in self.shaped or (apart and like == "query"):
                like = None
            alike = [held for other, held in values.items() if forward.kind(other) == like]
            same = [held for held in alike if isinstance(held, Tensor) and held.dim() == len(plan.shape)]
            tensor = next((held for held in same if held.shape[-1] == plan.shape[-1]), None)
            if tensor is None:
                tensor = draw(plan, forward.dtype, forward.device, generator)
                # Always drawn batch first: the content of a row does not hang on the layout.
                if plan.sequence and forward.batch_first is False:
                    tensor = tensor.transpose(0, 1).contiguous()
            values[name] = tensor
        return values

    def of(self, name: str) -> Plan:
        """Return what an argument is likely to be."""
        kind = self.forward.kind(name)
        if kind == "ids":
            return self.ids(name)
        if kind == "image":
            return self.image()
        if kind == "lengths":
            return Plan(kind, (self.inputs.batch,), "int64", rows=(self.inputs.seq_len,))
        return Plan(kind, (*self._batch_and_length(name), self._width(kind)), sequence=self._batched)

    def of_shape(self, name: str, said: InputShape) -> Plan:
        """Return a tensor of the shape that somebody gave it."""
        kind = self.forward.kind(name)
        if said.dtype is None:
            return Plan(kind, said.shape, "int64" if kind == "ids" else "", self._vocabulary())
        whole = said.dtype.startswith("int")
        return Plan("ids" if whole else "unknown", said.shape, said.dtype, self._vocabulary() if whole else 2)

    def ids(self, name: str, vocabulary: int | None = None) -> Plan:
        """Return an argument as ids of tokens."""
        shape = self._batch_and_length(name)
        return Plan("ids", shape, "int64", vocabulary or self._vocabulary(), sequence=self._batched)

    def image(self, channels: int | None = None) -> Plan:
        """Return an argument as images."""
        known, modules = self.target.arguments, self.target.module.modules()
        channels = channels or _first_int(known, "channels", "in_channels", "in_chans", "num_channels") or 3
        names = ("image_size", "img_size", "input_resolution", "resolution")
        size = next((known[name] for name in names if known.get(name)), None)
        size = size or next((getattr(m, n) for m in modules for n in names[:2] if hasattr(m, n)), 32)
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
        return Plan("image", (self.inputs.batch, channels, height, width))

    def corrected(self, name: str, plan: Plan, evidence: Evidence | None) -> Plan:
        """Return the plan as what the forward did with it shows that it should be."""
        if evidence is None:
            return plan
        if evidence.kind == "ids":
            return self.ids(name, evidence.size)
        if evidence.kind == "image":
            return self.image(evidence.size)
        return replace(plan, shape=(*plan.shape[:-1], evidence.size))

    def of_lazy(self) -> tuple[str, ...]:
        """Return a sentence on the width that lazy layers are given; empty where there are none.

        Raises `InputError` where nothing suggests one.
        """
        module = self.target.module
        lazy = [own for own in module.modules() if any(map(is_lazy, own.parameters(recurse=False)))]
        if not lazy or any(kind in ("ids", "image") for kind in self.forward.kinds.values()):
            return ()
        width, name = self._width("hidden"), next(iter(self.forward.parameters), "x")
        if width == _UNUSUAL:
            raise InputError(
                f"{self.target.name} has lazy layers ({type(lazy[0]).__name__}), which take any width, and nothing "
                f"tells which is meant. Give it: --input-shape {name}=2x10x512 with its own sizes."
            )
        return (f"Its lazy layers take any width, and were given {width}: --input-shape gives another.",)

    @property
    def _batched(self) -> bool:
        return not self.inputs.unbatched

    def _batch_and_length(self, name: str) -> tuple[int, ...]:
        inputs, forward = self.inputs, self.forward
        encoded = forward.encodes_and_decodes and plain(name) in ("src", "source", "inputids", "xids", "srcids")
        length = inputs.keys if forward.kind(name) in ("key", "value", "other") or encoded else inputs.seq_len
        return (inputs.batch, length) if self._batched else (length,)

    @property
    def _sources(self) -> tuple[Mapping[str, Any], ...]:
        """What may tell a size by its name: arguments of the constructor, attributes, a configuration."""
        module = self.target.module
        config = getattr(module, "config", None)
        held = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
        return self.target.arguments, vars(module), held

    def _width(self, kind: Kind) -> int:
        if self.spec is not None:
            widths = {"key": self.spec.key_width, "other": self.spec.key_width, "value": self.spec.value_width}
            return widths.get(kind, self.spec.embed_dim)
        own = {"key": "kdim", "value": "vdim", "other": "kdim"}.get(kind, "embed_dim")
        named = (_first_int(source, *ALIASES[flag]) for flag in (own, "embed_dim") for source in self._sources)
        linears = [m for m in self.target.module.modules() if isinstance(m, nn.Linear)]
        taken = [m.in_features for m in linears] + [m.out_features for m in linears]  # of lazy ones the first are 0
        return next(filter(None, (*named, *taken)), _UNUSUAL)

    def _vocabulary(self) -> int:
        named = (_first_int(source, *_VOCABULARY) for source in self._sources)
        tables = (m.num_embeddings for m in self.target.module.modules() if isinstance(m, nn.Embedding))
        return next(filter(None, (*named, *tables)), 2)


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of these names that is a size in the source, whatever its spelling."""
    known = {plain(name): value for name, value in source.items() if type(value) is int and value > 0}
    return next((known[plain(name)] for name in names if plain(name) in known), None)


_MOST_STARS = 4
"""Tensors that `*args` is tried with, at most."""


@dataclass
class Finder:
    """Runs a forward with guesses until one fits."""

    guesses: Guesses
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
        values = forward.with_none(self.guesses.drawn({**self.said, **plans}, self.given))
        return forward.probe(values, asks, about=plans, whole=whole)

    def find(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        """Return the plans, corrected by what the forward does with them.

        Raises `InputError` where it needs something that nothing tells.
        """
        forward, others = self.guesses.forward, self.said or self.given
        for owner in [name for name in plans if name in forward.holders]:
            plans = self._opened(owner, plans, sure=True)
        # An argument of an unknown name that stands behind others may be let out, or is one that somebody must give.
        extra = [n for n in plans if forward.kind(n) in ("unknown", "lengths") and (len(plans) > 1 or others)]
        extra = [n for n in extra if n != next(iter(forward.parameters), n) and "." not in n]
        tried: list[tuple[int, dict[str, Plan], Probed]] = []
        for attempt in self._attempts(plans, extra):
            probed = self.probe(attempt, whole=bool(extra) or forward.open_ended)
            missing = probed.error.args[0] if isinstance(probed.error, KeyError) and probed.error.args else None
            known_names = (*plans, *self.said, *self.given, *forward.lacking)
            if forward.open_ended and isinstance(missing, str) and missing not in known_names:
                if forward.kind(missing) != "mask":
                    return self.find({**plans, missing: self.guesses.of(missing)})
                forward.lacking.append(missing)
            for owner in filter(None, (probed.holder, probed.maybe)):
                if opened := self._opened(owner, plans, sure=owner == probed.holder):
                    return self.find(opened)
            known = len(probed.evidence) if probed.error is not None else len(plans) + 1
            tried.append((known, attempt, probed))
            if known >= len(plans):
                break
        _, chosen, probed = max(tried, key=lambda one: one[0])
        self.raises, self.evidence = probed.error is not None, probed.evidence
        firm = {n for n, evidence in probed.evidence.items() if evidence.firm}
        doubtful = [n for n in extra if forward.kind(n) == "unknown" and n not in firm]
        untold = [n for n in doubtful if (n in chosen or probed.error is not None)]
        for name in untold or (plans if isinstance(probed.error, TypeError) else ()):
            if opened := self._opened(name, plans, sure=False):
                return self.find(opened)
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
        if not loose:
            return attempts
        ids, images = {n: self.guesses.ids(n) for n in loose}, dict.fromkeys(loose, self.guesses.image())
        return [
            {name: instead.get(name, plan) for name, plan in attempt.items()}
            for instead in ({}, ids, images)
            for attempt in attempts
        ]

    def _opened(self, owner: str, plans: Mapping[str, Plan], *, sure: bool) -> dict[str, Plan]:
        """The plans with those for what an argument holds in its place: the entries that the forward asks it for.

        Those are two where it joins them. Empty where it does not run with them, unless it is `sure` that it holds any.

        Raises `InputError` where it is sure, and nothing tells what it holds.
        """
        forward, plans = self.guesses.forward, {name: plan for name, plan in plans.items() if name != owner}
        if forward.is_star(owner):
            return {**plans, **self._starred(owner, plans)}
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
        if not (found and runs):
            if sure:
                raise InputError(
                    f"{forward.label} takes several tensors in {owner}, and nothing tells what is in it. Give each "
                    f"entry: --input-shape {owner}.KEY=2x10x512:float32 with its own sizes."
                )
            forward.holders.pop(owner, None)
            return {}
        forward.entered.append(owner)
        return {**plans, **found}

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
