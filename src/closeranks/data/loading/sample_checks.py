"""Finds the bad rows of a batch, and the reason for each.

Checks run on whole tensors at once; rows are checked one by one only if a tensor fails, and for a user's own hooks.
Invariants: the result for a row does not depend on the other rows, except that all rows of a tensor share its dtype and
shape; an error inside a check stops the run, it never counts as a bad sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from closeranks.core.errors import DataError, UserError
from closeranks.core.protocols import Batch
from closeranks.core.registry import did_you_mean, load_object
from closeranks.core.tracebacks import describe_error
from closeranks.data.config import ChecksConfig

Reasons: TypeAlias = dict[int, str]
"""Row of the batch -> why it is bad."""
Hook: TypeAlias = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class FieldSchema:
    """What the schema says about one tensor: ``uint8[28,28]``; None stands for any size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = ",".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"

    def allows(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(wanted in (None, size) for wanted, size in zip(self.shape, shape, strict=True))
        )


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Minimum and maximum value, or minimum and maximum number of elements, of one tensor."""

    name: str
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class SampleChecks:
    """The checks that every sample must pass. Can be pickled; hooks are stored by name and loaded where they are
    called."""

    finite: bool = True
    ranges: tuple[ValueLimits, ...] = ()
    lengths: tuple[ValueLimits, ...] = ()
    fields: tuple[FieldSchema, ...] = ()
    hooks: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: ChecksConfig, *, finite: bool) -> SampleChecks:
        """``UserError`` if a rule cannot be parsed or a hook cannot be loaded."""
        checks = cls(
            finite,
            tuple(_limits(f"ranges.{name}", name, *pair) for name, pair in config.ranges.items()),
            tuple(_limits(f"lengths.{name}", name, *pair) for name, pair in config.lengths.items()),
            tuple(parse_field(name, text) for name, text in config.fields.items()),
            config.hooks,
        )
        for path in checks.hooks:
            _hook(path)
        return checks

    def find_bad_rows(self, batch: Batch, num_rows: int) -> Reasons:
        """The bad rows of a batch, with the first reason for each. Without any rule, the cost is one pass over each
        tensor."""
        self._refuse_unknown(batch)
        found: Reasons = {}
        for rule in self.fields:
            if reason := _misfit(rule, batch):
                _add(found, dict.fromkeys(range(num_rows), reason))
        for limits in self.lengths:
            _add(found, _wrong_lengths(limits, batch, num_rows))
        if self.finite:
            for name, value in batch.items():
                if isinstance(value, Tensor) and value.is_floating_point() and not _is_finite(value):
                    is_bad = ~torch.isfinite(_countable(value))
                    _add(found, _rows(is_bad, f"'{name}' holds NaN or infinity"))
        for limits in self.ranges:
            _add(found, _out_of_range(limits, batch, num_rows))
        for path in self.hooks:
            _add(found, {row: _ask(path, batch, row, num_rows) for row in range(num_rows) if row not in found})
        return found

    def _refuse_unknown(self, batch: Batch) -> None:
        """A rule for a field that no sample has is a mistake in the job, never a bad sample that could be skipped."""
        tables: dict[str, Sequence[FieldSchema | ValueLimits]] = {
            "fields": self.fields,
            "lengths": self.lengths,
            "ranges": self.ranges,
        }
        for table, rules in tables.items():
            for rule in rules:
                if batch.get(rule.name) is None:
                    what = f"data.checks.{table}.{rule.name}: there is no tensor '{rule.name}' in the batches"
                    raise DataError(what, did_you_mean(rule.name, batch))


def _add(found: Reasons, reasons: Mapping[int, str | None]) -> None:
    for row, reason in reasons.items():
        if reason:
            found.setdefault(row, reason)


def _limits(place: str, name: str, least: float, most: float) -> ValueLimits:
    if not least <= most:
        raise UserError(f"data.checks.{place} = [{least:g}, {most:g}] allows nothing", "Give the smaller one first.")
    return ValueLimits(name, least, most)


def parse_field(name: str, text: str) -> FieldSchema:
    """``float32[]`` is one number, ``uint8[28,28]`` a picture, ``int64[?]`` a list of any length."""
    place = f"data.checks.fields.{name} = '{text}'"
    parts = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,?]*)\]\s*", text)
    if parts is None:
        raise UserError(f"{place} is not a dtype and shape", "Write it as 'uint8[28,28]', with ? for any size.")
    if not isinstance(getattr(torch, parts[1], None), torch.dtype):
        known = [kind for kind in dir(torch) if isinstance(getattr(torch, kind), torch.dtype)]
        raise UserError(f"{place}: there is no dtype '{parts[1]}'", did_you_mean(parts[1], known))
    sizes = [size.strip() for size in parts[2].split(",")] if parts[2].strip() else []
    if not all(size == "?" or size.isdecimal() for size in sizes):
        raise UserError(f"{place} has a size that is neither a number nor ?", "Write it as 'uint8[28,28]'.")
    dtype = str(getattr(torch, parts[1])).removeprefix("torch.")  # torch has two names for some
    return FieldSchema(name, dtype, tuple(None if size == "?" else int(size) for size in sizes))


def _misfit(rule: FieldSchema, batch: Batch) -> str | None:
    value = batch[rule.name]
    if not isinstance(value, Tensor):
        return f"'{rule.name}' is not a tensor"
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])
    if rule.allows(dtype, shape):
        return None
    return f"'{rule.name}' is {dtype}[{','.join(map(str, shape))}], not {rule}"


def _wrong_lengths(limits: ValueLimits, batch: Batch, num_rows: int) -> Mapping[int, str | None]:
    value = batch[limits.name]
    if not isinstance(value, Tensor):
        return {row: _wrong_length(limits, len(value[row])) for row in range(num_rows)}
    reason = _wrong_length(limits, value.shape[1] if value.dim() > 1 else 1)
    return dict.fromkeys(range(num_rows), reason) if reason else {}


def _wrong_length(limits: ValueLimits, length: int) -> str | None:
    is_right = limits.least <= length <= limits.most
    return None if is_right else f"'{limits.name}' has length {length}, not {limits}"


def _out_of_range(limits: ValueLimits, batch: Batch, num_rows: int) -> Mapping[int, str | None]:
    """NaN compares neither below nor above a limit; it counts as out of range."""
    value = batch[limits.name]
    if not isinstance(value, Tensor):
        return dict.fromkeys(range(num_rows), f"'{limits.name}' is not a tensor")
    if not value.numel():
        return {}
    value = _countable(value)
    least, most = (bound.item() for bound in torch.aminmax(value))
    if limits.least <= least and most <= limits.most:
        return {}
    is_out = ~((value >= limits.least) & (value <= limits.most))
    rows = _rows(is_out, "")
    return {row: f"'{limits.name}' holds {_first(value[row], is_out[row]):g}, not {limits}" for row in rows}


def _first(row: Tensor, is_out: Tensor) -> float:
    return float(row[is_out].flatten()[0]) if row.dim() else float(row)


def _is_finite(value: Tensor) -> bool:
    """One pass: a sum over NaN or infinity is never finite. If the sum itself may have overflowed, elements are
    checked."""
    value = _countable(value)
    kind = torch.float64 if value.dtype == torch.float64 else torch.float32
    return math.isfinite(value.sum(dtype=kind).item()) or bool(torch.isfinite(value).all())


def _countable(value: Tensor) -> Tensor:
    """Torch stores wide unsigned integers and 8-bit floats, but neither adds nor compares them."""
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return value.long()
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _rows(is_bad: Tensor, reason: str) -> Reasons:
    rows = is_bad.flatten(1).any(dim=1) if is_bad.dim() > 1 else is_bad
    return dict.fromkeys(rows.nonzero().flatten().tolist(), reason)


def _ask(path: str, batch: Batch, row: int, num_rows: int) -> str | None:
    sample = {
        name: value[row] if isinstance(value, Tensor) or _is_by_row(value, num_rows) else value
        for name, value in batch.items()
    }
    try:
        answer = _hook(path)(sample)
    except Exception as error:
        what = f"the check '{path}' of data.checks.hooks raised {describe_error(error)}"
        raise DataError(what, "Fix it: a check returns why a sample is bad, or None.") from error
    if answer is None or isinstance(answer, str):
        return answer
    what = f"the check '{path}' of data.checks.hooks returned {answer!r}, neither a reason nor None"
    raise DataError(what, "Let it return a sentence for a bad sample and None for a good one.")


def _is_by_row(value: Any, num_rows: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == num_rows


@cache
def _hook(path: str) -> Hook:
    hook = load_object(path, place="data.checks.hooks")
    if not callable(hook):
        raise UserError(f"data.checks.hooks: '{path}' cannot be called", "Name a function.")
    return cast(Hook, hook)
