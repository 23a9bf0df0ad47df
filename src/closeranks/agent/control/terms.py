"""How long, how much and how many does the control channel put up with?

Invariant: whatever strangers do, they cost at most ``max_strangers`` connections of a few hundred bytes each, and one
who holds the token at most one message and one queue.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    handshake_s: float = 5.0
    """From the connection to the proof; who takes longer is dropped."""
    connect_s: float = 5.0
    """For one address to answer, and for a name to be looked up."""
    silence_s: float = 10.0
    """The kernel gives a connection up after this long without an answer from the other kernel."""
    max_frame_bytes: int = 16 << 20
    max_queue_bytes: int = 32 << 20
    """What may wait for one peer; who reads so slowly that more would, is closed."""
    max_strangers: int = 256
    """Connections without a proof yet. Beyond it, the oldest of the busiest address goes."""
    first_wait_s: float = 0.1
    """Before the second try to connect; each wait is twice the last, less up to a half by chance."""
    longest_wait_s: float = 5.0
