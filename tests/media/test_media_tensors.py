"""Named tensors of a request: however a client writes one, the model gets the same numbers in its declared form."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from segue.media.parts import messages_from
from segue.media.sources import PYTHON_POLICY, MediaPolicy
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.messages.tensors import DTYPES, TensorSpec, check_tensors, items_of

SPEC = TensorSpec("actions", "float32", (2, None), tokens=2, most=5)


def parsed(policy: MediaPolicy = PYTHON_POLICY, **fields: Any) -> MediaPart:
    content = [{"type": "tensor", "name": "actions", **fields}]
    [message] = messages_from([{"role": "user", "content": content}], policy)
    [part] = message.content
    assert isinstance(part, MediaPart)
    return part


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorSpec, np.ndarray, bool]:
    """A declaration, an array of it, and whether that has several items."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    free = tuple(None if draw(st.booleans()) else size for size in shape)
    several = draw(st.booleans())
    whole = (draw(st.integers(1, 3)), *shape) if several else tuple(shape)
    numbers = of_numpy.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False)
    array = draw(of_numpy.arrays(dtype, whole, elements=numbers))
    return TensorSpec("actions", dtype, free, tokens=1, most=3), array, several


@given(tensors())
def test_all_forms_give_the_same_items(made: tuple[TensorSpec, np.ndarray, bool]) -> None:
    spec, array, several = made
    wanted = array if several else array[None]
    encoded = base64.b64encode(array.tobytes()).decode()
    forms: list[dict[str, Any]] = [
        {"data": array},
        {"data": np.asfortranarray(array)},
        {"data": torch.from_numpy(array.copy())},
        {"data": array.tobytes(), "dtype": spec.dtype, "shape": list(array.shape)},
        {"data": encoded, "dtype": spec.dtype, "shape": list(array.shape)},
    ]
    if spec.dtype != "bool":  # JSON's true is no number
        forms.append({"data": array.tolist()})
    for fields in forms:
        part = parsed(**fields)
        counts = {"actions": 0}
        check_tensors([part], {"actions": spec}, counts)
        items = items_of(part, spec)
        assert items.dtype == spec.dtype
        np.testing.assert_array_equal(items, wanted)
        assert counts == {"actions": len(wanted)}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({}, "data", "data is missing; it must be nested lists of numbers, or base64"),
        ({"data": [[1.0], [2.0, 3.0]]}, "", "inhomogeneous"),
        ({"data": [["left"]]}, "data", "it must hold numbers"),
        ({"data": [[1.0], [2.0]], "dtype": "float32"}, "dtype", "left out: lists and arrays have their own"),
        ({"data": "AAAA"}, "dtype", "None; with base64 it is one of float32"),
        ({"data": "AAAA", "dtype": "float32", "shape": [-1]}, "shape", "it must be a list of sizes"),
        ({"data": "AA!A", "dtype": "float32", "shape": [1]}, "data", "not base64"),
        ({"data": [[1.0], [2.0]], "name": "image"}, "name", "it must be a tensor's name"),
        ({"data": [[1.0], [2.0]], "values": 3}, "values", "has no field 'values'"),
    ],
)
def test_a_malformed_tensor_is_named(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parsed(**fields)
    assert caught.value.field == f"messages[0].content[0].{field}".rstrip(".")


@pytest.mark.parametrize(
    ("array", "field", "says"),
    [
        (np.zeros((2, 3), np.int32), "dtype", r"'int32'; of actions it must be float32"),
        (np.zeros((3, 3), np.float32), "shape", r"\[3, 3\]; of actions it must be \[2, any\], or \[items, 2, any\]"),
        (np.zeros((2, 0), np.float32), "shape", r"\[2, 0\]"),
        (np.zeros((0, 2, 3), np.float32), "shape", r"\[0, 2, 3\]"),
        (np.full((2, 3), -np.inf, np.float32), "data", "with -inf; of actions it must be finite"),
    ],
)
def test_what_the_model_does_not_take(array: np.ndarray, field: str, says: str) -> None:
    part = parsed(data=array)
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_tensors([part], {"actions": SPEC}, {})
    assert caught.value.field == f"messages[0].content[0].{field}"


def test_lists_take_the_declared_dtype_only_if_it_holds_them() -> None:
    spec = TensorSpec("actions", "uint8", (2,), tokens=2, most=5)
    assert items_of(parsed(data=[255, 0]), spec).tolist() == [[255, 0]]
    for wrong in ([256, 0], [1.5, 0.0]):
        with pytest.raises(InvalidRequest, match=f"a list with {wrong[0]}; of actions it must be of uint8"):
            items_of(parsed(data=wrong), spec)


def test_items_are_counted_over_a_request() -> None:
    counts: dict[str, int] = {}
    three = parsed(data=np.zeros((3, 2, 1), np.float32))
    check_tensors([three], {"actions": SPEC}, counts)
    with pytest.raises(InvalidRequest, match="6 items of actions in this request; at most 5"):
        check_tensors([three], {"actions": SPEC}, counts)
    assert counts == {"actions": 3}, "a refused tensor is not counted"
    with pytest.raises(InvalidRequest, match="this model takes no tensors"):
        check_tensors([three], {}, {})
