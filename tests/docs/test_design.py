"""The picture of docs/design.md shows the code as it is."""

from __future__ import annotations

from pathlib import Path

from closeranks.run.components.component import Component
from tests.docs.design_picture import (
    COMPONENTS,
    EVALUATION,
    PHASES,
    STATE,
    described,
    draw,
    drawn_from,
    overrides,
    read_facts,
)
from tests.docs.pages import ROOT

PICTURE = ROOT / "docs" / "design.png"
COMMAND = ".venv/bin/python -m tests.docs.design_picture docs/design.png"


def test_it_was_drawn_from_this_code() -> None:
    assert drawn_from(PICTURE) == described(read_facts()), f"draw it again: {COMMAND}"
    assert COMMAND in (ROOT / "docs" / "design.md").read_text()
    assert PICTURE.stat().st_size < 400_000


def test_it_shows_every_component_and_phase() -> None:
    assert set(COMPONENTS) == {name for name in overrides() if not name.startswith("_")}
    assert {*PHASES, *EVALUATION, *STATE} <= set(vars(Component))
    assert {name for name in vars(Component) if name.startswith(("before_", "after_"))} <= {*PHASES, *EVALUATION}


def test_it_can_be_drawn_again(tmp_path: Path) -> None:
    draw(tmp_path / "design.png")
    assert drawn_from(tmp_path / "design.png") == drawn_from(PICTURE)
