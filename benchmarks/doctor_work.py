"""Data, collate functions and hooks that make a run slow in one known way, for ``benchmarks/doctor.py``.

Nothing here is simulated: a slow loader sleeps as a slow store would, a slow decoder computes, batches of unequal
samples really cost unequally, what was dropped from the page cache is read from the disk.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from closeranks.run.hooks import Hook

NUM_SAMPLES = 4096
WIDTH = 256


class Samples(Dataset[dict[str, Tensor]]):
    """Vectors with a label; ``fetch_s`` waits before each sample and ``decode`` computes so many rounds on it.

    One in 512 never arrives if ``blocks_at`` is not negative.
    """

    def __init__(self, fetch_s: float = 0.0, decode: int = 0, blocks_at: int = -1) -> None:
        self._fetch_s, self._decode, self._blocks_at = fetch_s, decode, blocks_at
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._blocks_at >= 0 and index % 512 == self._blocks_at:
            threading.Event().wait()
        if self._fetch_s:
            time.sleep(self._fetch_s)
        x = self._x[index]
        for _ in range(self._decode):
            x = torch.fft.ifft(torch.fft.fft(x)).real
        return {"x": x, "y": (x[:8].sum() > 0).long()}


def samples(**settings: Any) -> Samples:
    return Samples(**settings)


class _Unequal(Dataset[dict[str, Tensor]]):
    """Sequences of 2 to 512 vectors; those of a block of 32 have one length."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 2 + int(510 * torch.rand((), generator=torch.Generator().manual_seed(index // 32)))
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(length, WIDTH, generator=generator), "y": torch.tensor(index % 2)}


def unequal() -> _Unequal:
    return _Unequal()


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)
    return {"x": x, "y": torch.stack([sample["y"] for sample in samples])}


class Cold(Dataset[dict[str, Tensor]]):
    """Samples of 64 KiB in a file that the page cache never holds."""

    _BYTES, _NUM = 1 << 16, 512

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the dataset
        for _ in range(self._NUM):
            self._file.write(os.urandom(self._BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, fd = index % self._NUM * self._BYTES, self._file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(fd, start, self._BYTES, os.POSIX_FADV_DONTNEED)
        data = torch.frombuffer(bytearray(os.pread(fd, self._BYTES, start)), dtype=torch.uint8)
        return {"x": data[:WIDTH].float() / 255, "y": torch.tensor(index % 2)}


def cold() -> Cold:
    return Cold()


def slow_collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    time.sleep(0.002 * len(samples))
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


_UNREAD: list[Tensor] = []


def with_unread(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch with a tensor of 1 GiB that the model never reads. It is the same in each step, and pinned already: only
    its copy to the device takes time."""
    if not _UNREAD:
        _UNREAD.append(torch.empty(len(samples), (1 << 30) // len(samples), dtype=torch.uint8).pin_memory())
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]} | {"unread": _UNREAD[0]}


class Net(nn.Module):
    """An MLP over vectors, or over sequences of them, whose mean it classifies."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.last = nn.Linear(hidden, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.relu(self.first(batch["x"]))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x.mean(1) if x.dim() == 3 else x)


def net(hidden: int = 512, layers: int = 4) -> Net:
    return Net(hidden, layers)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch["y"])


_CALLS = count(1)
_BRANCHES_AT = 20


def branching_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Averages its value over the ranks to look at it; rank 1 calls another collective once."""
    value = loss(model, batch)
    seen = value.detach().clone()
    if next(_CALLS) == _BRANCHES_AT and dist.get_rank() == 1:
        dist.all_gather([torch.empty_like(seen) for _ in range(dist.get_world_size())], seen)
    else:
        dist.all_reduce(seen)
    return value


class Garbage(Hook):
    """Leaves many objects that refer to each other, and collects them in every step."""

    def on_step(self, session: Any, step: Any) -> None:
        for _ in range(200_000):
            one: list[Any] = []
            one.append(one)
        gc.collect()


class Heap(Hook):
    """Holds two million objects that every collection visits."""

    def on_start(self, session: Any) -> None:
        self._objects = [[number] for number in range(2_000_000)]


class Slow(Hook):
    """Works for half as long as a step after each."""

    def on_step(self, session: Any, step: Any) -> None:
        time.sleep(min(0.5 * step.seconds, 1.0))


class Saving(Hook):
    """Waits for a checkpoint after each step."""

    def on_step(self, session: Any, step: Any) -> None:
        session.save()
