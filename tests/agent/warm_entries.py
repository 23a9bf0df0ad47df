"""Entries that tell what the zygote they were forked from has learned. Imports nothing of torch."""

from __future__ import annotations

import gc
import os
from typing import Any

from closeranks.agent.workers.worker_link import WorkerLink

KNOWN: list[Any] = []


def learn(payload: dict[str, Any]) -> None:
    KNOWN.append(payload["lesson"])
    assert gc.get_freeze_count() > 0, "what was imported is frozen already"


def fail(payload: dict[str, Any]) -> None:
    raise ValueError("nothing to learn")


def leave(payload: dict[str, Any]) -> None:
    raise SystemExit(3)


def tell(payload: dict[str, Any], link: WorkerLink) -> int:
    is_frozen = not any(found is KNOWN for found in gc.get_objects())
    link.send_event({"event": "knows", "known": KNOWN, "is_frozen": is_frozen, "zygote": os.getppid()})
    return 0
