"""Debian's Prometheus scrapes a sink; its linter reads what the sink serves."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.events import StepPhases
from closeranks.telemetry.sinks.prometheus import PrometheusSink
from tests.telemetry.conftest import CPU, step
from tests.telemetry.sinks.test_prometheus import opened, token_file

pytestmark = [
    pytest.mark.world,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus on this machine"),
]
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: with the token
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{address}"]}}]
  - job_name: without
    static_configs: [{{targets: ["{address}"]}}]
"""


def fed(sink: PrometheusSink) -> None:
    sink.handle([CPU, *(step(number, loss=float(number), metrics={"accuracy": 0.5}) for number in range(1, 8))])
    sink.handle([StepPhases(7, 0.3, {"forward": 0.1, "data.all_reduce": 0.2})])


@contextmanager
def prometheus(folder: Path, address: object, token: str) -> Iterator[Callable[[str], list[Any]]]:
    """A server that scrapes ``address``; yields a function that queries it."""
    (folder / "prometheus.yml").write_text(CONFIG.format(address=address, token=token))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )

    def query(text: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(text)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except (OSError, urllib.error.URLError):
            return []

    try:
        yield query
    finally:
        server.terminate()
        server.wait(60)


def until(query: Callable[[str], list[Any]], text: str) -> list[Any]:
    """Prometheus scrapes when it likes: ask until it has an answer."""
    pause = threading.Event()
    for _ in range(600):
        if found := query(text):
            return found
        pause.wait(0.1)
    raise AssertionError(f"no answer to {text}")


def test_it_is_scraped_with_the_token_and_not_without(tmp_path: Path) -> None:
    token = token_file(tmp_path)
    with opened(tmp_path, token_file=token) as sink, prometheus(tmp_path, sink.address, token) as query:
        fed(sink)
        (loss,) = until(query, "closeranks_train_loss == 7")
        assert loss["metric"]["job"] == "with the token"
        phases = until(query, 'closeranks_phase_seconds{phase="data.all_reduce"}')
        assert [one["value"][1] for one in phases] == ["0.2"]
        assert until(query, "closeranks_step_items_total == 7000")
        up = {one["metric"]["job"]: one["value"][1] for one in until(query, "up")}
        assert up["with the token"] == "1"
        (down,) = until(query, 'up{job="without"} == 0')
        assert down["value"][1] == "0"


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as sink:
        fed(sink)
        text = urllib.request.urlopen(f"http://{sink.address}/metrics", timeout=60).read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
