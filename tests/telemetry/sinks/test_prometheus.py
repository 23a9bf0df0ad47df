"""What a scrape returns, and to whom."""

from __future__ import annotations

import math
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from closeranks.core.errors import SetupError
from closeranks.core.events import Event, StepPhases, Warned
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.sinks import prometheus
from closeranks.telemetry.sinks.config import PrometheusConfig
from closeranks.telemetry.sinks.prometheus import PrometheusSink
from closeranks.telemetry.sinks.sink import SinkContext
from tests.telemetry.conftest import CPU, step

SECRET = "0123456789abcdef" * 4


@contextmanager
def opened(folder: Path, **keys: str) -> Iterator[PrometheusSink]:
    sink = made(folder, **keys)
    sink.open()
    try:
        yield sink
    finally:
        sink.close()


def made(folder: Path, told: list[Event] | None = None, **keys: str) -> PrometheusSink:
    config = TelemetryConfig(prometheus=PrometheusConfig(**{"listen": "127.0.0.1", **keys}))
    return PrometheusSink(SinkContext(folder, config, [].append if told is None else told.append))


def scrape(sink: PrometheusSink, headers: dict[str, str] | None = None) -> dict[str, float]:
    request = urllib.request.Request(f"http://{sink.address}/metrics", headers=headers or {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return {
        one.name + "".join(f"{{{label}={value}}}" for label, value in sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def token_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return str(path)


def test_a_scrape_shows_the_latest_step_and_the_totals(tmp_path: Path) -> None:
    with opened(tmp_path) as sink:
        sink.handle([replace(CPU, folder="/runs/tiny", generation=2)])
        sink.handle([step(number, loss=float(number), metrics={"top-5": 0.5}) for number in (1, 2)])
        sink.handle([StepPhases(2, 0.3, {"forward": 0.1, "data.all_reduce": 0.2}), step(3, loss=math.nan)])
        found = scrape(sink)
    assert math.isnan(found["closeranks_train_loss"])
    assert found["closeranks_run_step"] == 3.0
    assert found["closeranks_run_generation"] == 2.0
    assert found["closeranks_step_items_total"] == 3000.0
    assert found["closeranks_phase_seconds{phase=data.all_reduce}"] == 0.2
    assert found["closeranks_phase_seconds_total{phase=forward}"] == 0.1
    assert found["closeranks_events_total{event=step}"] == 3.0
    assert found["closeranks_train_items_per_second"] == pytest.approx(10_000)
    assert found["closeranks_train_metric{metric=top-5}"] == 0.5
    (info,) = [name for name in found if name.startswith("closeranks_run_info")]
    assert "{run=tiny}" in info


def test_the_token_is_required_and_any_other_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, token_file=token_file(tmp_path)) as sink:
        sink.handle([step(1)])
        assert scrape(sink, {"Authorization": f"Bearer {SECRET}"})["closeranks_run_step"] == 1.0
        assert scrape(sink, {"Authorization": f"bearer {SECRET}"})["closeranks_run_step"] == 1.0
        for headers in ({}, *({"Authorization": text} for text in ("", "Bearer", f"Basic {SECRET}", "Bearer wrong"))):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(sink, headers)
            assert refused.value.code == 401
            assert b"closeranks_" not in refused.value.read()
            refused.value.close()


def test_a_bad_token_file_is_refused_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        made(tmp_path, token_file=str(tmp_path / "none"))
    with pytest.raises(SetupError, match="too short"):
        made(tmp_path, token_file=token_file(tmp_path, "abc"))
    told: list[Event] = []
    made(tmp_path, told, token_file=token_file(tmp_path, mode=0o644))
    (warning,) = told
    assert isinstance(warning, Warned)
    assert "chmod 600" in warning.what


def test_any_free_port_is_the_same_one_after_a_recovery(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        address = first.address
    with opened(tmp_path) as again:
        assert again.address == address
        with opened(tmp_path) as other:
            assert other.address != address, "it is taken"


def test_an_endpoint_that_cannot_be_noted_is_opened_again_on_its_port(tmp_path: Path) -> None:
    sink = made(tmp_path / "run")  # a folder that is not there yet
    with pytest.raises(FileNotFoundError):
        sink.open()
    first = sink.address
    assert first is not None
    (tmp_path / "run").mkdir()
    again = made(tmp_path / "run", listen=str(first))
    with pytest.raises(SetupError, match="Address already in use"):
        again.open()
    sink.open()
    assert scrape(sink) == {}
    sink.close()
    again.open()
    assert again.address == first
    again.close()


def test_a_port_that_is_taken_is_an_error_with_advice(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as first,
        pytest.raises(SetupError, match=r"telemetry\.prometheus cannot listen on .* Choose another port"),
        opened(tmp_path / "other", listen=str(first.address)),
    ):
        pass


def test_clients_that_stall_get_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_MOST_CLIENTS", 2)
    with opened(tmp_path) as sink:
        assert sink.address is not None
        stalled = [socket.create_connection(sink.address) for _ in range(2)]
        with socket.create_connection(sink.address) as third:
            third.settimeout(60)
            assert third.recv(1) == b"", "closed at once"
        for one in stalled:
            one.close()
        while True:  # until the server has noticed that they are gone
            try:
                assert scrape(sink) == {}
                break
            except (OSError, urllib.error.URLError):
                continue


def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    from closeranks.core.system.fork_safety import close_in_children

    close_in_children()
    to_child, from_test = os.pipe()
    with opened(tmp_path) as sink:
        address = sink.address
        child = os.fork()
        if child == 0:
            os.close(from_test)
            os.read(to_child, 1)  # outlives the sink
            os._exit(0)
    with opened(tmp_path) as again:
        assert again.address == address
    os.close(from_test)
    os.close(to_child)
    assert os.waitpid(child, 0)[1] == 0
