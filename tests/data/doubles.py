"""Sources whose samples say who they are."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from closeranks.core.errors import BadRecordError
from closeranks.core.protocols import Batch
from closeranks.data.sampling.order import Ints
from closeranks.data.timing import stage


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
        ids = torch.from_numpy(np.array(indices))
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


class StoredSource(CountingSource):
    """Lies somewhere; some of its samples are damaged, some hold NaN."""

    identity = "stored"
    block = 0

    def __init__(self, num_samples: int, damaged: tuple[int, ...] = (), nan: tuple[int, ...] = ()) -> None:
        super().__init__(num_samples)
        self._damaged, self._nan = damaged, nan
        self.wanted: list[list[int]] = []
        self.num_closed = 0

    def read(self, indices: Ints) -> Batch:
        batch = super().read(indices)
        for index in indices:
            if index in self._damaged:
                raise BadRecordError(f"{self.where(int(index))}: the checksum does not match")
        batch["x"][torch.from_numpy(np.isin(indices, self._nan))] = float("nan")
        return batch

    def where(self, index: int) -> str:
        return f"'shard-{index // 10}', byte {index}"

    def prefetch(self, indices: Ints) -> None:
        self.wanted.append(indices.tolist())

    def close(self) -> None:
        self.num_closed += 1


class SlowSource(CountingSource):
    """Takes its time over one stage of reading."""

    identity = "slow"

    def __init__(self, num_samples: int, name: str, seconds: float) -> None:
        super().__init__(num_samples)
        self._name, self._seconds = name, seconds

    def read(self, indices: Ints) -> Batch:
        with stage(self._name):
            time.sleep(self._seconds)
        return super().read(indices)


class MixedSource(CountingSource):
    """Tensors of every kind, strings and containers; rows get wider with the number of the first sample."""

    identity = "mixed"

    def read(self, indices: Ints) -> Batch:
        ids = torch.from_numpy(np.array(indices))
        wide = torch.arange(len(ids) * (1 + int(indices[0])) * 40_000, dtype=torch.int64)
        return {
            "id": ids,
            "wide": wide.view(len(ids), -1),
            "half": ids.to(torch.bfloat16),
            "is_even": ids % 2 == 0,
            "strided": torch.arange(2 * len(ids)).view(2, -1).t(),
            "empty": torch.empty(len(ids), 0),
            "text": [f"sample {index}" for index in indices],
            "nested": {"pair": (ids + 1, 7), "sparse": torch.eye(2).to_sparse()},
        }


class DrawingSource(CountingSource):
    """Draws from every global random stream."""

    identity = "drawing"

    def read(self, indices: Ints) -> Batch:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {**super().read(indices), "drawn": torch.tensor([drawn] * len(indices), dtype=torch.float64)}


class DyingSource(CountingSource):
    """Ends its process when it comes to a given sample: by a signal, or with an exit code."""

    identity = "dying"

    def __init__(self, num_samples: int, bad: int, status: int) -> None:
        super().__init__(num_samples)
        self._bad, self._status = bad, status

    def read(self, indices: Ints) -> Batch:
        if self._bad in indices:
            if self._status < 0:
                os.kill(os.getpid(), -self._status)
            os._exit(self._status)
        return super().read(indices)


class StuckSource(CountingSource):
    """Never comes back from reading a given sample; says in a file that it is there."""

    identity = "stuck"

    def __init__(self, num_samples: int, bad: int, path: str) -> None:
        super().__init__(num_samples)
        self._bad, self._path = bad, path

    def read(self, indices: Ints) -> Batch:
        if self._bad in indices:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open(self._path, "w") as stream:
                stream.write("here")
            while True:
                signal.pause()
        return super().read(indices)


class LoggedSource(CountingSource):
    """Writes a letter into a file for every batch that was read, in whichever process."""

    identity = "logged"

    def __init__(self, num_samples: int, path: str) -> None:
        super().__init__(num_samples)
        self._path = path

    def read(self, indices: Ints) -> Batch:
        with open(self._path, "a") as stream:
            stream.write("r")
        return super().read(indices)


class LocalSource(CountingSource):
    """Cannot be pickled."""

    identity = "local"

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.lock = threading.Lock()


class HeldSource(CountingSource):
    """Holds its samples in memory, as an array and as a tensor, and can change them."""

    identity = "held"

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.array = np.arange(num_samples * 1000, dtype=np.float32).reshape(num_samples, 1000)
        self.tensor = torch.from_numpy(self.array.copy())
        self.nothing = torch.empty(0, 3)

    def read(self, indices: Ints) -> Batch:
        self.array[indices] += 1.0
        rows = torch.from_numpy(np.array(indices))
        return {"id": rows, "array": torch.from_numpy(self.array[indices]), "tensor": self.tensor[rows]}


def big_values(sample: Mapping[str, Any]) -> str | None:
    """A check: samples from 15 on are bad."""
    return f"x is {float(sample['x'][0]):g}" if float(sample["x"][0]) >= 15 else None


def breaking(sample: Mapping[str, Any]) -> str | None:
    raise KeyError("no such field")


def wordless(sample: Mapping[str, Any]) -> Any:
    return False


NOT_A_FUNCTION = 3
