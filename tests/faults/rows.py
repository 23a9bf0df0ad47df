"""One fault of the table that ``make drills`` writes."""

from __future__ import annotations

from dataclasses import dataclass

AGENT = "SIGKILL of the agent"
HEADINGS = ("fault", "layout", "detected in", "back in", "steps redone", "state equal")


@dataclass(frozen=True)
class Row:
    fault: str
    layout: str
    detected_s: float | None
    back_s: float | None
    num_redone: int | None
    problem: str = ""
    """Empty: survived, and as equal as ``equal`` says."""
    equal: str = "yes"

    @property
    def cells(self) -> tuple[str, ...]:
        redone = "-" if self.num_redone is None else str(self.num_redone)
        equal = self.equal if not self.problem else f"**no**: {self.problem}"
        if self.fault == AGENT and not self.problem:
            equal = "the run ends; nothing outlives it"
        return self.fault, self.layout, _time(self.detected_s), _time(self.back_s), redone, equal


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
