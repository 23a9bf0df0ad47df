from __future__ import annotations

import logging
import threading

import pytest

from closeranks.core.system.background_thread import BackgroundThread


def test_jobs_are_done_in_order_by_one_thread_that_stays() -> None:
    background, seen = BackgroundThread("test"), list[tuple[int, int]]()
    for number in range(5):
        background.submit(lambda number=number: seen.append((number, threading.get_native_id())))
        background.drain()
    background.close()
    assert [number for number, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1
    assert threading.get_native_id() not in {thread for _, thread in seen}


def test_a_job_that_fails_is_told_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    background, seen = BackgroundThread("test"), list[str]()
    with caplog.at_level(logging.ERROR):
        background.submit(lambda: 1 / 0)
        background.submit(lambda: seen.append("next"))
        background.close()
    assert seen == ["next"]
    assert "division by zero" in caplog.text


def test_what_was_never_used_is_closed_at_once() -> None:
    BackgroundThread("test").close()
