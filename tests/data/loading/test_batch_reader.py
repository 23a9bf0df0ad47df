from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError, SetupError
from closeranks.core.protocols import Batch
from closeranks.data.config import ChecksConfig
from closeranks.data.loading.batch_reader import BatchReader, LoadedBatch, ReadPlan, WorkerSlice, map_tensors
from closeranks.data.loading.quarantine import BadSample
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.loading.sample_checks import SampleChecks
from closeranks.data.loading.sample_reader import SampleReader, name_samples, read_samples
from closeranks.data.sampling.order import BatchSchedule, FullOrder, Ints, SequentialOrder
from closeranks.data.source import as_loader_source
from closeranks.data.sources.user import MapSource
from tests.data.doubles import ChangedSource, CountingSource, FailingSource, StoredSource

SKIP = ReadSettings(on_bad="skip")


def reader(source: CountingSource, step: int = 0, **options: Any) -> BatchReader:
    size = len(source)
    plan = ReadPlan(source, FullOrder(size, 5), BatchSchedule.for_epochs(size, 8, 2, epochs=1), **options)
    return BatchReader(plan, step)


def in_order(source: CountingSource | MapSource, micro: int = 4, **options: Any) -> list[LoadedBatch]:
    """One epoch in the order of the data, one micro-batch a step."""
    schedule = BatchSchedule.for_epochs(len(source), micro, micro, epochs=1)
    plan = ReadPlan(source, SequentialOrder(len(source)), schedule, **options)
    one = BatchReader(plan, 0)
    return [loaded for step in range(schedule.num_steps) for loaded in one.read(step)]


@pytest.mark.parametrize("data_size", [1, 2, 3, 5, 8])
def test_ranks_together_read_what_one_reads(data_size: int) -> None:
    single = reader(CountingSource(20))
    alone = [one for step in range(3) for one in single.read(step)]
    ranks = [reader(CountingSource(20), data_rank=rank, data_size=data_size) for rank in range(data_size)]
    shared = [one for step in range(3) for rank in ranks for one in rank.read(step)]
    assert [one.micro_batch for one in shared] == [one.micro_batch for one in alone]
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one.batch["x"], other.batch["x"])
    ids = torch.cat([one.batch["id"] for one in alone])
    assert sorted(ids.tolist()) == list(range(20))


@given(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)
)
def test_shares_together_are_the_rank_in_order(
    num_samples: int, batch: int, micro: int, ranks: int, count: int, start: int
) -> None:
    schedule = BatchSchedule.for_epochs(num_samples, batch, micro, epochs=2)
    plan = ReadPlan(CountingSource(num_samples), FullOrder(num_samples, 3), schedule, ranks - 1, ranks)
    whole = list(plan.micro_batches_from(start, WorkerSlice()))
    shares = [iter(plan.micro_batches_from(start, WorkerSlice(number, count))) for number in range(count)]
    assert [next(shares[number % count]) for number in range(len(whole))] == whole
    assert [next(share, None) for share in shares] == [None] * count
    assert whole == [one for step in range(start, schedule.num_steps) for one in plan.assigned(step)]


def test_a_rank_reads_only_its_own_samples() -> None:
    source = CountingSource(20)
    reader(source, data_rank=1, data_size=2).read(0)
    expected = [m.indices(20, 5).tolist() for m in BatchSchedule.for_epochs(20, 8, 2, epochs=1).assigned(0, 1, 2)]
    assert source.read_indices == expected


def test_a_reader_that_starts_later_reads_the_same() -> None:
    early = reader(CountingSource(20))
    steps = [early.read(step) for step in range(3)]
    late = reader(CountingSource(20), step=2).read(2)
    assert [one.batch["id"].tolist() for one in late] == [one.batch["id"].tolist() for one in steps[2]]


def test_a_rank_without_a_micro_batch_reads_nothing() -> None:
    source = CountingSource(20)
    assert reader(source, step=2, data_rank=7, data_size=8).read(2) == []
    assert source.read_indices == []


def test_an_error_names_data_samples_and_line() -> None:
    with pytest.raises(DataError) as caught:
        reader(FailingSource(8, bad=3, error=ValueError("torn file"))).read(0)
    assert "of failing raised ValueError: torn file" in caught.value.what
    assert "doubles.py:" in caught.value.what
    assert "3" in caught.value.what.split(" of ")[0]
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("settings", [ReadSettings(), SKIP])
def test_our_own_errors_pass_unchanged_and_are_never_skipped(settings: ReadSettings) -> None:
    error = SetupError("the disk is gone")
    with pytest.raises(SetupError) as caught:
        reader(FailingSource(8, bad=3, error=error), settings=settings).read(0)
    assert caught.value is error
    with pytest.raises(DataError, match="raised OSError: gone"):
        reader(FailingSource(8, bad=3, error=OSError("gone")), settings=settings).read(0)


@pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.tensor(1.0)])
def test_a_batch_with_other_rows_is_refused(value: torch.Tensor) -> None:
    with pytest.raises(DataError, match="for 2 samples"):
        reader(ChangedSource(2, x=value)).read(0)


def test_a_batch_must_be_a_dict_of_tensors() -> None:
    class Bare(CountingSource):
        def read(self, indices: Any) -> Any:
            return torch.zeros(len(indices))

    with pytest.raises(DataError, match="returned Tensor, not a dict of tensors"):
        reader(Bare(2)).read(0)


# Bad samples


def test_a_bad_record_stops_the_run_and_is_named_with_place_and_reason() -> None:
    with pytest.raises(DataError) as caught:
        in_order(StoredSource(20, damaged=(13, 14)))
    assert str(caught.value) == (
        "sample 13 of stored is bad: 'shard-1', byte 13: the checksum does not match. "
        "Fix or remove it, or set data.on_bad = 'skip' to train without such samples."
    )
    assert not isinstance(caught.value, BadRecordError)


def test_a_sample_that_names_itself_is_named_once() -> None:
    class Torn:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return 1 // (index - 3)

    with pytest.raises(DataError) as caught:
        in_order(MapSource(Torn(), "torn"))
    assert str(caught.value).startswith("sample 3 of torn is bad: it raised ZeroDivisionError")
    assert str(caught.value).count("sample 3 of torn") == 1
    assert "Fix the dataset, or remove the sample from it, or set data.on_bad" in str(caught.value)


@pytest.mark.parametrize("known", [{}, {2: BadSample(2, "", "known")}])
def test_what_a_store_says_to_do_is_told(known: dict[int, BadSample]) -> None:
    error = BadRecordError("sample 3 is torn", "Copy the shard again.")
    with pytest.raises(DataError) as caught:
        SampleReader(as_loader_source(FailingSource(9, 3, error)), ReadSettings(), known).read(np.arange(5), ())
    assert caught.value.fix == ("Copy the shard again, or set data.on_bad = 'skip' to train without such samples.")


def test_nan_stops_the_run_too() -> None:
    with pytest.raises(DataError) as caught:
        in_order(StoredSource(20, nan=(6,)))
    assert "sample 6 of stored is bad: 'x' holds NaN or infinity ('shard-0', byte 6)." in str(caught.value)
    assert "data.check_finite = false" in caught.value.fix
    let_in = in_order(StoredSource(20, nan=(6,)), settings=ReadSettings(checks=SampleChecks(finite=False)))
    assert sum(one.micro_batch.num_samples for one in let_in) == 20


def test_skipped_samples_are_not_in_their_batch_and_are_told() -> None:
    source = StoredSource(12, damaged=(1, 2), nan=(6,))
    first, second, third = in_order(source, settings=SKIP)
    assert first.batch["id"].tolist() == [0, 3]
    assert (first.micro_batch.num_skipped, first.micro_batch.num_samples) == (2, 2)
    damage = "'shard-0', byte {}: the checksum does not match"
    assert first.skipped == tuple(BadSample(n, f"'shard-0', byte {n}", damage.format(n)) for n in (1, 2))
    assert second.batch["id"].tolist() == [4, 5, 7]
    assert second.skipped == (BadSample(6, "'shard-0', byte 6", "'x' holds NaN or infinity"),)
    assert third.batch["id"].tolist() == [8, 9, 10, 11]
    assert (third.skipped, third.micro_batch.num_skipped, third.micro_batch.is_padding) == ((), 0, False)
    assert not any(one.micro_batch.is_padding for one in (first, second, third))


def test_samples_are_read_one_by_one_only_where_a_record_is_bad() -> None:
    source = StoredSource(12, damaged=(1,), nan=(6,))
    in_order(source, settings=SKIP)
    assert source.read_indices == [
        *([0, 1, 2, 3], [0], [1], [2], [3], [0, 2, 3]),
        *([4, 5, 6, 7], [4, 5, 7]),
        [8, 9, 10, 11],
    ]


def test_known_samples_are_not_read_again() -> None:
    source = StoredSource(12, damaged=(1,))
    known = {1: BadSample(1, "there", "torn"), 5: BadSample(5, "there", "blank")}
    loaded = in_order(source, settings=SKIP, known=known)
    assert [one.skipped for one in loaded] == [(known[1],), (known[5],), ()]
    assert source.read_indices == [[0, 2, 3], [4, 6, 7], [8, 9, 10, 11]]
    assert [one.micro_batch.num_samples for one in loaded] == [3, 3, 4]


def test_a_micro_batch_without_a_good_sample_becomes_a_spare_of_those_that_follow() -> None:
    source = StoredSource(12, damaged=(0, 1, 2, 3, 4), nan=(5,))
    first, second, third = in_order(source, settings=SKIP)
    assert first.micro_batch.is_padding
    assert (first.micro_batch.num_samples, first.micro_batch.num_skipped) == (0, 4)
    assert [bad.sample for bad in first.skipped] == [0, 1, 2, 3]
    assert first.batch["id"].tolist() == [6, 7]
    assert [bad.sample for bad in second.skipped] == [4, 5]
    assert second.batch["id"].tolist() == [6, 7]
    assert not second.micro_batch.is_padding
    assert third.batch["id"].tolist() == [8, 9, 10, 11]


def test_data_that_is_bad_from_end_to_end_stops_the_run() -> None:
    with pytest.raises(
        DataError, match=r"nothing usable in samples 0, 1 of stored, nor in the many after them.*checksum"
    ):
        in_order(StoredSource(8, damaged=tuple(range(8))), micro=2, settings=SKIP)


def test_records_that_are_bad_only_together_stop_the_run() -> None:
    class Ragged(StoredSource):
        def read(self, indices: Ints) -> Batch:
            if len(indices) > 1:
                raise BadRecordError("'x' has other shapes in samples 0 and 1")
            return super().read(indices)

    for settings in (ReadSettings(), SKIP):
        with pytest.raises(BadRecordError, match="other shapes"):
            in_order(Ragged(8), settings=settings)


def test_a_schema_finds_the_odd_one_among_records_that_do_not_stack() -> None:
    class Ragged(StoredSource):
        def read(self, indices: Ints) -> Batch:
            if 2 in indices and len(indices) > 1:
                raise BadRecordError("'x' has other shapes in samples 0 and 2")
            batch = super().read(indices)
            return {**batch, "x": batch["x"][:, :1]} if 2 in indices else batch

    checks = SampleChecks.of(ChecksConfig(fields={"x": "float32[2]"}), finite=True)
    first, _ = in_order(Ragged(8), settings=ReadSettings(checks=checks, on_bad="skip"))
    assert first.batch["id"].tolist() == [0, 1, 3]
    assert first.skipped[0].reason == "'x' is float32[1], not float32[2]"


@given(st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)), st.integers(1, 7), st.booleans())
def test_whatever_is_bad_every_good_sample_comes_exactly_once(
    damaged: set[int], nan: set[int], micro: int, is_known: bool
) -> None:
    bad = damaged | nan
    if len(bad) == 30:
        return
    known = {number: BadSample(number, "", "known") for number in damaged} if is_known else {}
    loaded = in_order(StoredSource(30, tuple(damaged), tuple(nan)), micro, settings=SKIP, known=known)
    counted = [int(n) for one in loaded if not one.micro_batch.is_padding for n in one.batch["id"]]
    assert counted == [n for n in range(30) if n not in bad]
    assert sorted(n.sample for one in loaded for n in one.skipped) == sorted(bad)
    for one in loaded:
        assert one.micro_batch.num_samples == (0 if one.micro_batch.is_padding else len(one.batch["id"]))


def test_reading_outside_of_any_order() -> None:
    source = StoredSource(12, damaged=(1, 8, 9, 10, 11))
    rows = read_samples(source, np.arange(4), SKIP)
    assert (rows.batch["id"].tolist(), rows.num_rows) == ([0, 2, 3], 3)
    assert [bad.sample for bad in rows.skipped] == [1]
    rows = read_samples(source, np.arange(8, 12), SKIP)
    assert (rows.batch["id"].tolist(), rows.num_rows, len(rows.skipped)) == ([0, 2, 3], 0, 4)
    with pytest.raises(DataError, match="sample 1 of stored is bad"):
        read_samples(source, np.arange(4), ReadSettings())
    rows = read_samples(CountingSource(4), np.arange(4), ReadSettings())
    assert (rows.num_rows, rows.skipped) == (4, ())


# What the source hears ahead


@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.integers(1, 3))
def test_a_source_hears_of_every_sample_before_it_is_read(
    num_samples: int, micro: int, per_step: int, max_wanted: int, ranks: int
) -> None:
    class Listening(StoredSource):
        def read(self, indices: Ints) -> Batch:
            if max_wanted:
                told = self.wanted[-1]
                at = told.index(int(indices[0]))
                assert told[at : at + len(indices)] == indices.tolist()
                assert len(told) <= max_wanted * micro
            return super().read(indices)

    source = Listening(num_samples)
    schedule = BatchSchedule.for_epochs(num_samples, micro * per_step, micro, epochs=1)
    settings = ReadSettings(max_wanted=max_wanted)
    plan = ReadPlan(source, FullOrder(num_samples, 1), schedule, 0, ranks, settings)
    one = BatchReader(plan, 0)
    for step in range(schedule.num_steps):
        one.read(step)
    num_read = len(source.read_indices)
    assert len(source.wanted) <= 2 * num_read / max(max_wanted, 1) + 2


def test_settings_come_from_the_job() -> None:
    from closeranks.data.config import TextConfig

    config = TextConfig(prefetch=3, workers=2, on_bad="skip", check_finite=False)
    assert ReadSettings.of(config) == ReadSettings(3, 2, SampleChecks(finite=False), "skip")


def test_map_tensors_reaches_into_containers() -> None:
    one = torch.ones(2)
    mapped = map_tensors({"a": one, "b": [one, (one, "text")], "c": 3}, lambda tensor: tensor + 1)
    assert torch.equal(mapped["a"], one + 1)
    assert torch.equal(mapped["b"][1][0], one + 1)
    assert (mapped["b"][1][1], mapped["c"]) == ("text", 3)
    assert isinstance(mapped["b"][1], tuple)


def test_naming_samples() -> None:
    assert name_samples(np.array([4])) == "sample 4"
    assert name_samples(np.arange(3)) == "samples 0, 1, 2"
    assert name_samples(np.arange(20), limit=2) == "samples 0, 1 and 18 more"
