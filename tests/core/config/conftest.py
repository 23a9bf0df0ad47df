from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from closeranks.core.config.load import LoadedConfig, load
from closeranks.core.errors import ConfigError, Problem

from .job_shapes import Job

Load = Callable[..., LoadedConfig[Job]]
Problems = Callable[..., tuple[Problem, ...]]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Load a job from the text of its file."""

    def run(
        text: str, *overrides: str, extra: Mapping[str, Any] | None = None, checks: Sequence[Any] = ()
    ) -> LoadedConfig[Job]:
        path = tmp_path / "job.toml"
        path.write_bytes(text.encode())
        return load(Job, path, overrides, extra=extra, checks=checks)

    return run


@pytest.fixture
def problems(load_text: Load) -> Problems:
    """The problems of a job that must not load."""

    def run(text: str, *overrides: str, **options: Any) -> tuple[Problem, ...]:
        with pytest.raises(ConfigError) as caught:
            load_text(text, *overrides, **options)
        return caught.value.problems

    return run
