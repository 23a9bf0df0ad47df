from __future__ import annotations

import os
import signal
import sys
from math import nan
from typing import Any

import pytest
from sync_peers import FORGETFUL, GOAL, OURS, RIVALS, compare, compare_losses, judge, main

from closeranks.lab.compare.namespaces import unavailable_reason
from tests.benchmarks.scripts import run_script

LANES = [name for kind, ours in OURS.items() for name in (*RIVALS[kind], ours)] + [FORGETFUL]
WAITING, ONE_BUCKET = RIVALS["powersgd"]


def test_ratios_are_taken_within_a_round_and_a_turn_is_as_long_as_its_slower_rank() -> None:
    """The machine was busy in the second round; all paid for it."""
    quick = {name: [1.0, 9.0, 1.0] for name in LANES}
    slow = {**quick, OURS["fp16"]: [0.5, 20.0, 2.0], FORGETFUL: [0.5, 4.5, 0.5]}
    figures = compare([quick, slow], num_steps=2)
    assert figures["pairs"]["fp16"]["ratio"] == {"median": 0.5, "low": 0.475, "high": 0.75, "num": 3}
    assert figures["pairs"]["fp16"]["ratio_without_feedback"]["median"] == 1.0
    assert figures["step_ms"][OURS["fp16"]]["median"] == 1000.0


@pytest.mark.parametrize(("faster", "slower"), [(WAITING, ONE_BUCKET), (ONE_BUCKET, WAITING)])
def test_the_faster_of_torchs_lanes_is_the_rival(faster: str, slower: str) -> None:
    seconds = {name: [1.0, 1.0] for name in LANES} | {slower: [3.0, 3.0], OURS["powersgd"]: [2.0, 2.0]}
    pair = compare([seconds], num_steps=1)["pairs"]["powersgd"]
    assert (pair["beside"], pair["ratio"]["median"]) == (faster, 0.5)


def test_only_kinds_that_ran_are_compared() -> None:
    lanes = [*RIVALS["none"], OURS["none"]]
    assert set(compare([{name: [1.0] for name in lanes}], 1)["pairs"]) == {"none"}
    assert set(compare_losses({name: [3.0] for name in lanes})["loss_gaps"]) == {"none"}


@pytest.mark.parametrize(
    ("changed", "agree"),
    [
        ({}, True),
        ({OURS["none"]: [4.001, 3.0]}, False),
        ({OURS["fp16"]: [4.001, 3.0]}, True),
        ({OURS["fp16"]: [4.1, 3.0]}, False),
        ({OURS["powersgd"]: [4.1, 3.0]}, True),
        ({ONE_BUCKET: [5.0, 3.0]}, False),
        ({OURS["none"]: [4.0, nan]}, False),
        ({ONE_BUCKET: [4.0, nan]}, False),
        ({OURS["none"]: []}, False),
    ],
)
def test_each_kind_may_differ_as_much_as_it_leaves_out(changed: dict[str, list[float]], agree: bool) -> None:
    assert compare_losses({name: [4.0, 3.0] for name in LANES} | changed)["losses_agree"] is agree


def link(*, agree: bool = True, **ratios: float) -> dict[str, Any]:
    pairs = {kind: {"ratio": {"median": value}} for kind, value in ratios.items()}
    return {"losses_agree": agree, "pairs": pairs}


GOOD = link(none=1.0, fp16=GOAL, powersgd=1.2)


@pytest.mark.parametrize(
    ("links", "met"),
    [
        ([GOOD, GOOD], True),
        ([GOOD, link(none=1.0, fp16=GOAL - 0.01, powersgd=1.2)], False),
        ([link(none=1.0, fp16=1.0)], False),
        ([link(agree=False, none=1.0, fp16=1.0, powersgd=1.0)], False),
        ([], False),
    ],
)
def test_the_goal_is_asked_of_every_kind_on_every_link(links: list[dict[str, Any]], met: bool) -> None:
    assert judge({str(number): one for number, one in enumerate(links)}) is met


def test_without_root_it_says_so_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["sync_peers.py", "--quick"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr()
    assert "network namespaces need root" in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or bool(unavailable_reason(shaped=True)), reason="network namespaces cannot be made"
)
def test_every_lane_trains_on_two_hosts_and_compressed_ones_send_less() -> None:
    closing = run_script("sync_peers.py", "--quick")
    figures = closing["figures"]["1000 Mbit/s"]
    assert set(figures["step_ms"]) == set(LANES)
    assert figures["losses_agree"]
    sent = figures["bytes_per_step"]
    for kind, least in (("fp16", 1.8), ("powersgd", 5.0)):
        for name in (OURS[kind], *RIVALS[kind]):
            assert sent["ddp none"] > least * sent[name], name
    assert not closing["met"]  # sizes that mean nothing meet no goal
