"""What the arguments of a forward are: guesses by their names and the target's sizes, and one run of it with those."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import Parameter
from typing import Any, get_origin, is_typeddict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..build.arguments import InputShape
from ..build.target import Target
from ..build.vocabulary import ALIASES, Kind, plain
from ..errors import InputError, SpecError
from ..layers.spec import AttentionSpec, InputSpec
from .drawing import Axis, Plan
from .forward import Forward
from .hugging_face import is_hugging_face
from .probe import Evidence, Probed

_UNUSUAL = 37
"""A width that nothing has: whatever takes it, does not look at it."""
_VOCABULARY = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")
_CHANNELS = ("channels", "in_channels", "in_chans", "num_channels")
_IMAGE_SIZES = ("image_size", "img_size", "input_resolution", "resolution")


@dataclass(frozen=True)
class Sizes:
    """What a target says of its arguments, by their names, by names of settings and by its layers."""

    target: Target
    forward: Forward
    spec: AttentionSpec | None
    """The sizes of a layer that are known before it runs; None for any other."""
    unbatched: bool

    def plan(self, name: str, kind: Kind | None = None, size: int | None = None) -> Plan:
        """Return what an argument is likely to be, or a plan of this kind.

        `size` is the width of its last axis, of ids the number of tokens, of an image its channels.
        """
        kind = kind or self.forward.kind(name)
        if kind == "image":
            channels = size or _first_int(self.target.arguments, *_CHANNELS) or 3
            return Plan(kind, ("batch", channels, *self._image_size()))
        if kind == "lengths":
            return Plan(kind, ("batch",), "int64")
        is_encoded = plain(name) in ("src", "source", "inputids", "xids", "srcids") and self.forward.encodes_and_decodes
        is_second = is_encoded or self.forward.kind(name) in ("key", "value", "other")
        length: Axis = "key" if is_second else "query"
        places: tuple[Axis, ...] = (length,) if self.unbatched else ("batch", length)
        if kind == "ids":
            return Plan(kind, places, "int64", size or self.vocabulary())
        return Plan(kind, (*places, size or self.width(kind)))

    def corrected(self, name: str, plan: Plan, evidence: Evidence | None) -> Plan:
        """Return a plan as what the forward did with the argument shows that it should be."""
        if evidence is None:
            return plan
        return self.plan(name, plan.kind if evidence.kind == "width" else evidence.kind, evidence.size)

    def of_shape(self, name: str, shape: InputShape) -> Plan:
        """Return a tensor of the shape that somebody gave it."""
        kind = self.forward.kind(name)
        if shape.dtype is None:
            return Plan(kind, shape.shape, "int64" if kind == "ids" else "", self.vocabulary())
        whole = shape.dtype.startswith("int")
        return Plan("ids" if whole else "unknown", shape.shape, shape.dtype, self.vocabulary() if whole else 2)

    def width(self, kind: Kind) -> int:
        """Return the width of vectors of a kind, or one that nothing has where nothing says it."""
        if self.spec is not None:
            widths = {"key": self.spec.key_width, "other": self.spec.key_width, "value": self.spec.value_width}
            return widths.get(kind, self.spec.embed_dim)
        flag = {"key": "kdim", "value": "vdim", "other": "kdim"}.get(kind, "embed_dim")
        named = (_first_int(source, *ALIASES[f]) for f in (flag, "embed_dim") for source in self._sources())
        linears = [m for m in self.target.module.modules() if isinstance(m, nn.Linear)]
        taken = [m.in_features for m in linears] + [m.out_features for m in linears]  # of lazy ones the first are 0
        return next(filter(None, (*named, *taken)), _UNUSUAL)

    def vocabulary(self) -> int:
        """Return the number of tokens that there are."""
        named = (_first_int(source, *_VOCABULARY) for source in self._sources())
        tables = (m.num_embeddings for m in self.target.module.modules() if isinstance(m, nn.Embedding))
        return next(filter(None, (*named, *tables)), 2)

    def of_lazy(self) -> tuple[str, ...]:
        """Return a sentence on the width that lazy layers are given; empty where there are none.

        Raises `InputError` where nothing suggests one.
        """
        lazy = [m for m in self.target.module.modules() if any(map(is_lazy, m.parameters(recurse=False)))]
        if not lazy or not {"ids", "image"}.isdisjoint(self.forward.kinds):
            return ()
        width, name = self.width("hidden"), next(iter(self.forward.parameters), "x")
        if width == _UNUSUAL:
            raise InputError(
                f"{self.target.name} has lazy layers ({type(lazy[0]).__name__}), which take any width, and nothing "
                f"tells which is meant. Give it: --input-shape {name}=2x10x512 with its own sizes."
            )
        return (f"Its lazy layers take any width, and were given {width}: --input-shape gives another.",)

    def _image_size(self) -> tuple[int, int]:
        sources = (self.target.arguments, *map(vars, self.target.module.modules()))
        size = next((source[name] for source in sources for name in _IMAGE_SIZES if source.get(name)), 32)
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))

    def _sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return what may tell a size by its name: arguments of the constructor, attributes, a configuration."""
        module = self.target.module
        config = getattr(module, "config", None)
        settings = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
        return self.target.arguments, vars(module), settings


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these names that is a size in the source, whatever its spelling; None where none is."""
    known = {plain(name): value for name, value in source.items() if type(value) is int and value > 0}
    return next((known[plain(name)] for name in names if plain(name) in known), None)


# -- which arguments, and what they are --------------------------------------------------------------------------------


def needed(forward: Forward, target: Target, inputs: InputSpec, given: Collection[str]) -> list[str]:
    """Return the names of the tensors to draw beside those that are given.

    Raises:
        InputError: something is needed that can be no tensor of a guess.
        SpecError: --key-len has nothing to set.
    """
    required = [name for name in forward.parameters if forward.needs(name) and name not in given]
    for name in required:
        if forward.kind(name) == "setting":
            raise InputError(f"{forward.label} needs {name}, which is no tensor. Give it: --set {name}=VALUE.")
        if _holds_tensors(forward.parameters[name].annotation):
            raise InputError(several(forward, target, name))
    names = [name for name in required if forward.kind(name) != "mask"]
    if not names and not given:
        main = str(getattr(forward.module, "main_input_name", ""))
        names = [main] if main in forward.parameters else forward.tensors[:1]
        if forward.open_ended and not forward.parameters:
            raise InputError(several(forward, target, "**kwargs"))
    if inputs.key_len is not None and not forward.encodes_and_decodes:
        second = [name for name in forward.parameters if forward.kind(name) in ("key", "value", "other")]
        if not second:
            listed = ", ".join(forward.parameters)
            raise SpecError(f"--key-len has nothing to set: {forward.label} takes one sequence ({listed}).")
        source = [name for name in second if forward.kind(name) == "other"][:1] or second
        names += [name for name in source if name not in names and name not in given]
    return names


def guessed(
    sizes: Sizes, names: Sequence[str], given: Collection[str], run: Callable[[Mapping[str, Plan], bool], Probed]
) -> dict[str, Plan]:
    """Return plans for arguments, by what the forward does with them: in one run, or in more where it raises.

    Args:
        sizes: what the target says.
        names: of the arguments.
        given: other arguments, which are there.
        run: runs the forward with plans, to the end where that is asked for.

    Raises `InputError` where it needs something that nothing tells.
    """
    forward = sizes.forward
    # An argument of an unknown name that stands behind others may be left out, or is one that somebody must give.
    behind = [name for name in names if name != next(iter(forward.parameters), name) and (len(names) > 1 or given)]
    extra = [name for name in behind if forward.kind(name) in ("unknown", "lengths")]
    tried: list[tuple[int, dict[str, Plan], Probed]] = []
    for attempt in _attempts(sizes, names, extra):
        probed = run(attempt, bool(extra))
        if probed.holder is not None:
            raise InputError(several(forward, sizes.target, probed.holder))
        known = len(probed.evidence) if probed.error is not None else len(names) + 1
        tried.append((known, attempt, probed))
        if known >= len(names):
            break
    _, chosen, probed = max(tried, key=lambda attempt: attempt[0])
    firm = {name for name, evidence in probed.evidence.items() if evidence.firm}
    is_guesswork = is_hugging_face(forward.module) and probed.error is not None  # its configuration says the rest
    open_names = names if is_guesswork else [name for name in extra if forward.kind(name) == "unknown"]
    untold = [n for n in open_names if n not in firm and (n in chosen or probed.error is not None)]
    if untold:
        lines = function_of(sizes.target, {n: None if n in untold else sizes.plan(n) for n in names})
        raise InputError(
            f"{forward.label} needs {untold[0]}, and nothing tells what that is. Give it: --input-shape "
            f"{untold[0]}=2x10x512:float32 with its own sizes, --input FILE with {untold[0]} in it, or as a function "
            f"that returns it with the module:\n{lines}"
        )
    return {name: sizes.corrected(name, plan, probed.evidence.get(name)) for name, plan in chosen.items()}


def _attempts(sizes: Sizes, names: Sequence[str], extra: Sequence[str]) -> Iterator[dict[str, Plan]]:
    """Yield what to try, the likeliest first: without what may be left out, and with ids or images for vectors."""
    plans = {name: sizes.plan(name) for name in names}
    loose = [name for name, plan in plans.items() if plan.kind in ("hidden", "unknown", "query")]
    kinds: tuple[Kind | None, ...] = (None, "ids", "image") if loose else (None,)
    for kind in kinds:
        changed = {name: sizes.plan(name, kind if name in loose else None) for name in names}
        if extra:
            yield {name: plan for name, plan in changed.items() if name not in extra}
        yield changed


# -- what nobody can guess ---------------------------------------------------------------------------------------------


def _holds_tensors(annotation: Any) -> bool:
    """Return whether an annotation says that an argument holds several tensors."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind is Parameter.empty or issubclass(kind, (str, Tensor)):
        return False
    return is_dataclass(kind) or is_typeddict(kind) or issubclass(kind, (Mapping, Sequence))


def several(forward: Forward, target: Target, name: str) -> str:
    """Return the message for an argument that holds several tensors, and nobody can guess which."""
    return (
        f"{forward.label} takes several tensors in {name}, and nothing tells what is in it. Give it as a function "
        f"that returns it with the module:\n{function_of(target, {name.strip('*'): None})}"
    )


def function_of(target: Target, arguments: Mapping[str, Plan | None]) -> str:
    """Return the three lines of a function that returns a module and its arguments, filled in as far as is known."""
    passed = ", ".join(f"{name}={value!r}" for name, value in target.passed.items())
    function = target.made_from.rpartition(":")[2]
    is_plain = function.isidentifier() and all(name.isidentifier() for name in target.passed)
    values = ", ".join(f"{name}={'...' if plan is None else plan.code}" for name, plan in arguments.items())
    module = f"{function}({passed})" if is_plain and not target.made_from.startswith("hf:") else "..."
    return f"def attention():\n    module = {module}\n    return module, (), dict({values})"
