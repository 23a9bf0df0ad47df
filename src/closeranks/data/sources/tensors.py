"""Converts an array that was read into a tensor for a model.

Invariant: integers keep their values and, where torch can compute with it, their small dtype; 64-bit floats become
32-bit, as in models. Tensors are never read-only: the caller owns its batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WIDENED = {"uint32": np.int64, "uint64": np.int64, "float64": np.float32}
_NUMERIC = "biuf"


def is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _NUMERIC


@cache
def tensor_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that an array of this dtype has in a batch; native byte order."""
    return np.dtype(_WIDENED.get(dtype.name, dtype.newbyteorder("=")))


def to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Without a copy if the array is writable and torch has its dtype."""
    array = np.ascontiguousarray(array, dtype=tensor_dtype(array.dtype))
    return torch.from_numpy(array if array.flags.writeable else array.copy())
