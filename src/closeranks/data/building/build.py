"""Runs a build, from the user's request to the finished data set.

Call sequence: inspect the inputs (nothing is written), decide what to do with the output folder, build the parts that
are not done, write the manifest, remove temporary files. Invariant: the manifest is written last, atomically: a folder
without ``dataset.json`` is an unfinished build, and is never read by mistake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from closeranks.core.errors import DataError, Interrupted
from closeranks.core.system.failpoints import failpoint
from closeranks.data.building.build_spec import BuildSettings, BuildSpec, PartCounts, PartDone, SkippedRecord
from closeranks.data.building.inspect_inputs import make_build_spec
from closeranks.data.building.journal import DESCRIBED, PARTS_DONE, BuildJournal, decide
from closeranks.data.building.output_folder import output_folder_state, read_output_manifest, remove_old_build
from closeranks.data.building.part_plan import part_ranges
from closeranks.data.building.temporary_folder import temporary_folder
from closeranks.data.building.tokenizer import BYTES, encoder_spec, open_encoder
from closeranks.data.building.worker_pool import build_parts
from closeranks.data.shards.commit import commit
from closeranks.data.shards.manifest import DatasetInfo, DatasetManifest


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What the user asked for."""

    inputs: tuple[str, ...]
    out: Path
    tokenizer: str = BYTES
    kind: str = "tokens"
    field: str = ""
    eos: str = "auto"
    split: str = "file"
    shard_bytes: int = 256_000_000
    num_processes: int = 0
    format: str = ""
    on_bad: str = "stop"
    is_overwriting: bool = False


@dataclass(frozen=True, slots=True)
class BuildSummary:
    kind: str
    num_documents: int
    """Or the number of records."""
    num_tokens: int
    num_shards: int
    num_bytes: int
    """Total size of the shards."""
    text_bytes: int
    num_skipped: int
    skipped: tuple[str, ...]
    """The first skipped records: where, and why."""
    num_parts: int = 0
    num_resumed: int = 0
    """Parts that an earlier run had finished."""
    is_old: bool = False
    """The data set was complete already."""
    read_bytes: int = 0
    """Bytes of the inputs read in this run."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BuildReporter:
    """Receives progress reports."""

    on_total: Callable[[int, int], None] = lambda total, done: None
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    on_remark: Callable[[str], None] = lambda text: None


def build_shards(request: BuildRequest, reporter: BuildReporter | None = None) -> BuildSummary:
    """Raises before anything is written if the request cannot be fulfilled."""
    reporter, started_at = reporter or BuildReporter(), time.monotonic()
    with temporary_folder() as indexes:
        spec = _inspect(request, indexes, reporter)
        if decide(output_folder_state(spec), str(request.out), request.is_overwriting) == "done":
            BuildJournal(request.out).clear(plan_too=False)  # for a kill between writing the manifest and this
            return replace(_summary(read_output_manifest(request.out)), is_old=True)
        summary, read_bytes = _build(spec, request, reporter)
    return replace(summary, seconds=time.monotonic() - started_at, read_bytes=read_bytes)


def _inspect(request: BuildRequest, indexes: Path, reporter: BuildReporter) -> BuildSpec:
    try:
        return make_build_spec(request.inputs, settings_of(request), request.out, str(indexes), reporter.on_remark)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before anything was built", "Run the same command again.") from None


def settings_of(request: BuildRequest) -> BuildSettings:
    is_tokens = request.kind == "tokens"
    return BuildSettings(
        kind=request.kind,
        field=request.field,
        split=request.split,
        format=request.format,
        shard_bytes=request.shard_bytes,
        on_bad=request.on_bad,
        encoder=encoder_spec(request.tokenizer, request.eos) if is_tokens else None,
    )


def _build(spec: BuildSpec, request: BuildRequest, reporter: BuildReporter) -> tuple[BuildSummary, int]:
    journal = BuildJournal(spec.out)
    with journal.lock():
        # Checked again: another process may have worked here before this one held the lock.
        if decide(output_folder_state(spec), str(request.out), request.is_overwriting) == "fresh":
            remove_old_build(spec.out)
            journal.clear(plan_too=True)
            journal.begin(spec)
        saved = {part.index: journal.finished_part(part.index) for part in spec.parts}
        done = {index: part for index, part in saved.items() if part is not None}
        num_resumed, read_bytes = len(done), _build_parts(spec, journal, done, request, reporter)
        failpoint(PARTS_DONE)
        if problem := _nothing(spec, done):
            remove_old_build(spec.out)
            journal.clear(plan_too=True)
            raise DataError(problem, "Name inputs that hold documents.")
        manifest = commit(spec.out, _shards(done), _dataset_info(spec, done))
        failpoint(DESCRIBED)
        journal.clear(plan_too=False)
    return replace(_summary(manifest), num_parts=len(done), num_resumed=num_resumed), read_bytes


def _build_parts(
    spec: BuildSpec,
    journal: BuildJournal,
    done: dict[int, PartDone],
    request: BuildRequest,
    reporter: BuildReporter,
) -> int:
    """Adds the parts built to ``done``; returns the number of bytes read."""
    todo = [part.index for part in spec.parts if part.index not in done]
    total, rest = spec.input_bytes, sum(_input_bytes(spec, index) for index in todo)
    reporter.on_total(total, total - rest)
    if done:
        reporter.on_remark(f"resuming: {len(done):,} of {len(spec.parts):,} parts are done")

    def on_part(part: PartDone) -> None:
        journal.record_part(part)
        done[part.index] = part

    try:
        build_parts(spec, todo, request.num_processes or num_cores(), reporter.on_bytes, on_part)
    except KeyboardInterrupt:
        what = f"interrupted: {len(done):,} of {len(spec.parts):,} parts are built"
        raise Interrupted(what, "Run the same command again to continue.") from None
    return rest


def _nothing(spec: BuildSpec, done: dict[int, PartDone]) -> str:
    """Why there is nothing to train on, though every part was built; empty if there is something."""
    counts = sum((done[index].tally for index in sorted(done)), PartCounts())
    if _shards(done) and (spec.settings.kind != "tokens" or counts.text_bytes):
        return ""
    given = ", ".join(f"'{text}'" for text in spec.given_paths[:3]) + (", ..." if len(spec.given_paths) > 3 else "")
    if counts.num_skipped:
        first = str(SkippedRecord(*counts.skipped[0])) if counts.skipped else ""
        return f"nothing of {given} could be used: {counts.num_skipped:,} records were left out, such as {first}"
    return f"{given} holds nothing to build from: no text and no records"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _input_bytes(spec: BuildSpec, index: int) -> int:
    """Bytes of the inputs that a part reads."""
    total = 0
    for span in part_ranges(spec.parts[index], spec.extents):
        size, units = spec.inputs[span.input].num_bytes, spec.extents[span.input].num_units
        total += size * span.last // units - size * span.first // units
    return total


def _shards(done: dict[int, PartDone]) -> list[str]:
    return [name for index in sorted(done) for name in done[index].shards]


def _dataset_info(spec: BuildSpec, done: dict[int, PartDone]) -> DatasetInfo:
    settings = spec.settings
    counts = sum((done[index].tally for index in sorted(done)), PartCounts())
    provenance = {
        "inputs": [PurePosixPath(text.rstrip("/")).name or text for text in spec.given_paths],
        "num_input_files": len(spec.inputs),
        "input_bytes": spec.input_bytes,
        "settings": settings.as_options(),
        "text_bytes": counts.text_bytes,
        "num_skipped": counts.num_skipped,
        "skipped": [str(SkippedRecord(*one)) for one in counts.skipped],
    }
    if settings.encoder is None:
        return DatasetInfo(provenance=provenance)
    encoder = open_encoder(settings.encoder)
    name = PurePosixPath(settings.encoder.tokenizer).name
    return DatasetInfo(encoder.vocab_size, name, settings.encoder.digest, provenance)


def _summary(manifest: DatasetManifest) -> BuildSummary:
    provenance = manifest.about.provenance
    is_tokens = manifest.head.kind == "tokens"
    return BuildSummary(
        kind=manifest.head.kind,
        num_documents=manifest.num_items,
        num_tokens=manifest.num_units if is_tokens else 0,
        num_shards=len(manifest.shards),
        num_bytes=manifest.num_bytes,
        text_bytes=int(provenance.get("text_bytes", 0)),
        num_skipped=int(provenance.get("num_skipped", 0)),
        skipped=tuple(provenance.get("skipped", ())),
    )
