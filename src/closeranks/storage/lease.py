"""How is a store without locks held by one process alone?

Every process that wants it leaves a lease of its own under ``.lock/`` and then looks for others:

    1. look: a living lease of somebody else -> not now
    2. write mine
    3. look again: a living lease of somebody else -> take mine away, not now
    4. it is mine; a thread renews the lease until it is given back

Invariant: of two that both wrote before they looked again, at least one sees the other, so never two hold it; a store
needs no conditional writes for this, only listings that show what was written, which object stores give today.
A lease is dead if its time has passed by the clock here *and* it was not renewed while this process watched for a
renewal: a clock that runs ahead alone takes nothing away from a living holder. One whose holder was a process
of this host is dead at once when that process is gone.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from closeranks.storage.names import LOCK
from closeranks.storage.protocol import DeniedError, MissingError, Storage, StorageError

_LOG = logging.getLogger(__name__)
_HELD: dict[str, Storage] = {}
"""The leases of this process by their names, those that it is about to take among them."""
_CHANGED = threading.Condition()


@dataclass(frozen=True, slots=True)
class Terms:
    renew_s: float = 15.0
    lease_s: float = 60.0
    """From each renewal on; several renewals may fail before it passes."""
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
    """When that process did, in ticks since the host booted: numbers of processes are used again."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def until(self, expires_at: float) -> Lease:
        return replace(self, expires_at=expires_at)

    @property
    def is_orphan(self) -> bool:
        """Its holder was a process of this host and is gone; False where that cannot be told from here."""
        if not self.host or self.host != this_host() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # there is one, of another user
        began = _began(self.pid)
        return began is not None and began != self.began


@cache
def this_host() -> str:
    """One running system, and the numbers that processes have in it: containers may share a host's name, and have
    numbers of their own. Empty where it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> int | None:
    """None where it cannot be told; -1 for one that has ended and is not waited for yet."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if state in "ZX" else int(rest[18])


def mine(owner: str) -> Lease:
    """Of this process, without any time yet."""
    pid = os.getpid()
    began = _began(pid)
    host = this_host() if began is not None else ""
    return Lease(f"{owner}, process {pid} on {socket.gethostname()}", 0.0, host, pid, began or 0)


def decode(data: bytes) -> Lease:
    """Anything else found there counts as a lease that has passed: only watching tells whether somebody keeps it."""
    try:
        fields = json.loads(data)
        who = str(fields.get("host", "")), int(fields.get("pid", 0)), int(fields.get("began", 0))
        return Lease(str(fields["owner"]), float(fields["expires_at"]), *who)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Lease("an unknown process", 0.0)


@contextmanager
def held(storage: Storage, owner: str, wait_s: float, terms: Terms) -> Iterator[None]:
    """``StorageError`` at the end where the lease was lost meanwhile: what was done may have met another holder."""
    lease = mine(owner)
    name = f"{LOCK}/{secrets.token_hex(8)}.json"
    _acquire(storage, name, lease, time.monotonic() + wait_s, terms)
    renewal = _Renewal(storage, name, lease, terms)
    renewal.start()
    try:
        yield
    finally:
        renewal.stop()
        _remove(storage, name)
    if renewal.is_lost:
        raise StorageError(f"the lock of {storage.url} was lost while it was held: it could not be renewed in time")


def give_back(patience_s: float) -> None:
    """For a process that is about to end, and has told its threads so: waits a moment for them to give back what they
    hold, then takes it from them. What a store does not answer in time stays behind."""
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
        _LOG.warning("the lock of %s was left behind: %s", storage.url, error)


def _publish(storage: Storage, name: str, lease: Lease) -> None:
    with _CHANGED:
        _HELD[name] = storage
    storage.publish(name, lease.encode(), replace=True)


def _remove(storage: Storage, name: str) -> None:
    storage.remove(name)
    with _CHANGED:
        _HELD.pop(name, None)
        _CHANGED.notify_all()


def _acquire(storage: Storage, name: str, lease: Lease, until: float, terms: Terms) -> None:
    while True:
        rival = _rival(storage, name, terms)
        if rival is None:
            _publish(storage, name, lease.until(time.time() + terms.lease_s))
            rival = _rival(storage, name, terms)
            if rival is None:
                return
            _remove(storage, name)
        if time.monotonic() >= until:
            raise DeniedError(f"{storage.url} is in use by {rival.owner}; wait for it, or stop it")
        time.sleep(terms.poll_s * (0.5 + random.random()))


def _rival(storage: Storage, mine: str, terms: Terms) -> Lease | None:
    """A living lease of somebody else; dead ones are removed."""
    for child in storage.names(LOCK):
        name = f"{LOCK}/{child}"
        if name == mine:
            continue
        with suppress(MissingError):  # given back meanwhile
            data = storage.read(name)
            lease = decode(data)
            if not lease.is_orphan:
                if lease.expires_at > time.time():
                    return lease
                time.sleep(terms.watch_s)
                if storage.read(name) != data:
                    return lease
            storage.remove(name)
            _LOG.warning("the lock of %s was left behind by %s and is taken over", storage.url, lease.owner)
    return None


class _Renewal:
    """Rewrites the lease until it is stopped, or finds that somebody took it for dead."""

    def __init__(self, storage: Storage, name: str, lease: Lease, terms: Terms) -> None:
        self._storage, self._name, self._lease, self._terms = storage, name, lease, terms
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewed_at = time.monotonic()
        self._is_gone = False

    @property
    def is_lost(self) -> bool:
        return self._is_gone or time.monotonic() - self._renewed_at > self._terms.lease_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stopped.wait(self._terms.renew_s):
            try:
                self._storage.size(self._name)
                lease = self._lease.until(time.time() + self._terms.lease_s)
                self._storage.publish(self._name, lease.encode(), replace=True)
                self._renewed_at = time.monotonic()
            except MissingError:
                self._is_gone = True
                return
            except StorageError as error:
                _LOG.warning("the lock of %s could not be renewed: %s", self._storage.url, error)
