"""How do other loaders read the same samples? Each as its own documentation shows, tuned where it offers a choice.

``StatefulDataLoader`` and grain read the memory-mapped stream by index; litdata, streaming, WebDataset and datasets
read the format of their own. What a peer cannot do (a full shuffle of tar files) it does not take part in.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from data_work import NUM_LABELS, RECORD_BYTES, SEQ_LEN, Work, records, stream, windows

BUFFER = 10_000
"""Samples that buffered shuffles hold, as much as our blocks mix at a time."""


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in batch.items()}


class MemmapTokens:
    """A map-style dataset over the stream, as nanoGPT and its descendants have it."""

    def __init__(self, path: str, num_samples: int) -> None:
        self._path, self._num_samples = path, num_samples
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._tokens is None:
            self._tokens = np.memmap(self._path, dtype=np.uint16, mode="r")
        first = int(index) * SEQ_LEN
        return {"tokens": self._tokens[first : first + SEQ_LEN + 1].copy()}


class MemmapRecords:
    def __init__(self, path: str, num_samples: int) -> None:
        self._path, self._num_samples = path, num_samples
        self._rows: Any = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._rows is None:
            self._rows = np.memmap(self._path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)
        return {"data": self._rows[int(index)].copy(), "label": int(index) % NUM_LABELS}


class _OverMemmap:
    """The stream and the records as plain files."""

    def supports(self, work: Work) -> bool:
        return True

    def prepare(self, work: Work) -> None:
        path = work.place("memmap.bin")
        if work.kind == "tokens":
            stream(work.num_samples).tofile(path)
            return
        with path.open("wb") as file:
            for data, _ in records(work.num_samples):
                file.write(data)

    def dataset(self, work: Work) -> Any:
        kind = MemmapTokens if work.kind == "tokens" else MemmapRecords
        return kind(str(work.place("memmap.bin")), work.num_samples)


class BareLoop(_OverMemmap):
    """What one writes by hand: a permutation, a slice for each sample, a stack."""

    def supports(self, work: Work) -> bool:
        return work.workers == 0

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        dataset, random = self.dataset(work), np.random.default_rng(work.seed)
        while True:
            order = np.arange(work.num_samples) if work.shuffle == "none" else random.permutation(work.num_samples)
            for first in range(0, work.num_samples, work.batch):
                rows = [dataset[index] for index in order[first : first + work.batch]]
                yield as_tensors({name: np.stack([row[name] for row in rows]) for name in rows[0]})
            if not endless:
                return


class Stateful(_OverMemmap):
    """torchdata's StatefulDataLoader, which is torch's DataLoader that can be saved."""

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        is_mixed, lasts = work.shuffle != "none", work.workers > 0
        loader: Iterable[dict[str, Any]] = StatefulDataLoader(
            self.dataset(work), work.batch, shuffle=is_mixed, num_workers=work.workers, persistent_workers=lasts
        )
        return loader


class Grain(_OverMemmap):
    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        import grain

        data = grain.MapDataset.source(self.dataset(work)).seed(work.seed)
        data = data.shuffle() if work.shuffle != "none" else data
        data = data.repeat(None if endless else 1).batch(work.batch)
        batches = data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=64))
        if work.workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=work.workers))
        return (as_tensors(batch) for batch in batches)


class LitData:
    def supports(self, work: Work) -> bool:
        return True

    def prepare(self, work: Work) -> None:
        import litdata

        loader = litdata.TokensLoader() if work.kind == "tokens" else None
        settings = {"chunk_bytes": "16MB", "num_workers": 1, "item_loader": loader}
        parts = 10
        if work.kind == "tokens":
            inputs = [(part, parts, work.num_samples) for part in range(parts)]
            litdata.optimize(fn=_lit_tokens, inputs=inputs, output_dir=str(work.place("litdata")), **settings)
        else:
            inputs = [work.num_samples]
            litdata.optimize(fn=_lit_records, inputs=inputs, output_dir=str(work.place("litdata")), **settings)

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        import litdata

        is_tokens = work.kind == "tokens"
        data = litdata.StreamingDataset(
            str(work.place("litdata")),
            item_loader=litdata.TokensLoader(block_size=SEQ_LEN + 1) if is_tokens else None,
            shuffle=work.shuffle != "none",
            seed=work.seed,
            drop_last=False,
        )
        loader = litdata.StreamingDataLoader(
            data, batch_size=work.batch, num_workers=work.workers, persistent_workers=work.workers > 0
        )
        return _Named(loader, "tokens") if is_tokens else loader


class _Named:
    """Batches that come as one tensor, under a name."""

    def __init__(self, batches: Iterable[Any], name: str) -> None:
        self._batches, self._name = batches, name

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield {self._name: batch}


def _lit_tokens(part: tuple[int, int, int]) -> Iterator[torch.Tensor]:
    number, parts, num_samples = part
    rows = windows(num_samples)
    for row in rows[num_samples * number // parts : num_samples * (number + 1) // parts]:
        yield torch.from_numpy(row.astype(np.int32))


def _lit_records(num_samples: int) -> Iterator[dict[str, Any]]:
    for data, label in records(num_samples):
        yield {"data": np.frombuffer(data, dtype=np.uint8), "label": label}


def _import_streaming() -> Any:
    """MosaicML streaming asks for torchvision on import, for its image classes alone; its CPU build is not always to be
    had, and no image is read here."""
    if find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules["torchvision.transforms.functional"].__dict__["to_tensor"] = None
        datasets = sys.modules["torchvision.datasets"] = ModuleType("torchvision.datasets")
        datasets.__dict__["VisionDataset"] = object
    return import_module("streaming")


class Streaming:
    """MosaicML streaming."""

    def supports(self, work: Work) -> bool:
        return True

    def prepare(self, work: Work) -> None:
        streaming = _import_streaming()
        columns = {"tokens": "ndarray:uint16:129"} if work.kind == "tokens" else {"data": "bytes", "label": "int"}
        with streaming.MDSWriter(out=str(work.place("mds")), columns=columns, size_limit=1 << 24) as writer:
            if work.kind == "tokens":
                for row in windows(work.num_samples):
                    writer.write({"tokens": row})
            else:
                for data, label in records(work.num_samples):
                    writer.write({"data": data, "label": label})

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        streaming = _import_streaming()
        streaming.base.util.clean_stale_shared_memory()
        data = streaming.StreamingDataset(
            local=str(work.place("mds")),
            shuffle=work.shuffle != "none",
            shuffle_algo="py1s" if work.shuffle == "full" else "py1e",
            shuffle_block_size=BUFFER,
            shuffle_seed=work.seed,
            batch_size=work.batch,
        )
        loader: Iterable[dict[str, Any]] = streaming.StreamingDataLoader(
            data,
            batch_size=work.batch,
            num_workers=work.workers,
            collate_fn=None if work.kind == "tokens" else _bytes_stacked,
            persistent_workers=work.workers > 0,
        )
        return loader


def _bytes_stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    data = np.stack([np.frombuffer(row["data"], dtype=np.uint8) for row in rows])
    return {"data": torch.from_numpy(data), "label": torch.tensor([int(row["label"]) for row in rows])}


class WebDataset:
    """Tar files, read front to back; mixed by a buffer alone."""

    def supports(self, work: Work) -> bool:
        return work.shuffle != "full"

    def prepare(self, work: Work) -> None:
        folder = work.place("wds")
        folder.mkdir()
        shards = max(2, work.workers)
        rows = list(enumerate(_members(work)))
        for shard in range(shards):
            with tarfile.open(folder / f"{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for number, members in rows[shard::shards]:
                    for suffix, data in members.items():
                        entry = tarfile.TarInfo(f"{number:08d}.{suffix}")
                        entry.size = len(data)
                        tar.addfile(entry, io.BytesIO(data))

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        import webdataset

        paths = [str(path) for path in sorted(work.place("wds").glob("*.tar"))]
        data = webdataset.WebDataset(paths, shardshuffle=len(paths) if work.shuffle != "none" else False)
        data = data.shuffle(BUFFER) if work.shuffle != "none" else data
        data = data.map(_wds_tokens if work.kind == "tokens" else _wds_record)
        data = data.batched(work.batch, collation_fn=_stacked)
        loader: Iterable[dict[str, Any]] = webdataset.WebLoader(
            data, batch_size=None, num_workers=work.workers, persistent_workers=work.workers > 0
        )
        return loader


def _members(work: Work) -> Iterator[dict[str, bytes]]:
    if work.kind == "tokens":
        yield from ({"bin": row.tobytes()} for row in windows(work.num_samples))
    else:
        yield from ({"bin": data, "cls": str(label).encode()} for data, label in records(work.num_samples))


def _wds_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": np.frombuffer(row["bin"], dtype=np.uint16)}


def _wds_record(row: dict[str, Any]) -> dict[str, Any]:
    return {"data": np.frombuffer(row["bin"], dtype=np.uint8), "label": int(row["cls"])}


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in rows[0] if not name.startswith("__")]
    return as_tensors({name: np.stack([row[name] for row in rows]) for name in names})


class HuggingFace:
    """datasets: memory-mapped Arrow, indexed by a permutation, rows taken a batch at a time."""

    def supports(self, work: Work) -> bool:
        return True

    def prepare(self, work: Work) -> None:
        import datasets
        import pyarrow as pa
        import pyarrow.ipc

        folder = work.place("arrow")
        folder.mkdir()
        if work.kind == "tokens":
            values = pa.array(windows(work.num_samples).reshape(-1))
            table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(values, SEQ_LEN + 1)})
        else:
            rows = list(records(work.num_samples))
            table = pa.table({"data": pa.array([row[0] for row in rows]), "label": pa.array([row[1] for row in rows])})
        datasets.Dataset(table).save_to_disk(str(folder / "set"))

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        import datasets

        data = datasets.load_from_disk(str(work.place("arrow") / "set"))
        is_tokens, lasts = work.kind == "tokens", work.workers > 0
        data = data.with_format("numpy") if is_tokens else data
        if work.shuffle == "blocks":
            rows = data.to_iterable_dataset(num_shards=max(1, work.workers)).shuffle(work.seed, buffer_size=BUFFER)
            settings: Mapping[str, Any] = {"collate_fn": _stacked if is_tokens else _bytes_stacked}
        else:
            data = data.shuffle(seed=work.seed, keep_in_memory=True) if work.shuffle == "full" else data
            rows, settings = _Batches(data), {"collate_fn": _columns if is_tokens else _byte_columns}
        loader: Iterable[dict[str, Any]] = torch.utils.data.DataLoader(
            rows, work.batch, num_workers=work.workers, persistent_workers=lasts, **settings
        )
        return loader


class _Batches:
    """``__getitems__`` gives a batch in one call, the fastest way that datasets has."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self._data[indices]


def _columns(batch: dict[str, Any]) -> dict[str, Any]:
    return as_tensors(batch)


def _byte_columns(batch: dict[str, Any]) -> dict[str, Any]:
    data = np.stack([np.frombuffer(row, dtype=np.uint8) for row in batch["data"]])
    return {"data": torch.from_numpy(data), "label": torch.tensor(batch["label"])}


PEERS: dict[str, Any] = {
    "bare loop": BareLoop,
    "StatefulDataLoader": Stateful,
    "grain": Grain,
    "litdata": LitData,
    "streaming": Streaming,
    "WebDataset": WebDataset,
    "datasets": HuggingFace,
}
