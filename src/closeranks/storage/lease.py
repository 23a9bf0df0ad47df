"""Leases: one process holds a store exclusively, without locks in the store.

Every process that wants the store writes a lease of its own into a folder (``.lock/`` for a save or a prune,
``.owner/`` for the life of a run) and then checks for others:

    1. list: a live lease of another process -> not acquired
    2. write own lease
    3. list again: a live lease of another process -> remove own lease, not acquired
    4. acquired; a thread renews the lease until it is released

Invariant: of two processes that both wrote before they listed again, at least one sees the other, so two never hold the
store at once. This needs no conditional writes, only listings that are consistent with earlier writes, which object
stores provide today. A lease is dead if it has expired by the local clock *and* was not renewed while this process
watched for a renewal: a clock that runs ahead cannot by itself take a lease from a live holder. If the holder was a
process of this host, its lease is dead as soon as that process is gone. A store whose listing does not show what was
just written is refused: two processes there would not see each other.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from closeranks.storage.names import LOCK, OWNER
from closeranks.storage.protocol import DeniedError, MissingError, Storage, StorageError

_LOG = logging.getLogger(__name__)
_HELD: dict[str, Storage] = {}
"""The leases of this process by name, including those it is about to acquire."""
_CHANGED = threading.Condition()
_RELEASE_S = 10.0
_MAX_AHEAD_S = 3600.0
_COMMAND_CHARS = 400
_LAST_TIMESTAMP = 253402300800.0
"""The end of the year 9999."""


class StaleListingError(StorageError):
    """The store cannot be held exclusively, since its listings are stale."""

    is_final = True


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    renew_s: float = 15.0
    lease_s: float = 60.0
    """Counted from each renewal; several renewals may fail before it expires."""
    poll_s: float = 0.5

    @property
    def watch_s(self) -> float:
        return self.renew_s * 1.5


@dataclass(frozen=True, slots=True)
class Lease:
    owner: str
    expires_at: float
    """Unix time by the holder's clock."""
    host: str = ""
    pid: int = 0
    began: int = 0
    """Start time of that process, in ticks since the host booted: process ids are reused."""
    since: float = 0.0
    """Unix time at which it was requested."""
    command: str = ""
    """The command line of its holder."""

    @property
    def holder(self) -> str:
        """For messages: who holds it, since when, and with which command line."""
        since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}" if self.since else ""
        return f"{self.owner}{since}" + (f" ({self.command})" if self.command else "")

    @property
    def boot(self) -> str:
        """Identifies the boot of the machine that its holder runs on, shared by its containers; empty if unknown."""
        return [*self.host.split(), "", ""][1]

    def is_valid(self, now: float) -> bool:
        """Whether it has not expired. An expiry in the far future is foreign, or comes from a wrong clock."""
        return now < self.expires_at <= now + _MAX_AHEAD_S

    @property
    def is_of_other_host(self) -> bool:
        """Whether its holder is a process that cannot be checked from here."""
        return not self.host or self.host != host_id()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def renewed_until(self, expires_at: float) -> Lease:
        return replace(self, expires_at=expires_at)

    @property
    def is_orphan(self) -> bool:
        """Its holder was a process of this host and is gone; False if that cannot be determined from here."""
        if self.is_of_other_host or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # the process exists, and belongs to another user
        began = _start_time(self.pid)
        return began is not None and began != self.began


class InUseError(DeniedError):
    """Another process holds the store, and is alive as far as can be determined."""

    def __init__(self, url: str, rival: Lease) -> None:
        super().__init__(f"{url} is in use by {rival.holder}; wait for it, or stop it")
        self.rival = rival


@cache
def host_id() -> str:
    """Identifies a running system and its PID namespace: containers may share a host's name but number their processes
    separately. Empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """None if unknown; -1 for a process that has ended and was not reaped yet."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if state in "ZX" else int(rest[18])


def own_lease(owner: str) -> Lease:
    """A lease of this process, without an expiry yet."""
    pid = os.getpid()
    began = _start_time(pid)
    host = host_id() if began is not None else ""
    who = f"{owner}, process {pid} on {socket.gethostname()}"
    return Lease(who, 0.0, host, pid, began or 0, round(time.time(), 3), _command())


def _command() -> str:
    """Bounded: a command line may be megabytes long and contain anything."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    words = ["closeranks" if name == "__main__.py" else name, *sys.argv[1:]] if name else []
    return " ".join(shlex.join(words)[:_COMMAND_CHARS].encode(errors="replace").decode().split())


def decode(data: bytes) -> Lease:
    """Any other content counts as an expired lease: only watching tells whether somebody renews it."""
    try:
        fields = json.loads(data)
        who = str(fields.get("host", "")), int(fields.get("pid", 0)), int(fields.get("began", 0))
        started = _timestamp(fields.get("since", 0.0)), str(fields.get("command", ""))[:_COMMAND_CHARS]
        return Lease(str(fields["owner"]), float(fields["expires_at"]), *who, *started)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Lease("an unknown process", 0.0)


def _timestamp(value: Any) -> float:
    """A Unix time within the range of the calendar; 0 for anything else."""
    timestamp = float(value)
    return timestamp if 0.0 < timestamp < _LAST_TIMESTAMP else 0.0


@contextmanager
def hold_lease(
    storage: Storage, lease: Lease, wait_s: float, times: LeaseTimes, folder: str = LOCK
) -> Iterator[LeaseRenewal]:
    """Hold the store exclusively until the context ends; a forked child that exits the context releases nothing."""
    name = f"{folder}/{secrets.token_hex(8)}.json"
    _acquire(storage, name, lease, time.monotonic() + wait_s, times)
    renewal = LeaseRenewal(storage, name, lease, times)
    renewal.start()
    try:
        yield renewal
    finally:
        if os.getpid() == lease.pid:
            renewal.stop()
            _remove(storage, name)


@contextmanager
def hold_ownership(storage: Storage, owner: str, wait_s: float, times: LeaseTimes) -> Iterator[LeaseRenewal]:
    """For the life of a run. A store that does not respond at the end delays the run only briefly, and the lease then
    expires by itself."""
    lease = own_lease(owner)
    with ExitStack() as held_until:
        renewal = held_until.enter_context(hold_lease(storage, lease, wait_s, times, OWNER))
        cleanup = held_until.pop_all()
    try:
        yield renewal
    finally:
        if os.getpid() == lease.pid:
            thread = threading.Thread(target=_release, args=(cleanup, storage), daemon=True)
            thread.start()
            thread.join(_RELEASE_S)


def _release(cleanup: ExitStack, storage: Storage) -> None:
    try:
        cleanup.close()
    except StorageError as error:
        _LOG.warning("the lease of %s was not released: %s", storage.url, error)


@contextmanager
def hold_lock(storage: Storage, owner: str, wait_s: float, times: LeaseTimes) -> Iterator[None]:
    """``StorageError`` at the end if the lease was lost meanwhile: the work may have overlapped with another holder."""
    with hold_lease(storage, own_lease(owner), wait_s, times) as renewal:
        yield
    if renewal.is_lost:
        raise StorageError(f"the lock of {storage.url} was lost while it was held: it could not be renewed in time")


def release_all(patience_s: float) -> None:
    """For a process that is about to exit and has told its threads so: waits a moment for them to release their leases,
    then removes those that are left. A lease that the store does not remove in time stays behind."""
    with _CHANGED:
        _CHANGED.wait_for(lambda: not _HELD, patience_s / 2)
        left = dict(_HELD)
    removals = [threading.Thread(target=_try_to_remove, args=(left[name], name), daemon=True) for name in left]
    for removal in removals:
        removal.start()
    until = time.monotonic() + patience_s / 2
    for removal in removals:
        removal.join(max(0.0, until - time.monotonic()))


def _try_to_remove(storage: Storage, name: str) -> None:
    try:
        _remove(storage, name)
    except StorageError as error:
        _LOG.warning("the lock of %s was not released: %s", storage.url, error)


def _publish(storage: Storage, name: str, lease: Lease) -> None:
    with _CHANGED:
        _HELD[name] = storage
    storage.publish(name, lease.encode(), replace=True)


def _remove(storage: Storage, name: str) -> None:
    storage.remove(name)
    with _CHANGED:
        _HELD.pop(name, None)
        _CHANGED.notify_all()


def _acquire(storage: Storage, name: str, lease: Lease, until: float, times: LeaseTimes) -> None:
    while True:
        rival = _rival(storage, name, times)
        if rival is None:
            _publish(storage, name, lease.renewed_until(time.time() + times.lease_s))
            rival = _rival_or_withdraw(storage, name, times)
            if rival is None:
                return
            _remove(storage, name)
        if time.monotonic() >= until:
            raise InUseError(storage.url, rival)
        time.sleep(times.poll_s * (0.5 + random.random()))


def _rival_or_withdraw(storage: Storage, mine: str, times: LeaseTimes) -> Lease | None:
    """The second check. If it cannot be trusted, nobody may hold the store, and our own lease is removed."""
    folder, _, child = mine.rpartition("/")
    try:
        if child not in storage.names(folder):
            what = f"{storage.url} does not list what was just written to it"
            raise StaleListingError(f"{what}: two processes that write there would not see each other")
        return _rival(storage, mine, times)
    except StorageError:
        _try_to_remove(storage, mine)
        raise


def _rival(storage: Storage, mine: str, times: LeaseTimes) -> Lease | None:
    """A live lease of another process; dead ones are removed."""
    folder = mine.rpartition("/")[0]
    for child in storage.names(folder):
        name = f"{folder}/{child}"
        if name == mine:
            continue
        with suppress(MissingError):  # released meanwhile
            data = storage.read(name)
            lease = decode(data)
            if not lease.is_orphan:
                if lease.is_valid(time.time()):
                    return lease
                time.sleep(times.watch_s)
                if storage.read(name) != data:
                    return lease
            storage.remove(name)
            _LOG.warning("the lock of %s was left behind by %s and is taken over", storage.url, lease.owner)
    return None


class LeaseRenewal:
    """Renews the lease until it is stopped, or until it finds that another process removed it as dead."""

    def __init__(self, storage: Storage, name: str, lease: Lease, times: LeaseTimes) -> None:
        self._storage, self._name, self._lease, self._times = storage, name, lease, times
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewed_at = time.monotonic()
        self.is_gone = False
        """Another process considered the lease dead and removed it."""

    @property
    def is_lost(self) -> bool:
        """Another process may hold it by now: it was removed, or was not renewed in time."""
        return self.is_gone or time.monotonic() - self._renewed_at > self._times.lease_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stopped.wait(self._times.renew_s):
            try:
                self._storage.size(self._name)
                lease = self._lease.renewed_until(time.time() + self._times.lease_s)
                self._storage.publish(self._name, lease.encode(), replace=True)
                self._renewed_at = time.monotonic()
            except MissingError:
                self.is_gone = True
                return
            except StorageError as error:
                _LOG.warning("the lock of %s could not be renewed: %s", self._storage.url, error)
