"""How does a benchmark say what it found? As spreads, and one closing line of JSON that machines read.

Invariant: the last line a benchmark prints is one JSON object with ``name``, ``figures``, ``goal`` and ``met``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from closeranks.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements in short: the middle, and the quartiles that half of them lie between."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        seen = list(values)
        low, _, high = quantiles(seen, n=4, method="inclusive") if len(seen) > 1 else seen * 3
        return cls(median(seen), low, high, len(seen))

    def fields(self, digits: int) -> dict[str, Any]:
        rounded = {key: round(getattr(self, key), digits) for key in ("median", "low", "high")}
        return {**rounded, "num": self.num}

    def words(self, digits: int) -> str:
        """``0.991 (0.987 to 0.995)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def say(text: str) -> None:
    """A line for people, at once: a benchmark that is truncated has told what it had."""
    print(text, flush=True)


def conclude(name: str, figures: Mapping[str, Any], goal: str, met: bool) -> None:
    say(json.dumps({"name": name, "figures": figures, "goal": goal, "met": met}))


def begin(main: Callable[[], None]) -> None:
    """As the command line does: what the user can mend is one sentence and exit 2."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
