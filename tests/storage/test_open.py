from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fsspec.config
import pytest
from fsspec.registry import _registry

from closeranks.core.errors import SetupError
from closeranks.storage.object_store.connection import connect
from closeranks.storage.open import open_storage


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}"])
def test_a_path_is_a_folder(tmp_path: Path, form: str) -> None:
    storage = open_storage(form.format(tmp_path / "run"))
    assert (storage.is_local, storage.url) == (True, str(tmp_path / "run"))
    assert storage.names() == []
    assert not (tmp_path / "run").exists()


def test_a_path_may_be_a_path_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage(Path("run")).url == str(tmp_path / "run")


def test_a_url_is_remote(prefix: str) -> None:
    storage = open_storage(f"memory://{prefix}/")
    assert (storage.is_local, storage.url) == (False, f"memory://{prefix}")


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(SetupError, match="unknown protocol 's4'"):
        open_storage("s4://bucket/run")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(SetupError, match=r"s3://bucket/run needs a package.*pip install 'closeranks\[s3\]'"):
        open_storage("s3://bucket/run")


def test_settings_of_a_person_win_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {
        "endpoint_url": "http://127.0.0.1:1",
        "config_kwargs": {"read_timeout": 77, "s3": {"addressing_style": "path"}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", mine)
    fs = connect("s3://bucket/run", {}).fs
    assert fs.endpoint_url == "http://127.0.0.1:1"
    assert fs.config_kwargs["read_timeout"] == 77
    assert fs.config_kwargs["s3"] == {"addressing_style": "path"}
    assert fs.config_kwargs["retries"] == {"total_max_attempts": 1}
    assert fs.retries == 1
    fs.connect()
    assert connect("s3://bucket/run", {}).fs is fs, "one client for a place, however often it is opened"


def test_a_folder_needs_neither_torch_nor_fsspec() -> None:
    script = (
        "import sys; from closeranks.storage.open import open_storage; open_storage('/tmp').names();"
        "print([name for name in ('torch', 'fsspec', 's3fs', 'aiohttp') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"
