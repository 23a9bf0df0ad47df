"""Describes one value of a sample as text, or writes it to a file.

Values come from records (bytes, text, numbers, JSON) and from batches (arrays). Invariant: nothing is ever unpickled,
and a value that cannot be shown as text is described by its size.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from closeranks.data.decode import looks_like_image

_IMAGES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"BM": "bmp"}
_MIN_SHOWN = 12


@dataclass(frozen=True, slots=True)
class FieldFile:
    name: str
    data: bytes


def is_tokens(name: str, value: Any) -> bool:
    """Whether a value is a row of token ids: integers in one dim, but not the ``documents`` of a packed row."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "ui" and name != "documents"


def describe_field(value: Any, length: int) -> str:
    """A value in one line; ``length``: about how many characters of it are spelled out."""
    if isinstance(value, bytes):
        return _describe_bytes(value, length)
    if isinstance(value, np.ndarray):
        return _describe_array(value, length)
    text = value if isinstance(value, str) else json.dumps(value, default=repr, ensure_ascii=False)
    more = f"... ({len(text) - length:,} characters more)" if len(text) > length else ""
    return text[:length] + more


def _describe_bytes(value: bytes, length: int) -> str:
    size = f"{len(value):,} byte{'' if len(value) == 1 else 's'}"
    if image := _image_kind(value):
        return f"{size}, {_image_size(value) or image}"
    if value.startswith(b"\x93NUMPY"):
        array = np.load(io.BytesIO(value), allow_pickle=False)
        return f"{size}, NumPy {_describe_array(array, length)}"
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return size
    return f"{size}: {describe_field(text, length)}" if text.isprintable() or "\n" in text else size


def _image_kind(value: bytes) -> str:
    if not looks_like_image(value):
        return {b"P6\n": "ppm", b"P5\n": "pgm"}.get(value[:3], "")
    return next(kind for magic, kind in _IMAGES.items() if value.startswith(magic))


def _image_size(value: bytes) -> str:
    """Read from the header alone; empty if it cannot be read."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(value)) as image:
            return f"{image.format} {image.width}x{image.height} {image.mode}"
    except (ImportError, OSError, ValueError):
        return ""


def _describe_array(value: np.ndarray, length: int) -> str:
    what = f"{value.dtype}{list(value.shape)}"
    if value.ndim == 0:
        return f"{value.item()} ({value.dtype})"
    if not value.size or value.dtype.kind not in "uifb":
        return what
    if value.ndim == 1 and value.dtype.kind in "uib":
        shown = value[: max(length // 6, _MIN_SHOWN)].tolist()
        more = f" and {value.size - len(shown):,} more" if value.size > len(shown) else ""
        return what if length == 0 else f"{what}: {' '.join(map(str, shown))}{more}"
    low, mean, high = float(value.min()), float(value.mean(dtype=np.float64)), float(value.max())
    return f"{what}, {low:.6g} to {high:.6g}, mean {mean:.6g}"


def plain(value: Any) -> Any:
    """A value for JSON: bytes as their size, short arrays as lists."""
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray):
        if value.size <= 4096:
            return value.tolist()
        return {"dtype": str(value.dtype), "shape": list(value.shape)}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def file_of_field(name: str, value: Any) -> FieldFile:
    stem = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "field"
    if isinstance(value, bytes):
        kind = _image_kind(value)
        return FieldFile(stem if "." in stem or not kind or stem == kind else f"{stem}.{kind}", value)
    if isinstance(value, str):
        return FieldFile(f"{stem}.txt", value.encode(errors="surrogateescape"))
    if isinstance(value, np.ndarray):
        return _file_of_array(stem, value)
    return FieldFile(f"{stem}.json", json.dumps(value, default=repr).encode())


def _file_of_array(stem: str, value: np.ndarray) -> FieldFile:
    data = io.BytesIO()
    if value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4))):
        try:
            from PIL import Image
        except ImportError:
            pass  # an array file holds the same
        else:
            Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value).save(data, "PNG")
            return FieldFile(f"{stem}.png", data.getvalue())
    np.save(data, value, allow_pickle=False)
    return FieldFile(f"{stem}.npy", data.getvalue())
