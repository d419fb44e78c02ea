"""The weights of an attention that was found in a recording, read off the parameters of its products, and written.

Nothing is known of the module but what it did. A product with a parameter says which memory its matrix is; which column
of what it gives is which feature of which head is seen from the numbers themselves: the features of the stages are
columns of it, moved at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import WeightsError
from ...graph.attention import Attention
from ...layers.weights import AttentionWeights
from ...naming.axes import AxisNames
from ...naming.canonical import canonical, contents_of
from ...record.ops import Op
from ...record.ops import TensorRef as Recorded
from ...record.subject import Run

_BY_KEY_HEAD = ("w_k", "w_v", "b_k", "b_v")
SIDES = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True)
class Matrix:
    """A projection, as the parameters hold it: views, into which can be written."""

    label: str
    """`q`, `k`, `v` or `o`."""
    rows: tuple[Tensor, ...]
    """For `q`, `k` and `v` a row for each feature, `(heads head_dim)` to `embed`; for `o` a column for each."""
    biases: tuple[Tensor, ...] | None
    """For `q`, `k` and `v` a number for each feature; for `o` one view of all. None where there is no bias."""
    names: tuple[str, ...]
    """The parameters that hold the matrix."""
    bias_names: tuple[str, ...]
    heads: int

    @property
    def matrix(self) -> Tensor:
        """`(heads head_dim) embed`, for the output `(heads head_dim) embed` as well; a copy."""
        return torch.stack(self.rows)

    @property
    def bias(self) -> Tensor | None:
        """`(heads head_dim)`, for the output `embed`; a copy."""
        if self.biases is None:
            return None
        return self.biases[0].clone() if self.label == "o" else torch.stack(self.biases)


@dataclass(frozen=True)
class FoundWeights:
    """The projections of one attention."""

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those that there are."""
        return tuple(m for m in (self.query, self.key, self.value, self.output) if m is not None)

    def read(self) -> AttentionWeights:
        """A copy of them, by head."""

        def by_head(matrix: Matrix) -> Tensor:
            return rearrange(matrix.matrix, "(heads head_dim) embed -> heads head_dim embed", heads=matrix.heads)

        def bias(matrix: Matrix) -> Tensor | None:
            flat = matrix.bias
            return None if flat is None else rearrange(flat, "(heads head_dim) -> heads head_dim", heads=matrix.heads)

        out = self.output
        w_o = None if out is None else rearrange(out.matrix, "(heads d) embed -> embed heads d", heads=out.heads)
        return AttentionWeights(
            w_q=by_head(self.query),
            w_k=by_head(self.key),
            w_v=by_head(self.value),
            w_o=w_o,
            b_q=bias(self.query),
            b_k=bias(self.key),
            b_v=bias(self.value),
            b_o=None if out is None else out.bias,
        )

    def completed(self, weights: AttentionWeights) -> AttentionWeights:
        """The weights as these parameters can hold them: shared key/value heads repeated, an identity for want of W_o.

        Raises `WeightsError` where no identity could stand there.
        """
        if self.key.heads != weights.kv_heads and self.key.heads % weights.kv_heads == 0:
            group = self.key.heads // weights.kv_heads
            shared = {name: tensor for name, tensor in weights.tensors().items() if name in _BY_KEY_HEAD}
            repeated = {name: tensor.repeat_interleave(group, dim=0) for name, tensor in shared.items()}
            weights = replace(weights, **repeated)
        if self.output is None or weights.w_o is not None:
            return weights
        features, embed = weights.num_heads * weights.head_dim, self.output.rows[0].shape[0]
        if features != embed:
            raise WeightsError(
                f"one has no output projection and {features} features, and the other gives {embed}: no identity can "
                "stand for W_o."
            )
        identity = torch.eye(features, dtype=weights.w_q.dtype, device=weights.w_q.device)
        return replace(weights, w_o=identity.reshape(features, weights.num_heads, weights.head_dim))

    def write(self, weights: AttentionWeights) -> None:
        """Write numbers into these parameters, zeros for biases that are absent. All or, where it raises, none.

        Raises `WeightsError` where sizes differ, or there is no place for numbers that matter.
        """
        if (self.output is None) != (weights.w_o is None):
            raise WeightsError("one has an output projection and the other has none.")
        given = {
            name: rearrange(tensor, "embed heads d -> (heads d) embed") if name == "w_o" else tensor.flatten(0, 1)
            for name, tensor in weights.tensors().items()
            if name.startswith("w_")
        }
        writes: list[tuple[Tensor, Tensor]] = []
        for mine in self.matrices:
            writes += _writes(mine, given[f"w_{mine.label}"], getattr(weights, f"b_{mine.label}"))
        with torch.no_grad():
            for place, numbers in writes:
                place.copy_(numbers)


def _writes(mine: Matrix, given: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    own = (len(mine.rows), *mine.rows[0].shape)
    if own != tuple(given.shape):
        raise WeightsError(f"W_{mine.label} is {list(given.shape)} in the one and {list(own)} in the other.")
    yield from zip(mine.rows, given.unbind(0), strict=True)
    if mine.biases is not None:
        numbers = torch.zeros_like(torch.stack(mine.biases)) if bias is None else bias.reshape(len(mine.biases), -1)
        yield from ((place, numbers[n].reshape(place.shape)) for n, place in enumerate(mine.biases))
    elif bias is not None and bool(bias.count_nonzero()):
        raise WeightsError(f"one has no place for a bias b_{mine.label}, and the other's is not zero.")


def find_weights(module: nn.Module, seen: Run, found: Attention, names: AxisNames) -> FoundWeights:
    """Where the parameters of an attention are.

    The run must have been recorded with its tensors kept, and the parameters not have been changed since.

    Raises `WeightsError` that says what could not be told.
    """
    finder = _Finder(module, seen, found, names)
    query, key, value = (finder.of_side(side) for side in SIDES)
    return FoundWeights(query, key, value, finder.of_output())


class _Finder:
    """Looks for the parameters of one attention."""

    def __init__(self, module: nn.Module, seen: Run, found: Attention, names: AxisNames) -> None:
        self._module, self._seen, self._found, self._names = module, seen, found, names
        self._turns = found.branches or (found,)
        self._contents = contents_of(seen, found, names)
        self._parameters = {named.tensor.storage: named.name for named in seen.recording.parameters}

    def of_side(self, side: str) -> Matrix:
        letter = SIDES[side]
        features, heads = self._features(side)
        ops = {turn.projections[side].index: turn.projections[side] for turn in self._turns if side in turn.projections}
        if not ops:
            raise WeightsError(f"no projection makes {letter}_heads.")
        columns: dict[bytes, list[tuple[Tensor, Tensor | None, str, str]]] = {}
        for op in ops.values():
            weight, name = self._weight(op, letter)
            bias, bias_name = self._bias(op, weight.shape[0])
            for column, sign in enumerate(_signs(self._produced(op))):
                place = (weight[column], None if bias is None else bias[column], name, bias_name)
                columns.setdefault(sign, []).append(place)
        signs = _signs(features)
        if any(sign not in columns or not columns[sign] for sign in signs):
            raise WeightsError(f"W_{letter} cannot be cut into heads: more is done to its features than to move them.")
        places = [columns[sign].pop(0) if len(columns[sign]) > 1 else columns[sign][0] for sign in signs]
        biases = [bias for _, bias, _, _ in places if bias is not None]
        return Matrix(
            letter,
            tuple(row for row, _, _, _ in places),
            tuple(biases) if len(biases) == len(places) else None,
            tuple(dict.fromkeys(name for _, _, name, _ in places)),
            tuple(dict.fromkeys(name for _, _, _, name in places if name)),
            heads,
        )

    def of_output(self) -> Matrix | None:
        op = self._found.projections.get("output")
        if op is None:
            return None
        weight, name = self._weight(op, "o")
        bias, bias_name = self._bias(op, weight.shape[0])
        concat = self._contents.get("concat")
        taken = _signs(self._seen.recording.values[self._seen.graph.projected(op).id])
        order = {sign: place for place, sign in enumerate(taken)}
        signs = [] if concat is None else _signs(concat)
        if not signs or len(signs) != weight.shape[1] or any(sign not in order for sign in signs):
            raise WeightsError("W_o cannot be told apart by head: more is done to the heads than to put them together.")
        return Matrix(
            "o",
            tuple(weight[:, order[sign]] for sign in signs),
            None if bias is None else (bias,),
            (name,),
            (bias_name,) if bias_name else (),
            self._names.num_heads,
        )

    def _features(self, side: str) -> tuple[Tensor, int]:
        """`batch query (heads head_dim)` of a projection, and the number of heads in it."""
        letter = SIDES[side]
        heads = self._names.num_heads if side == "query" else self._names.num_kv_heads
        content = self._contents.get(f"{letter}_proj")
        if content is not None and content.dim() == 3:
            return content, heads
        for content in self._by_heads(side):
            if content is not None and content.dim() == 4 and content.shape[1] == heads:
                return rearrange(content, "batch heads query head_dim -> batch query (heads head_dim)"), heads
        raise WeightsError(f"the axes of {letter}_proj have no name in it.")

    def _by_heads(self, side: str) -> Iterator[Tensor | None]:
        """What a projection gives, only moved since, in the canonical axes of heads; last what the heads became.

        A rotation by positions, or a norm, comes after the projections were cut apart.
        """
        stage, graph = f"{SIDES[side]}_heads", self._seen.graph
        op = self._found.projections.get(side)
        if op is not None and not self._found.branches:
            whole = {op.output.id, graph.after_projection(op).id}
            sizes = {"heads": self._names.num_heads, "kv_heads": self._names.num_kv_heads}
            for step in graph.back(self._found.stages[stage], lambda op: graph.operands(op) is None):
                if graph.before_moves(step.tensor).id in whole and step.tensor.id in self._seen.recording.values:
                    axes = self._names.as_stage(step.tensor, stage)
                    yield canonical(self._seen.recording.values[step.tensor.id], stage, axes, sizes)
        yield self._contents.get(stage)

    def _produced(self, op: Op) -> Tensor:
        """What a projection gives, its features last."""
        graph, values = self._seen.graph, self._seen.recording.values
        if self._weight_is_first(op):
            rows: Tensor = values[op.output.id]
            return rows.mT
        after = graph.after_projection(op)
        same = after.shape and after.shape[-1] == op.output.shape[-1] and after.numel == op.output.numel
        content: Tensor = values[after.id if same else op.output.id]
        if self._by_head(op):
            return rearrange(content.reshape(op.output.shape), "heads rows out -> rows (heads out)")
        return content

    def _weight_is_first(self, op: Op) -> bool:
        factors = self._seen.graph.operands(op)
        return factors is not None and self._seen.graph.is_weight(factors[0])

    def _operand(self, op: Op) -> Recorded:
        factors = self._seen.graph.operands(op)
        if factors is None:
            raise WeightsError(f"{op.base_name} is no product with a matrix.")
        return factors[0] if self._weight_is_first(op) else factors[1]

    def _by_head(self, op: Op) -> bool:
        """Whether a product has a matrix for each of several rows of heads."""
        operand = self._operand(op)
        return len(operand.shape) == 3 and operand.shape[0] > 1 and operand.stride[0] != 0

    def _weight(self, op: Op, letter: str) -> tuple[Tensor, str]:
        """`out in`, a view of the parameter, and its name."""
        operand = self._operand(op)
        view, name = self._view(operand, f"W_{letter}")
        if view.dim() not in (2, 3):
            raise WeightsError(f"W_{letter} has {view.dim()} dimensions in its product.")
        if not self._weight_is_first(op):
            view = view.mT
        if view.dim() == 3 and self._by_head(op):
            flat = view.as_strided((view.shape[0] * view.shape[1], view.shape[2]), (view.stride(1), view.stride(2)))
            if view.stride(0) != view.shape[1] * view.stride(1):
                raise WeightsError(f"W_{letter} holds a matrix for each head, laid out in a way that is not known.")
            return flat, name
        return (view[0] if view.dim() == 3 else view), name

    def _bias(self, op: Op, width: int) -> tuple[Tensor | None, str]:
        """`out`, a view of the parameter, and its name; None where there is none."""
        graph, recording = self._seen.graph, self._seen.recording
        if not graph.has_bias(op):
            return None, ""
        added: Recorded | None = op.inputs[0] if len(op.inputs) == 3 else None
        tensor = graph.after_projection(op)
        while added is None and tensor.id != op.output.id:
            made = recording.producer(tensor)
            if made is None or not made.inputs:
                break
            others = [t for t in made.inputs if graph.is_weight(t)]
            if made.base_name.rstrip("_") == "add" and others:
                added = others[0]
            tensor = next((t for t in made.inputs if not graph.is_weight(t)), made.inputs[0])
        if added is None:
            raise WeightsError("its bias is not where a bias is looked for.")
        view, name = self._view(added, "the bias")
        while view.dim() > 1:
            view = view[0]
        if view.shape[0] != width:
            raise WeightsError(f"its bias has {view.shape[0]} numbers for {width} features.")
        return view, name

    def _view(self, tensor: Recorded, what: str) -> tuple[Tensor, str]:
        name = self._parameters.get(tensor.storage)
        if name is None:
            raise WeightsError(f"{what} is made in the forward, and is no parameter as it stands.")
        parameter = self._module.get_parameter(name).detach()
        return parameter.as_strided(tensor.shape, tensor.stride, tensor.offset), name


def _signs(content: Tensor) -> list[bytes]:
    """What tells columns apart, whatever the order of the rows: `... features` to the numbers of each, sorted."""
    ordered = content.detach().cpu().double().flatten(0, -2).sort(dim=0).values.T.contiguous().numpy()
    return [column.tobytes() for column in ordered]
