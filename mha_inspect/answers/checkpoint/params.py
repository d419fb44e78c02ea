"""List the tensors of a checkpoint from its headers: their roles, and on request their numbers.

Headers are read without torch. Functions that read numbers import it themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError, MhaInspectError, SpecError, is_out_of_memory
from ...files.attentions import Role, find_attentions, fitting_counts
from ...files.checkpoint import Checkpoint, read_checkpoint
from ...files.tensors import StoredTensor, read_stored
from ...reports.common import Environment, LayerInfo
from ...reports.params import LikeModule, Parameter, ParametersTotal, ParamsReport, StoredAttention, StoredName
from ...text import first_few, first_line, listed, plural, shown, spans
from .pruned import Pruned, pruned_in, pruned_notes, with_kept_heads
from .stacked import Stacked, find_stacked, stacked_notes
from .transposed import Transposed, find_transposed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...layers.spec import Show
    from ...naming.named_run import NamedRun
    from ...naming.parameter_words import ParameterRole
    from ...naming.projection import Projection
    from ...running.subject import Subject

_SHOWN = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Entries of config.json above the table."""


@dataclass(frozen=True)
class Known:
    """The roles of a file's tensors, from their names or from a run of a module."""

    attentions: tuple[StoredAttention, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By the names in the file."""
    notes: tuple[str, ...] = ()
    like: LikeModule | None = None


def params_of_checkpoint(
    path: Path,
    *,
    num_heads: int | None = None,
    per_head: bool = False,
    show: Show | None = None,
    like: Subject | nn.Module | None = None,
) -> ParamsReport:
    """Return the tensors of a checkpoint. Numbers are read only for `show`, one tensor at a time.

    The path is of a file, an index of shards, or a folder. `per_head` shows each head's rows and columns. `like` is
    a module to compare with; a subject is also run, to find the roles of tensors.

    Raises:
        InputError: there are no tensors, a file is damaged, or it has no name in common with `like`.
        UnsafeFileError: a file is compressed, or could only be opened by running code in it.
        SpecError: the shapes do not allow the head count that was given.
    """
    checkpoint = read_checkpoint(path)
    tensors = checkpoint.tensors
    known = _by_names(checkpoint, num_heads) if like is None else _by_run(checkpoint, num_heads, like)
    notes = [*checkpoint.notes, *known.notes]
    whole = sum(tensor.numel for tensor in tensors.values())
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    if show is not None and show.stats:
        for stored in known.attentions:
            of_stored = {name: known.roles[name] for name in stored.parameters if name in known.roles}
            notes += _unusual_heads(stored.module, numbers_of(of_stored, tensors))
    shown_config = {name: checkpoint.config.get(name) for name in _SHOWN}
    return ParamsReport(
        environment=Environment(torch="", device="", dtype=dtypes.most_common(1)[0][0], seed=None),
        layer=LayerInfo(path.resolve().name, dict(_plain(shown_config))),
        parameters=tuple(_parameter(name, tensor, known, whole, per_head, show) for name, tensor in tensors.items()),
        total=ParametersTotal(whole, sum(tensor.nbytes for tensor in tensors.values()), "", None),
        notes=tuple(notes),
        stored_attentions=known.attentions,
        like=known.like,
    )


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the texts, and the numbers that fit into 64 bits."""
    for name, value in values.items():
        if isinstance(value, str) or (isinstance(value, int) and 0 <= value < 2**63):
            yield name, shown(value) if isinstance(value, str) else value


def _by_names(checkpoint: Checkpoint, num_heads: int | None, *, fits: bool = True) -> Known:
    """Return the roles from names and shapes. Raises `SpecError` if no attention can have that many heads.

    `fits` says whether the shapes are those of the module that the file is for.
    """
    named = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
    attentions = [attention.stored for attention in named]
    if num_heads is not None and named and not any(stored.num_heads == num_heads for stored in attentions):
        allowed = sorted({n for stored in attentions for n in (*stored.fits, stored.num_heads) if n is not None})
        where, counts = shown(checkpoint.path), listed(list(map(str, allowed)))
        raise SpecError(f"num_heads {num_heads} does not fit the shapes in {where}. Use {counts}.")
    return Known(
        tuple(attentions),
        {name: role for attention in named for name, role in attention.roles.items()},
        tuple(_notes(attentions, from_config=num_heads is None and bool(checkpoint.config), fits=fits)),
    )


def _parameter(
    name: str, tensor: StoredTensor, known: Known, whole: int, per_head: bool, show: Show | None
) -> Parameter:
    role = known.roles.get(name, Role("", ""))
    stats = values = None
    if show is not None and (show.stats or show.values) and tensor.numel and tensor.read is not None:
        from ...measure.content import stats_of, values_of

        numbers = read_stored(tensor, shown(name))
        stats = stats_of(numbers) if show.stats and not numbers.is_complex() else None
        values = values_of(numbers, show) if show.values else None
    return Parameter(
        name=name,
        shape=tensor.shape,
        axes=role.axes or " ".join(map(str, tensor.shape)),
        dtype=tensor.dtype,
        numel=tensor.numel,
        nbytes=tensor.nbytes,
        share=tensor.numel / whole if whole else 0.0,
        role=role.text,
        heads=(role.heads or None) if per_head else None,
        stats=stats,
        values=values,
    )


def _notes(attentions: Sequence[StoredAttention], *, from_config: bool, fits: bool) -> Iterator[str]:
    if not attentions:
        yield "No tensor has the name of an attention's projection, so their roles are unknown."
        return
    yield "Roles come from names and shapes; nothing was run."
    for counts, number in Counter(stored.fits for stored in attentions if stored.fits).items():
        yield (
            f"num_heads is not in the file: {listed(list(map(str, counts)))} fit the shapes of "
            f"{plural(number, 'attention')}."
        )
    if any(stored.fits for stored in attentions):
        # A file of other shapes than the module's does not load with any number of heads.
        loads = "Each of these head counts loads without an error. " if fits else ""
        yield f"{loads}Give the right head count: --num-heads N."
    if from_config and any(stored.num_heads for stored in attentions):
        yield "Head counts are from config.json, or the only ones that fit the shapes."
    without = sum(not stored.fits and stored.num_heads is None for stored in attentions)
    if without:
        yield f"No number of heads fits the shapes of {plural(without, 'attention')}."


# -- heads ----------------------------------------------------------------------------------------------------------


def numbers_of(roles: Mapping[str, Role], tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the parts of an attention by head, `W_q` to `b_v`, as far as the heads of its tensors are known.

    A matrix is `heads head_dim embed`, a bias `heads head_dim`.
    """
    import torch

    pieces: dict[str, dict[int, list[Tensor]]] = {}
    for name, role in roles.items():
        if role.heads and tensors[name].has_numbers:
            content = read_stored(tensors[name], shown(name))
            for piece in role.heads:
                bounds = [slice(*bound) for bound in (piece.rows, piece.columns) if bound is not None]
                numbers = content if content.dim() == len(bounds) else content.squeeze()
                heads = pieces.setdefault(piece.part, {})
                heads.setdefault(piece.head, []).append(numbers[tuple(bounds)].movedim(role.axis, 0))
    whole = {part: [torch.cat(heads[head]) for head in sorted(heads)] for part, heads in pieces.items()}
    return {part: torch.stack(heads) for part, heads in whole.items() if len({head.shape for head in heads}) == 1}


def _unusual_heads(module: str, numbers: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each unusual finding in the matrices of an attention."""
    for part, matrix in sorted(numbers.items(), key=lambda item: "qkvo".find(item[0][-1])):
        if part.startswith("W"):
            yield from _unusual(matrix.flatten(1), f"{part} of {shown(module) or 'the file'}")


def _unusual(heads: Tensor, called: str) -> Iterator[str]:
    """Yield a sentence about heads that are zero, not finite, or equal to each other."""
    import torch

    zero = [number for number, head in enumerate(heads) if not bool(head.any())]
    broken = [number for number, head in enumerate(heads) if not bool(head.isfinite().all())]
    if zero:
        yield f"{called}: {_heads_are(zero)} all zero."
    if broken:
        yield f"{called}: {_heads_are(broken)} not finite (NaN or inf)."
    same: dict[bytes, list[int]] = {}
    for number in set(range(len(heads))) - {*zero, *broken}:
        same.setdefault(heads[number].contiguous().view(torch.uint8).numpy().tobytes(), []).append(number)
    for twins in sorted(twins for twins in same.values() if len(twins) > 1):
        yield f"{called}: {_heads_are(twins)} identical."


def _heads_are(heads: list[int]) -> str:
    return f"head {heads[0]} is" if len(heads) == 1 else f"heads {spans(heads)} are"


# -- a module beside the file -----------------------------------------------------------------------------------------


def _by_run(checkpoint: Checkpoint, num_heads: int | None, beside: Subject | nn.Module) -> Known:
    """Return the roles from a run of a subject; for a module, those from names; each with how it fits the file.

    Raises `InputError` if no name of the module is in the file.
    """
    import torch

    from ...naming.parameter_words import roles_of
    from ...naming.parameters import projections
    from ...running.subject import Subject

    subject = beside if isinstance(beside, Subject) else Subject(beside, (), {})
    tensors, module, label, run = checkpoint.tensors, subject.module, subject.name, None
    why_not_run: tuple[str, ...] = ()
    if subject is beside:
        try:
            with torch.no_grad(), subject.replaying(subject.state()):
                run = subject.recorded(keep=True)
        except Exception as error:  # user code may raise anything on meta, e.g. for a tensor that it makes on the CPU
            if is_out_of_memory(error) or isinstance(error, MhaInspectError):
                raise
            why_not_run = (f"{label} could not be run without memory, so roles come from names: {first_line(error)}",)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if hasattr(tensor, "data")}
    shapes = {name: tuple(tensor.data.shape) for name, tensor in state.items()}
    prefix = _prefix({*tensors}, {*state})
    inner = {name: prefix[1:] + name if prefix[:1] == "-" else name.removeprefix(prefix) for name in tensors}
    names = {name: of for name, of in inner.items() if of in state}
    if not names:
        there, wanted = (shown(next(iter(names), "none")) for names in (tensors, state))
        raise InputError(
            f"The file has no tensor name of {label}: the file has {there}, the module {wanted}. "
            "Give the class that the file was saved from, or a part of it."
        )
    transposed = find_transposed(module, shapes, tensors, names)
    fits = {
        name: of for name, of in names.items() if tensors[name].shape == shapes[of] and name not in transposed.names
    }
    tied = {id(state[of]) for of in names.values()}  # of tied tensors, one in the file is enough
    like = LikeModule(
        label,
        prefix,
        len(fits),
        tuple(
            StoredName(of, shapes[of], buffer=of in buffers) for of, tensor in state.items() if id(tensor) not in tied
        ),
        tuple(StoredName(name, tensor.shape) for name, tensor in tensors.items() if name not in names),
        tuple(
            StoredName(name, tensors[name].shape, shapes[of], buffer=of in buffers)
            for name, of in names.items()
            if name not in fits and name not in transposed.names
        ),
        called=run is not None,
        transposed=tuple(StoredName(name, tensors[name].shape, shapes[names[name]]) for name in transposed.names),
    )
    stored_buffers = {name: tensors[name].numel for name, of in names.items() if of in buffers}
    to_split, to_join = _restacked(tensors, inner, shapes)
    further = [
        *stacked_notes(to_split, to_join, label),
        *_about_transposed(transposed, tensors, label),
        *_about_buffers(stored_buffers, label, sum(tensor.numel for tensor in tensors.values())),
    ]
    loads = not (transposed.names or like.wrong_shape or to_split or to_join)
    as_linear = _with_linears_turned(checkpoint, transposed)
    by_names = _by_names(as_linear, num_heads, fits=loads)
    if run is None:
        roles_by_name = _with_transposed(by_names.roles, transposed)
        notes = [*by_names.notes, *why_not_run, *further]
        return replace(by_names, roles=roles_by_name, like=like, notes=tuple(notes))
    stored = by_names.attentions if checkpoint.config else ()
    counts = {attention.module: attention.num_heads for attention in stored}
    in_file = {of: name for name, of in names.items() if name in fits or name in transposed.names}
    of_run, parts_of_run = roles_of(run, module), projections(run)
    without_heads = _pruned(run, parts_of_run, of_run, shapes, {of: tensors[name].shape for name, of in names.items()})
    trimmed = {of: each for each in without_heads.values() for of in each.parameters}
    in_file |= {of: name for name, of in names.items() if of in trimmed}
    parameters = {id(parameter): of for of, parameter in module.named_parameters()}
    for name, of in fits.items():  # a tied tensor gets the name that it has in the run
        in_file.setdefault(parameters.get(id(state[of]), of), name)
    roles: dict[str, ParameterRole] = {}
    for of, role in of_run.items():
        if of in in_file:
            name = in_file[of]
            if of in trimmed:
                role = with_kept_heads(role, trimmed[of])
            roles[name] = role.transposed() if name in transposed.names else role
    notes = [f"Roles come from a run of {label}."]
    if not run.attentions:
        notes.append("No attention was found in that run.")
    attentions = []
    for place, ((attention, axes), parts) in enumerate(zip(run.attentions, parts_of_run, strict=True)):
        used = dict.fromkeys(in_file[of] for part in parts for of in part.parameters if of in in_file)
        path = attention.module.removeprefix(prefix[1:]) if prefix[:1] == "-" else prefix + attention.module
        path, sizes = path.rstrip("."), (axes.num_heads, axes.num_kv_heads, axes.head_dim)
        fitting = _fitting(parts)
        if place in without_heads:
            kept = without_heads[place].kept
            sizes, fitting = (kept, kept, axes.head_dim), ()
        attentions.append(StoredAttention(path, tuple(used), *sizes, fitting))
        if counts.get(path) not in (None, axes.num_heads):
            notes.append(f"{shown(path)} has {axes.num_heads} heads in {label}, but {counts[path]} in config.json.")
    if any(len(attention.fits) > 1 for attention in attentions):
        notes.append(f"Head counts are from {label}.")
        if loads:
            notes.append("Every head count that fits would load without an error.")
    notes += pruned_notes([*without_heads.values()], label)
    packed = {each.packed for each in to_split}
    roles_of_packed = {name: by_names.roles[name] for name, of in inner.items() if of in packed}
    stored_roles = {name: _stored_role(role, is_transposed=name in transposed.names) for name, role in roles.items()}
    return Known(
        tuple(attentions),
        roles_of_packed | stored_roles,
        (*notes, *further),
        like,
    )


def _restacked(
    tensors: Mapping[str, StoredTensor], inner: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Stacked], list[Stacked]]:
    """Return the tensors of a file to split for a module, and those to join, by their names in the module.

    `inner` has the name in the module of each tensor of the file, `shapes` the shapes of the module.
    """
    in_file = {inner[name]: tensor for name, tensor in tensors.items()}
    in_module = {name: StoredTensor(shape, "float32", 0, None) for name, shape in shapes.items()}
    return find_stacked(in_file, in_module), find_stacked(in_module, in_file)


def _pruned(
    run: NamedRun,
    parts: Sequence[list[Projection]],
    roles: Mapping[str, ParameterRole],
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
) -> dict[int, Pruned]:
    """Return the attentions of a run of which a file has fewer heads, by their place.

    `expected` has the shapes of the module, `stored` those of the file.
    """
    others = {name: shape for name, shape in stored.items() if shape != expected[name]}
    found: dict[int, Pruned] = {}
    for place, ((attention, _), of_attention) in enumerate(zip(run.attentions, parts, strict=True)):
        pruned = pruned_in(attention.module, of_attention, roles, expected, others) if others else None
        if pruned is not None:
            found[place] = pruned
    return found


def _stored_role(role: ParameterRole, *, is_transposed: bool) -> Role:
    """Return a role in a run as the role of a tensor in a file."""
    heads = role.heads if role.is_part else ()
    # In a transposed matrix the heads may be columns, with the same rows for all.
    by_columns = is_transposed and len({piece.rows for piece in heads}) == 1
    return Role(role.axes, role.text, heads, int(by_columns))


def _about_transposed(transposed: Transposed, tensors: Mapping[str, StoredTensor], label: str) -> Iterator[str]:
    """Yield sentences about the weights that the file has transposed, and about square ones that may be."""
    names, unknown = transposed.names, transposed.unknown
    if names:
        yield _are_transposed(transposed, label)
    square = [name for name in names if tensors[name].shape[0] == tensors[name].shape[1]]
    if square:
        fits = "is square, so it loads" if len(square) == 1 else "are square, so they load"
        yield (
            f"{first_few([*map(shown, square)], 3)} {fits} without an error and would be wrong: "
            "the other weights of the same block are all transposed."
        )
    if unknown:
        are = "is" if len(unknown) == 1 else "are"
        yield (
            f"{first_few([*map(shown, unknown)], 3)} {are} square: could not determine whether transposed, "
            "as some weights of the same block are and others are not."
        )


def _are_transposed(transposed: Transposed, label: str) -> str:
    """Return the sentence about the transposed weights, with the fix."""
    names = first_few([*map(shown, transposed.names)], 3)
    is_one = len(transposed.names) == 1
    fix = f"Use .t() on {'it' if is_one else 'each of them'} before loading."
    if transposed.of_linear:
        it = "it" if is_one else "them"
        return (
            f"{names} {'is' if is_one else 'are'} transposed: the file has {it} as [in, out], the layout of GPT-2's "
            f"Conv1D; nn.Linear expects [out, in]. {fix}"
        )
    are = "is the transpose of the weight" if is_one else "are the transposes of the weights"
    return f"{names} {are} in {label}. {fix}"


def _with_linears_turned(checkpoint: Checkpoint, transposed: Transposed) -> Checkpoint:
    """Return a checkpoint with the shapes of nn.Linear, `out in`, for the weights that the file has as `in out`.

    Names and shapes are read in this layout. A file whose module has another layout, as Conv1D, has it already.
    """
    if not transposed.of_linear:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for name in transposed.names:
        tensors[name] = replace(tensors[name], shape=tensors[name].shape[::-1])
    return replace(checkpoint, tensors=tensors)


def _with_transposed(roles: Mapping[str, Role], transposed: Transposed) -> dict[str, Role]:
    """Return the roles of the file's layout, from the roles of nn.Linear's layout."""
    from ...naming.parameter_words import ParameterRole

    turned = dict(roles)
    for name in transposed.names if transposed.of_linear else ():
        role = roles.get(name)
        if role is not None and role.axes:
            other = ParameterRole(role.axes, role.text, role.heads).transposed()
            turned[name] = Role(other.axes, other.text, other.heads, 1 - role.axis)
    return turned


def _about_buffers(numels: Mapping[str, int], label: str, whole: int) -> Iterator[str]:
    """Yield a sentence about the tensors of the file that are buffers in the module, with their numbers of elements."""
    if numels:
        names, numel = first_few([shown(name) for name in numels], 3), sum(numels.values())
        are = "is a buffer" if len(numels) == 1 else "are buffers"
        yield f"{names} {are} of {label}, not weights: {numel:,} of the {whole:,} numbers in the file."


def _prefix(names: set[str], wanted: set[str]) -> str:
    """Return the prefix of names in the file that the module's names lack; with `-` in front, the other way round.

    It is the prefix with most names in common, the shortest if several are equal. A model may be saved alone, or as a
    part of a larger one.
    """
    agreeing = {"": len(names & wanted)}
    for sign, longer, shorter in (("", names, wanted), ("-", wanted, names)):
        for name in longer:
            pieces = name.split(".")
            for at in range(1, min(len(pieces), 6)):
                if ".".join(pieces[at:]) in shorter:
                    prefix = f"{sign}{'.'.join(pieces[:at])}."
                    agreeing[prefix] = agreeing.get(prefix, 0) + 1
    return min(agreeing, key=lambda prefix: (-agreeing[prefix], len(prefix), prefix))


def _fitting(projections: list[Projection]) -> tuple[int, ...]:
    """Return the numbers of heads that the shapes of an attention allow."""
    widths = {each.part: each.shape[0] * each.shape[1] for each in projections if each.part.startswith("W")}
    if not {"W_q", "W_k", "W_v"} <= {*widths}:
        return ()
    return fitting_counts(widths["W_q"], widths["W_k"], widths["W_v"], widths.get("W_o", widths["W_q"]))
