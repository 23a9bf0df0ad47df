import struct
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import ActionCosts, Timeline, timeline
from closeranks.plan.schedule_picture import draw_schedule, schedule_text


def laid_out(name: str, num_ranks: int, num_micro: int) -> Timeline:
    return timeline(schedule_for(name, num_ranks, num_micro))


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_drawn_and_nothing_else_is_left(name: str, tmp_path: Path) -> None:
    path = draw_schedule(laid_out(name, 2, 4), tmp_path / "schedule.png")
    assert path == tmp_path / "schedule.png"
    assert list(tmp_path.iterdir()) == [path]


def test_the_picture_grows_with_the_schedule_up_to_a_screen(tmp_path: Path) -> None:
    small, large, huge = (
        size_of(draw_schedule(laid_out("1f1b", *shape), tmp_path / "schedule.png"))
        for shape in ((1, 1), (8, 16), (32, 48))
    )
    assert small[0] < large[0] < huge[0] <= 3800
    assert small[1] < large[1] < huge[1] <= 1600


def test_uneven_costs_are_drawn(tmp_path: Path) -> None:
    uneven = timeline(schedule_for("zbv", 3, 7), ActionCosts(1.0, 2.3, 1.4, 0.7))
    assert size_of(draw_schedule(uneven, tmp_path / "schedule.png", "by measurement"))[0] > 1000
    assert len({len(line) for line in schedule_text(uneven).splitlines()[1:4]}) == 1


def test_the_text_shows_who_does_what_when() -> None:
    assert schedule_text(laid_out("1f1b", 2, 2)) == (
        "1f1b: 2 ranks, 2 stages, 2 micro-batches, 9 units of time\n"
        "rank 0  F0 F1 .  .  B0--- .  B1---   holds 2, waits 33%\n"
        "rank 1  .  F0 B0--- F1 B1--- .  .    holds 1, waits 33%\n"
        "bubble 33.3%, (P-1)/(M+P-1) = 33.3%"
    )


def test_a_second_stage_is_in_small_letters_and_numbers_go_where_room_is_short() -> None:
    assert schedule_text(laid_out("zbv", 2, 2), width=60).splitlines()[1:3] == [
        "rank 0  FF.fifiIwIwWW  holds 4, waits 8%",
        "rank 1  .FfFfiIiIwWwW  holds 4, waits 8%",
    ]


def test_what_is_too_long_is_cut_off() -> None:
    lines = schedule_text(laid_out("1f1b", 4, 64), width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all("...  holds" in line for line in lines[1:-1])


def test_neither_torch_nor_matplotlib_is_imported_before_a_picture_is_drawn() -> None:
    program = (
        "import sys\n"
        "from closeranks.plan import schedule_picture\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
