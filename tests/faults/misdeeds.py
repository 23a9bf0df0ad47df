"""Code of a user's that goes wrong: in the middle of a forward, when somebody outside says so.

The job's hook looks at every forward of its rank whether a file is there that names a misdeed and this rank
(``sleep-1``). It is removed before anything happens, so that one file is one misdeed, whatever is forked afterwards.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from closeranks import Hook, Session
from closeranks.core.events import StepDone
from closeranks.run.components.optimizer import OptimizerStep

FOREVER_S = 100_000
ORDERS = "orders"
"""The folder of those files, beside the run's."""
AT_STEP = 5
"""The step that ``always`` goes wrong at."""
PACE_S = 0.03
"""A step takes this long at least, so that there is one to strike; more makes no difference to anything."""


class Misdeeds(Hook):
    def on_start(self, session: Session) -> None:
        self._orders = session.folder.parent / ORDERS
        self._rank, self._next_step = session.world.rank, session.num_done + 1
        # Made by all ranks, so that one of them can wait in it for the others in vain.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if session.world.generation and (self._orders / "forget").exists():
            _forget(session)
        session.model.register_forward_pre_hook(self._look)

    def on_step(self, session: Session, step: StepDone) -> None:
        self._next_step = step.step + 1
        time.sleep(PACE_S)

    def _look(self, module: Any, inputs: Any) -> None:
        for name, misdeed in MISDEEDS.items():
            with suppress(FileNotFoundError):
                os.unlink(self._orders / f"{name}-{self._rank}")
                misdeed(self)
        if self._next_step == AT_STEP and (self._orders / f"always-{self._rank}").exists():
            raise RuntimeError("these samples are too much for it")

    def sleep(self) -> None:
        """In Python, the interpreter free for others."""
        time.sleep(FOREVER_S)

    def hold_gil(self) -> None:
        """In a call that never lets go of the interpreter's lock: no other thread of it, no signal handler runs."""
        sum(itertools.repeat(0))

    def wait_alone(self) -> None:
        """In a collective that nobody else comes to."""
        dist.barrier(group=self._group)

    def raise_once(self) -> None:
        raise RuntimeError("the device said no, this once")

    def exit_with_0(self) -> None:
        sys.exit(0)

    def exit_at_once_with_0(self) -> None:
        os._exit(0)


MISDEEDS: dict[str, Callable[[Misdeeds], None]] = {
    "sleep": Misdeeds.sleep,
    "gil": Misdeeds.hold_gil,
    "alone": Misdeeds.wait_alone,
    "raise": Misdeeds.raise_once,
    "exit": Misdeeds.exit_with_0,
    "os-exit": Misdeeds.exit_at_once_with_0,
}


def _forget(session: Session) -> None:
    """Go on with the weights alone, as who saves only them must."""
    for _, _, tensor in session.engine.components.get(OptimizerStep).optimizer.state_tensors():
        tensor.zero_()
