"""The training loop: trains a job, or a user's model and data, by iterating a session to its end.

``train`` is the entry for Python scripts, ``train_job`` the one for the command line. Both iterate the same session.
Invariant: what takes seconds to import is imported when a function is called, after a message that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.core.errors import SetupError
from closeranks.core.system.environment import detect_world
from closeranks.core.system.stdio import ignore_broken_pipes

if TYPE_CHECKING:
    from closeranks.run.hooks import Hook
    from closeranks.run.job.job import Job
    from closeranks.run.result import Result
    from closeranks.run.session import Session


def train(
    model: Any,
    data: Any,
    loss: Callable[..., Any],
    *,
    eval_data: Any = None,
    hooks: Sequence[Hook] = (),
    metrics: Sequence[str] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    **tables: Any,
) -> Result:
    """Train ``model`` (a module, or a function that makes one) on ``data`` and return the result.

    ``loss(model, batch)`` returns the mean over the batch's samples, or a ``Loss``, whose extra sums ``metrics`` names.
    ``collate(samples)`` makes the batch of a micro-batch's samples, which are stacked otherwise.
    Tables of the job are given by name: ``train={"steps": 200, "global_batch": 32}``; what the axes need to know of the
    model is ``stages=["embed", "blocks.*", "head"]`` for a pipeline and ``tensor=[{"pattern": "*.up.weight", "dim":
    0}, ...]`` for the tensor axis; how the data is read, the table ``[data]``, is ``loading={"workers": 2}``. Runs on
    the workers this script was started with: one under plain ``python``, more under ``closeranks run -n``,
    ``torchrun`` or ``srun``.
    """
    _print_import_notice()
    from closeranks.run.session import Session

    options = {"eval_data": eval_data, "hooks": hooks, "metrics": metrics, "collate": collate}
    return run_session(Session(model, data, loss, **options, **tables))


def train_job(job: Job, folder: Path | None = None, hooks: Sequence[Hook] = ()) -> Result:
    """Train what a job file names."""
    _print_import_notice()
    from closeranks.run.session import Session

    return run_session(Session.from_job(job, folder, hooks))


def _print_import_notice() -> None:
    """Print a message if the session's modules are not imported yet, as in a script that none of our commands
    started."""
    world = detect_world()
    if "closeranks.run.session" not in sys.modules and world.is_lead and world.launcher != "testing":
        ignore_broken_pipes()
        print("closeranks: importing PyTorch's distributed modules ...", flush=True)


def run_session(session: Session) -> Result:
    from closeranks.telemetry.device import is_out_of_memory

    with session:
        try:
            for step in session:
                step.run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory_error(session, error) from error
    return session.result


def out_of_memory_error(session: Session, error: BaseException) -> SetupError:
    """An error that explains the allocator's: what took the memory, and what to change."""
    from closeranks.run.components.optimizer import OptimizerStep
    from closeranks.telemetry.device import explain_out_of_memory

    engine = session.engine
    is_mixed = engine.model.precision.compute.itemsize == 2
    state_tensors = [tensor for _, _, tensor in engine.components.get(OptimizerStep).optimizer.state_tensors()]
    text = explain_out_of_memory(session.model, state_tensors, session.context.device, error, is_mixed=is_mixed)
    return SetupError(f"rank {session.world.rank} failed at step {session.num_done + 1}: {text}")
