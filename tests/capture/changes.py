"""Which tensors of a sealed copy hold other bytes than were copied?"""

from __future__ import annotations

from crc32c import crc32c

from closeranks.capture.slots import SealedSlot


def changed(path: str) -> list[str]:
    """Their keys; reads all of the copy."""
    sealed = SealedSlot(path)
    pairs = zip(sealed.index.entries, sealed.index.crcs, strict=True)
    return [entry.key for entry, crc in pairs if crc32c(sealed.data(entry).data) != crc]
