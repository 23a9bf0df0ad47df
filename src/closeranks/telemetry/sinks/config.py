"""What can a job say about where its metrics go? The tables of ``[telemetry]``, one for each sink.

A sink is off until the one key is set that it cannot do without. Loads without torch and without any sink's package.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import UserError
from closeranks.core.system.address import is_loopback, parse_listen


class PrometheusConfig(ConfigTable):
    """An endpoint that Prometheus scrapes, on the host of rank 0 (needs `pip install closeranks[track]`)."""

    listen: str = ""
    """Address of the endpoint, such as "127.0.0.1:9400"; without a port any free one. Empty: no endpoint."""
    token_file: str = ""
    """A file with the bearer token that every request must carry. Required beyond loopback."""

    @property
    def is_on(self) -> bool:
        return bool(self.listen)

    @field_validator("listen")
    @classmethod
    def _is_address(cls, text: str) -> str:
        try:
            if text:
                parse_listen(text)
        except UserError as error:
            raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _is_protected(self) -> PrometheusConfig:
        if self.listen and not self.token_file and not is_loopback(parse_listen(self.listen).host):
            raise ValueError(
                f"{self.listen} can be reached from other machines, so the endpoint needs a token. Set "
                "telemetry.prometheus.token_file to a file made with `openssl rand -hex 32`, or listen on 127.0.0.1"
            )
        return self


class OtlpConfig(ConfigTable):
    """OpenTelemetry metrics, sent to a collector over HTTP (needs `pip install closeranks[track]`). Headers, such as
    credentials, come from the environment variable OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str = ""
    """URL of the collector, such as "http://localhost:4318"; "/v1/metrics" is added if it has no path. Empty: none."""
    every_s: float = Field(default=10.0, ge=0.1)
    """Seconds between two exports."""

    @property
    def is_on(self) -> bool:
        return bool(self.endpoint)

    @property
    def url(self) -> str:
        has_path = urlsplit(self.endpoint).path.strip("/")
        return self.endpoint if has_path else f"{self.endpoint.rstrip('/')}/v1/metrics"

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, text: str) -> str:
        parts = urlsplit(text)
        if text and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"'{text}' is not a URL. Write one such as http://localhost:4318")
        return text


class MlflowConfig(ConfigTable):
    """A run in MLflow (needs `pip install closeranks[track]`)."""

    experiment: str = ""
    """Name of the experiment, which is made if there is none. Empty: MLflow is not used."""
    tracking_uri: str = ""
    """A server or a database, such as "http://mlflow:5000" or "sqlite:///mlflow.db". Empty: what MLFLOW_TRACKING_URI
    says, or MLflow's own default."""
    every: int = Field(default=10, ge=1)
    """Send the metrics of every this many steps. Evaluations and other rare events are always sent."""

    @property
    def is_on(self) -> bool:
        return bool(self.experiment)


class WandbConfig(ConfigTable):
    """A run in Weights & Biases (needs `pip install closeranks[track]`, and `wandb login`)."""

    project: str = ""
    """Name of the project. Empty: W&B is not used."""
    entity: str = ""
    """The user or team that the project belongs to. Empty: the default of the account."""
    mode: Literal["", "online", "offline"] = ""
    """"offline" writes to wandb/ in the run folder, for `wandb sync`. Empty: what WANDB_MODE says, or "online"."""
    every: int = Field(default=10, ge=1)
    """Send the metrics of every this many steps. Evaluations and other rare events are always sent."""

    @property
    def is_on(self) -> bool:
        return bool(self.project)
