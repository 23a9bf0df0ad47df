"""How does a step take long without keeping a processor busy? Every rank waits after it, as for a device."""

from __future__ import annotations

import time
from typing import Any

from closeranks.run.hooks import Hook

WAIT_S = 0.4


class Wait(Hook):
    """Changes no number: the run that is compared with goes without it."""

    def on_step(self, session: Any, step: Any) -> None:
        time.sleep(WAIT_S)
