"""The layout of a run folder.

    RUN/job.toml                    the whole job, every default filled in
    RUN/config.json                 the same for machines
    RUN/status.json                 the current state of the run, or how it ended
    RUN/metrics/rank-00000.jsonl    events of each rank, one JSON line each
    RUN/metrics/rank-00000.index    sums of blocks of its steps, for who draws a long run
    RUN/metrics/agent.jsonl         what the agent saw: ranks lost and closed, slow ranks, hosts
    RUN/metrics/samples-00000.jsonl which samples each step took (data.log_samples)
    RUN/logs/rank-00000.log         what each worker printed
    RUN/checkpoints/step-00000400/  the state after that step; RUN/checkpoints/latest names the newest
    RUN/curve.png, RUN/report.md    what people look at; also report.html, phases.png,
                                    memory.png, goodput.png
    RUN/traces/rank-00000.json.gz   profiler traces of the steps that the job names
    RUN/traces/step-00000012/       those that `closeranks profile` asked for, and all of them in trace.json.gz
    RUN/tensorboard/                scalars for TensorBoard
    RUN/sinks.json                  the ids of this run in trackers, the port of its Prometheus endpoint
    RUN/wandb/                      what W&B keeps on disk

Invariant: names are defined here once; all code that reads or writes a run folder gets its paths from this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.core.system.regular_file import read_text


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plot(self) -> Path:
        return self.path / "curve.png"

    @property
    def phase_plot(self) -> Path:
        return self.path / "phases.png"

    @property
    def memory_plot(self) -> Path:
        return self.path / "memory.png"

    @property
    def goodput_plot(self) -> Path:
        return self.path / "goodput.png"

    @property
    def html(self) -> Path:
        return self.path / "report.html"

    @property
    def report(self) -> Path:
        return self.path / "report.md"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def sinks(self) -> Path:
        return self.path / "sinks.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def agent(self) -> Path:
        return self.path / "metrics" / "agent.jsonl"

    @property
    def is_run(self) -> bool:
        """Whether a run ever began here."""
        return any(path.exists() for path in (self.status, self.job, self.metrics(0)))

    @property
    def touched_at(self) -> float:
        """The wall-clock time of the last write to this run."""
        files = (self.status, self.metrics(0), self.agent, self.job)
        return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)

    def metrics(self, rank: int) -> Path:
        return self.path / "metrics" / f"rank-{rank:05d}.jsonl"

    def index(self, rank: int) -> Path:
        """The index of a rank's metrics, beside them."""
        return self.metrics(rank).with_suffix(".index")

    def samples(self, rank: int) -> Path:
        return self.path / "metrics" / f"samples-{rank:05d}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def worker_logs(self) -> list[Path]:
        """All logs, those of other hosts included."""
        return sorted(self.path.glob("logs/*.log"))

    def trace(self, rank: int) -> Path:
        return self.traces / f"rank-{rank:05d}.json.gz"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    def step_traces(self, first_step: int) -> Path:
        """The traces that were asked for while the run trained, by the first step in them."""
        return self.traces / f"step-{first_step:08d}"

    def other_metrics(self) -> list[Path]:
        """The metrics of every rank but 0, in the order of ranks."""
        return [path for path in sorted(self.path.glob("metrics/rank-*.jsonl")) if path != self.metrics(0)]

    def resolved(self) -> ResolvedSettings:
        """The resolved job; empty if the run failed before it was written, or while writing it."""
        try:
            values = json.loads(read_text(self.config, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            values = {}
        return ResolvedSettings(values if isinstance(values, dict) else {})


_MOST_BYTES = 16 << 20
"""No resolved job is larger."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """A resolved job as plain values, looked up by dotted key; None for a missing key."""

    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        found: Any = self.values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return None
            found = found[part]
        return found


def newest_run(under: Path) -> Path | None:
    """The run below a folder that was written to last; None if there is none."""
    runs = [RunFolder(path) for path in sorted(under.iterdir()) if path.is_dir()] if under.is_dir() else []
    found = [(run.touched_at, run.path) for run in runs if run.is_run]
    return max(found)[1] if found else None
