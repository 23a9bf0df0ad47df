"""Which memory of this host outlives its workers? Boxes of its agent, as paths. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shelf:
    """The boxes of this host as paths, four files each, and which one is this rank's own. Without any, nothing is
    kept."""

    boxes: tuple[tuple[str, ...], ...] = ()
    own: int = 0
    run: int = 0
    """The number of the session in its process: copies of another one are not taken for its own."""

    def __bool__(self) -> bool:
        return bool(self.boxes)
