"""One loader in a process of its own, which reads while it is told to and stands still otherwise.

Started by ``data.py``; a line of JSON on standard input says what to do: ``check`` reads one epoch and tells its sum,
``go`` reads for so many seconds and tells the rate. The process and its workers wait in between, so that contenders can
take turns on a machine they share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from data_ours import OURS
from data_peers import PEERS
from data_work import Contender, Work, checksum, num_rows


def main() -> None:
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    name, work = sys.argv[1], Work(**json.loads(sys.argv[2]))
    contender: Contender = {**PEERS, **OURS}[name]()
    lane = Lane(contender, work)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(lane, request.pop("do"))(**request)
        os.write(answers, (json.dumps(answer) + "\n").encode())


class Lane:
    def __init__(self, contender: Contender, work: Work) -> None:
        self._contender, self._work = contender, work
        self._batches: Iterator[dict[str, Any]] | None = None

    def prepare(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._contender.prepare(self._work)
        return {"seconds": time.perf_counter() - began}

    def check(self) -> dict[str, Any]:
        """One epoch, counted and added up."""
        rows = total = 0
        for batch in self._contender.open(self._work, endless=False):
            rows += num_rows(batch)
            total += checksum(batch)
        return {"rows": rows, "sum": total}

    def go(self, seconds: float) -> dict[str, Any]:
        """Samples a second, over as many epochs as fit; the first batch, which opens things, is not counted."""
        if self._batches is None:
            self._batches = self._endless()
            next(self._batches)
        rows, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            rows += num_rows(next(self._batches))
        return {"rate": rows / spent, "rss_mb": _anonymous_mb()}

    def _endless(self) -> Iterator[dict[str, Any]]:
        loader = self._contender.open(self._work, endless=True)
        while True:
            yield from loader


def _anonymous_mb() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
