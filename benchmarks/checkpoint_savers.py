"""Who saves? Ours, torch.save and DCP in each of its ways, behind one small interface; all of them fsync.

Call sequence of a save: ``ask`` with the state, then training steps that call ``before_update`` ahead of the optimizer,
then ``settle``, which returns when the save is durable. DCP's asynchronous saves come twice: as they are by default,
which copies the state before training goes on, and with a stager that copies it in a thread and keeps its memory
(``staged``), which is the most its documentation offers without a CUDA device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from closeranks.capture.capture import Capture
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings
from closeranks.checkpoint.save.saver import CheckpointSaver
from closeranks.core.pieces import Piece
from closeranks.storage.open import open_storage

WAIT_S = 300.0
State = Mapping[str, Tensor]


class Contender(Protocol):
    def ask(self, step: int, state: State) -> None: ...

    def before_update(self) -> None: ...

    def settle(self) -> None: ...

    def load(self, state: State) -> None:
        """What was saved last, into these tensors."""
        ...

    def files(self) -> list[Path]:
        """Of what was saved last, those of all ranks."""
        ...

    def close(self) -> None: ...


class Ours:
    """With the settings a run has by default: verified, read back, the writer niced."""

    def __init__(self, folder: Path, state: State) -> None:
        config = CheckpointConfig(keep_last=2)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        settings = SaveSettings.from_config(config, str(folder))
        self._folder, self._name = folder, ""
        self._saver = CheckpointSaver(rank, num_ranks, "benchmark", 1, "data=2", settings, config)
        self._capture = Capture()
        self._saver.warm_up(self._capture, _items(state))
        self.reports: list[SaveReport] = []

    def ask(self, step: int, state: State, *, is_full: bool | None = None) -> None:
        self._name = f"step-{step:08d}"
        tree = {"step": step} if dist.get_rank() == 0 else None
        self._capture.begin(_items(state), self._saver.begin_save(step, tree, is_full=is_full))

    def before_update(self) -> None:
        self._capture.wait_until_copied()

    def settle(self) -> None:
        self.reports = self._saver.wait(WAIT_S)
        failed = [report.what for report in self.reports if report.kind == "failed"]
        if failed:
            raise RuntimeError("; ".join(failed))

    def load(self, state: State) -> None:
        reader = CheckpointReader(open_storage(self._folder), self._name)
        for item in _items(state):
            reader.read_into(item.section, item.key, item.piece, item.tensor)

    def files(self) -> list[Path]:
        return sorted((self._folder / self._name).glob("*.safetensors"))

    def close(self) -> None:
        self._capture.close()
        self._saver.close()


def _items(state: State) -> list[StateTensor]:
    items = []
    for name, tensor in state.items():
        section, _, key = name.partition("/")
        items.append(StateTensor(section, key, Piece.whole(key, tuple(tensor.shape)), tensor))
    return items


class TorchSave:
    """Each rank its own file, while training waits."""

    def __init__(self, folder: Path, state: State) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{dist.get_rank()}.pt"

    def ask(self, step: int, state: State) -> None:
        with self._path.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())

    def before_update(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def load(self, state: State) -> None:
        found = torch.load(self._path, weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(found[name])

    def files(self) -> list[Path]:
        return sorted(self._path.parent.iterdir())

    def close(self) -> None:
        return None


class Dcp:
    """``dcp.save``, while training waits."""

    def __init__(self, folder: Path, state: State) -> None:
        self._folder, self._last, self._group = folder, folder, dist.new_group()

    def ask(self, step: int, state: State) -> None:
        dcp.save(dict(state), storage_writer=self._writer(step), process_group=self._group)

    def before_update(self) -> None:
        return None

    def settle(self) -> None:
        """Two stay, as with ours."""
        if dist.get_rank() == 0:
            for old in sorted(self._folder.iterdir())[:-2]:
                shutil.rmtree(old)

    def load(self, state: State) -> None:
        dcp.load(dict(state), checkpoint_id=self._last, process_group=self._group)

    def files(self) -> list[Path]:
        return sorted(self._last.glob("*.distcp"))

    def close(self) -> None:
        return None

    def _writer(self, step: int) -> dcp.FileSystemWriter:
        self._last = self._folder / f"step-{step:08d}"
        return dcp.FileSystemWriter(self._last, sync_files=True)


class DcpAsync(Dcp):
    """``dcp.async_save`` in a thread or a process; its collectives have a group of their own."""

    def __init__(
        self, folder: Path, state: State, *, checkpointer_type: AsyncCheckpointerType, is_staged: bool
    ) -> None:
        super().__init__(folder, state)
        self._checkpointer_type, self._stager = checkpointer_type, None
        if is_staged:
            is_shared = checkpointer_type == AsyncCheckpointerType.PROCESS
            self._stager = DefaultStager(StagingOptions(False, is_shared, True, False))
        self._staged: Future[Any] | None = None
        self._done: Future[Any] | None = None

    def ask(self, step: int, state: State) -> None:
        answer: Any = dcp.async_save(
            dict(state),
            storage_writer=self._writer(step),
            process_group=self._group,
            async_checkpointer_type=self._checkpointer_type,
            **({"async_stager": self._stager} if self._stager is not None else {}),
        )
        self._staged = getattr(answer, "staging_completion", None)
        self._done = getattr(answer, "upload_completion", answer)

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def settle(self) -> None:
        if self._done is not None:
            self._done.result(WAIT_S)
        super().settle()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def _asynchronous(checkpointer_type: AsyncCheckpointerType, is_staged: bool) -> Callable[[Path, State], Contender]:
    return lambda folder, state: DcpAsync(folder, state, checkpointer_type=checkpointer_type, is_staged=is_staged)


MAKERS: dict[str, Callable[[Path, State], Contender]] = {
    "closeranks": Ours,
    "torch.save": TorchSave,
    "dcp": Dcp,
    "dcp thread": _asynchronous(AsyncCheckpointerType.THREAD, is_staged=False),
    "dcp thread staged": _asynchronous(AsyncCheckpointerType.THREAD, is_staged=True),
    "dcp process": _asynchronous(AsyncCheckpointerType.PROCESS, is_staged=False),
    "dcp process staged": _asynchronous(AsyncCheckpointerType.PROCESS, is_staged=True),
}
ASYNCHRONOUS = tuple(name for name in MAKERS if name.startswith("dcp "))
