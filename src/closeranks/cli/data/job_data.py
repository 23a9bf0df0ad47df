"""Opens the data of the job that the user named: what its run reads, and in which order.

Imports torch through the sources. Invariant: source, order and schedule are those that ``train`` would use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from closeranks.core.config.overrides import UNSET_MARK
from closeranks.core.errors import UserError
from closeranks.data.config import MixtureConfig
from closeranks.data.sampling.job_order import order_of
from closeranks.data.sampling.mixture_order import MixtureOrder, WeightedInterleave
from closeranks.data.sampling.order import BatchSchedule, SampleOrder
from closeranks.data.source import LoaderSource, as_loader_source
from closeranks.data.sources.open import open_source
from closeranks.run.builder.context import batch_schedule
from closeranks.run.job.batch_history_lookup import find_batch_history
from closeranks.run.job.job import Job, load_job
from closeranks.run.job.launch import add_job_folder_to_path
from closeranks.run.job.paths import resolve_paths
from closeranks.run.job.run_folder import choose_folder

DEFAULT = "job.toml"


@dataclass(frozen=True, slots=True)
class MixtureDraw:
    """Which part of a mixture a position belongs to."""

    part: str
    sample: int
    """Its index in the part."""
    epoch: int
    """Of the part: each part counts epochs of its own."""


@dataclass(frozen=True, slots=True)
class JobData:
    """What a run reads."""

    name: str
    job: Job
    source: LoaderSource
    order: SampleOrder
    schedule: BatchSchedule


@dataclass(frozen=True, slots=True)
class DataArguments:
    """Arguments of the command line: a job or a data set, and values to change."""

    place: str
    overrides: tuple[str, ...]

    @property
    def is_job(self) -> bool:
        return self.place.endswith(".toml")


def parse_arguments(words: Sequence[str], folder: Path) -> DataArguments:
    """The job or data set comes first, if one is given; else it is the folder's ``job.toml``."""
    if words and not words[0].startswith(UNSET_MARK) and ("=" not in words[0] or Path(words[0]).exists()):
        return DataArguments(words[0], tuple(words[1:]))
    if not (folder / DEFAULT).is_file():
        what = f"no job was named, and there is no {DEFAULT} in this folder"
        raise UserError(what, "Name a job file, or the path of a data set where the command takes one.")
    return DataArguments(DEFAULT, tuple(words))


def open_job_data(arguments: DataArguments) -> JobData:
    path = Path(arguments.place)
    job = resolve_paths(load_job(path, arguments.overrides).value, path)
    add_job_folder_to_path(path)
    source = as_loader_source(open_source(job.data, "train", job.run.seed))
    order = order_of(job.data, source, job.run.seed)
    history = find_batch_history(job, choose_folder(job, path.stem))
    return JobData(
        arguments.place, job, source, order, batch_schedule(history.apply_to(job), len(source), history.ends)
    )


def draw_at(job_data: JobData, position: int) -> MixtureDraw | None:
    """None if the data is not a mixture."""
    config, order = job_data.job.data, job_data.order
    if not isinstance(config, MixtureConfig) or not isinstance(order, MixtureOrder):
        return None
    positions = np.array([position], dtype=np.int64)
    numbers, draws = WeightedInterleave.of(order.weights).at(positions)
    number, draw = int(numbers[0]), int(draws[0])
    offset = sum(part.num_samples for part in order.parts[:number])
    sample = int(order.at(positions)[0]) - offset
    return MixtureDraw(list(config.parts)[number], sample, draw // order.parts[number].num_samples)
