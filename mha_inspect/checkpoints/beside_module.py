"""Compare a checkpoint with the module that is to load it, and find the roles of its tensors in a run of the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import MhaInspectError, is_out_of_memory
from ..files.attentions import Role, fitting_counts
from ..files.checkpoint import Checkpoint
from ..files.tensors import StoredTensor
from ..naming.named_run import NamedRun
from ..naming.parameter_words import ParameterRole, roles_of
from ..naming.parameters import projections
from ..naming.projection import Projection
from ..reports.params import LikeModule, StoredAttention, StoredName
from ..running.subject import Subject
from ..text import first_few, first_line, shown
from .file_roles import FileRoles, roles_by_names
from .prefix import Prefix, common_prefix
from .stacked import Stacked, find_stacked, stacked_notes
from .transposed import Transposed, find_transposed

_NAMED = 3
"""The largest number of tensors in a sentence."""
Shape = tuple[int, ...]


def roles_beside_module(checkpoint: Checkpoint, num_heads: int | None, like: Subject | nn.Module) -> FileRoles:
    """Return the roles from a run of a subject; for a module, those from names; each with how it fits the file."""
    if isinstance(like, Subject):
        subject, attempt = like, _run_without_memory(like)
    else:
        subject, attempt = Subject(like, (), {}), _Attempt()
    file = _FileForModule.of(checkpoint, _ModuleTensors.of(subject))
    by_names = file.roles_by_names(num_heads)
    # A run has nothing to say about a file that has no name of the module.
    is_called = attempt.run is not None and bool(file.names)
    like_module = file.like(called=is_called)
    if attempt.run is None or not file.names:
        roles = _with_transposed(by_names.roles, file.transposed)
        notes = *by_names.notes, *attempt.notes, *file.notes()
        return replace(by_names, roles=roles, like=like_module, notes=notes)
    run = _RunInFile.of(attempt.run, file)
    counts: dict[str, int | None] = {}
    if checkpoint.config:
        counts = {attention.module: attention.num_heads for attention in by_names.attentions}
    return FileRoles(
        attentions=run.attentions(),
        roles={**_roles_of_packed(file, by_names.roles), **run.roles()},
        notes=(*run.notes(counts), *file.notes()),
        like=like_module,
    )


def _roles_of_packed(file: _FileForModule, roles: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles by name of the tensors to split: the module has only their parts."""
    packed = {stacked.packed for stacked in file.to_split}
    roles_of_packed = {}
    for name, in_module in file.renamed.items():
        if in_module in packed:
            roles_of_packed[name] = roles[name]
    return roles_of_packed


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Attempt:
    """A run of the module, or the sentence on why it could not be run; neither if nothing was tried."""

    run: NamedRun | None = None
    notes: tuple[str, ...] = ()


def _run_without_memory(subject: Subject) -> _Attempt:
    """Run a subject whose tensors have no numbers. Errors other than those of its own code are raised."""
    try:
        with torch.no_grad(), subject.replaying(subject.state()):
            return _Attempt(subject.recorded(keep=True))
    except Exception as error:  # user code may raise anything on meta, e.g. for a tensor that it makes on the CPU
        if is_out_of_memory(error) or isinstance(error, MhaInspectError):
            raise
        reason = first_line(error)
    return _Attempt(notes=(f"{subject.name} could not be run without memory, so roles come from names: {reason}",))


# -- the names of the module ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ModuleTensors:
    """The tensors that a module loads, by their names in its state dict."""

    label: str
    module: nn.Module
    tensors: Mapping[str, Tensor]
    """Two names of tied tensors have the same object."""
    shapes: Mapping[str, Shape]
    buffers: frozenset[str]
    """The names of those that are buffers, and no weights."""

    @classmethod
    def of(cls, subject: Subject) -> _ModuleTensors:
        module = subject.module
        tensors = {}
        shapes = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            # A module may also save objects that are no tensors.
            if hasattr(tensor, "data"):
                tensors[name] = tensor
                shapes[name] = tuple(tensor.data.shape)
        return cls(
            label=subject.name,
            module=module,
            tensors=tensors,
            shapes=shapes,
            buffers=frozenset(name for name, _ in module.named_buffers(remove_duplicate=False)),
        )


@dataclass(frozen=True)
class _FileForModule:
    """The tensors of a checkpoint beside those of a module."""

    checkpoint: Checkpoint
    module: _ModuleTensors
    prefix: Prefix
    renamed: Mapping[str, str]
    """The name in the module of each tensor of the file, also if the module has no such tensor."""
    names: Mapping[str, str]
    """The name in the module of each tensor of the file that the module has."""
    transposed: Transposed
    to_split: Sequence[Stacked]
    """Tensors of the file with several tensors of the module, by their names in the module."""
    to_join: Sequence[Stacked]
    """Tensors of the module with several tensors of the file, by their names in the module."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, module: _ModuleTensors) -> _FileForModule:
        """Find which tensor of the file is which of the module."""
        tensors = checkpoint.tensors
        prefix = common_prefix({*tensors}, {*module.tensors})
        renamed: dict[str, str] = {}
        names: dict[str, str] = {}
        by_name_in_module: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            in_module = prefix.in_module(name)
            renamed[name] = in_module
            by_name_in_module[in_module] = tensor
            if in_module in module.tensors:
                names[name] = in_module
        of_module = {}
        for name, shape in module.shapes.items():
            of_module[name] = StoredTensor(shape, "float32", 0, None)
        return cls(
            checkpoint=checkpoint,
            module=module,
            prefix=prefix,
            renamed=renamed,
            names=names,
            transposed=find_transposed(module.module, module.shapes, tensors, names),
            to_split=find_stacked(by_name_in_module, of_module),
            to_join=find_stacked(of_module, by_name_in_module),
        )

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor of the file."""
        return self.checkpoint.tensors[name].shape

    def expected(self, name: str) -> Shape:
        """Return the shape in the module of a tensor of the file."""
        return self.module.shapes[self.names[name]]

    def fitting(self) -> list[str]:
        """Return the names in the file of the tensors with the module's shape, without transposed square ones."""
        return [name for name in self._untransposed() if self.shape(name) == self.expected(name)]

    def wrong_shape(self) -> list[str]:
        """Return the names in the file of the tensors with another shape than the module's, without transposed ones."""
        return [name for name in self._untransposed() if self.shape(name) != self.expected(name)]

    def _untransposed(self) -> list[str]:
        transposed = {*self.transposed.names}
        return [name for name in self.names if name not in transposed]

    def loads(self) -> bool:
        """Return whether the module loads the file without an error, as far as shapes and packing show it."""
        return not (self.transposed.names or self.wrong_shape() or self.to_split or self.to_join)

    def like(self, *, called: bool) -> LikeModule:
        """Return how the file fits the module. `called` says whether roles come from a run of it."""
        tensors = self.checkpoint.tensors
        transposed = self.transposed.names
        return LikeModule(
            module=self.module.label,
            prefix=str(self.prefix),
            matching=len(self.fitting()),
            missing=tuple(self._missing()),
            unexpected=tuple(StoredName(name, self.shape(name)) for name in tensors if name not in self.names),
            wrong_shape=tuple(map(self._misfit, self.wrong_shape())),
            called=called,
            transposed=tuple(StoredName(name, self.shape(name), self.expected(name)) for name in transposed),
        )

    def _missing(self) -> Iterator[StoredName]:
        """Yield the tensors that only the module has; of tied tensors, one in the file is enough."""
        module = self.module
        stored = {id(module.tensors[in_module]) for in_module in self.names.values()}
        for name, tensor in module.tensors.items():
            if id(tensor) in stored:
                continue
            is_buffer = name in module.buffers
            yield StoredName(name, module.shapes[name], buffer=is_buffer)

    def _misfit(self, name: str) -> StoredName:
        is_buffer = self.names[name] in self.module.buffers
        return StoredName(name, self.shape(name), self.expected(name), buffer=is_buffer)

    def roles_by_names(self, num_heads: int | None) -> FileRoles:
        """Return the roles from names and shapes, in the layout of nn.Linear."""
        return roles_by_names(_with_linears_turned(self.checkpoint, self.transposed), num_heads, loads=self.loads())

    def notes(self) -> Iterator[str]:
        """Yield sentences on names, on tensors to split, to join or to transpose, and on buffers in the file."""
        if not self.names:
            yield _no_name_in_common(self.checkpoint, self.module)
        yield from stacked_notes(self.to_split, self.to_join, self.module.label)
        yield from self._about_transposed()
        yield from self._about_buffers()

    def _about_transposed(self) -> Iterator[str]:
        """Yield sentences about the weights that the file has transposed, and about square ones that may be."""
        square = [name for name in self.transposed.names if len({*self.shape(name)}) == 1]
        by_shape = [name for name in self.transposed.names if name not in square]
        if by_shape:
            yield _are_transposed(by_shape, self.module.label, of_linear=self.transposed.of_linear)
        if square:
            yield _are_square(square)
        if self.transposed.unknown:
            yield _may_be_transposed(self.transposed.unknown)

    def _about_buffers(self) -> Iterator[str]:
        """Yield a sentence about the tensors of the file that are buffers in the module, with their sizes."""
        buffers = []
        numel = whole = 0
        for name, tensor in self.checkpoint.tensors.items():
            whole += tensor.numel
            if self.names.get(name) in self.module.buffers:
                buffers.append(name)
                numel += tensor.numel
        if not buffers:
            return
        are = "is a buffer" if len(buffers) == 1 else "are buffers"
        of_file = f"{numel:,} of the {whole:,} numbers in the file"
        yield f"{_few(buffers)} {are} of {self.module.label}, not weights: {of_file}."


def _no_name_in_common(checkpoint: Checkpoint, module: _ModuleTensors) -> str:
    """Return the sentence about a file that has no name of the module."""
    in_file = shown(next(iter(checkpoint.tensors), "none"))
    in_module = shown(next(iter(module.tensors), "none"))
    return (
        f"The file has no tensor name of {module.label}: the file has {in_file}, the module {in_module}. "
        "Compare it with the class that the file was saved from, or with a part of it."
    )


# -- transposed weights -----------------------------------------------------------------------------------------------


def _few(names: Sequence[str]) -> str:
    """Return the first names: `a.weight, b.weight, c.weight and 9 more`."""
    return first_few([shown(name) for name in names], _NAMED)


def _are_transposed(names: Sequence[str], label: str, *, of_linear: bool) -> str:
    """Return the sentence about the weights whose shapes are transposed, with the fix."""
    is_single = len(names) == 1
    are, them, each, transposes = "are", "them", "each of them", "the transposes of the weights"
    if is_single:
        are, them, each, transposes = "is", "it", "it", "the transpose of the weight"
    subject = f"{_few(names)} {are}"
    fix = f"Use .t() on {each} before loading."
    if not of_linear:
        return f"{subject} {transposes} in {label}. {fix}"
    layout = f"the file has {them} as [in, out], the layout of GPT-2's Conv1D; nn.Linear expects [out, in]"
    return f"{subject} transposed: {layout}. {fix}"


def _are_square(names: Sequence[str]) -> str:
    """Return the sentence about square weights that are likely transposed: their shape does not show it."""
    are, them = "are square, so they load", "them"
    if len(names) == 1:
        are, them = "is square, so it loads", "it"
    others = "the other weights of the same block are all transposed"
    return f"{_few(names)} {are} without an error either way: {others}, so use .t() on {them} too unless it was done."


def _may_be_transposed(names: Sequence[str]) -> str:
    """Return the sentence about square weights whose layout is unknown."""
    are = "is" if len(names) == 1 else "are"
    why = "as some weights of the same block are and others are not"
    return f"{_few(names)} {are} square: could not determine whether transposed, {why}."


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
    turned = dict(roles)
    if not transposed.of_linear:
        return turned
    for name in transposed.names:
        role = roles.get(name)
        if role is not None and role.axes:
            in_out = ParameterRole(role.axes, role.text, role.heads).transposed()
            turned[name] = Role(in_out.axes, in_out.text, in_out.heads, 1 - role.axis)
    return turned


# -- the run by the names of the file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RunInFile:
    """A run of a module, described by the names and the heads of a file for it."""

    run: NamedRun
    file: _FileForModule
    projections: Sequence[list[Projection]]
    """The matrices and biases of each attention."""
    roles_in_run: Mapping[str, ParameterRole]
    """The role of each parameter of the module."""
    in_file: Mapping[str, str]
    """The name in the file of each parameter of the module, where the file has it in a layout that is understood."""

    @classmethod
    def of(cls, run: NamedRun, file: _FileForModule) -> _RunInFile:
        of_attentions, roles = projections(run), roles_of(run, file.module.module)
        return cls(
            run=run,
            file=file,
            projections=of_attentions,
            roles_in_run=roles,
            in_file=_names_in_file(file),
        )

    def roles(self) -> dict[str, Role]:
        """Return the roles by the names in the file, in the layout that the file has."""
        transposed = {*self.file.transposed.names}
        roles: dict[str, Role] = {}
        for parameter, role in self.roles_in_run.items():
            if parameter not in self.in_file:
                continue
            name = self.in_file[parameter]
            roles[name] = _transposed_role(role) if name in transposed else _stored_role(role)
        return roles

    def attentions(self) -> tuple[StoredAttention, ...]:
        """Return the attentions by their paths and tensors in the file."""
        return tuple(self._attention(place) for place in range(len(self.run.attentions)))

    def _attention(self, place: int) -> StoredAttention:
        _, axes = self.run.attentions[place]
        return StoredAttention(
            module=self._path(place),
            parameters=tuple(self._names_of(place)),
            num_heads=axes.num_heads,
            num_kv_heads=axes.num_kv_heads,
            head_dim=axes.head_dim,
            fits=_fitting(self.projections[place]),
        )

    def _path(self, place: int) -> str:
        """Return the path of an attention in the file."""
        attention, _ = self.run.attentions[place]
        return self.file.prefix.in_file(attention.module)

    def _names_of(self, place: int) -> dict[str, None]:
        """Return the names in the file of the tensors of an attention, each once."""
        names: dict[str, None] = {}
        for projection in self.projections[place]:
            for parameter in projection.parameters:
                if parameter in self.in_file:
                    names[self.in_file[parameter]] = None
        return names

    def notes(self, counts: Mapping[str, int | None]) -> Iterator[str]:
        """Yield sentences on where roles and head counts come from.

        `counts` has the number of heads that config.json gives each path of the file; it is empty without one.
        """
        label = self.file.module.label
        yield f"Roles come from a run of {label}."
        if not self.run.attentions:
            yield "No attention was found in that run."
        for place, (_, axes) in enumerate(self.run.attentions):
            path = self._path(place)
            count = counts.get(path)
            if count is not None and count != axes.num_heads:
                where = shown(path) or "The attention"
                yield f"{where} has {axes.num_heads} heads in {label}, but {count} in config.json."
        if any(len(attention.fits) > 1 for attention in self.attentions()):
            yield f"Head counts are from {label}."
            if self.file.loads():
                yield "Every head count that fits would load without an error."


def _names_in_file(file: _FileForModule) -> dict[str, str]:
    """Return the name in the file of each parameter of the module that fits, or is transposed.

    A tied tensor also gets the name that it has in the run.
    """
    readable = {*file.fitting(), *file.transposed.names}
    in_file: dict[str, str] = {}
    for name, in_module in file.names.items():
        if name in readable:
            in_file[in_module] = name
    names_in_run = {}
    for name, parameter in file.module.module.named_parameters():
        names_in_run[id(parameter)] = name
    for name in file.fitting():
        in_module = file.names[name]
        tensor = file.module.tensors[in_module]
        in_file.setdefault(names_in_run.get(id(tensor), in_module), name)
    return in_file


def _stored_role(role: ParameterRole) -> Role:
    """Return a role in a run as the role of a tensor in a file; its heads only if all of them are known."""
    return Role(role.axes, role.text, role.heads if role.is_part else ())


def _transposed_role(role: ParameterRole) -> Role:
    """Return a role in a run as the role of a tensor that the file has transposed."""
    stored = _stored_role(role.transposed())
    # The heads may be columns, with the same rows for all.
    by_columns = len({piece.rows for piece in stored.heads}) == 1
    return replace(stored, axis=int(by_columns))


def _fitting(of_attention: list[Projection]) -> tuple[int, ...]:
    """Return the numbers of heads that the shapes of an attention allow."""
    widths = {}
    for projection in of_attention:
        if projection.part.startswith("W"):
            heads, head_dim, *_ = projection.shape
            widths[projection.part] = heads * head_dim
    if not {"W_q", "W_k", "W_v"} <= widths.keys():
        return ()
    query, key, value = widths["W_q"], widths["W_k"], widths["W_v"]
    return fitting_counts(query, key, value, widths.get("W_o", query))
