"""How is a store without locks held by one process alone?

Every process that wants it leaves a lease of its own in a folder (``.lock/`` for a save or a prune, ``.owner/`` for as
long as a run lives) and then looks for others:

    1. look: a living lease of somebody else -> not now
    2. write mine
    3. look again: a living lease of somebody else -> take mine away, not now
    4. it is mine; a thread renews the lease until it is given back

Invariant: of two that both wrote before they looked again, at least one sees the other, so never two hold it; a store
needs no conditional writes for this, only listings that show what was written, which object stores give today.
A lease is dead if its time has passed by the clock here *and* it was not renewed while this process watched for a
renewal: a clock that runs ahead alone takes nothing away from a living holder. One whose holder was a process
of this host is dead at once when that process is gone. A store whose listing does not show what was just written is
refused: two processes there would not see each other.
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
"""The leases of this process by their names, those that it is about to take among them."""
_CHANGED = threading.Condition()
_LEAVE_S = 10.0
_FAR_S = 3600.0
_COMMAND_CHARS = 400
_LAST_MOMENT = 253402300800.0
"""The end of the year 9999."""


class StaleListingError(StorageError):
    """The place cannot be held by one process alone."""

    is_final = True


@dataclass(frozen=True, slots=True)
class LeaseTimes:
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
    since: float = 0.0
    """Unix time at which it was asked for."""
    command: str = ""
    """What was typed to start its holder."""

    @property
    def holder(self) -> str:
        """For people: who, since when, started how."""
        since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}" if self.since else ""
        return f"{self.owner}{since}" + (f" ({self.command})" if self.command else "")

    @property
    def boot(self) -> str:
        """Which start of which machine its holder runs in, containers there included; empty where unknown."""
        return [*self.host.split(), "", ""][1]

    def is_valid(self, now: float) -> bool:
        """Whether its time has not passed; one that ends in a far future was not written by us, or by a wrong clock."""
        return now < self.expires_at <= now + _FAR_S

    @property
    def is_of_other_host(self) -> bool:
        """Whether its holder is a process that cannot be looked for from here."""
        return not self.host or self.host != host_id()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def renewed_until(self, expires_at: float) -> Lease:
        return replace(self, expires_at=expires_at)

    @property
    def is_orphan(self) -> bool:
        """Its holder was a process of this host and is gone; False where that cannot be told from here."""
        if self.is_of_other_host or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # there is one, of another user
        began = _began(self.pid)
        return began is not None and began != self.began


class InUseError(DeniedError):
    """Somebody else holds the place, and lives as far as can be told."""

    def __init__(self, url: str, rival: Lease) -> None:
        super().__init__(f"{url} is in use by {rival.holder}; wait for it, or stop it")
        self.rival = rival


@cache
def host_id() -> str:
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


def own_lease(owner: str) -> Lease:
    """Of this process, without any time yet."""
    pid = os.getpid()
    began = _began(pid)
    host = host_id() if began is not None else ""
    who = f"{owner}, process {pid} on {socket.gethostname()}"
    return Lease(who, 0.0, host, pid, began or 0, round(time.time(), 3), _command())


def _command() -> str:
    """Bounded: a command line may be megabytes long, and hold anything."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    words = ["closeranks" if name == "__main__.py" else name, *sys.argv[1:]] if name else []
    return " ".join(shlex.join(words)[:_COMMAND_CHARS].encode(errors="replace").decode().split())


def decode(data: bytes) -> Lease:
    """Anything else found there counts as a lease that has passed: only watching tells whether somebody keeps it."""
    try:
        fields = json.loads(data)
        who = str(fields.get("host", "")), int(fields.get("pid", 0)), int(fields.get("began", 0))
        told = _moment(fields.get("since", 0.0)), str(fields.get("command", ""))[:_COMMAND_CHARS]
        return Lease(str(fields["owner"]), float(fields["expires_at"]), *who, *told)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Lease("an unknown process", 0.0)


def _moment(value: Any) -> float:
    """A Unix time that a calendar knows; 0 for anything else."""
    moment = float(value)
    return moment if 0.0 < moment < _LAST_MOMENT else 0.0


@contextmanager
def hold_lease(
    storage: Storage, lease: Lease, wait_s: float, terms: LeaseTimes, folder: str = LOCK
) -> Iterator[LeaseRenewal]:
    """The place is this process's until the end; a fork of it that comes by here gives nothing back."""
    name = f"{folder}/{secrets.token_hex(8)}.json"
    _acquire(storage, name, lease, time.monotonic() + wait_s, terms)
    renewal = LeaseRenewal(storage, name, lease, terms)
    renewal.start()
    try:
        yield renewal
    finally:
        if os.getpid() == lease.pid:
            renewal.stop()
            _remove(storage, name)


@contextmanager
def hold_ownership(storage: Storage, owner: str, wait_s: float, terms: LeaseTimes) -> Iterator[LeaseRenewal]:
    """For the life of a run: a store that does not answer at its end keeps the run for a moment only, and the lease
    passes by itself."""
    lease = own_lease(owner)
    with ExitStack() as held_until:
        renewal = held_until.enter_context(hold_lease(storage, lease, wait_s, terms, OWNER))
        leaving = held_until.pop_all()
    try:
        yield renewal
    finally:
        if os.getpid() == lease.pid:
            thread = threading.Thread(target=_leave, args=(leaving, storage), daemon=True)
            thread.start()
            thread.join(_LEAVE_S)


def _leave(leaving: ExitStack, storage: Storage) -> None:
    try:
        leaving.close()
    except StorageError as error:
        _LOG.warning("the lease of %s was not released: %s", storage.url, error)


@contextmanager
def hold_lock(storage: Storage, owner: str, wait_s: float, terms: LeaseTimes) -> Iterator[None]:
    """``StorageError`` at the end where the lease was lost meanwhile: what was done may have met another holder."""
    with hold_lease(storage, own_lease(owner), wait_s, terms) as renewal:
        yield
    if renewal.is_lost:
        raise StorageError(f"the lock of {storage.url} was lost while it was held: it could not be renewed in time")


def release_all(patience_s: float) -> None:
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


def _acquire(storage: Storage, name: str, lease: Lease, until: float, terms: LeaseTimes) -> None:
    while True:
        rival = _rival(storage, name, terms)
        if rival is None:
            _publish(storage, name, lease.renewed_until(time.time() + terms.lease_s))
            rival = _rival_or_withdraw(storage, name, terms)
            if rival is None:
                return
            _remove(storage, name)
        if time.monotonic() >= until:
            raise InUseError(storage.url, rival)
        time.sleep(terms.poll_s * (0.5 + random.random()))


def _rival_or_withdraw(storage: Storage, mine: str, terms: LeaseTimes) -> Lease | None:
    """The second look. Where it cannot be trusted nobody may hold the place, and nothing of ours stays."""
    folder, _, child = mine.rpartition("/")
    try:
        if child not in storage.names(folder):
            what = f"{storage.url} does not list what was just written to it"
            raise StaleListingError(f"{what}: two processes that write there would not see each other")
        return _rival(storage, mine, terms)
    except StorageError:
        _try_to_remove(storage, mine)
        raise


def _rival(storage: Storage, mine: str, terms: LeaseTimes) -> Lease | None:
    """A living lease of somebody else; dead ones are removed."""
    folder = mine.rpartition("/")[0]
    for child in storage.names(folder):
        name = f"{folder}/{child}"
        if name == mine:
            continue
        with suppress(MissingError):  # given back meanwhile
            data = storage.read(name)
            lease = decode(data)
            if not lease.is_orphan:
                if lease.is_valid(time.time()):
                    return lease
                time.sleep(terms.watch_s)
                if storage.read(name) != data:
                    return lease
            storage.remove(name)
            _LOG.warning("the lock of %s was left behind by %s and is taken over", storage.url, lease.owner)
    return None


class LeaseRenewal:
    """Rewrites the lease until it is stopped, or finds that somebody took it for dead."""

    def __init__(self, storage: Storage, name: str, lease: Lease, terms: LeaseTimes) -> None:
        self._storage, self._name, self._lease, self._terms = storage, name, lease, terms
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewed_at = time.monotonic()
        self.is_gone = False
        """Somebody took the lease for dead and removed it."""

    @property
    def is_lost(self) -> bool:
        """It may be somebody else's by now: it is gone, or was not renewed in time."""
        return self.is_gone or time.monotonic() - self._renewed_at > self._terms.lease_s

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stopped.wait(self._terms.renew_s):
            try:
                self._storage.size(self._name)
                lease = self._lease.renewed_until(time.time() + self._terms.lease_s)
                self._storage.publish(self._name, lease.encode(), replace=True)
                self._renewed_at = time.monotonic()
            except MissingError:
                self.is_gone = True
                return
            except StorageError as error:
                _LOG.warning("the lock of %s could not be renewed: %s", self._storage.url, error)
