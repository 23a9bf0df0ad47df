"""User code that does what a case orders: hold a step, print floods, leave children behind.

Orders are files in the folder that ``HOSTILE_ORDERS`` names, outside the run folder, so that they work when that is
full or gone. A step that a case holds is named ``hold-STEP`` and waited for until ``release-STEP`` appears.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from tests.hostile.jobs import FLOODS, ORDERS, PACE

_PATIENCE_S = 25.0
MIB = 1 << 20


class Obedient(Hook):
    def on_start(self, session: Session) -> None:
        self._orders = Path(os.environ[ORDERS])
        self._rank = session.world.rank

    def on_step(self, session: Session, step: StepDone) -> None:
        if session.world.is_lead:
            (self._orders / f"done-{step.step}").touch()
            self._hold(step.step)
        for name, act in ACTS.items():
            for order in self._orders.glob(f"{name}-{self._rank}-{step.step}-*"):
                with suppress(FileNotFoundError):
                    order.unlink()
                    act(order.name.split("-", 3)[3])
        time.sleep(float(os.environ.get(PACE, "0.01")))

    def _hold(self, step: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (self._orders / f"hold-{step}").exists() and not (self._orders / f"release-{step}").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)


def flood(order: str) -> None:
    """``KIND-MIB``: that much of something that is no line."""
    name, _, size = order.partition("-")
    pattern = FLOODS[name]
    block = (pattern * (MIB // len(pattern) + 1))[:MIB]
    for _ in range(int(size)):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


def child(order: str) -> None:
    """A process in a session of its own that sleeps on and notes its pid; ``bare`` drops its environment as well."""
    env = {} if order == "bare" else None
    notes = os.environ[ORDERS] + "/child-pid"
    process = subprocess.Popen(["sleep", "300"], start_new_session=True, close_fds=order != "open", env=env)
    Path(notes).write_text(str(process.pid))


ACTS: dict[str, Callable[[str], None]] = {"flood": flood, "child": child}
