"""How soon does the first batch come when a run goes on at 90% of an epoch, and what memory does reading take?

Each size in fresh processes: data set, order and loader are opened at the position and one batch is taken. The data is
tokens with samples of two (a sample is small so that 100 million of them fit a disk), and records of eight bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import Spread, say

REPEATS = 7
RECORDS_LIMIT = 10**6
"""Records are written one by one, which takes a while."""


def resume_figures(folder: Path, sizes: list[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in ("tokens", "records"):
        for size in sizes:
            if kind == "records" and size > RECORDS_LIMIT:
                continue
            place = folder / f"resume-{kind}-{size}"
            _write(kind, place, size)
            runs = [_resume(kind, place) for _ in range(REPEATS + 1)][1:]  # the first one warms the disk's cache
            row = {
                "first_batch_s": Spread.of(run["seconds"] for run in runs).fields(4),
                "anonymous_mb": Spread.of(run["anonymous_mb"] for run in runs).fields(1),
            }
            say(f"resume at 90% of {size:,} samples of {kind}: {row}")
            figures[f"{kind} {size}"] = row
    return figures


def _write(kind: str, place: Path, size: int) -> None:
    from closeranks.data.shards.manifest import DatasetInfo
    from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

    if kind == "tokens":
        with TokenShardWriter(place, dtype="uint16", vocab_size=65_536) as tokens:
            for first in range(0, size + 1, 1 << 20):
                tokens.append(np.arange(first, min(first + (1 << 20), size + 1)).astype(np.uint16))
            tokens.finish_and_commit(DatasetInfo(vocab_size=65_536))
        return
    with RecordShardWriter(place) as writer:
        for number in range(size):
            writer.append({"x": number})
        writer.finish_and_commit(DatasetInfo())


def _resume(kind: str, place: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, kind, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """In a process of its own: imports are not counted, everything that depends on the data is."""
    import torch

    from closeranks.data.config import RecordsConfig, TokensConfig
    from closeranks.data.loading.loader import Loader
    from closeranks.data.loading.read_settings import ReadSettings
    from closeranks.data.sampling.job_order import order_of
    from closeranks.data.sampling.order import BatchSchedule
    from closeranks.data.shards import records, tokens  # noqa: F401  opened by name later
    from closeranks.data.source import as_loader_source
    from closeranks.data.sources.open import open_source

    torch.set_num_threads(1)
    kind, place = sys.argv[1:]
    began = time.perf_counter()
    config = TokensConfig(path=place, seq_len=1) if kind == "tokens" else RecordsConfig(path=place)
    source = open_source(config, "train", 7)
    schedule = BatchSchedule.for_epochs(len(source), 32, 32, 1)
    step = int(0.9 * schedule.num_steps)
    loader = Loader(source, order_of(config, as_loader_source(source), 7), schedule, settings=ReadSettings.of(config))
    loader.start(step)
    loader.take(step)
    seconds = time.perf_counter() - began
    with open("/proc/self/status") as status:
        anonymous = next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))
    loader.close()
    print(json.dumps({"seconds": seconds, "anonymous_mb": anonymous}))


if __name__ == "__main__":
    main()
