"""A host's report about its workers when a generation has ended or is about to.

Times are sent as ages, since no two hosts share a clock. Invariant: ``from_fields`` returns what ``to_fields`` encoded,
with times by the reader's clock, or raises ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from closeranks.agent.detection.failure import FailureReport
from closeranks.agent.detection.root_cause import WorkerReport
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence, decode_evidence, encode_evidence
from closeranks.agent.membership.field_codecs import ProtocolError


@dataclass(frozen=True, slots=True)
class HostReport:
    workers: tuple[WorkerReport, ...] = ()
    num_oom_kills: int = 0
    zygote: str = ""
    """Why no more workers can be forked, in words; empty if they can."""
    evidence: tuple[RankEvidence, ...] = ()
    """Of each worker, where one has failed: ranks whose collectives do not match raise errors, abort, or hang."""

    def to_fields(self, now: float) -> dict[str, Any]:
        return {
            "workers": [_aged(worker, now) for worker in self.workers],
            "num_oom_kills": self.num_oom_kills,
            "zygote": self.zygote,
            "evidence": list(map(encode_evidence, self.evidence)),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], now: float) -> HostReport:
        try:
            return cls(
                workers=tuple(_dated(worker, now) for worker in fields["workers"]),
                num_oom_kills=int(fields["num_oom_kills"]),
                zygote=str(fields["zygote"]),
                evidence=tuple(map(decode_evidence, fields.get("evidence", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a host's exit report cannot be read: {error}") from None


def merge_reports(reports: Sequence[HostReport]) -> HostReport:
    """Merge the reports of all hosts."""
    workers = sorted((worker for one in reports for worker in one.workers), key=lambda worker: worker.rank)
    return HostReport(
        workers=tuple(workers),
        num_oom_kills=sum(one.num_oom_kills for one in reports),
        zygote=next((one.zygote for one in reports if one.zygote), ""),
        evidence=tuple(rank for one in reports for rank in one.evidence),
    )


def has_failed(report: HostReport) -> bool:
    """Whether any worker failed, rather than being killed with the others or being done."""
    return bool(report.zygote) or any(
        worker.failure is not None or worker.hang_kind or (worker.died_at is not None and not worker.is_finished)
        for worker in report.workers
    )


def _aged(worker: WorkerReport, now: float) -> dict[str, Any]:
    fields = asdict(worker)
    fields["died_at"] = None if worker.died_at is None else now - worker.died_at
    if worker.failure is not None:
        fields["failure"]["at"] = now - worker.failure.at
    return fields


def _dated(fields: Mapping[str, Any], now: float) -> WorkerReport:
    died_at, failure = fields["died_at"], fields["failure"]
    tuples = {key: tuple(fields[key]) for key in ("ended_for", "log_tail")}
    worker = WorkerReport(**{**fields, **tuples, "failure": None, "died_at": None})
    return replace(
        worker,
        died_at=None if died_at is None else now - float(died_at),
        failure=None if failure is None else FailureReport(**{**failure, "at": now - float(failure["at"])}),
    )
