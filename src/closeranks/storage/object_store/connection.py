"""Finds and configures the fsspec file system behind a URL.

fsspec knows the protocols and reads its own settings (``FSSPEC_S3='{"endpoint_url": ...}'``, files in
``~/.config/fsspec``); the user's settings there win over those set here. Invariants: nothing of fsspec is imported
before a URL is opened; for S3 the retries of both client libraries are off, since ours cover more (see retry.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from closeranks.core.errors import SetupError

_EXTRAS = {"s3": "closeranks[s3]", "s3a": "closeranks[s3]"}
_CONFIG = {
    # Seconds. The libraries' default read timeout of 15 is short for a store that joins a thousand parts.
    "connect_timeout": 10,
    "read_timeout": 30,
    # The newer checksums confuse stores other than AWS's (some return that of the whole object with a range of it).
    # What is sent carries a Content-MD5, and what is stored is read back and compared with our own digests anyway.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


@dataclass(frozen=True, slots=True)
class FsspecConnection:
    fs: Any
    root: str
    """The URL's path as the file system writes it, without a trailing ``/``."""
    is_s3: bool


def connect(url: str, options: Mapping[str, Any]) -> FsspecConnection:
    """``SetupError`` if the URL's protocol is unknown or its package is not installed. No request is made."""
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0].rpartition("::")[2]
    _check_installed(protocol, url)
    is_s3 = protocol in _EXTRAS and "::" not in url
    try:
        fs, root = url_to_fs(url, **(_s3_options(options) if is_s3 else options))
    except (ValueError, TypeError, OSError) as error:
        raise SetupError(f"{url} cannot be opened: {error}", "See the documentation of fsspec for this URL.") from error
    if is_s3:
        fs.retries = 1
    return FsspecConnection(fs, root.rstrip("/"), is_s3)


def _check_installed(protocol: str, url: str) -> None:
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        what = f"'{url}' is not a valid location: unknown protocol '{protocol}'"
        raise SetupError(what, "Use a folder, s3://bucket/prefix, or another fsspec URL.") from error
    except ImportError as error:
        package = _EXTRAS.get(protocol)
        fix = f"Install it: pip install '{package}'" if package else f"{error}."
        raise SetupError(f"{url} needs a package that is not installed", fix) from error


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Merged here because fsspec lets an explicit dictionary replace one from the settings instead of merging them.
    Copied because botocore modifies its argument, and fsspec looks up cached file systems by these very values."""
    from fsspec.config import conf

    settings = {**conf.get("s3", {}), **options}
    one_try = {"retries": {"total_max_attempts": 1}}
    config = deepcopy({**_CONFIG, **settings.get("config_kwargs", {}), **one_try})
    return {**options, "config_kwargs": config, "use_listings_cache": False}
