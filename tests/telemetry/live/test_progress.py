import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from closeranks.core.events import (
    Evaluated,
    Event,
    HostChanged,
    NoiseSeen,
    RankLost,
    RanksClosed,
    Restored,
    RunEnded,
    RunStarted,
    SlowRank,
    Snapshotting,
    StepDone,
    Warned,
)
from closeranks.facts.prices import DevicePrice, PriceTable
from closeranks.telemetry.live import progress
from closeranks.telemetry.live.progress import ProgressDisplay
from tests.telemetry.conftest import CPU, step


class Clock:
    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def plain(events: list[Event], *, log_every: int = 10) -> list[str]:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, width=40), log_every=log_every) as progress:
        for event in events:
            progress.handle(event)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    return text.splitlines()


def steps_in(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"step +(\d+)/40  loss", line))]


def test_plain_lines_come_first_every_ten_and_last_and_never_wrap() -> None:
    lines = plain([CPU, *(step(number) for number in range(1, 41)), RunEnded(40, "finished", 31.0)], log_every=15)
    assert steps_in(lines) == [1, 15, 30, 40]
    assert lines[-1] == "finished at step 40 after 31 s"
    assert re.fullmatch(
        r"step +15/40  loss 2\.3925  10\.0k tok/s  peak 3\.0%  mem 1\.0 GiB  eta 0:03  lr 1\.00e-03  grad 1\.0000",
        lines[2],
    )


def test_a_run_that_ends_early_still_shows_its_last_step_once() -> None:
    assert steps_in(plain([CPU, *(step(n) for n in range(1, 14)), RunEnded(13, "drained", 2.0)])) == [1, 10, 13]
    assert steps_in(plain([CPU, *(step(n) for n in range(1, 14))])) == [1, 10, 13]


def test_a_resumed_run_shows_its_own_first_step() -> None:
    lines = plain([replace(CPU, first_step=22), *(step(number) for number in range(23, 41))])
    assert "steps 23 to 40" in lines[0]
    assert steps_in(lines) == [23, 30, 40]


def test_other_ranks_start_silently_and_brackets_are_words_not_markup() -> None:
    lines = plain([replace(CPU, rank=1), Warned("[bold]batch[/bold] :smile: is odd")])
    assert lines == ["warning: [bold]batch[/bold] :smile: is odd"]


def test_a_scaled_rate_is_said_once_at_the_start() -> None:
    lines = plain([replace(CPU, rate="learning rate 1.6 = 0.1 x 16")])
    assert lines[1:] == ["learning rate 1.6 = 0.1 x 16"]
    assert len(plain([CPU])) == 1


def test_the_noise_scale_is_a_line_where_there_is_news() -> None:
    scales = [None, 480.0, 500.0, 400.0, 800.0, 70.0, 60.0, 61.0, 65.0, 59.0]
    lines = plain([NoiseSeen(number, scale, 64) for number, scale in enumerate(scales)])
    assert [line.split()[3] for line in lines] == ["480", "800", "70", "60"]
    assert lines[-1].endswith("a step now has 64: batches beyond 60 gain little")


def test_skipped_steps_are_said_and_counted() -> None:
    skipped = step(2, taken=False, loss=float("nan"), loss_scale=32768.0)
    lines = plain([replace(CPU, precision="fp16"), step(1), skipped, step(40)])
    assert "step     2/40  skipped: gradients not finite, loss scale now 32768" in lines
    assert lines[-1].endswith("skipped 1")


def test_on_a_terminal_one_line_is_redrawn_at_most_ten_times_a_second() -> None:
    out = io.StringIO()
    console = Console(file=out, width=90, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    progress = ProgressDisplay(console, clock=Clock(tick_s=0.01))
    progress.handle(CPU)
    for number in range(1, 41):
        progress.handle(step(number))
    progress.handle(Evaluated(step=40, loss=1.6))
    progress.handle(RunEnded(40, "finished", 31.0))
    progress.close()
    text = out.getvalue()
    drawn = {int(number) for number in re.findall(r"(\d+)/40  ", text)}
    assert {1, 40} <= drawn
    assert 3 <= len(drawn) <= 8
    assert "\x1b[?25h" in text.split("finished at step 40")[0], "the cursor comes back"
    assert "━" in text
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert all(len(line) <= 89 for part in words.split("\n")[1:] for line in part.split("\r"))


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, _environ={"TERM": "dumb"})
    with ProgressDisplay(console) as progress:
        progress.handle(CPU)
        progress.handle(step(1))
    assert "\r" not in out.getvalue()
    assert "step     1/40" in out.getvalue()


LOST = RankLost(0, 1, "", 21, "killed", "killed by SIGKILL", 0.01)
CLOSED = RanksClosed(1, 21, 0.93, 1, 2)
KEY = "rank 1 lost at step 21 (killed by SIGKILL); closed ranks in 0.9 s"


def broken_run(*between: Event) -> list[Event]:
    """Forty steps with a fault in the twenty-first."""
    first = [CPU, *(step(number) for number in range(1, 21))]
    again = [replace(CPU, generation=1, first_step=19), Restored(19, "memory", 1, 0.02), step(20, seconds=3.0)]
    rest = [step(number) for number in range(21, 41)]
    return [*first, LOST, *between, *again, CLOSED, *rest, RunEnded(40, "finished", 5.0)]


def test_a_fault_is_one_line_and_the_run_goes_on_as_if_nothing_had_been() -> None:
    lines = plain(broken_run())
    assert lines.count(KEY) == 1
    assert sum("parameters" in line for line in lines) == 1, "a run is introduced once"
    assert steps_in(lines) == [1, 10, 20, 20, 30, 40]
    assert "10.0k tok/s" in lines[lines.index(KEY) + 1], "speed and time to go survive it"
    assert re.search(r"eta 0:0[12]", lines[lines.index(KEY) + 1])
    assert not any("generation" in line or "memory" in line for line in lines)


def test_what_a_generation_said_as_it_fell_is_not_the_runs_end() -> None:
    lines = plain(broken_run(RunEnded(20, "failed", 3.0)))
    assert not any("failed" in line for line in lines)
    lines = plain([CPU, step(1), RunEnded(1, "failed", 3.0), LOST, replace(CPU, generation=1), step(1)])
    assert not any("failed" in line for line in lines)


def test_a_run_that_fails_says_so_at_the_end_and_once() -> None:
    lines = plain([CPU, step(1), RunEnded(1, "failed", 3.0)])
    assert lines[-1] == "failed after step 1 and 3.0 s"
    lines = plain([CPU, step(1), LOST])
    assert lines[-1] == "rank 1 lost at step 21 (killed by SIGKILL)"
    assert steps_in(lines) == [1]


def test_a_generation_that_ends_by_agreement_ends_in_silence() -> None:
    leaves = RankLost(0, 1, "", 20, "preempted", "SIGTERM")
    regrouped = [RunEnded(20, "regrouped", 3.0), leaves, replace(CPU, generation=1, first_step=20)]
    lines = plain([CPU, step(20), *regrouped, step(21), replace(CLOSED, num_redone=0)])
    assert "rank 1 leaves at step 20 (SIGTERM); closed ranks in 0.9 s" in lines
    assert not any("regrouped" in line for line in lines)


def test_a_second_fault_before_ranks_are_closed_has_its_own_line() -> None:
    second = RankLost(1, 0, "", None, "killed", "killed by SIGKILL")
    lines = plain([CPU, step(20), LOST, second, replace(CPU, generation=2, first_step=20), step(21), CLOSED])
    told = [line for line in lines if line.startswith("rank")]
    assert told == [
        "rank 1 lost at step 21 (killed by SIGKILL)",
        "rank 0 lost while closing ranks (killed by SIGKILL); closed ranks in 0.9 s",
    ]


def test_fewer_workers_are_told() -> None:
    smaller = replace(CLOSED, world_size=1, layout="data=1")
    lines = plain([CPU, step(20), LOST, replace(CPU, generation=1, first_step=19, world_size=1), step(20), smaller])
    assert f"{KEY}, now on 1 worker (data=1)" in lines


def test_a_state_from_farther_than_memory_and_what_was_found_broken_are_told() -> None:
    restored = Restored(10, "checkpoint", 1, 2.0, ["the copy of step 19 on rank 1 is torn"])
    lines = plain([CPU, step(20), LOST, replace(CPU, generation=1, first_step=10), restored, step(11), CLOSED])
    assert "generation 1 continues after step 10, from the checkpoint (2.0 s)" in lines
    assert "warning: the copy of step 19 on rank 1 is torn" in lines


def test_what_every_generation_says_as_it_begins_is_heard_once() -> None:
    kept = Snapshotting(3, 1, 1 << 20, 0.001, "replica")
    again = [replace(CPU, generation=1, first_step=19), Warned("no room"), replace(kept, cost_s=0.002), step(20)]
    lines = plain([CPU, Warned("no room"), kept, step(20), LOST, *again, replace(kept, every=2), CLOSED])
    assert lines.count("warning: no room") == 1
    assert [line.split(" (")[0] for line in lines if "kept" in line] == [
        "state kept in memory every step",
        "state kept in memory every 2 steps",
    ]


def test_slow_ranks_and_hosts_have_a_line() -> None:
    lines = plain([CPU, step(1), SlowRank(1, "", 30, 2.0, 0.2, 0.1), HostChanged("b", "left")])
    assert lines[-2:] == [
        "rank 1 is slow at step 30: 2 times the others (0.2 s a micro-batch, the others 0.1 s)",
        "host b left",
    ]


def test_skipped_steps_that_are_done_again_count_once() -> None:
    skipped = step(20, taken=False, loss=float("nan"))
    lines = plain([CPU, step(19), skipped, LOST, replace(CPU, generation=1, first_step=19), skipped, CLOSED, step(40)])
    assert lines[-1].endswith("skipped 1")


def test_the_end_counts_the_time_of_all_generations() -> None:
    out = io.StringIO()
    clock = Clock(tick_s=0.0)
    with ProgressDisplay(Console(file=out, width=80), clock=clock) as progress:
        progress.handle(CPU)
        progress.handle(step(20))
        progress.handle(LOST)
        progress.handle(replace(CPU, generation=1, first_step=19))
        clock.now_s = 60.0
        progress.handle(RunEnded(40, "finished", 12.0))
    assert "finished at step 40 after 1 min 0 s" in out.getvalue()


def test_on_a_terminal_closing_ranks_is_a_live_line_and_then_the_steps_are_again() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    with ProgressDisplay(console, clock=Clock(tick_s=0.01)) as progress:
        for event in broken_run():
            progress.handle(event)
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    live = words.index("rank 1 lost at step 21 (killed by SIGKILL); closing ranks ...")
    told = words.index(KEY)
    assert live < told
    assert words.count("closed ranks in") == 1
    assert "/40  loss" in words[told:].split("\n")[1], "the step's line stands under it at once"
    assert out.getvalue().count("\x1b[?25h") == 1


def test_what_a_worker_printed_is_passed_on_as_it_is_and_in_its_place() -> None:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, width=40)) as progress:
        progress.print_line("before")
        progress.print_output(f"[bold]{'x' * 100}\nsecond � line")
        progress.print_line("after")
    assert out.getvalue() == f"before\n[bold]{'x' * 100}\nsecond � line\nafter\n"


def test_cost_is_on_the_line_where_there_is_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "process_age_s", lambda: 0.0)  # that of the tests' own process may be an hour
    prices = PriceTable((DevicePrice("H200", 3600.0, "USD"),))
    lines = []
    for device in ("NVIDIA H200", "NVIDIA H9000"):
        out = io.StringIO()
        with ProgressDisplay(
            Console(file=out, width=200), log_every=1, clock=Clock(tick_s=1.0), prices=prices
        ) as shown:
            shown.handle(RunStarted(world_size=2, last_step=3, device=device))
            for number in range(1, 3):
                shown.handle(StepDone(step=number, loss=1.0, seconds=1.0, items=10))
        lines.append(out.getvalue().splitlines())
    costs = [re.search(r"cost \$(\d+)", line) for line in lines[0] if line.startswith("step")]
    first, second = (int(cost[1]) for cost in costs if cost is not None)
    assert second > first > 0
    assert not any("cost" in line for line in lines[1])
