"""The list of bad samples that a run skips, and the limit on their number.

A sample is in quarantine from the step that would have trained on it: a bad sample in a prefetched step does not count
yet, so that a resumed run has the same list. Invariants: a sample is listed once, however many ranks found it;
``state`` returns plain values in the order of the samples, the same on every rank that added the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.core.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class BadSample:
    """A sample that cannot be used."""

    sample: int
    """Its number in the data."""
    place: str
    """Its location, for people; empty if the data does not say."""
    reason: str

    @property
    def message(self) -> str:
        """Reason and location; the location, or a file name in it, is not repeated if the reason already contains
        it."""
        if self.place in self.reason:
            return self.reason
        rest = re.sub(r"('[^']+')(?:, )?", lambda file: "" if file[1] in self.reason else file[0], self.place)
        return f"{self.reason} ({rest})" if rest else self.reason

    def to_json(self) -> dict[str, Any]:
        return {"sample": self.sample, "place": self.place, "reason": self.reason}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> BadSample:
        return cls(int(fields["sample"]), str(fields["place"]), str(fields["reason"]))


def merge(found: Iterable[BadSample]) -> tuple[BadSample, ...]:
    """What several ranks found, each sample once and in order; of two reasons the alphabetically first is kept, so that
    all ranks keep the same one."""
    kept: dict[int, BadSample] = {}
    for bad in sorted(found):
        kept.setdefault(bad.sample, bad)
    return tuple(kept.values())


class Quarantine:
    """The samples a run leaves out."""

    def __init__(self, max_bad: int, found: Iterable[BadSample] = ()) -> None:
        self.max_bad = max_bad
        self._found: dict[int, BadSample] = {}
        self.add(found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, sample: int) -> bool:
        return sample in self._found

    @property
    def samples(self) -> tuple[BadSample, ...]:
        """In the order of their numbers."""
        return tuple(sorted(self._found.values()))

    def by_sample(self) -> dict[int, BadSample]:
        """A snapshot, by sample number; a reader skips these without reading them."""
        return dict(self._found)

    def add(self, found: Iterable[BadSample]) -> tuple[BadSample, ...]:
        """Returns the samples that are new. A sample that was known keeps its first reason."""
        fresh = tuple(bad for bad in merge(found) if bad.sample not in self._found)
        self._found.update({bad.sample: bad for bad in fresh})
        return fresh

    @property
    def exceeds_limit(self) -> bool:
        return len(self._found) > self.max_bad

    def check(self, step: int | None = None) -> None:
        """``DataError`` once more samples were skipped than the job allows."""
        if self.exceeds_limit:
            shown = "; ".join(f"sample {bad.sample}: {bad.message}" for bad in self.samples[:3])
            more = f"; and {len(self) - 3} more" if len(self) > 3 else ""
            what = f"{len(self)} bad samples were skipped, more than data.max_bad = {self.max_bad} ({shown}{more})"
            raise DataError(what, "Fix the data, or raise data.max_bad to let the run skip more of it.", step=step)

    def state(self) -> list[dict[str, Any]]:
        return [bad.to_json() for bad in self.samples]

    def load(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the list by that of a saved run."""
        self._found = {}
        self.add(BadSample.from_json(row) for row in rows)
