"""The hook of a run that loses a worker while it is traced."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from closeranks import Hook, Session

DIES_IN = 2
"""The traced step in which rank 1 dies, counted from the first."""


class DiesWhileTraced(Hook):
    """Rank 1 of the first generation, once."""

    def on_step(self, session: Session, step: Any) -> None:
        time.sleep(0.05)
        answer = session.folder / "traces" / "answer.json"
        if session.world.rank == 1 and session.world.is_first_generation and answer.exists():
            first = json.loads(answer.read_text())["first_step"]
            if step.step == first + DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
