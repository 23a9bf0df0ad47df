from __future__ import annotations

import threading
from collections.abc import Callable

from closeranks.core.errors import DataError
from closeranks.data.files.cache import PrefetchOutcome
from closeranks.data.files.prefetch import NUM_THREADS, FilePrefetcher


class Fetches:
    """Notes what it is asked for, and answers when it may."""

    def __init__(self, answer: Callable[[str], PrefetchOutcome] = lambda name: PrefetchOutcome.HERE) -> None:
        self.asked: list[str] = []
        self._answer = answer
        self._changed = threading.Condition()

    def __call__(self, name: str, stop: threading.Event) -> PrefetchOutcome:
        with self._changed:
            self.asked.append(name)
            self._changed.notify_all()
        return self._answer(name)

    def wait_for(self, num_asked: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= num_asked, 20)


def end_of_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "fetch ahead":
            thread.join(20)
            assert not thread.is_alive()


def test_files_come_in_their_order_once_and_the_threads_end() -> None:
    fetches = Fetches()
    ahead = FilePrefetcher(fetches)
    assert threading.active_count() == len(threading.enumerate())
    ahead.prefetch(["a", "b", "c", "d", "a"])
    end_of_threads()
    assert sorted(fetches.asked) == ["a", "b", "c", "d"]
    assert abs(fetches.asked.index("a") - fetches.asked.index("d")) >= 4 - NUM_THREADS
    ahead.prefetch(["b", "c", "d", "e"])
    end_of_threads()
    assert fetches.asked[4:] == ["e"], "what is settled is not looked at again"
    ahead.prefetch([])
    ahead.prefetch(["a"])
    end_of_threads()
    assert fetches.asked[5:] == ["a"], "unless it was out of mind meanwhile"


def test_a_new_wish_replaces_the_old_one() -> None:
    go_on = threading.Event()
    fetches = Fetches(lambda name: PrefetchOutcome.HERE if go_on.wait(20) else PrefetchOutcome.FAILED)
    ahead = FilePrefetcher(fetches)
    ahead.prefetch(["a", "b", "c", "d"])
    fetches.wait_for(2)
    ahead.prefetch(["x"])
    go_on.set()
    end_of_threads()
    assert sorted(fetches.asked) == ["a", "b", "x"]
    assert ahead.pending == ("x",)


def test_an_error_is_left_to_who_needs_the_file() -> None:
    def fails(name: str) -> PrefetchOutcome:
        if name == "a":
            raise DataError("the line is dead")
        raise RuntimeError("a bug")

    fetches = Fetches(fails)
    ahead = FilePrefetcher(fetches)
    ahead.prefetch(["a", "b", "c"])
    end_of_threads()
    assert sorted(fetches.asked) == ["a", "b", "c"]


def test_where_there_is_no_room_nobody_goes_on_before_some_is_let_go() -> None:
    has_room = threading.Event()
    fetches = Fetches(
        lambda name: PrefetchOutcome.HERE if name == "a" or has_room.is_set() else PrefetchOutcome.NO_SPACE
    )
    ahead = FilePrefetcher(fetches)
    ahead.prefetch(["a", "b", "c", "d", "e"])
    fetches.wait_for(5)
    assert not {"d", "e"} & set(fetches.asked)
    has_room.set()
    ahead.space_changed()
    end_of_threads()
    assert {"d", "e"} <= set(fetches.asked)


def test_closing_ends_it() -> None:
    fetches = Fetches(lambda name: PrefetchOutcome.NO_SPACE)
    ahead = FilePrefetcher(fetches)
    ahead.prefetch(["a", "b"])
    fetches.wait_for(2)
    ahead.close()
    end_of_threads()
    assert ahead.pending == ()


def test_what_was_closed_fetches_again_when_it_is_asked_to() -> None:
    stops: list[bool] = []

    def fetch(name: str, stop: threading.Event) -> PrefetchOutcome:
        stops.append(stop.is_set())
        return PrefetchOutcome.HERE

    ahead = FilePrefetcher(fetch)
    ahead.close()
    ahead.prefetch(["a"])
    end_of_threads()
    assert stops == [False]
