"""Decides which rank prints an error when no agent collects the errors of all ranks.

Under torchrun and srun every rank writes to the same terminal. Invariant: an error is printed once, by the first rank
that hit it, before that rank exits: launchers kill all others as soon as one has exited. Imports no torch.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from enum import Enum

from closeranks.agent.detection.failure import is_consequence, plain_message
from closeranks.core.errors import CloseranksError, ConfigError, RunFailed
from closeranks.core.world import World

_RANK_0_FIRST_S = 5.0
"""How long a rank that cannot ask the others lets rank 0 print first, which has most likely hit the same error."""


STORE_LOST = 0
"""The ``failure_number`` of a rank that failed after the store was lost, and rank 0 with it."""


class ReportTurn(Enum):
    NOW = "now"
    AFTER_RANK_0 = "after rank 0"
    NEVER = "never"
    EXIT_LATE = "never, and exit only after rank 0 has printed"


def report_turn(error: BaseException, world: World, failure_number: int | None) -> ReportTurn:
    """When this rank may print its error. ``failure_number``: 1 for the first rank that failed, 2 for the second, and
    so on; None before there was a store to count with.

    Without a store rank 0 prints for all. An error in the job is the same on every rank; any other may occur on this
    host only (a file that is missing here), so it is printed late rather than never. A rank 0 that has exited has
    printed its error, unless it was killed: then rank 1 reports the loss.
    """
    if failure_number == STORE_LOST:
        return ReportTurn.NOW if world.rank == 1 and is_consequence(error) else ReportTurn.NEVER
    if failure_number is not None:
        return ReportTurn.NOW if failure_number == 1 else ReportTurn.NEVER
    if world.is_lead:
        return ReportTurn.NOW
    return ReportTurn.EXIT_LATE if isinstance(error, ConfigError) else ReportTurn.AFTER_RANK_0


def describe_failure(error: BaseException, world: World, num_done: int) -> CloseranksError:
    """The error to print: our own errors as they are, a lost peer in a sentence, anything else with its traceback."""
    if isinstance(error, CloseranksError):
        return error
    if is_consequence(error):
        reason = re.sub(r"^\[\S+\] ", "", plain_message(error)).split(". ")[0]  # without gloo's source line and advice
        what = f"rank {world.rank} lost another rank after step {num_done}: {reason}."
        return RunFailed(f"{what} The rank that the launcher names first has failed.", rank=world.rank)
    text = "".join(traceback.format_exception(error)).rstrip()
    return RunFailed(f"rank {world.rank} failed after step {num_done}:\n{text}", rank=world.rank)


def print_error(error: CloseranksError, turn: ReportTurn) -> None:
    if turn in (ReportTurn.AFTER_RANK_0, ReportTurn.EXIT_LATE):
        # The launcher sends SIGTERM once rank 0 has printed its error and exited.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(error.exit_code))
        time.sleep(_RANK_0_FIRST_S)
    if turn in (ReportTurn.NOW, ReportTurn.AFTER_RANK_0):
        print(f"closeranks: {error}", file=sys.stderr, flush=True)
