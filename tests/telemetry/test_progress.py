import io
import re
from dataclasses import replace

from rich.console import Console

from closeranks.core.events import Evaluated, Event, RunEnded, Warned
from closeranks.telemetry.progress import Progress

from .conftest import CPU, step


class Clock:
    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def plain(events: list[Event], *, log_every: int = 10) -> list[str]:
    out = io.StringIO()
    with Progress(Console(file=out, width=40), log_every=log_every) as progress:
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


def test_skipped_steps_are_said_and_counted() -> None:
    skipped = step(2, taken=False, loss=float("nan"), loss_scale=32768.0)
    lines = plain([replace(CPU, precision="fp16"), step(1), skipped, step(40)])
    assert "step     2/40  skipped: gradients not finite, loss scale now 32768" in lines
    assert lines[-1].endswith("skipped 1")


def test_on_a_terminal_one_line_is_redrawn_at_most_ten_times_a_second() -> None:
    out = io.StringIO()
    console = Console(file=out, width=90, force_terminal=True, color_system="standard", _environ={"TERM": "xterm"})
    progress = Progress(console, clock=Clock(tick_s=0.01))
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
    with Progress(console) as progress:
        progress.handle(CPU)
        progress.handle(step(1))
    assert "\r" not in out.getvalue()
    assert "step     1/40" in out.getvalue()
