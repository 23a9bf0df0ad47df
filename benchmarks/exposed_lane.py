"""One rank of ``exposed.py``: trains a few steps each time it is asked to, and answers what was recorded of each.

Its gradients are summed by Gloo and then delayed as by a link that carries one bucket after the other. Invariant: the
link's clock and the recorder's share nothing: the link notes when a bucket is handed to it and when it has arrived, in
a thread of its own; the recorder's phases are those of every run, as they are written to its metrics.
"""

from __future__ import annotations

import gc
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from workload import Workload

from closeranks.core.events import Event, StepPhases
from closeranks.core.phases import TimedWork
from closeranks.run.session import Session
from closeranks.sync.collectives.async_reductions import AsyncReduction
from closeranks.sync.collectives.reductions import PlainReduction
from closeranks.telemetry.config import TelemetryConfig

NUM_RANKS = 2
EXPOSED = "data.all_reduce"


@dataclass
class Shipment:
    """A bucket on the link: what a reducer waits for."""

    work: Any
    num_bytes: int
    handed_at: float = field(default_factory=time.monotonic)
    arrived_at: float = 0.0
    has_arrived: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.has_arrived.wait()


class SlowLink:
    """Carries one bucket after the other, by sleeping: it takes no processor time from backward."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._shipments: queue.SimpleQueue[Shipment] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name="link", daemon=True).start()

    def ship(self, shipment: Shipment) -> None:
        self._shipments.put(shipment)

    def _carry(self) -> None:
        free_at = 0.0
        while True:
            shipment = self._shipments.get()
            with suppress(RuntimeError):  # the other rank has ended, and so will this one
                shipment.work.wait()  # for the sum, and so for the other rank
            free_at = max(free_at, shipment.handed_at) + shipment.num_bytes / self._bytes_per_s
            time.sleep(max(0.0, free_at - time.monotonic()))
            shipment.arrived_at = free_at = time.monotonic()
            shipment.has_arrived.set()


def busy_s(shipments: Iterable[Shipment]) -> float:
    """How long something was under way: the union of the times from handing a bucket over to its arrival."""
    total, until = 0.0, 0.0
    for one in sorted(shipments, key=lambda one: one.handed_at):
        total += max(0.0, one.arrived_at - max(until, one.handed_at))
        until = max(until, one.arrived_at)
    return total


class Trainer:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self._link = SlowLink(arguments["bytes_per_s"])
        self._shipped: dict[int, list[Shipment]] = {}
        self._recorded: dict[int, StepPhases] = {}
        self._num_begun = 0
        PlainReduction.all_reduce = self._all_reduce()  # type: ignore[method-assign]
        sizes = (arguments["seq_len"], arguments["batch"], NUM_RANKS, arguments["num_steps"], Path(arguments["folder"]))
        job = Workload("small", *sizes, num_layers=arguments["num_layers"]).job
        sync = {"overlap": arguments["overlap"], "bucket_mib": 1.0, "first_bucket_mib": 1.0}
        tables = {
            "telemetry": TelemetryConfig(sample_s=0.0, report=False),
            "checkpoint": job.checkpoint.model_copy(update={"save": False}),
            "sync": job.sync.model_copy(update=sync),
        }
        self._session = Session.from_job(job.model_copy(update=tables))
        self._session.recorder.add_sink(self._note)
        self._steps = iter(self._session)

    def _all_reduce(self) -> Callable[[PlainReduction, Tensor], AsyncReduction]:
        """As ``PlainReduction`` does, over the link."""

        def all_reduce(reduction: PlainReduction, flat: Tensor) -> AsyncReduction:
            work = dist.all_reduce(flat, group=reduction._group.process_group, async_op=True)
            shipment = Shipment(work, flat.nbytes)
            self._shipped.setdefault(self._num_begun, []).append(shipment)
            self._link.ship(shipment)
            yield TimedWork(shipment, EXPOSED)

        return all_reduce

    def _note(self, event: Event) -> None:
        if isinstance(event, StepPhases):
            self._recorded[event.step] = event

    def steps(self, num_steps: int) -> dict[str, list[float]]:
        """Of each step but the last two: the last is committed in the next turn, and phases come a step later."""
        for _ in range(num_steps):
            step = next(self._steps)  # commits the one before
            self._num_begun += 1
            step.run()
        counted = range(self._num_begun - num_steps + 1, self._num_begun - 1)
        recorded = [self._recorded[number] for number in counted]
        return {
            "step_s": [one.seconds for one in recorded],
            "exposed_s": [one.phases.get(EXPOSED, 0.0) for one in recorded],
            "busy_s": [busy_s(self._shipped[number]) for number in counted],
        }


def main() -> None:
    trainer = Trainer(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answer = trainer.steps(int(line.split()[1]))
        gc.collect(0)
        print(f"@{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
