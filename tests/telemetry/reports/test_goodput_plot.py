"""The picture of goodput and cost: bars add up to the whole, and the cost ends with that of the account."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from closeranks.facts.prices import DevicePrice
from closeranks.telemetry.goodput.account_text import account_rows
from closeranks.telemetry.goodput.rank_record import record_of
from closeranks.telemetry.goodput.run_account import session_accounts
from closeranks.telemetry.goodput.run_cost import money
from closeranks.telemetry.goodput.spending import spending
from closeranks.telemetry.reports.goodput_plot import _figure, draw_goodput, unit_of
from closeranks.telemetry.run_log.recorder import EventRecorder
from tests.telemetry.conftest import CPU, step
from tests.telemetry.goodput.simulated import SimulatedRun
from tests.telemetry.goodput.test_run_account import write


def faulty() -> SimulatedRun:
    run = SimulatedRun(num_ranks=4)
    run.launch()
    run.steps(10)
    run.fault(back_to=8)
    run.steps(20)
    run.end()
    return run


PRICE = DevicePrice("H100", 3.6, "USD")


def figure_of(run: SimulatedRun, price: DevicePrice | None, device: str = "NVIDIA H100") -> tuple[Any, Any]:
    sessions = session_accounts({rank: record_of(events) for rank, events in run.ranks.items()}, run.agent)
    above, below = _figure(run.account(), spending(sessions), unit_of(price, device)).axes
    return above, below


def test_the_bars_add_up_to_workers_times_wall_time() -> None:
    run = faulty()
    above, _ = figure_of(run, PRICE)
    whole, *rows = above.patches
    assert whole.get_width() == 1.0
    assert sum(bar.get_width() for bar in rows) == pytest.approx(1.0)
    for bar, later in pairwise(rows):
        assert later.get_x() == pytest.approx(bar.get_x() + bar.get_width()), "each begins where the one above ends"
    labels = [label.get_text() for label in above.get_yticklabels()]
    account = account_rows(run.account())
    assert labels == ["workers × wall time", *(row.label for row in account)]
    assert [bar.get_width() for bar in rows] == pytest.approx([row.share for row in account], abs=1e-9)
    texts = [text.get_text() for text in above.texts]
    assert texts[1].startswith(f"{100 * account[0].share:.1f}%, ")


def lines_of(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


def test_the_cost_ends_with_that_of_the_account() -> None:
    run = faulty()
    _, below = figure_of(run, PRICE)
    account, lines = run.account(), lines_of(below)
    cost = PRICE.cost(account.device_hours)
    spent, lost = lines["all"].get_ydata(), lines["lost to faults"].get_ydata()
    assert spent[-1] == pytest.approx(cost)
    lost_s = sum(account.rows[name] for name in ("redone", "detection", "recovery"))
    assert lost[-1] == pytest.approx(PRICE.cost(lost_s / 3600))
    assert len(lines["1 fault"].get_xdata()) == 1
    title = below.get_title(loc="right")
    amounts = money(cost, "USD"), money(lost[-1], "USD")
    assert title == f"{amounts[0]}, of it {amounts[1]} ({100 * lost[-1] / cost:.1f}%) lost to faults"


@pytest.mark.parametrize(("device", "words"), [("NVIDIA H100", "GPU-hours"), ("Intel Xeon Processor", "worker-hours")])
def test_without_a_price_device_hours_are_drawn(device: str, words: str) -> None:
    run = faulty()
    _, below = figure_of(run, None, device)
    spent = lines_of(below)["all"].get_ydata()
    assert spent[-1] == pytest.approx(run.account().device_hours)
    assert below.get_title(loc="left") == words


def test_a_picture_is_drawn_from_the_folder(tmp_path: Path) -> None:
    write(faulty(), tmp_path)
    drawn = draw_goodput(tmp_path)
    assert drawn == tmp_path / "goodput.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_died_young_is_drawn_and_one_that_recorded_nothing_is_not(tmp_path: Path) -> None:
    recorder = EventRecorder(tmp_path, 0)
    recorder.emit(CPU)
    recorder.emit(step(1))
    recorder.close()
    assert draw_goodput(tmp_path) is not None
    assert draw_goodput(tmp_path / "nowhere") is None
