"""Payloads as bytes: everything that may travel comes back bit by bit, and nothing else gets in or out."""

import math
import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_values import DTYPES, raw_tensor, same

from segue.connectors.payload import ALIGN, MAX_DEPTH, PayloadError, measure, read_from

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def through(payload: dict[str, Any]) -> dict[str, Any]:
    encoded = measure(payload)
    buffer = bytearray(encoded.size)
    encoded.write_into(memoryview(buffer))
    return read_from(memoryview(buffer))


def blob(tree: object, body: bytes = b"") -> memoryview:
    """Bytes as a payload would be, around any header."""
    header = msgspec.msgpack.encode(tree)
    padded = header + bytes(-(16 + len(header)) % ALIGN)
    return memoryview(bytearray(struct.pack("<4sIQ", b"SGP1", len(header), 16 + len(padded + body)) + padded + body))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (2, 1, 3)])
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    sent = {"x": raw_tensor(dtype, shape)}
    assert same(through(sent), sent)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).view(4, 6).t(),
        torch.arange(24.0)[::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[1:],
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj(),
        torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj().imag,
        torch.nn.Parameter(torch.arange(4.0)),
        torch.tensor([math.nan, -0.0, math.inf]),
    ],
    ids=["transposed", "strided", "expanded", "permuted", "conjugated", "negated", "parameter", "special"],
)
def test_tensors_that_are_not_plain(view: torch.Tensor) -> None:
    received = through({"x": view})["x"]
    assert same({"x": received}, {"x": view.detach().resolve_neg()})
    assert not received.requires_grad


def test_received_tensors_are_views_of_the_buffer_and_aligned() -> None:
    encoded = measure({"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(5), "c": torch.zeros(2)})
    buffer = torch.zeros(encoded.size, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    encoded.write_into(view)
    received = read_from(view)
    base = buffer.data_ptr()
    for tensor in received.values():
        assert base <= tensor.data_ptr() < base + encoded.size
        assert (tensor.data_ptr() - base) % ALIGN == 0
    buffer[:] = 255
    assert received["a"].tolist() == [255, 255, 255]


def test_views_keep_the_buffer_alive() -> None:
    received = through({"x": torch.arange(1000)})["x"]
    assert torch.equal(received, torch.arange(1000))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
tensors = st.builds(
    raw_tensor,
    st.sampled_from(["float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "complex64"]),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)
keys = st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1)
nodes = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, nodes, max_size=4))
def test_any_nesting_comes_back(payload: dict[Any, Any]) -> None:
    assert same(through(payload), payload)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        ({"a": [1, {"b": 2**64}]}, "payload['a'][1]['b']"),
        ({"a": (0, -(2**63) - 1)}, "payload['a'][1]"),
        ({2**70: 1}, f"payload[{2**70}]"),
        ({"t": torch.zeros(2), "a": ["\ud800"]}, "payload['a'][0]"),
        ({"a": {1.5: 2}}, "payload['a']"),
        ({True: 2}, "payload"),
        ({"a": {1, 2}}, "payload['a']"),
        ({"a": [object()]}, "payload['a'][0]"),
        ({"a": bytearray(b"x")}, "payload['a']"),
        ({"a": Text("x")}, "payload['a']"),
        ({"a": torch.eye(3).to_sparse()}, "payload['a']"),
        ([1, 2], "payload"),
    ],
)
def test_what_cannot_travel_is_named(payload: Any, place: str) -> None:
    with pytest.raises(PayloadError) as caught:
        measure(payload)
    assert caught.value.field == place
    assert place in str(caught.value)


def test_a_quantised_tensor_is_refused() -> None:
    scale = torch.tensor([1.0])
    with pytest.warns(UserWarning, match="quant"):
        quantised = torch.quantize_per_tensor(torch.zeros(2), float(scale), 0, torch.qint8)
    with pytest.raises(PayloadError, match="not quantised"):
        measure({"q": quantised})


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(PayloadError, match=f"deeper than {MAX_DEPTH}"):
        measure(loop)


def test_the_deepest_nesting_that_is_sent_is_received() -> None:
    payload: Any = 1
    for _ in range(MAX_DEPTH - 1):
        payload = [payload]
    assert same(through({"a": payload}), {"a": payload})


def test_a_buffer_that_is_too_small_or_read_only() -> None:
    encoded = measure({"x": torch.zeros(100)})
    with pytest.raises(PayloadError, match="does not fit"):
        encoded.write_into(memoryview(bytearray(encoded.size - 1)))
    buffer = bytearray(encoded.size)
    encoded.write_into(memoryview(buffer))
    with pytest.raises(PayloadError, match="read-only"):
        read_from(memoryview(bytes(buffer)))


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (memoryview(bytearray(b"SGP1")), "prefix"),
        (memoryview(bytearray(100)), "not a payload"),
        (memoryview(bytearray(struct.pack("<4sIQ", b"SGP1", 1, 1000) + bytes(64))), "not a payload"),
        (memoryview(bytearray(struct.pack("<4sIQ", b"SGP1", 2**32 - 1, 80) + bytes(64))), "not a payload"),
        (memoryview(bytearray(struct.pack("<4sIQ", b"SGP1", 1, 64) + b"\xc1" + bytes(47))), "not msgpack"),
        (memoryview(bytearray(struct.pack("<4sIQ", b"SGP1", 40000, 40064) + b"\x91" * 40048)), "not msgpack"),
        (blob([0]), "not a map"),
        (blob({"a": [9]}), "invalid node"),
        (blob({"a": []}), "invalid node"),
        (blob({"a": b"x"}), "invalid node"),
        (blob({"a": {1.5: 1}}), "invalid node"),
        (blob({"a": [2, "float32", [1.5], 0]}), "invalid node"),
        (blob({"a": [2, "float33", [1], 0]}), "float33"),
        (blob({"a": [2, "qint8", [1], 0]}), "qint8"),
        (blob({"a": [2, "float32", [-1, -1], 0]}), "shape"),
        (blob({"a": [2, "float32", [1] * 100, 0]}), "shape"),
        (blob({"a": [2, "float32", [0, 2**63], 0]}), "addressed"),
        (blob({"a": [2, "float32", [2], 0]}, bytes(4)), "beyond"),
        (blob({"a": [2, "float32", [1], -64]}, bytes(64)), "beyond"),
        (blob({"a": [2, "float32", [1], 4]}, bytes(64)), "multiple"),
        (blob({"a": [3, 0, 5]}, bytes(4)), "beyond"),
        (blob({"a": [3, 0, -1]}, bytes(4)), "beyond"),
    ],
)
def test_broken_bytes_are_an_error(buffer: memoryview, said: str) -> None:
    with pytest.raises(PayloadError, match=said):
        read_from(buffer)


def test_a_header_nested_too_deep_is_an_error() -> None:
    tree: Any = 1
    for _ in range(MAX_DEPTH + 2):
        tree = [0, tree]
    with pytest.raises(PayloadError, match="deeper"):
        read_from(blob({"a": tree}))


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_give_an_error_or_a_payload(data: st.DataObject) -> None:
    encoded = measure(
        {"a": [1, ("x", None)], "t": raw_tensor("bfloat16", (3, 2)), "b": b"bytes", "e": torch.zeros(0, 3)}
    )
    buffer = bytearray(encoded.size)
    encoded.write_into(memoryview(buffer))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(buffer)) | st.just(len(buffer)))
    try:
        received = read_from(memoryview(buffer[:end]))
    except PayloadError:
        return
    assert isinstance(received, dict)
