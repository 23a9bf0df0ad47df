"""The page of worked plans is what its commands print.

Words are compared exactly, figures within a tenth: a constant that is fitted anew moves the figures a little, and the
script (``--check`` compares to the last digit) then writes the page again.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher

import pytest
from plan_worked import HEAD, PAGE, PLANS, printed

QUICK = ("finetune-13b", "--compare")
COMMANDS = [
    pytest.param(command, marks=[] if any(part in command for part in QUICK) else [pytest.mark.slow])
    for plan in PLANS
    for command in plan.commands
]


def block_after(command: str) -> str:
    return PAGE.read_text().partition(f"\n{command}\n```\n\n```text\n")[2].partition("\n```")[0]


def test_the_page_has_every_plan_in_order() -> None:
    page = PAGE.read_text()
    assert page.startswith(HEAD)
    assert re.findall(r"(?m)^## (.+)$", page) == [plan.title for plan in PLANS]
    assert re.findall(r"(?m)^closeranks plan .+$", page) == [command for plan in PLANS for command in plan.commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_page_shows(command: str) -> None:
    shown, found = block_after(command), printed(command)
    assert shown
    assert likeness(shown, found) > 0.85
    assert steps_of(found)[:1] == pytest.approx(steps_of(shown)[:1], rel=0.1)


def likeness(one: str, other: str) -> float:
    """Of the words, numbers aside."""
    words = [re.sub(r"[\d.,]+", "#", text).split() for text in (one, other)]
    return SequenceMatcher(None, *words, autojunk=False).ratio()


def steps_of(text: str) -> list[float]:
    """Seconds of a step, of each row that has them."""
    rows = re.findall(r"(?m)^\s?[\d,]+[*=]*\s+.*?(\d[\d.]*) (ms|s|min)\s+\d+\.\d%", text)
    return [float(value) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[unit] for value, unit in rows]


def test_another_page_is_noticed() -> None:
    command = next(command for plan in PLANS for command in plan.commands if "8xh100" in command)
    shown = block_after(command)
    assert steps_of(shown)
    assert likeness(shown, shown) == 1.0
    assert likeness(shown, block_after(PLANS[1].commands[0])) < 0.85
