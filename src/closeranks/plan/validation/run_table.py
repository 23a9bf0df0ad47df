"""Which runs does a table of published measurements hold?

A CSV file with one run per row: model, layout, cluster, and a step time or a rate. Invariant: a blank cell
is "not published", never zero; a row with a cell that cannot be read is kept aside with the reason, so that the number
of rows used and not used adds up to the number of rows.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from io import StringIO
from pathlib import Path

from closeranks.core.errors import UserError
from closeranks.core.system.regular_file import read_text
from closeranks.plan.validation.run_cells import BLANK, read_number, read_word

_MOST_BYTES = 64 << 20
_FIX = "The columns are those of benchmarks/plan_runs.csv (docs/plan-validate.md)."
_WANTED = ("source", "gpu", "gpu_count", "seq_len", "global_batch")
_TIMES = ("step_time_s", "tokens_per_s_per_gpu", "step_time_derived_s", "tflops_per_gpu", "mfu_pct")
_CONTRADICTION = 1.25


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
    def is_contradictory(self) -> bool:
        """Whether a step time and tokens per second are published that cannot both be right."""
        if (
            not self.step_time_s
            or (other := replace(self, step_time_s=None, step_time_derived_s=None).measured_s) is None
        ):
            return False
        return not 1 / _CONTRADICTION < self.step_time_s / other < _CONTRADICTION


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
    unread: tuple[str, ...] = ()
    """Columns that are not known."""


def load_runs(path: Path) -> RunTable:
    """``UserError`` for a file that is not such a table at all."""
    try:
        text = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"the runs {path} cannot be read: {error.strerror or error}", _FIX) from error
    except ValueError as error:
        raise UserError(f"the runs {path} are no text in UTF-8", "Save the table as CSV in UTF-8.") from error
    return parse_runs(text, str(path))


def parse_runs(text: str, name: str) -> RunTable:
    try:
        lines = list(csv.reader(StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise UserError(f"the runs {name} are not a CSV table: {error}", _FIX) from error
    if not lines or not any(cell.strip() for cell in lines[0]):
        raise UserError(f"the runs {name} have no header of columns", _FIX)
    header = [re.sub(r"[\s-]+", "_", cell.strip().lower()) for cell in lines[0]]
    _check_header(header, name)
    rows = [(number, cells) for number, cells in enumerate(lines[1:], start=2) if any(cell.strip() for cell in cells)]
    if not rows:
        raise UserError(f"the runs {name} have a header and no rows", "Write one run per row.")
    found = [_read_row(header, cells, number) for number, cells in rows]
    return RunTable(
        tuple(one for one in found if isinstance(one, PublishedRun)),
        tuple(one for one in found if isinstance(one, UnusableRun)),
        tuple(sorted({column for column in header if column and column not in _KINDS})),
    )


def _check_header(header: Sequence[str], name: str) -> None:
    if len(header) == 1 and (other := re.search(r"[;\t|]", header[0])):
        raise UserError(f"the cells of the runs {name} are separated by {other.group()!r}", "Separate them by commas.")
    if missing := [column for column in _WANTED if column not in header]:
        others = ", ".join(column[:40] for column in header[:50] if column and column not in _KINDS)
        what = f"the runs {name} have no column {', '.join(missing)}"
        raise UserError(f"{what}; not known: {others}" if others else what, _FIX)
    if twice := [column for column in _KINDS if header.count(column) > 1]:
        raise UserError(f"the runs {name} have the column {twice[0]} twice", "Keep one of them.")
    if not any(column in header for column in _TIMES):
        raise UserError(f"the runs {name} have no measured time: none of the columns {', '.join(_TIMES)}", _FIX)


_KINDS = {
    field.name: str(field.type).removesuffix(" | None") for field in fields(PublishedRun) if field.name != "number"
}


def _read_row(header: Sequence[str], cells: Sequence[str], number: int) -> PublishedRun | UnusableRun:
    row = {key: cell.strip() for key, cell in zip(header, cells, strict=False)}
    row = {key: text for key, text in row.items() if key in _KINDS and text.lower() not in BLANK}
    source = row.get("source", "")
    if len(cells) != len(header):
        return UnusableRun(number, source, "the row has more or fewer cells than the header")
    values: dict[str, str | int | float] = {}
    for key, text in row.items():
        found = _read_cell(key, text)
        if isinstance(found, _Unreadable):
            return UnusableRun(number, source, found.reason)
        values[key] = found
    for key in ("source", "gpu", "gpu_count"):
        if key not in values:
            return UnusableRun(number, source, f"{key} is blank")
    run = PublishedRun(number=number, **values)  # type: ignore[arg-type]  # each value was read as its field's type
    return (
        UnusableRun(number, source, "its step time and its tokens per second differ") if run.is_contradictory else run
    )


@dataclass(frozen=True, slots=True)
class _Unreadable:
    reason: str


def _read_cell(key: str, text: str) -> str | int | float | _Unreadable:
    kind = _KINDS[key]
    if kind == "str":
        word = read_word(key, text)
        return _Unreadable(f"its {key} '{text[:40]}' is not known") if word is None else word
    value = read_number(key, text)
    if isinstance(value, str):
        return _Unreadable(value.replace("a number", "a whole number") if kind == "int" else value)
    if kind == "int" and value != int(value):
        return _Unreadable(f"{key} is not a whole number")
    if value < 0 or (value == 0 and key not in ("zero_stage", "interleave_v")):
        return _Unreadable(f"{key} is not positive")
    return int(value) if kind == "int" else value
