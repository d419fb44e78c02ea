"""Represent a recorded forward pass as plain data without torch: tensors, operations, and their dataflow."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from . import catalog

if TYPE_CHECKING:
    from .rounding import Rounding
    from .sight import Sight

Kind = Literal["view", "copy", "write", "compute"]
"""How an operation uses memory: share its input's, copy unchanged elements, write into its input, or compute."""
RESULT_LINK = "kernel.result.default"
"""An added operation that torch never ran: the link from the last step of a fused kernel to the kernel's result."""
KERNEL = "kernel."
"""The namespace of added operations that torch never ran: steps of a fused attention kernel (`record.kernels.STEPS`),
and the link to its result."""
_COLLECTIVE_NAMESPACES = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.")
"""The namespaces of collectives: operations of all ranks of a process group."""
_WITHOUT_EXCHANGE = ("wait_tensor", "_wrap_tensor")
"""Beginnings of names in these namespaces that only pass on the result of a collective."""


@dataclass(slots=True, unsafe_hash=True)  # creating a frozen one takes three times as long, and there are many
class TensorRef:
    """The identity of a tensor when an operation read or wrote it, without its content."""

    id: int
    """Equal for the same content with the same shape and strides."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """The step in the storage from an element to the next one of each dimension, in elements."""
    offset: int
    """Position of the first element in the storage, in elements."""
    dtype: str
    """`float32`, `bool`, ..."""
    itemsize: int
    """Bytes of one element."""
    storage: int
    """Number of the storage in this recording; tensors with the same number share memory."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its own elements, also for a view of a larger storage."""
        return self.numel * self.itemsize


# Many operations have one name, and are asked for it many times.
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
    """Its place in `Recording.ops`; one of `Recording.joins` is numbered after these."""
    name: str
    """Name in torch with its overload: `aten.bmm.default`."""
    args: tuple[Any, ...]
    """Positional arguments, each torch tensor replaced by its `TensorRef`."""
    kwargs: dict[str, Any]
    inputs: tuple[TensorRef, ...]
    """The tensors among the arguments, in order."""
    outputs: tuple[TensorRef, ...]
    """The tensors that it returned, in order."""
    kind: Kind
    pointwise: bool
    """Whether torch tags the operation as pointwise, with broadcasting."""
    source: str
    """The line of the module's code that called it: `attention.py:41`."""
    module: str
    """Path of the innermost module whose forward was running; empty for the recorded module itself."""
    call: int
    """Number of the Python call: all operations of one `matmul` (expand, view, bmm, view) have it."""
    kernel: int | None = None
    """Index in `Recording.kernels` of the fused kernel that this operation is, or is a step of; else None. For a kernel
    run by another kernel, the index of the outer one."""
    forwards: tuple[int, ...] = ()
    """Numbers of the calls of `forward` that it ran in, the outermost first: another call of one module has another
    number. Empty outside of modules."""

    @property
    def base_name(self) -> str:
        """The name without namespace and overload: `bmm`."""
        return _base_name(self.name)

    def does(self, *traits: catalog.Trait) -> bool:
        """Return whether the operation has at least one of these traits of `record.catalog`."""
        return not _traits(self.name).isdisjoint(traits)

    @property
    def is_collective(self) -> bool:
        """Whether it exchanges elements with other ranks."""
        return self.name.startswith(_COLLECTIVE_NAMESPACES) and not self.base_name.startswith(_WITHOUT_EXCHANGE)

    @property
    def makes_result(self) -> bool:
        """Whether this links the steps of a fused kernel to the kernel's result."""
        return self.name == RESULT_LINK

    @property
    def is_step(self) -> bool:
        """Whether this stands for a step of a fused attention kernel, which no operation of torch computes."""
        return self.name.startswith(KERNEL) and not self.makes_result

    @property
    def output(self) -> TensorRef:
        """The first output tensor."""
        return self.outputs[0]

    @property
    def swaps_last_two(self) -> bool:
        """Whether it swaps exactly the last two dimensions, as a matrix transpose does."""
        if catalog.axes_rule(self.base_name) != "permute" or len(self.output.shape) < 2:
            return False
        before, after = self.inputs[0], self.output
        is_shape_swapped = after.shape == _with_last_two_swapped(before.shape)
        return is_shape_swapped and after.stride == _with_last_two_swapped(before.stride)


def _with_last_two_swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes or strides of dimensions after the last two are swapped: (2, 3, 4) to (2, 4, 3)."""
    return (*sizes[:-2], *reversed(sizes[-2:]))


@dataclass(frozen=True)
class Kernel:
    """A fused kernel that ran, and whether it was opened: computed again in steps that the recording has."""

    op: str
    """Its name in torch: `aten._scaled_dot_product_flash_attention.default`."""
    title: str
    """A phrase for it: `a matrix product that adds the mask`."""
    hides: frozenset[str]
    """The stages of attention that the kernel does not return: `scores`, `weights`."""
    opened: bool = True
    """Whether its steps are in the recording."""
    shapes_only: bool = False
    """Whether the steps have shapes and no numbers, because the scores are too large."""
    check: Rounding | None = None
    """The difference between its steps and its result; None if it was not compared."""
    drops: bool = False
    """Whether it applies dropout to the weights."""
    note: str = ""
    """Why it was not opened or not compared; empty if it was."""
    within: int | None = None
    """Index in `Recording.kernels` of the kernel that ran it; None if no kernel did."""


@dataclass(frozen=True)
class Named:
    """A tensor with the name of the argument, parameter, buffer or returned value that it is."""

    name: str
    tensor: TensorRef


@dataclass(frozen=True)
class Recording:
    """Every operation of one forward pass, in order, with its dataflow."""

    ops: tuple[Op, ...]
    """The operations, with the steps of opened kernels in the place of the kernels."""
    inputs: tuple[Named, ...]
    """Tensors in the arguments, named after the parameters of `forward`."""
    parameters: tuple[Named, ...]
    """Parameters of the module, by their path."""
    buffers: tuple[Named, ...]
    """Buffers of the module, by their path."""
    outputs: tuple[Named, ...]
    """Returned tensors, named by their path: `0`, `1.attentions`; the name is empty for a single tensor."""
    producers: dict[int, int]
    """TensorRef id to the index of the operation that made it; tensors from outside the run are missing."""
    fast_path_refusals: tuple[str, ...] = ()
    """torch's own reasons for not taking the fast path of multi-head attention, one per module; else empty."""
    notes: tuple[str, ...] = ()
    """Sentences about operations that could not be recorded."""
    hides_compiled: bool = False
    """Whether code from torch.compile may have run, whose operations are not recorded."""
    kernels: tuple[Kernel, ...] = ()
    """Every fused kernel that ran, in order."""
    scalars: dict[int, float] = field(default_factory=dict)
    """TensorRef id to the number in a zero-dimensional CPU tensor; scales are often such tensors."""
    constants: dict[int, Any] = field(default_factory=dict, compare=False)
    """TensorRef id to the torch tensor, for tensors from outside the run that still exist and were not overwritten:
    e.g. a mask in a buffer or an attribute. Parameters and named inputs are excluded."""
    values: dict[int, Any] = field(default_factory=dict, compare=False)
    """TensorRef id to the torch tensor, for tensors that were kept."""
    sights: dict[int, Sight] = field(default_factory=dict, compare=False)
    """TensorRef id of attention weights to which query sees which key, i.e. has a nonzero weight."""
    joins: dict[int, Op] = field(default_factory=dict, compare=False)
    """TensorRef id to an added concatenation that torch never ran. It puts together the results of a forward that
    computes an attention in pieces, e.g. some of the queries at a time."""

    @cached_property
    def consumers(self) -> dict[int, tuple[Op, ...]]:
        """TensorRef id to the operations that read it, in order, each once."""
        readers: dict[int, list[Op]] = {}
        for op in self.ops:
            for tensor in {t.id: t for t in op.inputs}.values():
                readers.setdefault(tensor.id, []).append(op)
        return {key: tuple(ops) for key, ops in readers.items()}

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """TensorRef id to parameter name."""
        return {named.tensor.id: named.name for named in self.parameters}

    @cached_property
    def parameter_storages(self) -> dict[int, Named]:
        """Storage number to the parameter that it contains; to the last one of several in one storage."""
        return {named.tensor.storage: named for named in self.parameters}

    @cached_property
    def input_ids(self) -> frozenset[int]:
        """Ids of the tensors in the arguments."""
        return frozenset(named.tensor.id for named in self.inputs)

    def producer(self, tensor: TensorRef) -> Op | None:
        """Return the operation that made a tensor; None for a tensor from outside the run."""
        index = self.producers.get(tensor.id)
        return self.joins.get(tensor.id) if index is None else self.ops[index]

    def name_of(self, op: Op) -> str:
        """Return the torch name of an operation; for a link to a kernel's result, the name of the kernel."""
        return str(op.kwargs["kernel"]) if op.makes_result else op.name
