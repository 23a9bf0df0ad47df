"""Leader election by a lease in a linearizable register.

A register is one linearizable cell: the term, its holder, and when its lease expires. Candidates never talk to each
other; they compare and set. The agent does not use it yet: its only leader has term 1. For several candidates, etcd (a
key with a lease, written in transactions) can implement the same four operations.

Invariants: a term is acquired once, by one candidate; and a holder steps down by its own clock, counted from when it
SENT the request that renewed its lease, before the register may grant the next term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from closeranks.agent.membership.lease_timing import lease_margin_s

Verb = Literal["read", "take", "keep", "leave"]


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The contents of the cell."""

    term: int = 0
    """0: nobody has ever held it."""
    holder: str = ""
    """Empty: nobody holds it now."""


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """One operation, in the form sent to a register in another process."""

    number: int
    verb: Verb
    term: int
    """The term that was seen (take) or is held (keep, leave)."""
    holder: str
    """The candidate that sends it: unique for every start of its process."""


class LeaseRegister(Protocol):
    """Each operation is atomic and returns the contents of the cell after it."""

    def read(self, now: float) -> LeaseRecord: ...

    def acquire(self, seen_term: int, holder: str, now: float) -> LeaseRecord:
        """Acquire the next term, if nobody holds the cell and ``seen_term`` is still the last one."""
        ...

    def renew(self, term: int, holder: str, now: float) -> LeaseRecord:
        """Renew the lease, if it is still held."""
        ...

    def release(self, term: int, holder: str, now: float) -> LeaseRecord: ...


class EmbeddedRegister:
    """A register in memory. ``lease_s`` infinite: the only candidate holds it as long as its process lives."""

    def __init__(self, lease_s: float = math.inf) -> None:
        self.lease_s = lease_s
        self._record = LeaseRecord()
        self._expires_at = -math.inf

    def read(self, now: float) -> LeaseRecord:
        if self._record.holder and now >= self._expires_at:
            self._record = LeaseRecord(self._record.term)
        return self._record

    def acquire(self, seen_term: int, holder: str, now: float) -> LeaseRecord:
        if self.read(now) == LeaseRecord(seen_term):
            self._record, self._expires_at = LeaseRecord(seen_term + 1, holder), now + self.lease_s
        return self._record

    def renew(self, term: int, holder: str, now: float) -> LeaseRecord:
        if self.read(now) == LeaseRecord(term, holder):
            self._expires_at = now + self.lease_s
        return self._record

    def release(self, term: int, holder: str, now: float) -> LeaseRecord:
        if self.read(now) == LeaseRecord(term, holder):
            self._record = LeaseRecord(term)
        return self._record


def apply_request(register: LeaseRegister, request: RegisterRequest, now: float) -> LeaseRecord:
    """Apply a request to the register."""
    match request.verb:
        case "read":
            return register.read(now)
        case "take":
            return register.acquire(request.term, request.holder, now)
        case "keep":
            return register.renew(request.term, request.holder, now)
        case "leave":
            return register.release(request.term, request.holder, now)


@dataclass(frozen=True, slots=True)
class SendRegisterRequest:
    """Send this request to the register; an answer may never come."""

    request: RegisterRequest


@dataclass(frozen=True, slots=True)
class Elected:
    """This candidate leads until ``until``, or later if ``Renewed`` says so. Leases that an earlier leader granted to
    hosts may hold for ``LeaseTiming.dead_after_s`` from now; term 1 has no earlier leader."""

    term: int
    until: float


@dataclass(frozen=True, slots=True)
class Renewed:
    until: float


@dataclass(frozen=True, slots=True)
class Resigned:
    """This candidate is no longer the leader."""

    term: int


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """Another candidate holds the cell, or nobody if ``holder`` is empty."""

    term: int
    holder: str


CandidateEffect = SendRegisterRequest | Elected | Renewed | Resigned | LeaderSeen
Effects = list[CandidateEffect]


class Candidate:
    """One candidate. It has one request under way at a time, and sends a new one when no answer comes. It never resumes
    a term that it has resigned: the leader of that term has forgotten what it ordered."""

    def __init__(self, holder: str, *, now: float, lease_s: float = 3.0, poll_s: float = 0.5) -> None:
        self.holder = holder
        self.term = 0
        """The term it leads; 0 while it does not lead."""
        self.until = -math.inf
        self._lease_s = lease_s
        self._margin_s = 0.0 if math.isinf(lease_s) else lease_margin_s(lease_s)
        self._poll_s = poll_s
        self._seen = LeaseRecord()
        self._past = 0
        self._next_at = now
        self._number = 0
        self._pending: RegisterRequest | None = None
        self._asked_at = now

    def tick(self, now: float) -> Effects:
        effects = self._resign_if_late(now)
        if now < self._next_at:
            return effects
        if self.term:
            return [*effects, self._send("keep", self.term, now)]
        return [*effects, self._send("read", self._seen.term, now)]

    def on_answer(self, number: int, record: LeaseRecord, now: float) -> Effects:
        """The register has answered; an answer to any request but the last is ignored."""
        effects = self._resign_if_late(now)
        pending = self._pending
        if pending is None or pending.number != number:
            return effects
        self._pending = None
        last, self._seen = self._seen, record
        if record.holder == self.holder:
            return effects + self._on_mine(record, pending, now)
        if self.term:
            effects.append(self._resign(now))
        if not record.holder and pending.verb == "read":
            return [*effects, self._send("take", record.term, now)]
        return effects if record == last else [*effects, LeaderSeen(record.term, record.holder)]

    def resign(self, now: float) -> Effects:
        """Release the lease, so that the next candidate need not wait for it to expire."""
        if not self.term:
            return []
        term = self.term
        return [self._resign(now), self._send("leave", term, now)]

    def deadline(self, now: float) -> float | None:
        due = min(self._next_at, self.until) if self.term else self._next_at
        return None if math.isinf(due) else max(now, due)

    def _on_mine(self, record: LeaseRecord, request: RegisterRequest, now: float) -> Effects:
        """The lease runs from when the request that acquired or renewed it was sent. A read shows only that an earlier
        request succeeded, not when it was applied, so the lease is renewed first."""
        if record.term <= self._past:
            return [self._send("leave", record.term, now)]
        if request.verb == "read":
            return [self._send("keep", record.term, now)]
        until = self._asked_at + self._lease_s - self._margin_s
        if now >= until:
            return []
        self.until = max(self.until, until) if self.term == record.term else until
        self._next_at = math.inf if math.isinf(until) else now + self._lease_s / 4
        if self.term == record.term:
            return [Renewed(self.until)]
        self.term = record.term
        return [Elected(self.term, self.until)]

    def _resign_if_late(self, now: float) -> Effects:
        return [self._resign(now)] if self.term and now >= self.until else []

    def _resign(self, now: float) -> Resigned:
        term, self.term, self.until = self.term, 0, -math.inf
        self._past = term
        self._next_at = now + self._poll_s
        return Resigned(term)

    def _send(self, verb: Verb, term: int, now: float) -> SendRegisterRequest:
        self._number += 1
        self._pending = RegisterRequest(self._number, verb, term, self.holder)
        self._asked_at, self._next_at = now, now + self._poll_s
        return SendRegisterRequest(self._pending)
