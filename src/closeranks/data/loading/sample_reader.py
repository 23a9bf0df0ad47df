"""Reads samples as one batch and leaves out the bad ones.

A batch is read as a whole; its samples are read one by one only if something in it is bad. A bad sample stops the run,
or is left out and named: losses are sums over rows, so a missing row has no weight. Invariants: every returned row has
passed every check; only errors of a sample itself (``BadRecordError``, a failed check) are ever skipped, and the values
of the other samples do not depend on the bad ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from closeranks.core.errors import BadRecordError, CloseranksError, DataError
from closeranks.core.protocols import Batch, DataSource
from closeranks.core.tracebacks import describe_error
from closeranks.data.dataset_protocol import Ints
from closeranks.data.loading.quarantine import BadSample
from closeranks.data.loading.read_settings import ReadSettings
from closeranks.data.source import LoaderSource, as_loader_source

MAX_STAND_INS = 64
"""Number of consecutive batches without a single good sample after which reading gives up."""


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """The result of reading the requested samples."""

    batch: Batch
    num_rows: int
    """Samples that count; 0 if all were bad and the batch holds stand-ins, which have no weight."""
    skipped: tuple[BadSample, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads batches from a source by the job's rules."""

    source: LoaderSource
    settings: ReadSettings
    known: Mapping[int, BadSample]
    """Samples in quarantine: skipped without reading them."""

    def read(self, ids: Ints, next_ids: Iterable[Ints]) -> CheckedBatch:
        """``next_ids``: batches of samples to try as stand-ins if every sample is bad."""
        if not self.known and self.settings.on_bad == "stop":
            return CheckedBatch(self._checked(ids), len(ids))
        batch, skipped = self._good(ids)
        if batch is not None:
            return CheckedBatch(batch, len(ids) - len(skipped), skipped)
        for others in next_ids:
            batch, _ = self._good(others)
            if batch is not None:
                return CheckedBatch(batch, 0, skipped)
        what = f"nothing usable in {name_samples(ids)} of {self.source.identity}, nor in the many after them"
        raise DataError(f"{what}; the first: {skipped[0].message}", "Fix the data: hardly any of it can be read.")

    def _checked(self, ids: Ints) -> Batch:
        """The batch of these samples, or a ``DataError`` for the first of them that is bad."""
        try:
            batch = read_batch(self.source, ids)
        except BadRecordError as error:
            found = self._one_by_one(ids, limit=1)
            if not found:  # no sample is bad by itself: the batch's own error says most
                raise
            raise self._stopped(found[0], error.fix) from error
        reasons = self.settings.checks.find_bad_rows(batch, len(ids))
        if reasons:
            raise self._stopped(self._bad(ids, reasons)[0])
        return batch

    def _good(self, ids: Ints) -> tuple[Batch | None, tuple[BadSample, ...]]:
        """The batch without its bad samples, and the bad samples. If there are any, the good ones are read again: only
        the source knows how a batch is composed, so no row is cut out of it here."""
        skipped = [self.known[int(sample)] for sample in ids if int(sample) in self.known] if self.known else []
        while len(left := _without(ids, skipped)):
            advice = ""
            try:
                batch = read_batch(self.source, left)
            except BadRecordError as error:
                found, advice = self._one_by_one(left), error.fix
                if not found:
                    raise
            else:
                found = self._bad(left, self.settings.checks.find_bad_rows(batch, len(left)))
                if not found:
                    return batch, tuple(skipped)
            if self.settings.on_bad == "stop":
                raise self._stopped(found[0], advice)
            skipped += found
        return None, tuple(skipped)

    def _one_by_one(self, ids: Ints, limit: int | None = None) -> list[BadSample]:
        """The samples that are bad when read alone, at most ``limit`` of them."""
        found: list[BadSample] = []
        for number in range(len(ids)):
            one = ids[number : number + 1]
            try:
                found += self._bad(one, self.settings.checks.find_bad_rows(read_batch(self.source, one), 1))
            except BadRecordError as error:
                found += self._bad(one, {0: error.what})
            if limit is not None and len(found) >= limit:
                break
        return found

    def _bad(self, ids: Ints, reasons: Mapping[int, str]) -> list[BadSample]:
        samples = [(int(ids[row]), reasons[row]) for row in sorted(reasons)]
        return [
            BadSample(sample, self.source.where(sample), self._unnamed(sample, reason)) for sample, reason in samples
        ]

    def _unnamed(self, sample: int, reason: str) -> str:
        """The reason without a leading name of the sample: the message that contains it already begins with the
        name."""
        named = f"sample {sample} of {self.source.identity} "
        return f"it {reason.removeprefix(named)}" if reason.startswith(named) else reason

    def _stopped(self, bad: BadSample, advice: str = "") -> DataError:
        """``advice``: the fix that the original error suggests."""
        otherwise = "set data.on_bad = 'skip' to train without such samples."
        fix = f"{advice.rstrip('.') or 'Fix or remove it'}, or {otherwise}"
        if "NaN or infinity" in bad.reason:
            fix += " data.check_finite = false allows NaN."
        return DataError(f"sample {bad.sample} of {self.source.identity} is bad: {bad.message}", fix)


def read_samples(source: DataSource, ids: Ints, settings: ReadSettings) -> CheckedBatch:
    """Reads these samples by the job's rules, outside of any order. If all are bad, ``num_rows`` is 0 and the batch
    holds the next good samples of the source, for callers whose forward pass is a collective."""
    whole = as_loader_source(source)
    size = len(whole)
    after = ((ids[-1] + 1 + number * len(ids) + np.arange(len(ids))) % size for number in range(MAX_STAND_INS))
    return SampleReader(whole, settings, {}).read(ids, after)


def read_batch(source: LoaderSource, ids: Ints) -> Batch:
    """The source's batch, with its shape checked; any failure is an error that names the data and the samples."""
    try:
        batch = source.read(ids)
    except CloseranksError:
        raise
    except Exception as error:
        what = f"reading {name_samples(ids)} of {source.identity} raised {describe_error(error)}"
        raise DataError(what, "Fix the dataset, or remove the sample from it.") from error
    check_shape(batch, ids, source.identity)
    return batch


def length_changed_error(before: int, now: int, identity: str) -> DataError:
    what = f"the length of {identity} has changed while the run was opened: {before} samples first, then {now}"
    fix = "Make __len__ return the same number every time; store data without a fixed length first."
    return DataError(what, fix)


def check_shape(batch: Any, ids: Ints, identity: str) -> None:
    """A batch is a dict of tensors with one row for each sample asked for."""
    if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
        what = f"read() of {identity} returned {type(batch).__name__}, not a dict of tensors"
        raise DataError(what, "Return named tensors whose first dim is the sample.")
    for key, value in batch.items():
        if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] != len(ids)):
            what = f"'{key}' of {identity} has shape {tuple(value.shape)} for {len(ids)} samples"
            raise DataError(what, "The first dim of every tensor in a batch is the sample.")


def name_samples(ids: Ints, limit: int = 8) -> str:
    """``sample 3``, or ``samples 3, 5 and 70 more``."""
    shown = ", ".join(str(int(sample)) for sample in ids[:limit])
    rest = f" and {len(ids) - limit} more" if len(ids) > limit else ""
    return f"sample{'s' if len(ids) > 1 else ''} {shown}{rest}"


def _without(ids: Ints, skipped: Sequence[BadSample]) -> Ints:
    if not skipped:
        return ids
    return ids[~np.isin(ids, [bad.sample for bad in skipped])]
