"""Laws are checked without a deadline: a busy machine is not a counterexample. Object stores stand once a session.

Torch computes with one thread here, set before anything imports it: several processes of pytest share the cores, and
threads of OpenMP that spin while they wait for each other take ten times as long on a core that is taken.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from closeranks.core.system.environment import set_world
from tests import parts
from tests.storage import servers
from tests.storage.proxy import Standing

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis also fails a test whose examples take long to draw, by the clock.
BUSY = [HealthCheck.too_slow]
settings.register_profile("few", deadline=None, max_examples=25, suppress_health_check=BUSY)
settings.register_profile("many", deadline=None, max_examples=300, suppress_health_check=BUSY)
settings.load_profile("few")

# A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that: tests of Ctrl-C would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup a lost terminal is ignored, and children inherit that too.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SLOW = [line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if not line.startswith("#")]


UNMATCHED = pytest.StashKey[list[str]]()
"""What the list says of files that were collected, and no test there is called."""
MARKS = pytest.StashKey[dict[str, set[str]]]()
"""The marks of every test that was collected, whether it is selected or not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="K",
        help=f"run one of {parts.NUM_PARTS} parts of the selected tests (0 to 4), or auto: by commit",
    )


def pytest_configure(config: pytest.Config) -> None:
    """In every process: those of xdist are given the command line as it was typed."""
    if (asked := config.getoption("--part")) is None:
        return
    try:
        choice = parts.choose(asked)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if not hasattr(config, "workerinput"):
        print(choice)
    config.option.part = str(choice.part)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before anybody selects by marks."""
    names = [{item.nodeid, item.nodeid.partition("[")[0]} for item in items]
    for item, called in zip(items, names, strict=True):
        if not called.isdisjoint(SLOW):
            item.add_marker(pytest.mark.slow)
    files, known = {item.nodeid.partition("::")[0] for item in items}, set[str]().union(*names)
    config.stash[UNMATCHED] = [line for line in SLOW if line.partition("::")[0] in files and line not in known]
    config.stash[MARKS] = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    if (part := config.getoption("--part")) is not None:
        _select_part(int(part), config, items)


def _select_part(part: int, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest begin first, so that no process is left with one at the end."""
    durations = parts.read_durations()
    assigned = parts.assign([item.nodeid for item in items], durations)
    others = [item for item in items if assigned[item.nodeid] != part]
    seconds = Counter[str]()
    for node in durations:
        seconds[parts.file_of(node)] += durations[node] if assigned.get(node) == part else 0.0
    items[:] = [item for item in items if assigned[item.nodeid] == part]
    items.sort(key=lambda item: -seconds[parts.file_of(item.nodeid)])
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of ten thousand tests hardly any becomes garbage, and looking for it takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import: every session of ours would look through them as it begins."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers each time: one that passes today does not fail tomorrow by a draw."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _own_world() -> Iterator[None]:
    """What a module's tests said this process was is forgotten, or the next ones would believe it."""
    yield
    set_world(None)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A store that knows conditional puts."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A store that asks for keys, and keeps what it holds on a disk."""
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def proxied() -> Iterator[Standing]:
    """What stands between a client and a store, and breaks things by rule."""
    standing = Standing()
    yield standing
    standing.close()
