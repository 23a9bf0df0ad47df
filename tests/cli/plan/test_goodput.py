"""``closeranks plan goodput``: what it prints and draws, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import call
from tests.cli.commands import ROOT

FEW = ("--devices", 64, "--days", 1, "--seeds", 2)


def said(*words: object) -> str:
    done = call("plan", "goodput", *words)
    assert done.code == 0, done.err
    return done.out


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def test_it_prints_everything_a_person_decides_by() -> None:
    text = said("--devices", 1024, "--failures", "research", "--seeds", 4, "--price", "2.5")
    for part in (
        "1,024 devices on 128 hosts for 30 days: a failure every 7.9 h, by the table 'research' (Revisiting",
        "4 simulated runs", "closing ranks", "restart", "closed form", "paid / useful", "How many spares pay",
        "useful: steps that count", "steps redone, and cut short by a fault", "workers missing while the others train",
        " *", "Interruptions of a run: any ", "resumes 15 s later from the last step, in memory",
        "resumes 5 min later from the last checkpoint; waits for hosts that are missing.",
    ):  # fmt: skip
        assert part in text, part
    costs = [word for word in text.split() if word.startswith("$")]
    assert costs[0] == f"${1024 * 720 * 2.5 / 1e6 + 8 * 720 * 2.5 / 1e6 * figures_spares(text):.2f}M"


def figures_spares(text: str) -> int:
    """The spares of the first strategy in the first table."""
    heading, row = text.splitlines()[3:5]
    before_end = heading.index("spares") + len("spares")
    return int(row[:before_end].split()[-1])


def test_options_reach_the_simulation() -> None:
    found = figures(
        *FEW, "--per-host", 4, "--replica", 16, "--step-s", 2, "--spares", 3, "--cold-spares", 2, "--cold-start-s", 60,
        "--save-s", 0.5, "--durable-s", 7, "--recover-s", 20, "--restart-s", 400, "--when-short", "wait", "--seed", 5,
        "--snapshot-share", 0.002,
    )  # fmt: skip
    assert found["scenario"] == {
        "num_devices": 64, "per_host": 4, "replica_hosts": 4, "least_share": 0.5, "wall_s": 86400.0, "step_s": 2.0,
        "stall_s": 0.5, "durable_s": 7.0, "cold_spares": 2, "cold_s": 60.0,
    }  # fmt: skip
    assert found["seeds"] == [5, 6]
    closing, restart = found["strategies"]
    assert (closing["strategy"]["recover_s"], restart["strategy"]["recover_s"]) == (20, 400)
    assert closing["strategy"]["snapshot_share"] == 0.002
    assert not closing["strategy"]["shrinks"]
    assert closing["chosen_spares"] == 3
    assert 3 in [one["spares"] for one in closing["forecasts"]]
    assert figures(*FEW, "--when-short", "shrink")["strategies"][1]["strategy"]["shrinks"]
    (only,) = figures(*FEW, "--strategy", "restart")["strategies"]
    assert only["strategy"]["name"] == "restart"
    assert figures(*FEW, "--save-every-s", 300)["strategies"][0]["forecasts"][0]["save_every_s"] == 300


def test_the_size_of_the_state_gives_the_cost_of_saves() -> None:
    """640 GB on 64 devices are copied in 1 s, and written by 8 hosts in 80 s."""
    found = figures(*FEW, "--state-gib", 640e9 / 2**30)["scenario"]
    assert (found["stall_s"], found["durable_s"]) == (pytest.approx(1.0), pytest.approx(81.0))


def test_a_price_may_be_that_of_a_device() -> None:
    assert figures(*FEW, "--price", "H100")["price"]["per_hour"] == 3.78
    found = figures(*FEW, "--price", "2")["strategies"][0]["forecasts"][0]
    assert found["cost"] == pytest.approx(2 * found["device_hours"]) == 2 * 64 * 24
    assert figures(*FEW)["strategies"][0]["forecasts"][0]["cost"] is None


def test_the_same_options_give_the_same_figures() -> None:
    assert said(*FEW) == said(*FEW)
    assert said(*FEW, "--failures", "spot") != said(*FEW, "--failures", "spot", "--seed", 1)


def test_shares_and_infinities_as_json() -> None:
    """With the research fleet's rates and no spares, a restart of 65,536 devices never gets anywhere."""
    found = figures(*FEW, "--failures", "research", "--devices", 65536, "--days", 1, "--spares", 0)
    restart = found["strategies"][1]["forecasts"][0]
    assert restart["hours_per_useful"] is None or restart["hours_per_useful"] > 100
    assert sum(restart["shares"].values()) == pytest.approx(1.0)


def test_failures_of_your_own(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text("device_hours = 1000\n")
    assert "no failures, by the table" in said(*FEW, "--failures", table)
    table.write_text('device_hours = 1000\n[[failure]]\nkind = "fan"\ncount = 4\nshows = "slow"\nslowdown = 1.5\n')
    text = said(*FEW, "--failures", table)
    assert "slow hosts evicted" in text
    assert "waiting for the slowest rank" in text


def test_the_example_is_that_of_the_page() -> None:
    page, table = (ROOT / "docs" / "plan-goodput.md").read_text(), ROOT / "examples" / "failures" / "own.toml"
    assert f"```text\n{table.read_text()}```" in page
    text = said("--devices", 512, "--failures", table)
    waiting = next(line.split() for line in text.splitlines() if line.startswith("waiting for the slowest rank"))
    told = " ".join(page.split())
    for part in (
        "14 interruptions",
        "4.2 slow hosts evicted",
        f"{waiting[5]} of the time",
        f"{waiting[8]} with restarts",
    ):
        assert part in told, part
    assert "14 (" in text
    assert "4.2 slow hosts evicted" in text


def test_one_device_is_not_devices() -> None:
    assert said("--devices", 1, "--per-host", 1, "--seeds", 1).startswith("1 device on 1 host for 30 days")


def test_it_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert f"picture: {picture}" in said(*FEW, "--failures", "research", "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]
    said(*FEW, "--strategy", "restart", "--spares", 0, "--picture", picture)


def test_the_page_shows_what_it_prints() -> None:
    page = (ROOT / "docs" / "plan-goodput.md").read_text()
    shown = page.partition("--picture docs/plan-goodput.png")[2].partition("```text\n")[2].partition("\n```")[0]
    words = ("--devices", 16384, "--days", 54, "--replica", 128, "--state-gib", 6000, "--price", "H100")
    printed = "\n".join(line.rstrip() for line in said(*words).splitlines())
    assert shown == printed


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--devices", 100), "100 devices do not fill hosts of 8"),
        (("--devices", 64, "--replica", 12), "--replica 12: a replica must be whole hosts of 8 devices"),
        (("--devices", 64, "--replica", 24), "--replica 24: a replica must be whole hosts"),
        (("--days", 0), "--days 0 cannot be used. Name a number from 0.001 to 3650"),
        (("--days", "nan"), "--days nan cannot be used"),
        (("--step-s", "inf"), "--step-s inf cannot be used"),
        (("--recover-s", -1), "--recover-s -1 cannot be used"),
        (("--save-s", -1), "--save-s -1 cannot be used"),
        (("--save-s", 20, "--durable-s", 10), "a save cannot be durable after 10 s"),
        (("--failures", "lama3"), "there is no table of failures 'lama3'"),
        (("--failures", "none.toml"), "the failures none.toml cannot be read"),
        (("--price", "B9000"), "Name the dollars of a device-hour, or one of NVIDIA B200"),
        (("--price", "-1"), "--price -1 is not a price"),
        (("--devices", 8_000_000, "--failures", "spot"), "would fail every"),
        (("--picture", "out.jpg"), "does not end in .png"),
        (("--strategy", "hope"), "Invalid value for '--strategy'"),
        (("--devices", 0), "Invalid value for '--devices'"),
    ],
)
def test_it_refuses_in_one_sentence(words: tuple[object, ...], what: str) -> None:
    done = call("plan", "goodput", *words)
    assert (done.code, done.out) == (2, "")
    assert what in done.err
    assert "Traceback" not in done.err
