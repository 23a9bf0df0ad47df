"""What a fault prints is read back as the same fault; what cannot be read is answered in a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import UserError
from closeranks.elastic.faults.fault import KINDS, InjectedFault, check_faults
from closeranks.elastic.faults.fault_actions import FAULT_ACTIONS
from closeranks.elastic.faults.grammar import ParsedFaults, parse_faults


@st.composite
def faults(draw: st.DrawFn) -> InjectedFault:
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    ranks = draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=2, unique=True))
    values: dict[str, float] = {"rank": ranks[0], "other": ranks[1]}
    values["steps"] = draw(st.integers(1, 10**6))
    values["share"] = draw(st.floats(0.001, 1.0))
    taken = {name: value for name, value in values.items() if name in kind.takes}
    at = draw(st.sampled_from([0.0, 0.5]) | st.floats(0.0, 1.0, exclude_max=True, allow_subnormal=False))
    return InjectedFault(kind.name, draw(st.integers(1, 10**9)), at=abs(at), **taken)  # type: ignore[arg-type]


def test_every_kind_is_done_by_something_and_fits_the_help() -> None:
    assert FAULT_ACTIONS.keys() == KINDS.keys()
    assert [kind.name for kind in KINDS.values() if len(kind.meaning) > 65] == []


@given(faults())
def test_a_fault_prints_as_the_text_it_is_read_from(fault: InjectedFault) -> None:
    assert parse_faults(str(fault)) == ParsedFaults((fault,))


@given(st.lists(faults(), min_size=1, max_size=5), st.sampled_from([", ", ",", ";", " ", "  ,\n"]))
def test_many_faults_in_a_line_are_read_in_their_order(many: list[InjectedFault], gap: str) -> None:
    assert parse_faults(gap.join(map(str, many))).faults == tuple(many)


@given(st.text(alphabet="kil2(rank=1, step3);sow.-\n", max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    asked, refused = _read(text)
    assert (asked is None) == bool(refused)
    assert asked is None or all(parse_faults(str(fault)) == ParsedFaults((fault,)) for fault in asked.faults)


def _read(text: str) -> tuple[ParsedFaults | None, str]:
    try:
        return parse_faults(text), ""
    except UserError as error:
        return None, error.what if error.fix else ""


def test_the_spelling_that_the_docs_show() -> None:
    read = parse_faults("kill(rank=1,step=3)  slow( step=5 , rank=2, share=0.1 ) ").faults
    assert [str(fault) for fault in read] == ["kill(rank=1, step=3)", "slow(rank=2, step=5, share=0.1)"]
    assert str(InjectedFault("zygote", 4)) == "zygote(step=4)"
    assert str(InjectedFault("kill2", 4, 0, 3, at=0.5)) == "kill2(rank=0, other=3, step=4, at=0.5)"
    assert str(InjectedFault("diskfull", 2, steps=3)) == "diskfull(step=2, steps=3)"


def test_bare_words_ask_a_campaign() -> None:
    asked = parse_faults("kill,hang kill(rank=1, step=3) hang")
    assert asked.kinds == ("kill", "hang")
    assert asked.faults == (InjectedFault("kill", 3, 1),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no fault is named"),
        (" , ", "no fault is named"),
        ("kil(rank=1, step=3)", "Did you mean kill?"),
        ("kill(rank=1)", "step is missing"),
        ("kill(step=1)", "rank is missing"),
        ("kill(rank=1, step=3, steps=2)", "`steps=2` is not an argument of kill"),
        ("kill(rank=1, step=3, step=4)", "step is given twice"),
        ("kill(rank=-1, step=3)", "rank=-1 is not a whole number from 0 on"),
        ("kill(rank=1, step=0)", "step=0 is not a whole number from 1 on"),
        ("kill(rank=1, step=3, at=1.0)", "at=1.0 is not a share of a step"),
        ("slow(rank=1, step=3, share=7)", "share=7 is not a share of a processor"),
        ("slow(rank=1, step=3, share=nan)", "share=nan is not a share of a processor"),
        ("kill2(rank=1, other=1, step=3)", "the same worker"),
        ("kill(rank=1, step=3", "cannot be read as a fault"),
        ("kill(1, 3)", "`1` is not an argument of kill"),
        ("kill=3", "cannot be read as a fault"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_faults(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (InjectedFault("kill", 3, 4), "there is no rank 4"),
        (InjectedFault("kill2", 3, 0, 9), "there is no rank 9"),
        (InjectedFault("kill", 21, 1), "20 steps only"),
        (InjectedFault("diskfull", 18, steps=3), "still last after the last step"),
    ],
)
def test_a_fault_that_the_run_cannot_meet_is_refused(fault: InjectedFault, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_faults([fault], num_ranks=4, num_steps=20)


def test_faults_for_two_need_two() -> None:
    with pytest.raises(UserError, match="at least 2 workers"):
        check_faults([InjectedFault("exception", 1)], num_ranks=1)
    check_faults([InjectedFault("kill", 99)], num_ranks=1)
