"""What goes to the device, or comes back from it, as one copy is what went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segue.kernels.staging import Readback, upload, upload_all

CPU = torch.device("cpu")


def test_several_arrays_arrive_as_they_are():
    arrays = [
        np.arange(3),
        np.zeros((2, 0), dtype=np.int64),
        np.array([[0.5, -1.0], [2.0, 3.0]], dtype=np.float32),
        np.array([7], dtype=np.int32),
        np.broadcast_to(np.array([1.5]), (2, 3)),
        np.arange(6).reshape(2, 3).T,
    ]
    for array, there in zip(arrays, upload_all(arrays, CPU), strict=True):
        expected = torch.from_numpy(array.copy())
        assert there.dtype == expected.dtype
        assert torch.equal(there, expected)
        assert torch.equal(upload(array.copy(), CPU), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_read_back_is_what_was_there(dtype):
    floats = torch.tensor([[0.1, -2.5], [float("inf"), float("nan")]], dtype=dtype)
    tensors = [torch.tensor([True, False]), floats, torch.tensor(2**62), torch.empty(2, 0), torch.arange(3).int()]
    flags, numbers, large, none, ints = Readback(tensors).wait()
    assert flags.dtype == np.bool_
    assert flags.tolist() == [True, False]
    np.testing.assert_array_equal(numbers, floats.double().numpy())
    assert large.item() == 2**62
    assert none.shape == (2, 0)
    assert ints.tolist() == [0, 1, 2]


def test_it_is_as_of_the_launch():
    tensor = torch.arange(3)
    back = Readback([tensor, tensor.float()])
    tensor += 5
    assert [array.tolist() for array in back.wait()] == [[0, 1, 2], [0.0, 1.0, 2.0]]


def test_a_single_tensor_too():
    tensor = torch.arange(3)
    back = Readback([tensor])
    tensor += 5
    [array] = back.wait()
    assert array.tolist() == [0, 1, 2]
