"""The section of a report about what holds a run back."""

from __future__ import annotations

from closeranks.core.events import RankLost
from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.diagnosis_text import findings_markdown
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import facts


def _section(made: RunFacts) -> str:
    return findings_markdown(made, diagnose(made))


def test_each_finding_is_one_line() -> None:
    text = _section(facts({"save": 0.1}, settings={"checkpoint": {"every": 1}}))
    assert text.splitlines()[0] == "## What holds it back"
    assert text.splitlines()[2] == (
        "- **Saving checkpoints takes 50% of the time.** 100 ms of a step of 200 ms; 0 were saved. Save less often: "
        "faults are survived from memory, checkpoints are for the loss of all hosts. session.save() waits until the "
        "checkpoint is durable; the saves of checkpoint.every do not. Change: `checkpoint.every=25`. "
        "Expected: 1.92 times as fast, a step of 104 ms."
    )


def test_a_healthy_run_has_no_section_and_faults_have_one_of_their_own() -> None:
    assert _section(facts()) == ""
    assert _section(facts(events=[RankLost(kind="hang", cause="rank 1 hung")])) == ""
