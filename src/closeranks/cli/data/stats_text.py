"""Collects the statistics of the data sets that the user named, and formats them as text.

Invariant: a figure that was not measured is not printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from closeranks.cli.data.stored_data import StoredData, open_config, open_path
from closeranks.core.errors import UserError
from closeranks.data.stats.dataset_stats import DatasetStats, record_stats, token_stats


@dataclass(frozen=True, slots=True)
class StatsOptions:
    seq_len: int
    limit: int
    is_fast: bool
    format: str


@dataclass(frozen=True, slots=True)
class NamedStats:
    name: str
    stats: DatasetStats
    text_bytes: int
    """Size of the documents' text before tokenization; 0 if it was not recorded."""

    @property
    def noun(self) -> str:
        return "documents" if self.stats.kind == "tokens" else "records"

    @property
    def unit(self) -> str:
        return "tokens" if self.stats.kind == "tokens" else "bytes"

    def headline(self) -> str:
        lengths = self.stats.lengths
        what = f"{lengths.count:,} {self.noun}"
        return f"{what}, {self.stats.num_tokens:,} tokens" if self.stats.kind == "tokens" else what

    def rows(self) -> Iterator[tuple[str, str]]:
        lengths, repeats, packed = self.stats.lengths, self.stats.repeats, self.stats.packed
        if lengths.count:
            yield (
                self.unit,
                f"min {lengths.shortest:,}, median {lengths.quantile(0.5):,.0f}, mean {lengths.mean:,.1f}, "
                f"p95 {lengths.quantile(0.95):,.0f}, max {lengths.longest:,}",
            )
        if repeats is not None and repeats.num_kept:
            sample = f" (of a sample of {repeats.num_kept:,})" if repeats.is_sample else ""
            named = f"; such as {', '.join(map(str, repeats.first_copies))}" if repeats.first_copies else ""
            yield (
                "duplicates",
                f"{repeats.num_repeated:,} equal an earlier one, {repeats.share:.2%}{sample}"
                + (f", the most frequent {repeats.most:,} times{named}" if repeats.num_repeated else ""),
            )
        if self.stats.num_used:
            of = f" of {self.stats.vocab_size:,} ({self.stats.num_used / self.stats.vocab_size:.1%})"
            yield "vocabulary", f"{self.stats.num_used:,}{of if self.stats.vocab_size else ''} ids occur"
        if self.text_bytes and self.stats.num_tokens:
            yield "text", f"{self.text_bytes:,} bytes, {self.text_bytes / self.stats.num_tokens:.2f} per token"
        if packed is not None:
            yield (
                "samples",
                f"of {packed.seq_len:,} tokens: {packed.num_windows:,} from the stream, {packed.num_rows:,} rows of "
                f"whole documents, {packed.efficiency:.1%} full",
            )
        if self.stats.num_bad:
            yield "damaged", f"{self.stats.num_bad:,} records could not be read: see `closeranks data verify`"

    def as_dict(self) -> dict[str, Any]:
        from dataclasses import asdict

        lengths, repeats = self.stats.lengths, self.stats.repeats
        return {
            "name": self.name,
            "kind": self.stats.kind,
            f"num_{self.noun}": lengths.count,
            "num_tokens": self.stats.num_tokens,
            "num_bad": self.stats.num_bad,
            "vocab_size": self.stats.vocab_size,
            "num_used": self.stats.num_used,
            "text_bytes": self.text_bytes,
            "lengths": {
                "unit": self.unit,
                "min": lengths.shortest,
                "median": lengths.quantile(0.5),
                "mean": lengths.mean,
                "p95": lengths.quantile(0.95),
                "max": lengths.longest,
                "bars": [asdict(bar) for bar in lengths.bars()],
            },
            "duplicates": None if repeats is None else {**asdict(repeats), "share": repeats.share},
            "packed": None if self.stats.packed is None else asdict(self.stats.packed),
        }


def collect_stats(
    words: Sequence[str], options: StatsOptions, on_progress: Callable[[int, int], None]
) -> list[NamedStats]:
    return [_collect(stored, options, on_progress) for stored in _open_all(words, options)]


def _open_all(words: Sequence[str], options: StatsOptions) -> Iterator[StoredData]:
    from closeranks.cli.data.job_data import parse_arguments

    arguments = parse_arguments(words, Path.cwd())
    if arguments.is_job:
        from closeranks.run.job.job import load_job
        from closeranks.run.job.paths import resolve_paths

        path = Path(arguments.place)
        yield from open_config(resolve_paths(load_job(path, arguments.overrides).value, path).data)
        return
    if arguments.overrides:
        what = f"'{arguments.overrides[0]}' changes a value of a job, but '{arguments.place}' is not a job"
        raise UserError(what, "Values can be changed only in a job file (.toml).")
    yield open_path(arguments.place, options.format)


def _collect(stored: StoredData, options: StatsOptions, on_progress: Callable[[int, int], None]) -> NamedStats:
    if stored.tokens is not None:
        stats = token_stats(
            stored.tokens,
            limit=options.limit,
            seq_len=options.seq_len or stored.seq_len,
            on_progress=on_progress,
            reads_all=not options.is_fast,
        )
    else:
        assert stored.records is not None
        stats = record_stats(stored.records, limit=options.limit, on_progress=on_progress)
    return NamedStats(stored.name, stats, stored.text_bytes)
