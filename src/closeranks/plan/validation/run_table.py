"""Which runs does a table of published measurements hold?

A CSV file with one run per row: model, layout, cluster, and the time of a step or a throughput. Invariant: a blank cell
is "not published", never zero; a row with a cell that cannot be read is kept aside with the reason, so that the number
of rows used and not used adds up to the number of rows.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path

from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text

_MOST_BYTES = 64 << 20
_FIX = "The columns are those of benchmarks/plan_runs.csv (docs/plan-validate.md)."
_WANTED = ("source", "gpu", "gpu_count", "seq_len", "global_batch")
_TIMES = ("step_time_s", "tokens_per_s_per_gpu", "step_time_derived_s")


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row, in the columns' names; None where the cell is blank."""

    source: str
    gpu: str
    gpu_count: int
    number: int
    """Line of the file, from 2: the header is the first."""
    table_or_figure: str = ""
    model: str = ""
    precision: str = ""
    recompute: str = ""
    note: str = ""
    flag: str = ""
    tflops_kind: str = ""
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    interleave_v: int | None = None
    zero_stage: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu_pct: float | None = None
    memory_gib_per_gpu: float | None = None
    step_time_derived_s: float | None = None

    @property
    def measured_s(self) -> float | None:
        """Seconds of a step: as published, else from tokens per second, else derived from a published TFLOP/s."""
        if self.step_time_s:
            return self.step_time_s
        if self.tokens_per_s_per_gpu and self.seq_len and self.global_batch:
            return self.global_batch * self.seq_len / self.gpu_count / self.tokens_per_s_per_gpu
        return self.step_time_derived_s or None

    @property
    def has_published_time(self) -> bool:
        """Whether the step time needs no convention of FLOPs."""
        return bool(self.step_time_s or self.tokens_per_s_per_gpu)


@dataclass(frozen=True, slots=True)
class UnusableRun:
    """A row that cannot be predicted, and why, in words that rows of one kind share."""

    number: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunTable:
    runs: tuple[PublishedRun, ...]
    unusable: tuple[UnusableRun, ...]


def load_runs(path: Path) -> RunTable:
    """``UserError`` for a file that is not such a table at all."""
    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"the runs {path} cannot be read: {error.strerror or error}", _FIX) from error
    except ValueError as error:
        raise UserError(f"the runs {path} cannot be used: {error}", _FIX) from error
    return parse_runs(text, str(path))


def parse_runs(text: str, name: str) -> RunTable:
    try:
        lines = list(csv.reader(StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise UserError(f"the runs {name} are not a CSV table: {error}", _FIX) from error
    if not lines or not any(cell.strip() for cell in lines[0]):
        raise UserError(f"the runs {name} have no header of columns", _FIX)
    header = [cell.strip() for cell in lines[0]]
    _check_header(header, name)
    runs: list[PublishedRun] = []
    unusable: list[UnusableRun] = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        row = {key: cell.strip() for key, cell in zip(header, cells, strict=False)}
        found = _read_row(row, number, is_whole=len(cells) == len(header))
        if isinstance(found, PublishedRun):
            runs.append(found)
        else:
            unusable.append(found)
    return RunTable(tuple(runs), tuple(unusable))


def _check_header(header: Sequence[str], name: str) -> None:
    if missing := [column for column in _WANTED if column not in header]:
        raise UserError(f"the runs {name} have no column {', '.join(missing)}", _FIX)
    if not any(column in header for column in _TIMES):
        raise UserError(f"the runs {name} have no measured time: none of the columns {', '.join(_TIMES)}", _FIX)


_KINDS = {field.name: str(field.type).removesuffix(" | None") for field in fields(PublishedRun)}


def _read_row(row: Mapping[str, str], number: int, *, is_whole: bool) -> PublishedRun | UnusableRun:
    source = row.get("source", "")

    def unusable(reason: str) -> UnusableRun:
        return UnusableRun(number, source, reason)

    if not is_whole:
        return unusable("the row has more or fewer cells than the header")
    values: dict[str, str | int | float] = {}
    for key, kind in _KINDS.items():
        text = row.get(key, "")
        if not text or key == "number":
            continue
        if kind == "str":
            values[key] = text
            continue
        value = _number(text)
        if value is None or (kind == "int" and value != int(value)):
            return unusable(f"{key} is not a {'whole ' if kind == 'int' else ''}number")
        if value < 0 or (value == 0 and key not in ("zero_stage", "interleave_v")):
            return unusable(f"{key} is not positive")
        values[key] = int(value) if kind == "int" else value
    for key in ("source", "gpu", "gpu_count"):
        if key not in values:
            return unusable(f"{key} is blank")
    return PublishedRun(number=number, **values)  # type: ignore[arg-type]  # each value was read as its field's type


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
