from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from closeranks.core.events import Event, Warned, encode
from closeranks.core.requests import DRAIN, SAVE
from closeranks.run.worker.agent_client import StandaloneClient

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandaloneClient]:
    """Listening; the test process gets its own handlers back, and keeps none of the fork hooks."""
    before = {number: signal.getsignal(number) for number in HEARD}
    hooks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: hooks.append(after_in_child))
    client = StandaloneClient()
    client.install_signal_handlers()
    yield client
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nobody_asks_for_anything_at_first(client: StandaloneClient) -> None:
    assert client.poll() == set()


@pytest.mark.parametrize(
    ("number", "ending"),
    [(signal.SIGTERM, "drained"), (signal.SIGINT, "interrupted"), (signal.SIGHUP, "disconnected")],
)
def test_a_signal_asks_for_a_drain(client: StandaloneClient, number: signal.Signals, ending: str) -> None:
    signal.raise_signal(number)
    assert [client.poll() for _ in range(2)] == [{DRAIN}] * 2
    assert client.end_reason == ending


def test_an_ignored_hangup_stays_ignored() -> None:
    """``nohup torchrun`` and ``nohup python``: the run goes on."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HEARD}
    try:
        client = StandaloneClient()
        client.install_signal_handlers()
        signal.raise_signal(signal.SIGHUP)
        assert client.poll() == set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_sigusr1_asks_for_a_save_once_and_for_nothing_else(client: StandaloneClient) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert [client.poll() for _ in range(2)] == [{SAVE}, set()]


def test_sigterm_may_come_twice(client: StandaloneClient) -> None:
    """Slurm sends it to a step and to what started it, which passes it on."""
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert client.poll() == {DRAIN}


def test_a_second_interrupt_means_it(client: StandaloneClient) -> None:
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_events_reach_whoever_shows_them() -> None:
    shown: list[Event] = []
    StandaloneClient(shown.append).send_event(encode(Warned("look")))
    assert shown == [Warned("look")]


def test_events_nobody_shows_are_passed_over() -> None:
    StandaloneClient().send_event(encode(Warned("look")))
