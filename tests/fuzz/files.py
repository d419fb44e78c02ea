"""Files of tensors as people save them, as they break, and as somebody makes them who means harm."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

INTEGERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30]),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def _saved(content: object, **settings: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **settings)
    return file.getvalue()


def safetensors(header: object, data: bytes) -> bytes:
    """The bytes of a .safetensors file with that header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def saved(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write a .safetensors file, and the config.json of its folder where one is given."""
    path.parent.mkdir(exist_ok=True, parents=True)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        start, data = len(data), data + tensor.detach().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [start, len(data)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    path.write_bytes(safetensors(header, data))
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(dict(config)))
    return path


class _Own:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("this must not be printed",)


_X = torch.arange(70, dtype=torch.float32).reshape(2, 5, 7) / 70
WHOLE: dict[str, list[bytes]] = {
    ".pt": [
        *(_saved(_X, _use_new_zipfile_serialization=new) for new in (True, False)),
        *(_saved({"query": _X, "key": _X}, _use_new_zipfile_serialization=new) for new in (True, False)),
        _saved(_X.bfloat16(), pickle_protocol=4),
        _saved(_X[:1, :1, :1].expand(2, 5, 7)),
        _saved(torch.empty(2, 5, 7, device="meta")),
        _saved(_X.to_sparse()),
        _saved(torch.quantize_per_tensor(_X, 0.1, 0, torch.quint8)),
        _saved(torch.nested.nested_tensor([_X[0], _X[1]])),
        _saved(torch.nn.Parameter(_X)),
        _saved(torch.tensor(3.0)),
        _saved([_X, 3, None, "text", {"a": (1, 2)}]),
        _saved(_Own()),
        pickle.dumps(_X),
    ],
    ".safetensors": [
        safetensors({"x": {"dtype": "F32", "shape": [2, 5, 7], "data_offsets": [0, 280]}}, _X.numpy().tobytes()),
        safetensors(
            {
                "__metadata__": {"format": "pt"},
                "query": {"dtype": "BF16", "shape": [2, 5, 7], "data_offsets": [0, 140]},
                "key": {"dtype": "F16", "shape": [2, 5, 7], "data_offsets": [140, 280]},
            },
            bytes(280),
        ),
    ],
}


@st.composite
def damaged(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """A whole file with bytes changed, put in, left out, doubled or cut."""
    data = bytearray(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["set", "set", "number", "put", "cut", "drop", "double"]))
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        if kind == "set":
            data[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            width = draw(st.sampled_from([1, 2, 4, 8]))
            number = draw(INTEGERS) % 2 ** (8 * width)
            data[place : place + width] = number.to_bytes(width, draw(st.sampled_from(["little", "big"])))
        elif kind == "put":
            data[place:place] = draw(st.binary(max_size=12))
        elif kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place : place + draw(st.integers(1, 40))]
        else:
            data[place:place] = data[place : place + draw(st.integers(1, 60))]
    return bytes(data)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A .safetensors file whose header says what it likes."""
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "I64", "BOOL", "F4", "F8_E4M3", "X", "f32"]) | ANYTHING,
            "shape": st.lists(INTEGERS, max_size=4) | ANYTHING,
            "data_offsets": st.lists(INTEGERS, min_size=1, max_size=3) | ANYTHING,
        }
    )
    entries = st.dictionaries(st.text(max_size=12), entry, max_size=3)
    texts = [b"[" * 50_000, b"{}", b"[]", b"3", b'{"a":' * 20_000, b"1" * 9000, b"\xff\xfe", b"", b"nan"]
    header = entries.map(lambda entries: json.dumps(entries, default=str).encode())
    return safetensors(draw(header | st.sampled_from(texts) | st.binary(max_size=60)), draw(st.binary(max_size=300)))


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    """An archive as torch writes it, around a pickle that says what it likes."""

    def name(text: str) -> bytes:
        return b"c" + "\n".join(text.rsplit(".", 1)).encode() + b"\n"

    def plain(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    def tensor(key: object, count: int, place: int, sizes: list[int], strides: list[int]) -> bytes:
        storage = plain("storage") + name("torch.FloatStorage") + plain(key) + plain("cpu") + plain(count)
        layout = plain(place) + plain(tuple(sizes)) + plain(tuple(strides)) + plain(False)
        begin = name("torch._utils._rebuild_tensor_v2") + b"(("
        return begin + storage + b"tQ" + layout + name("collections.OrderedDict") + b")RtR"

    makers = "tensor_v2 tensor_v3 parameter sparse_tensor qtensor meta_tensor_no_storage"
    others = "torch.FloatStorage torch.storage.UntypedStorage builtins.bytearray torch.float32 os.system"
    others += " collections.OrderedDict torch._tensor._rebuild_from_type_v2"
    names = [*(f"torch._utils._rebuild_{what}" for what in makers.split()), *others.split()]
    operations = [bytes([op]) for op in b"()tRQ}])\x85\x86\x87\x88Nbsuae02\x81\x8f\x90\x91\x93\x94l1"]
    operations += [b"q\0", b"h\0", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x96" + b"\xff" * 7 + b"\x00"]
    sizes = st.lists(INTEGERS, max_size=4)
    steps: st.SearchStrategy[bytes] = st.one_of(
        ANYTHING.map(plain),
        sizes.map(lambda sizes: plain(tuple(sizes))),
        st.sampled_from([*map(name, names), b"\x8a\x05\0\0\0\0\x01"]),
        st.sampled_from(operations),
        st.builds(tensor, st.sampled_from(["0", "1", "", "../data.pkl", 0]), INTEGERS, INTEGERS, sizes, sizes),
    )
    program = b"\x80\x02" + b"".join(draw(st.lists(steps, min_size=1, max_size=6))) + b"."
    if draw(st.integers(0, 4)) == 0:
        return program
    file = io.BytesIO()
    kind = draw(st.sampled_from([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(file, "w", kind) as archive:
        members = ["x/data.pkl x/data/0", "x/data.pkl x/data.pkl", "data.pkl", "x/y/data.pkl"]
        for member in draw(st.sampled_from(members)).split():
            archive.writestr(member, program if member.endswith("pkl") else bytes(280))
    return file.getvalue()


def any_file() -> st.SearchStrategy[tuple[str, bytes]]:
    """A suffix and bytes."""
    made = [st.tuples(st.just(suffix), damaged(whole)) for suffix, whole in WHOLE.items()]
    made += [st.tuples(st.just(".safetensors"), headers())]
    made += [st.tuples(st.just(".pt"), pickles())]
    return st.one_of(made)
