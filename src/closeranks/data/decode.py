"""Decodes the bytes of a record's fields into values.

The last part of a field's name determines its type: ``jpg jpeg png webp ppm pgm bmp gif tif tiff``, ``image`` and
``img`` are images; ``npy`` and ``npz`` arrays; ``json``; ``cls``, ``cls2``, ``index``, ``inx``, ``id`` and ``int``
integers; ``txt``, ``text``, ``transcript`` and ``caption`` text. If the name says nothing, bytes that begin like a
JPEG, PNG, WebP or BMP are an image (``is_image``) and others an array of bytes. Other values are unchanged, except that
lists of numbers become arrays and nested values get dotted names (``json.label``). Invariants: nothing is ever
unpickled: a field that would need it is a ``DataError``, since skipping samples would not help; bytes that do not match
their field's name are a ``BadRecordError`` with location and reason; images are uint8 [height, width, 3], however they
were stored, so that greyscale and colour images fit into one batch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Record
from closeranks.data.formats.json_error import json_error
from closeranks.data.timing import stage

if TYPE_CHECKING:
    from PIL.Image import Image

Decoded: TypeAlias = dict[str, Any]
"""Named values: arrays, str, int, float, bool; None and lists that cannot be arrays are unchanged."""
Where: TypeAlias = Callable[[int], object]
"""Location of the n-th record of a batch; called only if something is wrong with it."""

IMAGES = frozenset(["jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "bmp", "gif", "tif", "tiff", "image", "img"])
NUMBERS = frozenset(["cls", "cls2", "index", "inx", "id", "int"])
TEXTS = frozenset(["txt", "text", "transcript", "caption"])
PICKLED = frozenset(["pkl", "pickle", "pt", "pth", "joblib", "pyd"])
_NAMED = IMAGES | NUMBERS | TEXTS | PICKLED | {"npy", "npz", "json", "jsn"}

_ALL: Mapping[str, str] = MappingProxyType({})
_DEEP_MODES = ("I", "F")
_EMPTY = "is empty"


def decode(record: Record, image_size: int = 0, fields: Mapping[str, str] = _ALL, where: object = "") -> Decoded:
    """``fields``: name in the result -> name in the record; empty: all, under their own names. ``image_size``: images
    are cropped to their centre square and scaled to this many pixels; 0: unchanged."""
    chosen = fields or {name: name for name in record}
    decoded: Decoded = {}
    try:
        for name, source in chosen.items():
            decoded.update(_flat(name, _value(record, source, image_size)))
    except _Unusable as error:
        place = f" at {where}" if where != "" else ""
        raise BadRecordError(f"bad record{place}: field '{error.field}' {error}") from error.__cause__
    except _Refused as error:
        place = f" at {where}" if where != "" else ""
        raise DataError(
            f"the record{place} holds {error}, which would have to be unpickled: that can run any code",
            "Leave the field out (data.fields), or store it as .npy, .json or text.",
        ) from None
    return decoded


def decode_batch(
    records: Sequence[Record], image_size: int = 0, fields: Mapping[str, str] = _ALL, where: Where | None = None
) -> list[Decoded]:
    """``decode`` for each record; the time counts as ``decode``."""
    with stage("decode"):
        if where is None:
            return [decode(record, image_size, fields) for record in records]
        return [
            decode(record, image_size, fields, LazyLocation(where, number)) for number, record in enumerate(records)
        ]


def is_image(name: str, value: Any) -> bool:
    """Whether a field is decoded as an image: by its name, or by its bytes where the name says nothing."""
    if is_embedded(value):
        value = value["bytes"]
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return False
    kind = _kind(name)
    return kind in IMAGES or (kind not in _NAMED and looks_like_image(value))


def is_plain(name: str) -> bool:
    """Whether a field's name says nothing about its type."""
    return _kind(name) not in _NAMED


def is_embedded(value: Any) -> bool:
    """Whether a value is an image or sound as Hugging Face's datasets store it in a column."""
    return isinstance(value, Mapping) and value.keys() == {"bytes", "path"} and value["bytes"] is not None


def _kind(name: str) -> str:
    return name.rpartition(".")[2].lower()


def looks_like_image(value: bytes | bytearray | memoryview) -> bool:
    """Strict enough that text and numbers are not mistaken for images: JPEG and BMP have short signatures, so what
    follows the signature must be plausible as well."""
    head = bytes(value[:16])
    if head.startswith(b"\x89PNG\r\n\x1a\n") or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    if head.startswith(b"\xff\xd8\xff"):
        following = 4 + int.from_bytes(head[4:6], "big")  # where the second segment begins
        return head[3:4] >= b"\xc0" and bytes(value[following : following + 1]) == b"\xff"
    return head.startswith(b"BM") and int.from_bytes(head[2:6], "little") == len(value) and head[6:10] == bytes(4)


class LazyLocation:
    """A location that is computed only when it is printed."""

    def __init__(self, where: Where, number: int) -> None:
        self._where, self._number = where, number

    def __str__(self) -> str:
        return str(self._where(self._number))


class _Unusable(Exception):
    """The bytes of a field do not match its name; ``str`` completes "field 'x' ..."."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class _Refused(Exception):
    """A field that would have to be unpickled; ``str`` names it."""


def _value(record: Record, name: str, image_size: int) -> Any:
    """The value of a field, or a value nested in one: ``json.label`` if the record has only ``json``."""
    if name in record:
        return _decoded(name, record[name], image_size)
    outer, dot, inner = name.rpartition(".")
    while dot and outer not in record:
        outer, dot, more = outer.rpartition(".")
        inner = f"{more}.{inner}"
    if not dot:
        raise _Unusable(name, f"is missing; found {', '.join(sorted(record))}")
    value = _decoded(outer, record[outer], image_size)
    for part in inner.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise _Unusable(name, f"is missing: nothing in '{outer}' is called '{part}'")
        value = value[part]
    return value


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for inner, deeper in value.items():
        yield from _flat(f"{name}.{inner}", deeper)


def _decoded(name: str, value: Any, image_size: int) -> Any:
    if is_embedded(value):
        value = value["bytes"]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _of_bytes(name, _kind(name), value, image_size)
    if isinstance(value, (list, tuple)):
        return _array_of(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise _Refused(f"field '{name}', an array of objects")
    return value


def _of_bytes(name: str, kind: str, value: bytes | bytearray | memoryview, image_size: int) -> Any:
    if kind in PICKLED:
        raise _Refused(f"field '{name}'")
    if kind in IMAGES:
        return _image(name, value, image_size)
    if kind in ("npy", "npz"):
        return (_npy if kind == "npy" else _npz)(name, bytes(value))
    if kind not in _NAMED:
        if looks_like_image(value):
            return _image(name, value, image_size)
        return np.frombuffer(bytearray(value), np.uint8)
    try:
        text = str(value, "utf-8")
        return text if kind in TEXTS else int(text) if kind in NUMBERS else _nested(json.loads(text))
    except UnicodeDecodeError as error:
        raise _Unusable(name, f"is not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise _Unusable(name, f"is not {'a number' if kind in NUMBERS else 'JSON'}: {json_error(error)}") from error


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _nested(inner) for name, inner in value.items()}
    return _array_of(value) if isinstance(value, list) else value


def _array_of(values: Sequence[Any]) -> Any:
    """Numbers in rows of equal length become an array; anything else stays a list."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return values
    return array if array.dtype.kind in "biuf" else values


def _npy(name: str, data: bytes) -> npt.NDArray[Any]:
    try:
        return _read_npy(name, io.BytesIO(data))
    except (ValueError, EOFError, OSError, SyntaxError, TypeError) as error:
        raise _Unusable(name, f"is not a NumPy array: {error}") from error


def _read_npy(name: str, file: io.BytesIO) -> npt.NDArray[Any]:
    """Never through ``np.load``, which treats unknown content as a pickle."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"format version {version[0]}.{version[1]} is not known")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    if read_header(file)[2].hasobject:
        raise _Refused(f"field '{name}', an array of objects")
    file.seek(0)
    array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _npz(name: str, data: bytes) -> dict[str, npt.NDArray[Any]]:
    import zipfile
    import zlib

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [member for member in archive.namelist() if member.endswith(".npy")]
            return {member[:-4]: _read_npy(name, io.BytesIO(archive.read(member))) for member in members}
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, NotImplementedError, RuntimeError) as error:
        raise _Unusable(name, f"is not a NumPy archive: {error}") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise _Unusable(name, f"is not a NumPy archive: {error}") from error


def _image(name: str, data: bytes | bytearray | memoryview, image_size: int) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images cannot be decoded without Pillow", "Install it: pip install 'closeranks[data]'."
        ) from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(_DEEP_MODES):
                raise _Unusable(name, "is an image of more than 8 bits a channel; store it as .npy")
            return np.array(_sized(image, image_size))
    except (MemoryError, _Unusable):
        raise
    except Exception as error:  # Pillow's decoders raise any exception
        raise _Unusable(name, _image_words(data, error)) from error


def image_error(data: bytes | bytearray | memoryview, *, in_full: bool) -> str:
    """Why these bytes are not an image; empty if they are. ``in_full``: decode all of it; otherwise check only what
    needs no decoding: its header, and the checksums of a PNG. Without Pillow: check only that there are bytes."""
    try:
        from PIL import Image
    except ImportError:
        return "" if len(data) else _EMPTY
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load() if in_full else image.verify()
    except MemoryError:
        raise
    except Exception as error:  # see above
        return _image_words(data, error)
    return ""


def _image_words(data: bytes | bytearray | memoryview, error: Exception) -> str:
    """Completes "field 'x' ..."; Pillow identifies unknown input by its memory address, which is left out."""
    if not len(data):
        return _EMPTY
    if type(error).__name__ == "UnidentifiedImageError":
        return "is not a readable image"
    return f"is a damaged image: {error or type(error).__name__}"


def _sized(image: Image, image_size: int) -> Image:
    if not image_size:
        return image.convert("RGB")
    from PIL.Image import Resampling

    width, height = image.size
    shorter = min(width, height)
    # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size: far faster, and still at least twice the requested size.
    image.draft("RGB", (2 * image_size * width // shorter, 2 * image_size * height // shorter))
    width, height = image.size
    shorter = min(width, height)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    box = (left, top, left + shorter, top + shorter)
    return image.convert("RGB").resize((image_size, image_size), Resampling.BILINEAR, box)
