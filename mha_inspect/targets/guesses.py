"""What a forward's arguments may be: by their names, and by what the target says of its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError
from ..layers.spec import AttentionSpec, InputSpec
from .drawing import Plan
from .forward import Forward
from .probe import Evidence
from .target import Target
from .values import InputShape
from .vocabulary import ALIASES, Kind, plain

_UNUSUAL = 37
"""A width that nothing has: whatever takes it, does not look at it."""
_VOCABULARY = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")


class Guesses:
    """Plans for the arguments of a target's forward."""

    def __init__(self, target: Target, forward: Forward, inputs: InputSpec, spec: AttentionSpec | None) -> None:
        self.target, self.forward, self.inputs = target, forward, inputs
        self.spec = spec
        """The sizes of a layer that are known before it runs; None for any other."""

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
        known = self.target.arguments
        channels = channels or _first_int(known, "channels", "in_channels", "in_chans", "num_channels") or 3
        size = next(
            (known[n] for n in ("image_size", "img_size", "input_resolution", "resolution") if n in known), None
        )
        modules = self.target.module.modules()
        size = size or next((getattr(m, n) for m in modules for n in ("image_size", "img_size") if hasattr(m, n)), 32)
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
        key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
        encoded = forward.encodes_and_decodes and plain(name) in ("src", "source", "inputids", "xids", "srcids")
        length = key_len if forward.kind(name) in ("key", "value", "other") or encoded else inputs.seq_len
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
        flags = {"key": ("kdim", "embed_dim"), "value": ("vdim", "embed_dim"), "other": ("kdim", "embed_dim")}
        for flag in flags.get(kind, ("embed_dim",)):
            for source in self._sources:
                width = _first_int(source, *ALIASES[flag])
                if width is not None:
                    return width
        linears = [m for m in self.target.module.modules() if isinstance(m, nn.Linear)]
        lazy = [m.out_features for m in linears if not m.in_features]
        return next((m.in_features for m in linears if m.in_features), lazy[0] if lazy else _UNUSUAL)

    def _vocabulary(self) -> int:
        sizes = (_first_int(source, *_VOCABULARY) for source in self._sources)
        tables = (m.num_embeddings for m in self.target.module.modules() if isinstance(m, nn.Embedding))
        return next((size for size in sizes if size is not None), next(tables, 2))


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of these names that is a size in the source, whatever its spelling."""
    known = {plain(name): value for name, value in source.items()}
    found = (known.get(plain(name)) for name in names)
    return next(
        (value for value in found if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )
