"""Laws are checked without a deadline: a busy machine is not a counterexample. Object stores stand once a session."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from closeranks.core.environment import set_world
from tests.storage import servers
from tests.storage.proxy import Standing

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that: tests of Ctrl-C would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup a lost terminal is ignored, and children inherit that too.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


SLOW = [line for line in Path(__file__).with_name("slow.txt").read_text().splitlines() if not line.startswith("#")]


UNMATCHED = pytest.StashKey[list[str]]()
"""What the list says of files that were collected, and no test there is called."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before anybody selects by marks."""
    names = [{item.nodeid, item.nodeid.partition("[")[0]} for item in items]
    for item, called in zip(items, names, strict=True):
        if not called.isdisjoint(SLOW):
            item.add_marker(pytest.mark.slow)
    files, known = {item.nodeid.partition("::")[0] for item in items}, set[str]().union(*names)
    config.stash[UNMATCHED] = [line for line in SLOW if line.partition("::")[0] in files and line not in known]


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import: every session of ours would look through them as it begins."""
    gc.collect()
    gc.freeze()


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
