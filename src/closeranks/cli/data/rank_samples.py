"""Computes what each data rank reads at a step, and compares it for two numbers of workers.

Invariant: nothing is decided here: the schedule assigns positions to ranks, the order gives the samples at those
positions, and the source their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.cli.data.job_data import JobData
from closeranks.core.errors import ConfigError
from closeranks.data.sampling.order import MicroBatch
from closeranks.data.source import LoaderSource
from closeranks.run.job.job import check_workers, layout_for

_MAX_LOOKED_UP = 4096
"""Maximum samples of a rank whose files are looked up."""


@dataclass(frozen=True, slots=True)
class RankSamples:
    """What one data rank reads."""

    rank: int
    micro_batches: tuple[MicroBatch, ...]
    samples: tuple[int, ...]
    files: tuple[str, ...]
    """In the order of first use; empty if the source has none."""


def samples_per_rank(job_data: JobData, step: int, num_workers: int) -> list[RankSamples]:
    if problems := check_workers(job_data.job, num_workers):
        raise ConfigError(problems)
    size = layout_for(job_data.job, num_workers).data
    return [_rank_samples(job_data, step, rank, size) for rank in range(size)]


def _rank_samples(job_data: JobData, step: int, rank: int, size: int) -> RankSamples:
    taken = job_data.schedule.assigned(step, rank, size)
    samples = job_data.order.between(taken[0].first, taken[-1].last).tolist() if taken else []
    return RankSamples(rank, taken, tuple(samples), tuple(files_of(job_data.source, samples[:_MAX_LOOKED_UP])))


def files_of(source: LoaderSource, samples: Iterable[int]) -> list[str]:
    """The files of samples, which ``source.where`` names in quotes."""
    return list(dict.fromkeys(name for index in samples for name in re.findall(r"'([^']+)'", source.where(index))))


def compare_assignments(one: Sequence[RankSamples], other: Sequence[RankSamples]) -> str:
    """How two assignments differ, in a sentence."""
    ranks, others = _readers(one), _readers(other)
    if ranks.keys() != others.keys():
        gone = sorted(set(ranks) ^ set(others))
        return f"Positions {gone} are read by only one of them: that is a bug."
    moved = sum(ranks[position] != others[position] for position in ranks)
    return (
        f"{len(one)} and {len(other)} data ranks read the same {len(ranks)} positions with the same samples, each "
        f"exactly once; {moved} of them on another rank."
    )


def _readers(assignment: Sequence[RankSamples]) -> dict[tuple[int, int], int]:
    """(position, sample) -> the rank that reads it."""
    return {
        (position, sample): rank.rank
        for rank in assignment
        for position, sample in zip(
            (p for micro in rank.micro_batches for p in range(micro.first, micro.last)), rank.samples, strict=True
        )
    }
