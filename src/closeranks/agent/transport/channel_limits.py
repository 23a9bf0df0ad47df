"""Limits of the control channel: timeouts, sizes and numbers of connections.

Invariant: unauthenticated clients cost at most ``max_unauthenticated`` connections of a few hundred bytes each, and an
authenticated one costs at most one message and one queue.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    handshake_s: float = 5.0
    """From the connection to the proof; a client that takes longer is dropped."""
    connect_s: float = 5.0
    """For one address to answer, and for a name to be looked up."""
    silence_s: float = 10.0
    """The kernel drops a connection after this long without an answer from the other kernel."""
    max_frame_bytes: int = 16 << 20
    max_queue_bytes: int = 32 << 20
    """What may wait for one connection; one that reads so slowly that more would wait is closed."""
    max_unauthenticated: int = 256
    """Unauthenticated connections. Beyond it, the oldest one of the address with the most of them is closed."""
    first_wait_s: float = 0.1
    """Before the second attempt to connect; each wait is twice the last, minus a random part of up to a half."""
    longest_wait_s: float = 5.0
