"""Records and evidence of ranks, written down briefly."""

from __future__ import annotations

from closeranks.agent.detection.hang import ProcessSample
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.detection.standstill.collective_record import Collective, CollectiveState, GroupLabel
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence

WAITING, DONE, ISSUED = CollectiveState.WAITING, CollectiveState.DONE, CollectiveState.ISSUED
WORLD = "0"


def call(
    sequence: int,
    op: str = "all_reduce",
    shape: tuple[int, ...] = (8,),
    *,
    state: CollectiveState = DONE,
    group: str = WORLD,
    place: str = "train.py:10 in loss",
    dtype: str = "float32",
    peer: int | None = None,
) -> Collective:
    is_p2p = peer is not None
    return Collective(
        sequence, op, group, 0 if is_p2p else sequence, state, shape, dtype, place, peer, 5.0 if state != DONE else 9.0
    )


def rank(
    number: int,
    *calls: Collective,
    phase: WorkerPhase = WorkerPhase.COMPUTE,
    state: str = "S",
    load: float = 0.0,
    place: str = "",
    reading: str = "",
    size: int = 4,
    groups: tuple[GroupLabel, ...] = (),
) -> RankEvidence:
    sequence = max((one.sequence for one in calls if one.group == WORLD), default=0)
    world = GroupLabel(WORLD, "data", tuple(range(size)), sequence)
    own = tuple(label for label in groups)
    return RankEvidence(
        number, 12, phase, 5.0, ProcessSample(state, "lock", load), place, reading, (), tuple(calls), (world, *own)
    )


def by_rank(*ranks: RankEvidence) -> dict[int, RankEvidence]:
    return {one.rank: one for one in ranks}
