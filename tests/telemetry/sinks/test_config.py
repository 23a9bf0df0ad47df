"""What the tables of sinks accept."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from closeranks.telemetry.sinks.config import OtlpConfig, PrometheusConfig


@pytest.mark.parametrize("listen", ["", "127.0.0.1:9400", "localhost", "[::1]:9400", "127.1.2.3"])
def test_loopback_needs_no_token(listen: str) -> None:
    assert PrometheusConfig(listen=listen).is_on == bool(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:9400", "10.0.0.1:9400", "[::]:9400", "node-1:9400"])
def test_beyond_loopback_a_token_is_required(listen: str) -> None:
    with pytest.raises(ValidationError, match="the endpoint needs a token"):
        PrometheusConfig(listen=listen)
    assert PrometheusConfig(listen=listen, token_file="token").is_on


@pytest.mark.parametrize("listen", ["127.0.0.1:x", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ValidationError, match="is not an address"):
        PrometheusConfig(listen=listen)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/metrics"),
        ("http://localhost:4318/", "http://localhost:4318/v1/metrics"),
        ("https://otel.example/api/otlp", "https://otel.example/api/otlp"),
    ],
)
def test_the_path_of_a_collector(endpoint: str, url: str) -> None:
    assert OtlpConfig(endpoint=endpoint).url == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="is not a URL"):
        OtlpConfig(endpoint=endpoint)
