"""How do we read the samples of the data benchmark? As a run does: shards, the pure order, the loader.

Checksums are on, as they are by default: every block is checked when it is first touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from data_work import SEQ_LEN, Work, records, stream

from closeranks.data.config import RecordsConfig, TokensConfig
from closeranks.data.loading.loader import Loader
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.sampling.job_order import order_of
from closeranks.data.sampling.order import BatchSchedule
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter
from closeranks.data.source import as_loader_source
from closeranks.data.sources.open import open_source

SHARD_BYTES = 16 << 20
"""As large as the other formats' pieces."""


class Closeranks:
    def supports(self, work: Work) -> bool:
        return True

    def prepare(self, work: Work) -> None:
        folder = work.place("shards")
        if work.kind == "tokens":
            with TokenShardWriter(folder, dtype="uint16", vocab_size=50_000, shard_bytes=SHARD_BYTES) as tokens:
                for part in np.array_split(stream(work.num_samples), 100):
                    tokens.append(part)
                tokens.finish_and_commit(DatasetInfo(vocab_size=50_000))
            return
        with RecordShardWriter(folder, shard_bytes=SHARD_BYTES) as writer:
            for data, label in records(work.num_samples):
                writer.append({"data": np.frombuffer(data, dtype=np.uint8), "label": label})
            writer.finish_and_commit(DatasetInfo())

    def open(self, work: Work, *, endless: bool) -> Iterable[dict[str, Any]]:
        loader, num_steps = open_loader(work, 1e6 if endless else 1)
        loader.start(0)
        return batches(loader, num_steps)


def open_loader(work: Work, epochs: float) -> tuple[Loader, int]:
    """``prefetch``: 2 steps, the default, of one micro-batch each; with more processes 2 for each of them, as torch."""
    values: dict[str, Any] = {
        "path": str(work.place("shards")),
        "shuffle": work.shuffle,
        "workers": work.workers,
        "prefetch": 2 * work.workers,
    }
    config = TokensConfig(seq_len=SEQ_LEN, **values) if work.kind == "tokens" else RecordsConfig(**values)
    source = open_source(config, "train", work.seed)
    order = order_of(config, as_loader_source(source), work.seed)
    schedule = BatchSchedule.for_epochs(len(source), work.batch, work.batch, epochs)
    return Loader(source, order, schedule, settings=ReadSettings.of(config)), schedule.num_steps


def batches(loader: Loader, num_steps: int) -> Iterator[dict[str, Any]]:
    try:
        for step in range(num_steps):
            for loaded in loader.take(step):
                yield dict(loaded.batch)
    finally:
        loader.close()


OURS: dict[str, Any] = {"closeranks": Closeranks}
