"""Logs a run in Weights & Biases, through its own package.

Invariant: one run of ours is one run of W&B, whatever happens to its workers: its id is kept in the run folder, and a
later generation, or a resumed run in the same folder, continues it. Steps are a metric of their own: W&B drops what is
logged for an earlier step than the last, as after a recovery.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from closeranks.core.events import Event, RunEnded
from closeranks.core.system.environment import default_setting
from closeranks.telemetry.sinks.metrics import Rates
from closeranks.telemetry.sinks.sink import SINKS, MissingPackageError, SinkContext, SinkMemory, tracked

if TYPE_CHECKING:
    from wandb import Run as WandbRun


class WandbSink:
    name = "telemetry.wandb"
    fix = 'Run `wandb login`, or set telemetry.wandb.mode = "offline".'

    def __init__(self, context: SinkContext) -> None:
        self._config, self._job, self._folder = context.config.wandb, dict(context.job), context.folder
        self._memory = SinkMemory(context.folder)
        self._rates = Rates()
        self._run: WandbRun | None = None
        self._exit_code = 0

    def open(self) -> None:
        # W&B's reports about itself come from threads that it starts again in every process forked from this one.
        with default_setting("WANDB_ERROR_REPORTING", "false"):
            self._open()

    def _open(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackageError(self.name, "wandb") from error
        run_id = self._memory.get("wandb") or secrets.token_hex(4)
        self._memory.put("wandb", run_id)
        # Output stays with the agent, which writes it to files; W&B would replace the worker's stdout.
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        run = self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity or None,
            id=run_id,
            resume="allow",
            reinit="finish_previous",
            name=self._folder.name,
            dir=str(self._folder),
            mode=self._config.mode or None,
            config=self._job,
            settings=settings,
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def handle(self, events: Sequence[Event]) -> None:
        assert self._run is not None
        for step, values in tracked(events, self._rates, self._config.every).items():
            row: dict[str, Any] = {**values, "step": step}
            self._run.log(row)
        if any(isinstance(one, RunEnded) and one.reason == "failed" for one in events):
            self._exit_code = 1

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


@SINKS.register("wandb")
def _make(context: SinkContext) -> WandbSink:
    return WandbSink(context)
