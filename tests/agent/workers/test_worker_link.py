"""The worker's side, with the agent's end of the socket in the test's hand."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from closeranks.agent.detection.progress import SharedProgress, WorkerPhase, create_progress_fd
from closeranks.agent.workers.wire import LineBuffer, encode_message
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.errors import CloseranksError, DataError, decode
from closeranks.core.requests import DRAIN, SAVE
from closeranks.core.world import World
from tests.cost import python_calls


@dataclass
class Ends:
    """A link, and the agent's end of it."""

    link: WorkerLink
    agent: socket.socket
    word: SharedProgress
    lines: LineBuffer = field(default_factory=LineBuffer)

    def tell(self, **message: Any) -> None:
        self.agent.sendall(encode_message(message))

    def hear(self) -> list[dict[str, Any]]:
        """Everything that was sent; polling passes on what had found no room."""
        heard: list[dict[str, Any]] = []
        self.agent.setblocking(False)
        while True:
            try:
                heard += self.lines.feed(self.agent.recv(1 << 20))
            except BlockingIOError:
                if not self.link._outbox:
                    return heard
                self.link.poll()


@pytest.fixture
def ends() -> Iterator[Ends]:
    agent, worker = socket.socketpair()
    fd = create_progress_fd()
    world = asdict(World(1, 4, 1, 4, launcher="agent", generation=3))
    hello = {
        "type": "hello",
        "world": world,
        "entry": "a:b",
        "payload": {},
        "host": "127.0.0.1",
        "port": 0,
        "boxes": [],
    }
    agent.sendall(encode_message(hello))
    ends = Ends(WorkerLink(worker, SharedProgress(fd)), agent, SharedProgress(fd))
    os.close(fd)
    yield ends
    agent.close()
    worker.close()


def test_the_world_is_the_agents_word(ends: Ends) -> None:
    assert ends.link.world == World(1, 4, 1, 4, launcher="agent", generation=3)


def test_a_drain_stays_and_a_save_is_told_once(ends: Ends) -> None:
    assert ends.link.poll() == set()
    ends.tell(type="request", request="save")
    assert [ends.link.poll() for _ in range(3)] == [{SAVE}, set(), set()]
    ends.tell(type="request", request="drain")
    assert [ends.link.poll() for _ in range(2)] == [{DRAIN}] * 2
    ends.tell(type="request", request="save")
    assert [ends.link.poll() for _ in range(2)] == [{DRAIN, SAVE}, {DRAIN}]


def test_a_request_cut_in_two_is_heard_when_whole(ends: Ends) -> None:
    line = encode_message({"type": "request", "request": "drain"})
    ends.agent.sendall(line[:9])
    assert ends.link.poll() == set()
    ends.agent.sendall(line[9:])
    assert ends.link.poll() == {DRAIN}


def test_the_store_is_waited_for_and_requests_on_the_way_are_kept(ends: Ends) -> None:
    ends.tell(type="request", request="drain")
    answer = threading.Timer(0.05, lambda: ends.tell(type="store", address="127.0.0.1:7"))
    answer.start()
    assert ends.link.wait_for_store(timeout_s=10.0) == "127.0.0.1:7"
    assert ends.link.poll() == {DRAIN}
    answer.join()


def test_a_store_that_never_comes(ends: Ends) -> None:
    with pytest.raises(CloseranksError, match=r"rank 0 has not opened its store within 0.01 s"):
        ends.link.wait_for_store(timeout_s=0.01)


def test_whoever_announces_knows_it_too(ends: Ends) -> None:
    ends.link.announce_store("127.0.0.1:9")
    assert ends.link.wait_for_store(timeout_s=0.0) == "127.0.0.1:9"
    assert ends.hear() == [{"type": "store", "address": "127.0.0.1:9"}]


def test_progress_is_seen_by_the_other_side(ends: Ends) -> None:
    ends.link.progress(17, WorkerPhase.UPDATE)
    assert (ends.word.read().step, ends.word.read().phase) == (17, WorkerPhase.UPDATE)


def test_a_deaf_agent_costs_a_moment_and_the_loss_is_counted(ends: Ends) -> None:
    num_sent, text = 0, "x" * 100_000
    while ends.link._num_dropped == 0:
        started_at = time.monotonic()
        ends.link.send_event({"index": num_sent, "text": text})
        assert time.monotonic() - started_at < 10.0
        num_sent += 1
    heard = ends.hear()
    ends.link.send_event({"index": num_sent})
    heard += ends.hear()
    kept = [message["event"]["index"] for message in heard if message["type"] == "event"]
    assert kept == [*range(num_sent - 1), num_sent]
    assert [message for message in heard if message["type"] == "dropped"] == [{"type": "dropped", "count": 1}]


def test_events_from_threads_do_not_mix(ends: Ends) -> None:
    def tell(name: int) -> None:
        for index in range(200):
            ends.link.send_event({"name": name, "index": index})

    threads = [threading.Thread(target=tell, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = [message["event"] for message in ends.hear()]
    assert all([e["index"] for e in events if e["name"] == name] == list(range(200)) for name in range(4))


def test_a_failure_is_told_once_with_the_step_of_the_word(ends: Ends) -> None:
    ends.link.progress(23, WorkerPhase.COMPUTE)
    ends.link.report_failure(DataError("bad sample", "Remove it."))
    ends.link.report_failure(ValueError("what came of it"))
    (message,) = ends.hear()
    assert message["failure"]["step"] == 23
    assert str(decode(message["failure"]["error"])) == "bad sample. Remove it."


def test_the_end_says_whether_it_was_asked_for(ends: Ends) -> None:
    ends.link.on_sigterm()
    ends.link.finish()
    assert ends.hear() == [{"type": "finished", "ended_for": ["drain"]}]


def test_an_agent_that_is_gone_does_not_hold_a_sender_up(ends: Ends) -> None:
    ends.agent.close()
    ends.link.send_event({"to": "nobody"})
    assert not ends.link._outbox


def test_polling_is_cheap(ends: Ends) -> None:
    assert python_calls(ends.link.poll, number=200) < 200, "some 40"
    assert python_calls(lambda: ends.link.progress(5, 2), number=200) < 120, "some 20"
