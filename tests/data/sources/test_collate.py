from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from closeranks.data.sources.collate import CollatedField, FieldMismatch, as_array, infer_field, stack
from closeranks.data.sources.tensors import to_tensor


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 2], "int64[]"),
        ([1, 2.5], "float32[]"),
        ([True, False], "bool[]"),
        ([[1.0, 2.0], [3, 4]], "float32[2]"),
        ([np.zeros((2, 3), np.uint8)], "uint8[2,3]"),
        ([np.zeros(3, np.float64)], "float32[3]"),
        ([np.zeros(3, np.float16)], "float16[3]"),
        ([np.zeros(3, np.uint32)], "int64[3]"),
        ([np.zeros(3, ">i4")], "int32[3]"),
        ([b"abc"], "uint8[3]"),
        ([np.zeros(3), np.zeros(4), np.zeros(4)], "float32[4]"),
    ],
)
def test_what_a_field_is(values: list[Any], said: str) -> None:
    assert str(infer_field(values, is_image=False)) == said


@pytest.mark.parametrize("values", [["text"], [None], [{}], [[[1], [1, 2]]], [1, "two"], [np.array(["a"])], [10**30]])
def test_what_cannot_be_a_tensor(values: list[Any]) -> None:
    assert infer_field(values, is_image=False) is None


def test_numbers_and_arrays_are_stacked() -> None:
    assert stack(CollatedField(np.dtype(np.int64), ()), [3, np.int32(4), True]).tolist() == [3, 4, 1]
    both = stack(CollatedField(np.dtype(np.float32), (2,)), [[1, 2], np.array([0.5, 1.5])])
    assert both.dtype == torch.float32
    assert both.tolist() == [[1, 2], [0.5, 1.5]]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (CollatedField(np.dtype(np.int64), ()), 0.5, r"is float64\[\], which does not fit into int64\[\]"),
        (CollatedField(np.dtype(np.int64), ()), "three", r"is the text 'three', which is not a tensor"),
        (CollatedField(np.dtype(np.int64), ()), None, r"is nothing, which is not a tensor"),
        (CollatedField(np.dtype(np.float32), (2,)), [1, 2, 3], r"is int64\[3\] where the others are float32\[2\]"),
        (CollatedField(np.dtype(np.uint8), ()), 256, r"does not fit into uint8"),
        (CollatedField(np.dtype(np.int64), ()), np.uint64(2**63), r"does not fit into int64"),
        (CollatedField(np.dtype(np.bool_), ()), 2, r"does not fit into bool"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_never_bent(field: CollatedField, value: Any, said: str) -> None:
    with pytest.raises(FieldMismatch, match=said) as caught:
        stack(field, [np.zeros(field.shape, field.dtype), value])
    assert caught.value.row == 1


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 3)])
def test_images_become_channels_first_from_0_to_1(shape: tuple[int, ...]) -> None:
    image = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape) * 14
    field = infer_field([image], is_image=True)
    assert field is not None
    assert field.is_image
    pixels = stack(field, [image, image])
    assert pixels.dtype == torch.float32
    assert pixels.shape == (2, 3 if len(shape) == 3 else 1, 2, 3)
    assert pixels.is_contiguous()
    assert pixels[1, -1, 1, 2] == image.reshape(2, 3, -1)[1, 2, -1] / np.float32(255)


def test_what_is_no_image_stays_as_it_is() -> None:
    field = infer_field([np.zeros((2, 3, 3), np.float32)], is_image=True)
    assert field is not None
    assert not field.is_image


def test_a_tensor_is_its_takers_own() -> None:
    locked = np.arange(3)
    locked.flags.writeable = False
    to_tensor(locked)[0] = 7
    assert locked.tolist() == [0, 1, 2]
    own = np.arange(3)
    assert to_tensor(own).data_ptr() == own.ctypes.data, "without a copy"
    assert as_array(b"") is not None
