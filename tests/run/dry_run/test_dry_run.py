"""A dry run holds and sends what a real rank does, and the closed form agrees with it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from closeranks.cli.layout_list import with_layout
from closeranks.core.errors import DataError, ModelError, UserError
from closeranks.plan.layouts import layout_cost
from closeranks.run.dry_run.dry_run import DryRun, dry_run
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import Job, layout_for, load_job
from closeranks.testing import run_world
from tests.cli.commands import TINY
from tests.plan.measured import Counts, step_counts, step_peak

SMALL = ["model.num_layers=4", "data.seq_len=128", "train.global_batch=48"]
DEEP = ["model.num_layers=8", "train.global_batch=48"]
LARGE = ["model.preset=160m", "data.seq_len=1024", "train.micro_batch=4", "train.global_batch=8192"]
OWN = Path(__file__).parents[3] / "examples" / "own_model" / "job.toml"


def job_of(path: Path | str, layout: str, num_ranks: int, changes: list[str]) -> Job:
    return with_layout(load_job(Path(path), changes).value, layout, num_ranks)


def dry(layout: str, num_ranks: int, changes: list[str], path: Path | str = TINY) -> DryRun:
    return dry_run(job_of(path, layout, num_ranks, changes), num_ranks, report=lambda line: None)


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("num_ranks", "layout", "changes"),
    [
        (8, "data=8", SMALL),
        (8, "zero=3 tensor=2", SMALL),
        (8, "pipeline=2 tensor=2", SMALL),
        slow(8, "zero=1", DEEP),
        slow(8, "zero=2", DEEP),
        slow(8, "zero=3 shard=4", DEEP),
        slow(8, "zero=3 tensor=2", [*DEEP, "train.recompute=full"]),
        slow(8, "tensor=2", [*DEEP, "train.recompute=selective", "train.precision=bf16"]),
        slow(8, "pipeline=4", [*DEEP, "model.tied=true"]),
        slow(8, "pipeline=4 schedule=zbv zero=1", [*DEEP, "model.tied=true"]),
        slow(8, "pipeline=2 schedule=interleaved-1f1b tensor=2", DEEP),
        slow(8, "pipeline=2 schedule=gpipe zero=3", DEEP),
        slow(1024, "data=1024", LARGE),
        slow(1024, "zero=1 data=256 pipeline=4", LARGE),
        slow(1024, "zero=2 tensor=4", LARGE),
        slow(1024, "zero=3 tensor=4", LARGE),
        slow(1024, "zero=3 shard=8 tensor=2", [*LARGE, "train.precision=bf16"]),
        slow(1024, "zero=1 tensor=4 pipeline=2", LARGE),
    ],
)
def test_the_closed_form_is_what_a_rank_holds_and_sends(num_ranks: int, layout: str, changes: list[str]) -> None:
    found = dry(layout, num_ranks, changes)
    weights, optimizer, _, peak = found.memory
    assert (weights.difference, optimizer.difference) == (0, 0)
    # In a model of a few MiB a single bucket is a fifth of all.
    assert peak.closed == pytest.approx(peak.dry, rel=0.05 if peak.dry > 100 << 20 else 0.1)
    assert found.traffic
    for row in found.traffic:
        assert (row.calls.difference, row.sent_bytes.difference) == (0, 0), row


def test_another_layout_holds_and_sends_something_else() -> None:
    """The control of the test above: its comparisons can fail."""
    found = dry("zero=1", 8, SMALL)
    job = job_of(TINY, "zero=3", 8, SMALL)
    other = layout_cost(describe_job(job), layout_for(job, 8)).ranks[0]
    assert found.memory[0].dry != other.state.parameters
    assert {(row.operation, row.calls.dry) for row in found.traffic} != {
        (volume.operation, volume.calls) for volume in other.volumes
    }


REAL = ["model.num_layers=2", "train.global_batch=12", "train.micro_batch=3"]


_TIMES_SENT = {"all-reduce": 1, "all-gather": 2, "reduce-scatter": 2, "send": 1}
"""How often two ranks send a payload in a ring, halved: a rank sends half of what is gathered or scattered."""


def counts(found: DryRun, votes: Counts) -> Counts:
    """On two ranks, with the vote, which a dry run leaves out."""
    calls, sizes = Counter[str](), Counter[str]()
    for row in found.traffic:
        calls[row.operation] += row.calls.dry
        sizes[row.operation] += row.sent_bytes.dry * _TIMES_SENT[row.operation]
    for operation, (number, size) in votes.items():
        calls[operation] += number
        sizes[operation] += size
    return {name: (calls[name], sizes[name]) for name in calls}


@pytest.mark.world
@pytest.mark.parametrize("layout", ["zero=3", *(slow(one) for one in ("zero=2", "tensor=2", "pipeline=2"))])
def test_a_real_rank_holds_and_sends_what_the_dry_run_said(tmp_path: Path, layout: str) -> None:
    overrides = [*REAL, *(f"layout.{pair}" for pair in layout.split())]
    peaks = run_world(step_peak, 2, TINY, overrides, str(tmp_path / "peak"), timeout_s=380)
    sent = run_world(step_counts, 2, TINY, overrides, str(tmp_path / "sent"), timeout_s=380)
    job = job_of(TINY, layout, 2, REAL)
    volumes = layout_cost(describe_job(job), layout_for(job, 2)).ranks[0].volumes
    votes = {row.operation: (row.calls, row.payload_bytes) for row in volumes if row.what == "the vote"}
    for rank in range(2):
        found = dry_run(job, 2, rank=rank, num_micro=4, report=lambda line: None)
        assert found.peak.dry == pytest.approx(peaks[rank], rel=0.03)
        assert counts(found, votes) == sent[rank]


def test_an_own_module_is_dry_run_with_a_sample_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN.parent))
    found = dry("zero=3", 4, [], OWN)
    assert all((row.calls.difference, row.sent_bytes.difference) == (0, 0) for row in found.traffic)
    assert "does not know this model's activations" in found.notes[-1]


def test_what_is_not_run_is_said() -> None:
    found = dry("data=2", 2, [*SMALL, "train.compile=true", "optim.ema=0.99", "sync.compress.name=int8"])
    assert [note.split(".")[0] for note in found.notes] == [
        "Blocks were not compiled: compiled ones keep less",
        "The moving average of the weights was left out",
        "Gradients were summed in every step, uncompressed",
        "2 of 8 micro-batches were run, and the closed form is of so many",
    ]


def test_the_process_stays_as_it_was() -> None:
    hook, stream = sys.excepthook, torch.get_rng_state()
    dry("zero=1", 4, SMALL)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.equal(torch.get_rng_state(), stream)


class Peeks(torch.nn.Module):
    """Its forward depends on values, which a dry run does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(x if x.sum() > 0 else -x)


def test_a_model_that_reads_values_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN.parent))
    changes = [f"model.name={__name__}:Peeks", "~model.args"]
    with pytest.raises(
        ModelError, match=r"cannot run without data: its code depends on the values of a tensor \(.*:\d+\)"
    ):
        dry("data=2", 2, changes, OWN)


def test_data_that_is_missing_and_ranks_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OWN.parent))
    with pytest.raises(DataError, match="a dry run needs a sample"):
        dry("data=2", 2, ["data.args.num_samples=0"], OWN)
    with pytest.raises(UserError, match="no rank 8 among 8"):
        dry_run(job_of(TINY, "data=8", 8, SMALL), 8, rank=8)
