"""A rate-limited log of refused connections: the first refusal of each address is reported, the rest are counted.

Invariant: however many unauthenticated clients connect, and from however many addresses, the number of lines and the
memory stay bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

_QUIET_S = 600.0
"""An address is reported again after this long."""
_SPAN_S = 60.0
_MOST_LINES = 10
"""In each ``_SPAN_S``, over all addresses."""
_MOST_ADDRESSES = 256


@dataclass(slots=True)
class _Known:
    logged_at: float
    num_since: int = 0


class RefusalLog:
    """Decides which refusals are reported. Times are ``time.monotonic()``."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._span_began = float("-inf")
        self._num_lines = 0
        self._num_suppressed = 0

    def line_for(self, host: str, why: str, now: float) -> str | None:
        """The line to log; None when this refusal is only counted."""
        known = self._known.get(host)
        if known is not None and now - known.logged_at < _QUIET_S:
            known.num_since += 1
            return None
        if not self._has_room(now):
            self._num_suppressed += 1
            return None
        self._known.pop(host, None)
        self._known[host] = _Known(now)
        while len(self._known) > _MOST_ADDRESSES:
            del self._known[next(iter(self._known))]
        return f"{host} {why}; it was refused.{self._suppressed_counts(known)}"

    def _has_room(self, now: float) -> bool:
        if now - self._span_began >= _SPAN_S:
            self._span_began, self._num_lines = now, 0
        self._num_lines += 1
        return self._num_lines <= _MOST_LINES

    def _suppressed_counts(self, known: _Known | None) -> str:
        """The counts of refusals not reported so far: of this address, and of those beyond the limit on lines."""
        suppressed, self._num_suppressed = self._num_suppressed, 0
        again = f" It was refused {known.num_since} more times before." if known and known.num_since else ""
        others = f" {suppressed} refusals of other addresses were not reported." if suppressed else ""
        return again + others
