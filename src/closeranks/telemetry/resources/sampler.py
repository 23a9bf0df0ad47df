"""Looks every few seconds at what a rank and its host use, on a thread of its own, and emits it as an event.

Every rank looks at its own process, control group and GPU; the first rank of each host also at the host. So it works
without an agent, under any launcher, and with one process. Invariants: no step waits for a look, and no look ends the
run: one that fails is reported once; a fork waits for the look in progress, so that no lock of a library stays held in
the child. Cost: less than a millisecond of processor time a look, most of it in system calls, outside the GIL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from closeranks.core.events import Event, Resources, Warned
from closeranks.telemetry.resources.cgroup_usage import read_cgroup
from closeranks.telemetry.resources.gpu_usage import GpuUsage
from closeranks.telemetry.resources.host_usage import read_host
from closeranks.telemetry.resources.link_usage import link_speeds, read_links
from closeranks.telemetry.resources.process_usage import read_process
from closeranks.telemetry.resources.reading import Reading, used_between

_SHORTEST_S = 0.5
"""The kernel counts processor time in hundredths of a second: what remains at the end is left out if it is shorter."""
_PATIENCE_S = 2.0
"""How long a fork, or the end of the run, waits for a look: a driver that does not answer must hold up neither."""
_looking = threading.RLock()
_is_held: list[bool] = []


def _before_fork() -> None:
    _is_held.append(_looking.acquire(timeout=_PATIENCE_S))


def _after_fork() -> None:
    if _is_held.pop():
        _looking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class ResourceSampler:
    """Call sequence: make it, which takes the first look; ``start``; ``close``, which emits what remains."""

    def __init__(self, interval_s: float, host_number: int, *, reads_host: bool, gpu_uuid: str = "") -> None:
        self._interval_s, self._host_number, self._reads_host = interval_s, host_number, reads_host
        self._gpu = GpuUsage(gpu_uuid) if gpu_uuid else None
        self._emit: Callable[[Event], None] = lambda event: None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resource sampler", daemon=True)
        self._has_failed = False
        self._read_at, self._before = time.monotonic(), self._read(with_gpu=False)

    def start(self, emit: Callable[[Event], None]) -> None:
        """``emit`` is called on the thread."""
        self._emit = emit
        self._thread.start()

    def close(self) -> None:
        """Waits for a look in progress."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        if self._gpu is not None and not self._gpu.open():
            self._gpu = None
        while not self._is_closing.wait(self._interval_s):
            self._look()
        if time.monotonic() - self._read_at >= min(_SHORTEST_S, self._interval_s):
            self._look()
        if self._gpu is not None:
            self._gpu.close()

    def _look(self) -> None:
        try:
            with _looking:
                now, readings = time.monotonic(), self._read()
        except Exception as error:
            if not self._has_failed:
                self._emit(Warned(f"the use of resources is not recorded: {type(error).__name__}: {error}"))
            self._has_failed = True
            return
        seconds, before = now - self._read_at, self._before
        self._read_at, self._before = now, readings
        self._emit(self._event(before, readings, seconds))

    def _event(self, before: Mapping[str, Reading], after: Mapping[str, Reading], seconds: float) -> Resources:
        used = {name: used_between(before.get(name, Reading()), reading, seconds) for name, reading in after.items()}
        words = after["gpu"].words if "gpu" in after else ()
        links = link_speeds(used.pop("links"), seconds)
        return Resources(
            round(seconds, 4),
            self._host_number,
            **used,
            gpu_throttled_by=list(words),
            address=after["links"].subject,
            link_bytes_per_s=links,
        )

    def _read(self, *, with_gpu: bool = True) -> dict[str, Reading]:
        readings = {"process": read_process(), "cgroup": read_cgroup(), "links": read_links()}
        if self._reads_host:
            readings["host_wide"] = read_host()
        if with_gpu and self._gpu is not None:
            readings["gpu"] = self._gpu.read()
        return readings
