"""The worker's end of the link to its agent: rendezvous, progress, requests, events and the final report.

Call sequence in a worker: the agent's ``hello`` is read before the entry runs; rank 0 calls ``listen_socket`` and
``announce_store``, every rank calls ``wait_for_store``; then each step ``progress`` and ``poll``, and ``send_event``
when there is an event. Invariant: inside a step nothing here waits for the agent, except briefly when its buffer is
full; an event that still does not fit is dropped, and the number of dropped events is reported.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Any

from closeranks.agent.detection.failure import NO_STORE, failure_report
from closeranks.agent.detection.progress import SharedProgress
from closeranks.agent.detection.standstill.collective_record import CollectiveRecord
from closeranks.agent.workers.store_socket import bind_store
from closeranks.agent.workers.wire import LineBuffer, Message, encode_message
from closeranks.core.errors import CloseranksError
from closeranks.core.requests import DRAIN, REGROUP, REQUESTS, PendingRequests, RunRequest
from closeranks.core.world import World

_OUTBOX_BYTES = 1 << 20
_EVENT_WAIT_S = 0.2
_SEND_WAIT_S = 2.0
_FINISH_WAIT_S = 60.0
"""Long enough for a busy agent: a worker whose last message is lost counts as failed."""
_CHUNK_BYTES = 1 << 16


class WorkerLink:
    """A worker's end of the link. ``send_event`` may be called from any thread, the rest from the main one."""

    def __init__(
        self, endpoint: socket.socket, progress: SharedProgress, collectives: CollectiveRecord | None = None
    ) -> None:
        self._endpoint = endpoint
        self._progress = progress
        self.collectives = collectives
        """Where the worker records its last collectives."""
        self._lines = LineBuffer()
        self._outbox = bytearray()
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._requests = PendingRequests()
        self._got_sigterm = self._has_reported_sigterm = False
        self._store = ""
        self._hello: Message = {}
        self._failed = False
        while not self._hello:
            self._read_blocking(None)
        self.world = World(**{**self._hello["world"], "hosts": tuple(self._hello["world"]["hosts"])})
        self.snapshot_paths: list[list[str]] = self._hello["boxes"]
        """Paths of the agent's snapshot memory: for each local rank of this host its own two files and its peer's two.
        This worker's index is its local rank. Empty: the run does not recover from faults, and needs no snapshots."""
        self.has_regrouped = False
        """Set by the training loop when this generation agreed to end, for another to take over."""
        self.host: str = self._hello["host"]
        """The address at which other workers reach this host."""
        self.entry: str = self._hello["entry"]
        self.payload: dict[str, Any] = self._hello["payload"]

    # --- rendezvous

    def listen_socket(self) -> socket.socket:
        """Rank 0: the socket that the store listens on, bound where the job's ``agent`` table says."""
        return bind_store(self._hello["host"], self._hello["port"])

    def announce_store(self, address: str) -> None:
        """Rank 0: tell every worker of this generation where the store is (``host:port``)."""
        self._store = address
        self._send({"type": "store", "address": address})

    def wait_for_store(self, timeout_s: float = 60.0) -> str:
        """The address of the store, after waiting for rank 0's announcement; each announcement is returned once.

        A script's second session has a store of its own: the address of the first must not be returned for it.
        """
        deadline = time.monotonic() + timeout_s
        while not self._store:
            if (left := deadline - time.monotonic()) <= 0:
                raise CloseranksError(f"{NO_STORE} within {timeout_s:g} s", rank=self.world.rank)
            self._read_blocking(left)
        address, self._store = self._store, ""
        return address

    # --- each step

    def progress(self, step: int, phase: int) -> None:
        """Write the shared progress: the current step (-1: none yet) and its ``WorkerPhase``."""
        self._progress.write(step, phase)

    def micro_batch_done(self, *, counts: bool = True) -> None:
        """One more micro-batch of the step is done; ``counts``: whether ranks that have done more are ahead."""
        self._progress.micro_batch_done(counts=counts)

    def note_compute_time(self, seconds: float, pipeline_rank: int = 0) -> None:
        """This worker's compute time of a micro-batch; ``pipeline_rank`` tells which workers have the same work."""
        self._progress.note_compute_time(seconds, pipeline_rank)

    def note_snapshot(self, step: int) -> None:
        """A snapshot of this step's state is sealed in memory."""
        self._progress.note_snapshot(step)

    def poll(self) -> frozenset[RunRequest]:
        """The agent's requests, without waiting; costs about a microsecond when there is nothing new."""
        try:
            data = self._endpoint.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        else:
            self._on_data(data)
        if self._outbox:
            with self._lock:
                self._flush(0.0)
        requests = self._requests.take()
        return self._with_sigterm(requests) if self._got_sigterm else requests

    def _with_sigterm(self, requests: frozenset[RunRequest]) -> frozenset[RunRequest]:
        """After a SIGTERM to this worker alone: pass it on to the agent if the run recovers from faults, else drain."""
        if not self.snapshot_paths:
            return requests | {DRAIN}
        if not self._has_reported_sigterm:
            self._has_reported_sigterm = True
            self._send({"type": "told"})
        return requests

    def on_sigterm(self) -> None:
        """This worker alone got SIGTERM: the next ``poll`` reports it to the agent, or returns ``DRAIN`` in a run that
        does not recover from faults."""
        # Only a flag: a change to the requests could be overwritten by the code that reads them.
        self._got_sigterm = True

    def send_event(self, event: dict[str, Any]) -> None:
        """Send an event to the agent; waits briefly when the buffer is full, then drops the event and counts it."""
        line = encode_message({"type": "event", "event": event})
        with self._lock:
            if len(self._outbox) > _OUTBOX_BYTES:
                self._flush(_EVENT_WAIT_S)
            if len(self._outbox) > _OUTBOX_BYTES:
                self._num_dropped += 1
                return
            self._outbox += self._drop_notice() + line
            self._flush(0.0)

    # --- the end

    def report_failure(self, error: BaseException) -> None:
        """Report an exception to the agent, once: the first is the cause."""
        if not self._failed:
            self._failed = True
            self._send({"type": "failure", "failure": failure_report(error, self._progress.read().step).fields()})

    def finish(self) -> None:
        """The entry has returned; send this and whatever is still queued."""
        is_drained = DRAIN in self._requests or (self._got_sigterm and not self.snapshot_paths)
        ended_for = [DRAIN.kind] * is_drained + [REGROUP.kind] * self.has_regrouped
        self._send({"type": "finished", "ended_for": ended_for}, _FINISH_WAIT_S)

    def close_in_child(self) -> None:
        """Called in a child that the worker forks: the link belongs to the worker only."""
        self._endpoint.close()

    # --- the wire

    def _send(self, message: Message, wait_s: float = _SEND_WAIT_S) -> None:
        with self._lock:
            self._outbox += self._drop_notice() + encode_message(message)
            self._flush(wait_s)

    def _drop_notice(self) -> bytes:
        count, self._num_dropped = self._num_dropped, 0
        return encode_message({"type": "dropped", "count": count}) if count else b""

    def _flush(self, wait_s: float) -> None:
        """Send what fits, waiting at most this long for room. Holds the lock."""
        deadline = time.monotonic() + wait_s
        while self._outbox:
            try:
                del self._outbox[: self._endpoint.send(self._outbox, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not _wait(self._endpoint, select.POLLOUT, left):
                    return
            except OSError:  # the agent is gone, and the kernel is about to kill this process
                self._outbox.clear()

    def _read_blocking(self, timeout_s: float | None) -> None:
        if _wait(self._endpoint, select.POLLIN, timeout_s):
            self._on_data(self._endpoint.recv(_CHUNK_BYTES))

    def _on_data(self, data: bytes) -> None:
        if not data:  # only a dead agent closes the link; without this a blocking read would spin until the kernel acts
            os._exit(1)
        for message in self._lines.feed(data):
            match message["type"]:
                case "hello":
                    self._hello = message
                case "store":
                    self._store = message["address"]
                case "request":
                    self._requests.add(REQUESTS[message["request"]])


def _wait(endpoint: socket.socket, event: int, timeout_s: float | None) -> bool:
    """``poll``, not ``select``: a worker may hold more than a thousand descriptors."""
    poller = select.poll()
    poller.register(endpoint, event)
    return bool(poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)))
