"""Who waits for whom, in words, and who is to blame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.agent.detection.standstill import explanation
from closeranks.agent.detection.standstill.collective_record import GroupLabel
from closeranks.agent.detection.standstill.explanation import explain, explain_mismatch
from closeranks.agent.detection.standstill.rank_evidence import RankEvidence, decode_evidence, encode_evidence
from closeranks.agent.membership.field_codecs import ProtocolError
from tests.agent.detection.standstill.scenes import DONE, ISSUED, WAITING, by_rank, call, rank

HERE = call(7, state=WAITING)


def waiting(*numbers: int) -> list[RankEvidence]:
    return [rank(number, call(6), HERE, phase=WorkerPhase.REDUCE) for number in numbers]


@pytest.mark.parametrize(
    ("missing", "kind", "cause"),
    [
        (
            rank(1, call(6), phase=WorkerPhase.HOOK, place="hooks.py:5 in on_step"),
            "user_code",
            "is in a hook or in the loop's own code at hooks.py:5 in on_step",
        ),
        (
            rank(1, call(6), phase=WorkerPhase.DATA, reading="data.py:9 in __getitem__"),
            "loader",
            "waits for data: reading a sample at data.py:9 in __getitem__ does not return",
        ),
        (rank(1, call(6), state="T"), "stopped", "is stopped by a signal or a frozen cgroup"),
        (
            rank(1, call(6), state="D", phase=WorkerPhase.SAVE),
            "disk",
            "is stuck in the kernel while saving: a slow disk or network file system?",
        ),
        (
            rank(1, call(6), load=1.0, place="model.py:3 in forward"),
            "busy",
            "is busy at model.py:3 in forward (computing gradients)",
        ),
        (
            rank(1, call(6), place="model.py:3 in forward"),
            "asleep",
            "is asleep outside of any collective at model.py:3 in forward (computing gradients)",
        ),
    ],
    ids=["hook", "loader", "stopped", "disk", "busy", "asleep"],
)
def test_the_rank_that_waits_for_nobody_is_named_with_what_it_does(
    missing: RankEvidence, kind: str, cause: str
) -> None:
    found = explain(by_rank(*waiting(0, 2, 3), missing))
    assert found is not None
    assert (found.kind, found.culprit, found.cause) == (kind, 1, cause)
    where = "all_reduce float32[8] on the data axis at train.py:10 in loss"
    assert found.lines == (f"ranks 0, 2 and 3: waiting for rank 1 in {where}, for 5.0 s", f"rank 1: {cause}, for 5.0 s")
    assert found.headline == f"rank 1 {cause}"


def test_waiting_is_followed_from_group_to_group() -> None:
    """Rank 0 waits for rank 1 along one axis, which waits for rank 3 along another."""
    pairs = {name: GroupLabel(name, "tensor", ranks) for name, ranks in (("t0", (0, 1)), ("t1", (1, 3)))}
    first = rank(0, call(1, group="t0", state=WAITING), groups=(GroupLabel("t0", "tensor", (0, 1), 1),))
    second = rank(1, call(1, group="t1", state=WAITING), groups=(pairs["t0"], GroupLabel("t1", "tensor", (1, 3), 1)))
    last = rank(3, phase=WorkerPhase.HOOK, groups=(pairs["t1"],))
    found = explain(by_rank(first, second, last))
    assert found is not None
    assert found.culprit == 3


def test_a_receive_waits_for_its_sender() -> None:
    found = explain(
        by_rank(rank(0, call(1, "recv", state=WAITING, peer=1)), rank(1, phase=WorkerPhase.DATA, reading="d.py:1 in f"))
    )
    assert found is not None
    assert (found.culprit, found.kind) == (1, "loader")
    assert "waiting for rank 1 in recv float32[8] from rank 1" in found.lines[0]


def test_ranks_that_wait_for_each_other_call_in_different_orders() -> None:
    a, b = GroupLabel("a", "", (0, 1), 0), GroupLabel("b", "", (0, 1), 0)
    first = rank(0, call(1, group="a", state=WAITING), groups=(GroupLabel("a", "", (0, 1), 1), b))
    second = rank(1, call(1, group="b", state=WAITING), groups=(a, GroupLabel("b", "", (0, 1), 1)))
    found = explain(by_rank(first, second))
    assert found is not None
    assert (found.kind, found.culprit) == ("order", -1)
    assert "rank 0 waits for rank 1 in all_reduce float32[8] of ranks 0 and 1 at train.py:10 in loss" in found.cause
    assert "rank 1 waits for rank 0" in found.cause


def test_records_that_were_read_at_different_instants_are_no_cycle() -> None:
    found = explain(by_rank(rank(0, call(9, state=WAITING), size=2), rank(1, call(5, state=WAITING), size=2)))
    assert found is not None
    assert found.kind == "link"


def test_the_one_that_waits_in_a_group_of_its_own_took_another_branch() -> None:
    mine = GroupLabel("mine", "", (0, 1, 2, 3), 0)
    alone = rank(
        1,
        call(6),
        call(1, "barrier", (), group="mine", dtype="", state=WAITING),
        groups=(GroupLabel("mine", "", (0, 1, 2, 3), 1),),
    )
    others = [rank(number, call(6), HERE, groups=(mine,)) for number in (0, 2, 3)]
    found = explain(by_rank(alone, *others))
    assert found is not None
    assert (found.kind, found.culprit) == ("branch", 1)
    assert "it waits alone in barrier of ranks 0-3 at train.py:10 in loss" in found.cause


def test_a_collective_that_all_have_issued_points_to_a_link() -> None:
    found = explain(by_rank(*waiting(0, 1, 2, 3)))
    assert found is not None
    assert (found.kind, found.culprit) == ("link", -1)
    assert "a link between them is probably lost" in found.headline


def test_a_rank_whose_host_has_not_reported_is_said_to_be_missing() -> None:
    found = explain(by_rank(*waiting(0, 2, 3)))
    assert found is not None
    assert (found.kind, found.culprit) == ("unknown", -1)
    assert found.headline == "the others wait for rank 1, of which nothing is known yet"


def test_alone_the_suspect_is_told() -> None:
    found = explain(by_rank(rank(0, phase=WorkerPhase.DATA, reading="d.py:1 in f", size=1)), suspects=(0,))
    assert found is not None
    assert (found.kind, found.culprit) == ("loader", 0)
    assert explain({}) is None


def test_ranks_that_all_compute_have_nothing_to_explain() -> None:
    assert explain(by_rank(rank(0, call(6)), rank(1, call(6)))) is None


_CALLS = st.builds(
    call,
    st.integers(1, 4),
    st.sampled_from(["all_reduce", "all_gather", "barrier"]),
    st.sampled_from([(1,), (2, 3)]),
    state=st.sampled_from([WAITING, DONE, ISSUED]),
    group=st.sampled_from(["0", "other", ""]),
    peer=st.none() | st.integers(0, 5),
)
_RANKS = st.builds(
    lambda number, calls, phase, state, load: rank(number, *calls, phase=phase, state=state, load=load),
    st.integers(0, 3),
    st.lists(_CALLS, max_size=5),
    st.sampled_from(WorkerPhase),
    st.sampled_from(["S", "T", "D", "R", ""]),
    st.floats(0, 2),
)


@given(st.lists(_RANKS, max_size=4), st.sets(st.integers(0, 4)))
def test_whatever_ranks_do_one_of_them_or_nobody_is_blamed(ranks: list[RankEvidence], suspects: set[int]) -> None:
    evidence = by_rank(*ranks)
    found = explanation._explain(evidence, sorted(suspects), 1.0)
    assert found is None or found.culprit in (-1, *evidence)
    assert found is None or found.cause


def test_an_explanation_that_goes_wrong_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert explain({0: None}) is None  # type: ignore[dict-item]
    assert "could not be explained" in caplog.text


def test_a_mismatch_is_the_cause_whatever_ranks_do_by_now() -> None:
    odd = rank(1, call(6), call(7, shape=(9,), state=WAITING))
    found = explain(by_rank(*waiting(0, 2, 3), odd))
    assert found is not None
    assert (found.kind, found.culprit) == ("shape", 1)
    assert found.cause == (
        "sends another shape: it calls all_reduce float32[9] on the data axis at train.py:10 in loss, "
        "ranks 0, 2 and 3 call all_reduce float32[8] on the data axis at train.py:10 in loss"
    )


def test_ranks_that_failed_are_explained_by_their_records_alone() -> None:
    failed = by_rank(rank(0, call(7, shape=(9,), state=ISSUED), size=2), rank(1, HERE, size=2))
    found = explain_mismatch(failed)
    assert found is not None
    assert (found.kind, found.culprit) == ("shape", -1), "of two without a past, nobody is blamed"
    assert "different shapes" in found.cause
    assert explain_mismatch(by_rank(rank(0, HERE), rank(1))) is None, "one that never came is no mismatch"


def test_evidence_is_read_as_it_was_written() -> None:
    for one in (*waiting(0), rank(1, call(1, "recv", peer=1), state="T", reading="d.py:1 in f")):
        assert decode_evidence(encode_evidence(one)) == one
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode_evidence({"rank": 1})
