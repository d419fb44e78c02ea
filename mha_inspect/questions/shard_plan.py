"""Plan how the projections of a module are cut over ranks: W_q, W_k and W_v by rows of whole heads, W_o by columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..errors import InputError
from ..making.importing import load_object
from ..measure.ranks import shard_of
from ..naming.parameters import parts_of
from ..naming.projection import Part, coordinates
from ..reports.trace import AttentionReport
from ..running.subject import Run
from ..text import did_you_mean, first_few, first_line, listed, plural, shown, span

Style = Literal["colwise", "rowwise", "replicate"]
STYLES: dict[Style, str] = {"colwise": "ColwiseParallel", "rowwise": "RowwiseParallel", "replicate": ""}
"""How a module's parameters are cut, in the words of Hugging Face's `tp_plan`, and torch's class for it."""

_WITH_DTENSORS = (
    "from torch.distributed.tensor.experimental import implicit_replication",
    "from torch.nn.attention import SDPBackend, sdpa_kernel",
)
_WRITE = 'Write e.g. {"q_proj": "colwise", "o_proj": "rowwise"}.'


@dataclass(frozen=True)
class Plan:
    """How a module is cut."""

    styles: Mapping[str, Style] = field(default_factory=dict)
    """Path of a module, in which `*` is any part, to its style; empty if the plan is code."""
    code: Mapping[str, Any] | Callable[..., Any] | None = None
    """The argument of `parallelize_module`, or a function of a module and a mesh; None for styles."""
    doubts: tuple[str, ...] = ()
    """The reasons that the styles cannot work, as sentences."""


def plan_from(text: str) -> Plan:
    """Return the plan in a JSON file, or the object `FILE.py:NAME`: a dict or a function of a module and a mesh.

    The JSON is from module path to style, also under the key `plan`, as in a report.

    Raises `InputError` if it cannot be read, or is something else.
    """
    if text.endswith(".py"):
        raise InputError(f"plan {shown(text)} is missing the name of a function or a dict. Write {shown(text)}:NAME.")
    if ".py:" in text:
        code, _ = load_object(text)
        return Plan(code=code)
    try:
        styles = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"plan {shown(text)} cannot be read: {error.strerror}. {_WRITE}") from None
    except ValueError as error:
        raise InputError(f"plan {shown(text)} is not JSON: {first_line(error)}. {_WRITE}") from None
    if isinstance(styles, dict) and "plan" in styles:
        styles = styles["plan"]
    if not _are_styles(styles):
        raise InputError(f"plan {shown(text)} is not a map from module path to {listed(list(STYLES))}. {_WRITE}")
    return Plan(styles)


def _are_styles(content: object) -> bool:
    """Return whether the content of a JSON file is a map to styles: `{"q_proj": "colwise"}`."""
    if not isinstance(content, dict) or not content:
        return False
    return all(style in STYLES for style in map(str, content.values()))


def plan_of(run: Run, module: nn.Module, attentions: Sequence[AttentionReport], ranks: int) -> Plan:
    """Return the plan from a run of the whole module. Raises `InputError` with the reason if heads cannot be cut."""
    styles: dict[str, Style] = {}
    for (_, names), in_parameters, attention in zip(run.attentions, parts_of(run), attentions, strict=True):
        matrices = _matrices(in_parameters.parts)
        _require_matrices(matrices, attention, module)
        _require_heads(names.num_heads, attention, ranks)
        key_heads = [_count(part) for part in matrices if part.letter in "kv"]
        are_copied = any(count % ranks for count in key_heads)
        for path, of_path in _by_module(matrices).items():
            style = _style_of(of_path, are_copied=are_copied)
            doubt = _doubt(path, of_path, ranks, style)
            if doubt:
                raise InputError(doubt)
            styles[path] = style
    if not styles:
        raise InputError("no attention was found, so there are no heads to shard. Check the target.")
    return Plan(styles)


def _style_of(parts: Sequence[Part], *, are_copied: bool) -> Style:
    """Return how a module with these projections is cut; `are_copied` if each rank has a copy of all key heads."""
    letters = {part.letter for part in parts}
    if are_copied and letters <= {"k", "v"}:
        return "replicate"
    if letters == {"o"}:
        return "rowwise"
    return "colwise"


def _matrices(parts: Iterable[Part]) -> list[Part]:
    """Return the projections whose rows or columns belong to heads, without biases."""
    return [part for part in parts if part.kind == "W" and part.heads]


def _require_matrices(matrices: Sequence[Part], attention: AttentionReport, module: nn.Module) -> None:
    """Raise `InputError` unless each projection is one matrix, W_q at least, and each is that of an nn.Linear."""
    for letter in "qkvo":
        names = [part.parameter.name for part in matrices if part.letter == letter]
        is_missing = letter == "q" and not names
        if is_missing or len(names) > 1:
            raise InputError(_not_one_matrix(f"W_{letter}{_place(attention)}", names, module))
    for part in matrices:
        _require_own_linear(part, module)


def _require_heads(num_heads: int, attention: AttentionReport, ranks: int) -> None:
    """Raise `InputError` if the heads do not divide among the ranks, or are normed together."""
    place = _place(attention)
    if num_heads % ranks:
        divisors = [str(number) for number in range(2, num_heads + 1) if num_heads % number == 0]
        way = "One head cannot be sharded."
        if divisors:
            way = f"Use --ranks {listed(divisors)}."
        raise InputError(f"{num_heads} heads{place} do not divide among {ranks} ranks. {way}")
    if attention.qk_norm is not None and attention.qk_norm.over == "all":
        raise InputError(f"queries or keys{place} are normed over all heads, and a rank has only some. Norm each head.")


def _place(attention: AttentionReport) -> str:
    return f" of {attention.module}" if attention.module else ""


def _not_one_matrix(letter: str, names: Sequence[str], module: nn.Module) -> str:
    """Return why a projection has no single matrix: there are others, or its weight is computed in each forward."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and "weight" not in part._parameters:
            return _computes_its_weight(path)
    if not names:
        return f"{letter} was not found, and without it no heads can be sharded."
    several = f"{len(names)} matrices ({first_few(names, 2)})"
    return f"{letter} is {several}, but a plan shards a single matrix by its heads. Join them in one nn.Linear."


def _computes_its_weight(path: str) -> str:
    """Return why the weight of a Linear cannot be cut."""
    return (
        f"{path} computes its weight in each forward, but parallelize_module shards parameters. Make the weight "
        "a parameter, e.g. with torch.nn.utils.parametrize.remove_parametrizations."
    )


def _require_own_linear(part: Part, module: nn.Module) -> None:
    """Raise `InputError` if a matrix is no parameter of an nn.Linear, or also of another module."""
    name = part.parameter.name
    owner, _, attribute = name.rpartition(".")
    linear, is_parametrized, _ = owner.rpartition(".parametrizations.")
    if is_parametrized and isinstance(module.get_submodule(linear), nn.Linear):
        raise InputError(_computes_its_weight(linear))
    submodule = module.get_submodule(owner)
    if not isinstance(submodule, nn.Linear):
        raise InputError(
            f"{part.name} is {_lines_of(part, module)}{name} of {type(submodule).__name__}, but parallelize_module "
            "shards nn.Linear. Give each projection a nn.Linear, or shard its heads in a function of module and mesh, "
            "and test it with --ranks N:FILE.py:NAME."
        )
    weight = submodule._parameters[attribute]
    for path, further in module.named_modules():
        has_weight = any(tensor is weight for tensor in further._parameters.values())
        if has_weight and path != owner:
            raise InputError(
                f"{path} has the weight of {owner}, but parallelize_module gives each module a part of its own. "
                "Give them two weights."
            )


def _lines_of(part: Part, module: nn.Module) -> str:
    """Return the lines of a parameter that a projection is: `rows 0–15 of `; empty for the whole parameter."""
    shard = shard_of(part, module.get_parameter(part.parameter.name))
    if shard is None or shard.rows == (0, shard.size):
        return ""
    lines = "columns" if shard.dim else "rows"
    return f"{lines} {span(shard.rows)} of "


def doubts_of(styles: Mapping[str, Style], run: Run, module: nn.Module, ranks: int) -> tuple[str, ...]:
    """Return the reasons, as sentences, that a user's styles do not cut whole heads.

    Raises `InputError` if there is no module at a path.
    """
    paths = [path for path, _ in module.named_modules()]
    for pattern in styles:
        if not any(is_at(path, pattern) for path in paths):
            raise InputError(f"the plan names {shown(pattern)}, which is not a module.{did_you_mean(pattern, paths)}")
    doubts: dict[str, None] = {}
    for in_parameters in parts_of(run):
        matrices = _matrices(in_parameters.parts)
        for path, of_path in _by_module(matrices).items():
            doubt = _doubt(path, of_path, ranks, _style_at(path, styles))
            if doubt:
                doubts[doubt] = None
    return tuple(doubts)


def _style_at(path: str, styles: Mapping[str, Style]) -> Style:
    """Return the style of the module at a path: that of the first pattern which names it."""
    for pattern, style in styles.items():
        if is_at(path, pattern):
            return style
    return "replicate"


def _by_module(parts: Sequence[Part]) -> dict[str, list[Part]]:
    paths: dict[str, list[Part]] = {}
    for part in parts:
        path, _, _ = part.parameter.name.rpartition(".")
        paths.setdefault(path, []).append(part)
    return paths


def _count(part: Part) -> int:
    """Return the number of heads in a matrix; a key head of which all queries have a copy counts once."""
    return len({tuple(places.tolist()) for places in part.heads.values()})


def _doubt(path: str, parts: Sequence[Part], ranks: int, style: Style) -> str:
    """Return why a cut of a projection does not give each rank whole heads; empty if it does."""
    if style == "replicate":
        return ""
    path = _folded(path)
    names = listed([f"W_{part.letter}" for part in parts])
    is_output = any(part.letter == "o" for part in parts)
    if is_output and len(parts) > 1:
        return f"{path} is {names}: one is sharded by rows, the other by columns. Give each a nn.Linear."
    if is_output and style != "rowwise":
        return f"{path} is {names} and is sharded {style}; expected rowwise: its columns belong to heads."
    if not is_output and style == "rowwise":
        return f"{path} is {names} and is sharded {style}; expected colwise: its rows belong to heads."
    dim = 1 if is_output else 0
    for part in parts:
        if _gives_whole_heads(part, dim, ranks):
            continue
        size = part.parameter.tensor.shape[dim]
        lines = f"{size} columns" if is_output else f"{size} rows"
        if len(parts) == 1:
            return _no_whole_heads(path, lines, _count(part), ranks)
        return (
            f"{path} has {names} in its {lines}, and sharding into {ranks} gives a rank other heads "
            "of each. Give each a nn.Linear."
        )
    return ""


def _no_whole_heads(path: str, lines: str, heads: int, ranks: int) -> str:
    """Return why equal parts of the `64 rows` of a matrix are not whole heads."""
    if heads % ranks:
        return f"{path} has {plural(heads, 'head')}, and sharding its {lines} into {ranks} would cut through a head."
    return f"the {lines} of {path} are not its {heads} heads one after the other."


def _gives_whole_heads(part: Part, dim: int, ranks: int) -> bool:
    """Return whether equal parts of the rows (0) or columns (1) of a matrix are the heads of each rank, in order."""
    matrix = part.parameter.tensor
    count = _count(part)
    if matrix.shape[dim] % ranks:
        return False
    size = matrix.shape[dim] // ranks
    for head, places in part.heads.items():
        lines = coordinates(places[places >= 0], matrix)[dim]
        rank = head * ranks // count
        if (lines // size != rank).any():
            return False
    return True


def is_at(path: str, pattern: str) -> bool:
    """Return whether a pattern of a plan names the module at a path."""
    words = pattern.split(".")
    parts = path.split(".")
    return len(words) == len(parts) and all(map(fnmatch, parts, words))


def _folded(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path)


def folded(styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the styles with `*` for numbers in paths, where all of them have the same style."""
    patterns: dict[str, set[Style]] = {}
    for path, style in styles.items():
        of_pattern = patterns.setdefault(_folded(path), set())
        of_pattern.add(style)
    by_pattern: dict[str, Style] = {}
    for pattern, kinds in patterns.items():
        if len(kinds) > 1:
            return dict(styles)
        by_pattern[pattern] = kinds.pop()
    return by_pattern


def code_of(styles: Mapping[str, Style], call: str, *, hugging_face: bool) -> str:
    """Return Python code that applies a plan; `call` is the call if the projections return DTensors, else empty."""
    patterns = folded(styles)
    classes = sorted({STYLES[style] for style in patterns.values()} - {""})
    imported = ", ".join([*classes, "parallelize_module"])
    lines = [f"from torch.distributed.tensor.parallel import {imported}"]
    if call:
        lines += _WITH_DTENSORS
    lines += ["", "parallelize_module(model, mesh, {"]
    for pattern, style in patterns.items():
        if style == "replicate":
            lines.append(f"    # {pattern}: every rank has a copy")
            continue
        argument = "use_local_output=False" if call and style == "colwise" else ""
        lines.append(f'    "{pattern}": {STYLES[style]}({argument}),')
    lines.append("})")
    if call:
        lines += ["with implicit_replication(), sdpa_kernel(SDPBackend.MATH):", f"    {call}"]
    if hugging_face:
        lines.append("tp_plan = {")
        for pattern, style in patterns.items():
            if style != "replicate":
                lines.append(f'    "{pattern}": "{style}",')
        lines.append("}")
    return "\n".join(lines)
