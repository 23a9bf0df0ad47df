"""Sources whose samples say who they are."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from closeranks.core.protocols import Batch
from closeranks.data.order import Ints


class CountingSource:
    """Sample i is ``{"x": [i, i], "id": i}``; remembers what was read, and in which thread."""

    identity = "counting"

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.read_indices: list[list[int]] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Ints) -> Batch:
        self.read_indices.append(indices.tolist())
        self.threads.add(threading.current_thread().name)
        ids = torch.from_numpy(np.asarray(indices))
        return {"x": ids.float().unsqueeze(1).expand(-1, 2).contiguous(), "id": ids}


class FailingSource(CountingSource):
    """Raises when it comes to read a given sample."""

    identity = "failing"

    def __init__(self, num_samples: int, bad: int, error: BaseException) -> None:
        super().__init__(num_samples)
        self._bad = bad
        self._error = error

    def read(self, indices: Ints) -> Batch:
        if self._bad in indices:
            raise self._error
        return super().read(indices)


class ChangedSource(CountingSource):
    """Puts a value of the test's choice into the batch."""

    identity = "changed"

    def __init__(self, num_samples: int, **values: Any) -> None:
        super().__init__(num_samples)
        self._values = values

    def read(self, indices: Ints) -> Batch:
        return {**super().read(indices), **self._values}
