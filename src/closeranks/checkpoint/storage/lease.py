"""How is a store without locks held by one process alone?

Every process that wants it leaves a lease of its own under ``.lock/`` and then looks for others:

    1. look: a living lease of somebody else -> not now
    2. write mine
    3. look again: a living lease of somebody else -> take mine away, not now
    4. it is mine; a thread renews the lease until it is given back

Invariant: of two that both wrote before they looked again, at least one sees the other, so never two hold it; a store
needs no conditional writes for this, only listings that show what was written, which object stores give today.
A lease is dead if its time has passed by the clock here *and* it was not renewed while this process watched for a
renewal: a clock that runs ahead alone takes nothing away from a living holder.
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
from dataclasses import dataclass

from closeranks.checkpoint.storage.names import LOCK
from closeranks.checkpoint.storage.protocol import DeniedError, MissingError, Storage, StorageError

_LOG = logging.getLogger(__name__)


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

    def encode(self) -> bytes:
        return json.dumps({"owner": self.owner, "expires_at": self.expires_at}).encode()


def decode(data: bytes) -> Lease:
    """Anything else found there counts as a lease that has passed: only watching tells whether somebody keeps it."""
    try:
        fields = json.loads(data)
        return Lease(str(fields["owner"]), float(fields["expires_at"]))
    except (ValueError, KeyError, TypeError):
        return Lease("an unknown process", 0.0)


@contextmanager
def held(storage: Storage, owner: str, wait_s: float, terms: Terms) -> Iterator[None]:
    """``StorageError`` at the end where the lease was lost meanwhile: what was done may have met another holder."""
    who = f"{owner}, process {os.getpid()} on {socket.gethostname()}"
    name = f"{LOCK}/{secrets.token_hex(8)}.json"
    _acquire(storage, name, who, time.monotonic() + wait_s, terms)
    renewal = _Renewal(storage, name, who, terms)
    renewal.start()
    try:
        yield
    finally:
        renewal.stop()
        storage.remove(name)
    if renewal.is_lost:
        raise StorageError(f"the lock of {storage.url} was lost while it was held: it could not be renewed in time")


def _acquire(storage: Storage, name: str, who: str, until: float, terms: Terms) -> None:
    while True:
        rival = _rival(storage, name, terms)
        if rival is None:
            storage.publish(name, Lease(who, time.time() + terms.lease_s).encode(), replace=True)
            rival = _rival(storage, name, terms)
            if rival is None:
                return
            storage.remove(name)
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

    def __init__(self, storage: Storage, name: str, who: str, terms: Terms) -> None:
        self._storage, self._name, self._who, self._terms = storage, name, who, terms
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
                lease = Lease(self._who, time.time() + self._terms.lease_s)
                self._storage.publish(self._name, lease.encode(), replace=True)
                self._renewed_at = time.monotonic()
            except MissingError:
                self._is_gone = True
                return
            except StorageError as error:
                _LOG.warning("the lock of %s could not be renewed: %s", self._storage.url, error)
