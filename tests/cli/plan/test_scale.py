"""``closeranks plan scale``: strong and weak scaling, where communication takes over, and what helps next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import call
from tests.cli.commands import ROOT, TINY

BIG = ROOT / "examples" / "plans" / "llama-70b.toml"
RANGE = ("--from", 16, "--to", 128)


def said(*words: object) -> str:
    done = call("plan", "scale", *words)
    assert done.code == 0, done.err
    return done.out


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def test_it_prints_both_curves_and_what_helps() -> None:
    text = said(BIG, "--cluster", "h100", *RANGE)
    for part in (
        "Strong scaling: the same global batch", "Weak scaling: the batch grows", "efficiency", "communication",
        "What helps next at 128 devices", "overlap", "compression", "larger batch", 'optim.scaling = "sqrt"',
    ):  # fmt: skip
        assert part in text, part


def test_points_are_searched_one_by_one() -> None:
    found = figures(BIG, "--cluster", "h100", *RANGE, "--batch-at", 128)
    assert [point["num_devices"] for point in found["strong"]] == [16, 32, 64, 128]
    assert [point["global_batch"] for point in found["strong"]] == [1024] * 4
    assert [point["global_batch"] for point in found["weak"]] == [128, 256, 512, 1024]
    planned = [point for point in found["strong"] if point.get("efficiency")]
    assert planned[0]["efficiency"] == 1.0
    for point in planned:
        rate = point["global_batch"] * 8192 / point["plan"]["step_s"]
        assert point["tokens_per_s"] == pytest.approx(rate)
    gains = [lever["gain"] for lever in found["levers"]]
    assert gains == sorted(gains, reverse=True)


def test_where_nothing_fits_is_said() -> None:
    text = said(BIG, "--cluster", "a100-40", "--from", 4, "--to", 8)
    assert "nothing fits: misses by" in text
    assert "Nothing fits on any of these." in text


def test_it_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "scale.png"
    assert f"picture: {picture}" in said(TINY, "--cluster", "cpu", "--from", 1, "--to", 4, "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [((), "no cluster"), (("--cluster", "h100", "--from", 8, "--to", 4), "there is nothing from 8 to 4 devices")],
)
def test_what_it_refuses(words: tuple[object, ...], sentence: str) -> None:
    done = call("plan", "scale", TINY, *words)
    assert done.code == 2
    assert sentence in done.err
