"""An account as a stranger reads it."""

from __future__ import annotations

from closeranks.facts.prices import DevicePrice
from closeranks.telemetry.goodput.account_text import account_lines
from closeranks.telemetry.goodput.time_account import REDONE, USEFUL, TimeAccount, merged
from closeranks.telemetry.reports.goodput_section import goodput_section
from tests.telemetry.goodput.simulated import SimulatedRun

ROWS = {"useful": 900.0, "recovery": 60.0, "data": 30.0, "gc": 0.1, "start": 9.0, "unaccounted": 0.9}
ACCOUNT = TimeAccount(ROWS, 1000.0, 250.0, 100, 3200, 409_600, 3, 1, 2, num_ranks=4, num_read=4, energy_j=7.2e6)


def test_the_table_of_a_terminal() -> None:
    lines = account_lines(ACCOUNT, DevicePrice("L4", 0.8, "USD"), "NVIDIA L4", "token")
    assert lines == [
        "goodput: 90.0% of 4 workers × 4 min 10 s, 2 faults, 3 steps redone",
        "hours: 0.2778 GPU-hours",
        "cost: $0.22 at $0.80 per device-hour (L4); $0.54 per million tokens, $69.44 per million samples",
        "energy: 2 kWh, of the accelerators alone",
        "  useful: steps that count          3 min 45 s   90.0%",
        "  recovery                                15 s    6.0%",
        "  waiting for data                       7.5 s    3.0%",
        "  starting, until the first step         2.2 s    0.9%",
        "  other losses                           25 ms   0.01%",
        "  unaccounted                            0.2 s    0.1%",
    ]


def test_the_section_adds_up_and_says_what_was_read() -> None:
    run = SimulatedRun(num_ranks=4)
    run.launch()
    run.steps(10)
    run.fault(back_to=7)
    run.steps(10)
    run.end()
    text = goodput_section(run.account(), None, "Xeon Processor", "sample")
    table = [row.split("|")[1:4] for row in text.splitlines() if row.startswith("| ") and "worker-seconds" not in row]
    *rows, (_, total, _) = table
    assert abs(sum(float(seconds) for _, seconds, _ in rows) - float(total)) < 0.05
    assert "worker-hours (CPU)" in text
    assert "no price known for Xeon Processor" in text
    assert "evenly spread" not in text
    part = TimeAccount(ROWS, 1000.0, 250.0, num_ranks=64, num_read=16)
    assert "From the records of 16 of 64 ranks" in goodput_section(part, None, "Xeon", "token", "a note")
    assert goodput_section(TimeAccount(), None, "Xeon", "token") == ""


def test_two_commands_are_one_run() -> None:
    both = merged(ACCOUNT, ACCOUNT, num_redone=50)
    assert both.worker_s == 2000.0
    assert both.rows[USEFUL] == 900.0 + 450.0
    assert both.rows[REDONE] == 450.0
    assert (both.num_steps, both.num_redone, both.num_launches) == (150, 56, 2)
    assert sum(both.rows.values()) == sum(ROWS.values()) * 2
