"""A recorded forward pass as plain data: tensors, operations, and the dataflow between them, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .rounding import Rounding
    from .sight import Sight

from . import catalog

Kind = Literal["view", "copy", "write", "compute"]
"""What an operation does to memory: share it, move it elsewhere unchanged, write into what it was given, or compute."""


RESULT = "kernel.result.default"
"""An operation that never ran: it leads from the last step of a fused kernel to what the kernel itself has made."""


@dataclass(slots=True, unsafe_hash=True)  # to make one that is frozen takes three times as long, and there are many
class TensorRef:
    """A tensor at the moment that an operation read or wrote it: what identifies it, never its content."""

    id: int
    """The same number is the same content, seen through the same shape and strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First element, in elements from the start of the storage."""
    dtype: str
    """`float32`, `bool`, ..."""
    itemsize: int
    """Bytes of one element."""
    storage: int
    """Number of the storage in this recording: tensors with the same number share memory."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, whether or not this tensor owns them."""
        return self.numel * self.itemsize


@cache
def _base_name(name: str) -> str:
    return name.split(".")[1]


@cache
def _traits(name: str) -> frozenset[str]:
    return catalog.traits(_base_name(name))


@dataclass(slots=True)
class Op:
    """One tensor operation that PyTorch dispatched."""

    index: int
    name: str
    """Name in torch, overload included: `aten.bmm.default`."""
    args: tuple[Any, ...]
    """Positional arguments, each torch tensor replaced by its `TensorRef`."""
    kwargs: dict[str, Any]
    inputs: tuple[TensorRef, ...]
    """The tensors among the arguments, in order."""
    outputs: tuple[TensorRef, ...]
    kind: Kind
    pointwise: bool
    """Whether torch tags it as one that works element by element, with broadcasting."""
    source: str
    """The line that asked for it: `attention.py:41`."""
    module: str
    """Path of the innermost module whose forward was running; empty for the recorded module itself."""
    call: int
    """Operations with the same number came out of one call in Python: `matmul` becomes expand, view, bmm, view."""
    kernel: int | None = None
    """Place in `Recording.kernels` of the fused kernel that this is a step of, or that it is itself; else None. Of a
    kernel that another one runs, the place of the other one."""

    @property
    def base_name(self) -> str:
        """Name without namespace and overload: `bmm`."""
        return _base_name(self.name)

    def does(self, *traits: catalog.Trait) -> bool:
        """Return whether this has one of these traits; the table of them is `record.catalog`."""
        return not _traits(self.name).isdisjoint(traits)

    @property
    def makes_result(self) -> bool:
        """Whether this leads from the steps of a fused kernel to what the kernel itself has made."""
        return self.name == RESULT

    @property
    def output(self) -> TensorRef:
        """The first tensor that came out."""
        return self.outputs[0]

    @property
    def swaps_last_two(self) -> bool:
        """Whether it transposes matrices: the last two dimensions change places, and no others do."""
        rank = len(self.output.shape)
        if rank < 2:
            return False
        name = self.base_name.rstrip("_")
        if name == "transpose":
            return {int(self.args[1]) % rank, int(self.args[2]) % rank} == {rank - 1, rank - 2}
        if name == "permute":
            return [int(place) % rank for place in self.args[1]] == [*range(rank - 2), rank - 1, rank - 2]
        return name == "t"


@dataclass(frozen=True)
class Kernel:
    """A fused kernel that ran, and what is known of its inside."""

    op: str
    """Its name in torch: `aten._scaled_dot_product_flash_attention.default`."""
    title: str
    """What it is, in one phrase."""
    hides: frozenset[str]
    """The stages of attention that it hides from who runs it."""
    opened: bool = True
    """Whether its steps are in the recording."""
    shapes_only: bool = False
    """Whether the steps have shapes and no numbers, the scores being too many."""
    check: Rounding | None = None
    """How far its steps are from its result; None where that was not compared."""
    drops: bool = False
    """Whether it drops weights at random."""
    note: str = ""
    """Why it is not opened, or not compared; empty where it is."""
    within: int | None = None
    """Place of the kernel that ran it; None where it was not run by another."""


@dataclass(frozen=True)
class Named:
    """A tensor with the name by which it is known outside: an argument, a parameter, a returned value."""

    name: str
    tensor: TensorRef


@dataclass(frozen=True)
class Recording:
    """Every operation of one forward pass, in order, with the dataflow between them."""

    ops: tuple[Op, ...]
    inputs: tuple[Named, ...]
    """Tensors among the arguments, named after the parameters of `forward`."""
    parameters: tuple[Named, ...]
    """Parameters of the module, by their path."""
    buffers: tuple[Named, ...]
    """Buffers of the module, by their path."""
    outputs: tuple[Named, ...]
    """Tensors that were returned, named by their place: `0`, `1.attentions`; one that is alone has an empty name."""
    producers: dict[int, int]
    """TensorRef id to the index of the operation that made it; one that came from outside is not in it."""
    fast_path_refusals: tuple[str, ...] = ()
    """Why torch's multi-head attention did not take its fast path, in its own words, one a module; else empty."""
    notes: tuple[str, ...] = ()
    """What of the run cannot be seen, as sentences."""
    kernels: tuple[Kernel, ...] = ()
    """Every fused kernel that ran, in order."""
    scalars: dict[int, float] = field(default_factory=dict)
    """TensorRef id to the number in it, for tensors of no dimension on the CPU: scales are often such."""
    constants: dict[int, Any] = field(default_factory=dict, compare=False)
    """TensorRef id to the torch tensor, for those from outside that were not written since and are still there: a mask
    that a module holds as a buffer or as a plain attribute. Parameters and named inputs are not among them."""
    values: dict[int, Any] = field(default_factory=dict, compare=False)
    """TensorRef id to the torch tensor, for those that were kept."""
    sights: dict[int, Sight] = field(default_factory=dict, compare=False)
    """TensorRef id to who sees whom, for what scores became weights by."""

    @cached_property
    def consumers(self) -> dict[int, tuple[Op, ...]]:
        """TensorRef id to the operations that read it."""
        found: dict[int, list[Op]] = {}
        for op in self.ops:
            for tensor in {t.id: t for t in op.inputs}.values():
                found.setdefault(tensor.id, []).append(op)
        return {key: tuple(ops) for key, ops in found.items()}

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """TensorRef id to the name of the parameter that it is."""
        return {named.tensor.id: named.name for named in self.parameters}

    @cached_property
    def parameter_storages(self) -> dict[int, Named]:
        """Storage number to the parameter that is in it."""
        return {named.tensor.storage: named for named in self.parameters}

    @cached_property
    def input_ids(self) -> frozenset[int]:
        """Ids of the tensors among the arguments."""
        return frozenset(named.tensor.id for named in self.inputs)

    def producer(self, tensor: TensorRef) -> Op | None:
        """The operation that made this tensor; None where it came from outside."""
        index = self.producers.get(tensor.id)
        return None if index is None else self.ops[index]

    def name_of(self, op: Op) -> str:
        """The name in torch of what made an operation's outputs: a kernel, where it is the link to its result."""
        return str(op.kwargs["kernel"]) if op.makes_result else op.name

    def tensors(self) -> Iterator[TensorRef]:
        """Every tensor that an operation wrote, in order."""
        for op in self.ops:
            yield from op.outputs
