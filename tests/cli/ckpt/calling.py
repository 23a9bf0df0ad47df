from __future__ import annotations

from tests.cli.calling import Said, call

__all__ = ["Said", "ckpt"]


def ckpt(*words: object) -> Said:
    """A verb of ``closeranks ckpt``."""
    return call("ckpt", *words)
