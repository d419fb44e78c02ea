"""Name the dimensions of tensors on the way to an attention that was never completed.

`axes` names them from the product of the scores; here there may be none yet. The evidence that is left: what a
projection takes in is `batch sequence embed`, the view that divides what it gives is `heads head_dim`, and once a call
says which operand is the query and which the key, the sequence of each has its own name. What a variable is called is
no evidence. What no evidence names stays a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal, TypeAlias

from ...graph.attention import Graph
from ...graph.axis import Axis, Dim, resolve
from ...record.ops import Op, TensorRef

Side = Literal["", "query", "key", "scores"]
"""Whose sequence a tensor has: unknown, the queries', the keys', or queries in rows and keys in columns."""

Tokens: TypeAlias = tuple[str, ...]
"""What one dimension consists of: names, and numbers where there is none."""

_SPLITS = {"split", "split_with_sizes"}


class PartialAxes:
    """The names of axes in a recording that ends early."""

    def __init__(self, graph: Graph, *, batch_first: bool = True, first: Iterable[TensorRef] = ()) -> None:
        self._graph = graph
        self._order = ("batch", "sequence") if batch_first else ("sequence", "batch")
        self._groups: list[tuple[str, Dim]] = []
        self._known: set[Axis] = set()
        self._query: set[Axis] = set()
        self._query_heads = 0
        projections = [op for op in graph.recording.ops if graph.is_projection(op)]
        for op in projections:
            self._learn_heads(graph.after_call(op))
        for tensor in first:
            self.learn_activation(tensor)
        # Only the failing layer is known to take its sequence first: elsewhere the batch is.
        self._order = ("batch", "sequence")
        for op in projections:
            source = graph.before_call(op, graph.projected(op))
            origin = graph.before_moves(source)
            self.learn_activation(origin if len(origin.shape) == 3 else source)
        for op in graph.recording.ops:
            if op.base_name == "embedding":
                self._learn_positions(self._dims(op.inputs[1]))

    def learn_activation(self, tensor: TensorRef) -> None:
        """Take a tensor as what a layer takes in: batch, sequence, embed."""
        dims = self._dims(tensor)
        if 2 <= len(dims) <= 3:
            self._learn_positions(dims[:-1])
            self._add("embed", dims[-1])

    def learn_order(self, operand: TensorRef) -> None:
        """Learn from an operand with heads which axis is the batch: it is with the heads, the sequence is not."""
        dims = self._dims(operand)
        before = {atom for dim in dims[:-2] for atom in dim}
        after = {atom for dim in dims[-2:] for atom in dim}
        heads = {atom for name, group in self._groups if name == "heads" for atom in resolve(group)}
        named = {name: set(resolve(group)) for name, group in self._groups if name in ("batch", "sequence")}
        swapped = heads & before and named.get("sequence", set()) & before and named.get("batch", set()) & after
        if swapped:
            other = {"batch": "sequence", "sequence": "batch"}
            self._groups = [(other.get(name, name), group) for name, group in self._groups]

    def learn_query(self, operand: TensorRef) -> None:
        """Learn which sequence is the queries'."""
        sequence = {atom for name, group in self._groups if name == "sequence" for atom in resolve(group)}
        heads = [resolve(group) for name, group in self._groups if name == "heads"]
        inside = {atom for dim in self._dims(operand) for atom in dim}
        self._query_heads = next((prod(a.size for a in group) for group in heads if inside & set(group)), 0)
        self._query |= sequence & {atom for dim in self._dims(operand) for atom in dim}

    def of(self, tensor: TensorRef, side: Side = "") -> tuple[Tokens, ...]:
        """The names of each dimension."""
        return tuple(self._name(dim, side) for dim in self._dims(tensor))

    def _dims(self, tensor: TensorRef) -> tuple[Dim, ...]:
        return self._graph.dimensions.of(tensor)

    def _add(self, name: str, atoms: Iterable[Axis]) -> None:
        dim = resolve(atoms)
        # Of what has one element only a batch is told, by where it is: a view puts others anywhere.
        one = name == "batch" and len(dim) == 1
        if dim and (one or prod(atom.size for atom in dim) > 1) and self._known.isdisjoint(dim):
            self._groups.append((name, dim))
            self._known.update(dim)

    def _learn_positions(self, dims: Sequence[Dim]) -> None:
        """Name what stands before the width: batch and sequence, side by side in one dimension or each in its own."""
        atoms = [atom for dim in dims for atom in dim]
        if len(dims) == 2:
            known = {name for name, group in self._groups if not set(atoms).isdisjoint(resolve(group))}
            for name, dim in zip(self._order, dims, strict=True):
                if name not in known:
                    self._add(name, dim)
        elif len(dims) == 1 and len(atoms) == 2:
            for name, atom in zip(self._order, atoms, strict=True):
                self._add(name, (atom,))
        elif len(atoms) == 1:
            self._add("sequence", atoms)

    def _learn_heads(self, projected: TensorRef) -> None:
        """Name the parts of a width from the first view that divides it."""
        dims = self._dims(projected)
        width = set(dims[-1]) if dims else set()
        for op, _ in self._graph.forward(projected, _only_moves):
            if op.kind != "view" or op.base_name in _SPLITS or op.output.id == projected.id:
                continue
            parts = [part for dim in self._dims(op.output) if (part := tuple(atom for atom in dim if atom in width))]
            read = [part for dim in self._dims(op.inputs[0]) if (part := tuple(a for a in dim if a in width))]
            if len(parts) == len(read):
                continue
            sizes = [prod(atom.size for atom in part) for part in parts]
            if len(parts) == 3 and sizes[0] in (2, 3):
                parts = parts[1:]
            elif len(parts) == 3 and sizes[1] in (2, 3):
                parts = [parts[0], parts[2]]
            elif len(parts) == 2 and len(parts[1]) > 1 and parts[1][0].size == 3:
                parts[1] = parts[1][1:]  # query, key and value of a head side by side
            if len(parts) == 2:
                self._add("heads", parts[0])
                self._add("head_dim", parts[1])
                return

    def _name(self, dim: Dim, side: Side) -> Tokens:
        atoms, tokens = list(resolve(dim)), list[str]()
        number = 1
        while atoms:
            for name, group in self._groups:
                known = resolve(group)
                if tuple(atoms[: len(known)]) == known:
                    if number > 1:
                        tokens.append(str(number))
                    tokens.append(self._sequence(known, side) if name == "sequence" else self._heads(name, known, side))
                    del atoms[: len(known)]
                    number = 1
                    break
            else:
                atom = atoms.pop(0)
                if (twin := self._twin_of_sequence(atom)) is not None:
                    tokens.append("key" if side == "scores" else twin)
                else:
                    number *= atom.size
        if number > 1 or not tokens:
            tokens.append(str(number))
        return tuple(tokens)

    def _heads(self, name: str, atoms: Dim, side: Side) -> str:
        """Heads of the keys are called so where there are fewer of them than of the queries."""
        count = prod(atom.size for atom in atoms)
        return "kv_heads" if name == "heads" and side == "key" and self._query_heads not in (0, count) else name

    def _sequence(self, atoms: Dim, side: Side) -> str:
        if side == "scores":
            return "query" if set(atoms) & self._query else "key"
        return side or "sequence"

    def _twin_of_sequence(self, atom: Axis) -> str | None:
        """`key` where this is the other sequence of a self-attention."""
        twins = set(resolve(atom.twins))
        named = any(name == "sequence" and twins & set(resolve(group)) for name, group in self._groups)
        return "key" if named else None


def _only_moves(op: Op) -> bool:
    return op.kind in ("view", "copy") or op.pointwise


def pattern(dims: Iterable[Tokens]) -> str:
    """An einops pattern."""
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
