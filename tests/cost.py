"""What a call costs, in a unit that a slow or busy machine stretches as much as the call itself."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time


def python_calls(call: Callable[[], object], number: int = 20, repeat: int = 100) -> float:
    """How many calls of an empty Python function take as long as ``call``, in processor time: both run by turns, and
    the shortest turn of each counts."""

    def empty() -> None: ...

    call_s = empty_s = float("inf")
    for _ in range(repeat):
        call_s = min(call_s, _seconds(call, number))
        empty_s = min(empty_s, _seconds(empty, 1000))
    return call_s / empty_s


def _seconds(call: Callable[[], object], number: int) -> float:
    began_at = thread_time()
    for _ in range(number):
        call()
    return (thread_time() - began_at) / number
