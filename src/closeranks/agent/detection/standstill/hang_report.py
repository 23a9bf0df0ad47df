"""What a host reports about a hang: the ranks that hang, and what is known about each rank.

Invariant: ``decode_report`` returns what ``encode_report`` was given, or raises ``ProtocolError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.hang_reports import decode_hang, encode_hang
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence, decode_evidence, encode_evidence
from closeranks.agent.membership.field_codecs import ProtocolError


@dataclass(frozen=True, slots=True)
class HangReport:
    hang: Hang
    evidence: tuple[RankEvidence, ...] = ()
    is_stall: bool = False
    """Whether no deadline has passed yet: it is told, and ends nothing."""


def encode_report(report: HangReport, now: float) -> dict[str, Any]:
    evidence = [encode_evidence(one) for one in report.evidence]
    return {**encode_hang(report.hang, now), "is_stall": report.is_stall, "evidence": evidence}


def decode_report(fields: Mapping[str, Any], now: float) -> HangReport:
    """Decode a report, with times by the reader's clock."""
    try:
        evidence = tuple(map(decode_evidence, fields["evidence"]))
        return HangReport(decode_hang(fields, now), evidence, bool(fields["is_stall"]))
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"a host's hang report cannot be read: {error}") from None
