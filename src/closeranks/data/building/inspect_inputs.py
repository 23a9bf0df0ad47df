"""Inspects the inputs of a build before anything is written.

Invariant: a mistake that shows in the first record of an input (a missing field, a wrong format) is reported now, in
one sentence, and not after an hour.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.data.building.build_spec import BuildSettings, BuildSpec
from closeranks.data.building.part_plan import InputExtent, InputRange, plan_parts
from closeranks.data.building.readers.decompress import open_stream
from closeranks.data.building.readers.input_files import JSONL, STORED, TAR, TEXT, BuildInput, FoundInputs, find_inputs
from closeranks.data.building.readers.input_reader import InputReadOptions, read_range
from closeranks.data.building.readers.input_store import open_input_store
from closeranks.data.building.tokenizer import TokenEncoder, open_encoder
from closeranks.data.dataset_protocol import Records
from closeranks.data.files.open import open_files
from closeranks.data.files.protocol import Files

_PEEK_BYTES = 4096
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")


def make_build_spec(
    given: tuple[str, ...], settings: BuildSettings, out: Path, index_folder: str, on_remark: Callable[[str], None]
) -> BuildSpec:
    """Everything that is decided before the first shard is written."""
    folders = tuple(_open_folder(text, out) for text in given)
    found = find_inputs(folders, given, settings.format)
    for text, one in zip(given, found, strict=True):
        if one.left_out:
            on_remark(f"note: '{text}' is taken as {one.inputs[0].kind}; {_left_out(one)}")
    inspector = _Inspector(
        settings, open_encoder(settings.encoder) if settings.encoder is not None else None, index_folder
    )
    for one in found:
        first = next((given for given in one.inputs if given.num_bytes), None)
        if first is not None:
            inspector.check_first(first, folders[first.root])
    inputs = tuple(part for one in found for part in one.inputs)
    extents = tuple(inspector.extent(one, folders[one.root]) for one in inputs)
    if not any(extent.num_units for extent in extents):
        raise DataError("the inputs hold no documents", "Name inputs that do.")
    return BuildSpec(
        given, folders, inputs, extents, plan_parts(extents, settings.shard_bytes), settings, out, index_folder
    )


def _open_folder(text: str, out: Path) -> Files:
    if not text.strip():
        raise DataError("the name of an input is empty", "Name a file, a folder, or a URL of those.")
    if "://" not in text:
        path = Path(text).expanduser()
        if not path.exists():
            raise DataError(f"there is no file or folder '{text}'", "Check the name.")
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise DataError(f"--out {out} lies inside the input '{text}'", "Name a folder outside of it.")
    return open_files(text)


def _left_out(found: FoundInputs) -> str:
    names = ", ".join(found.left_out[:4]) + (", ..." if len(found.left_out) > 4 else "")
    count = len(found.left_out)
    return f"left out: {count:,} other {'file' if count == 1 else 'files'} ({names})"


@dataclass(frozen=True, slots=True)
class _Inspector:
    settings: BuildSettings
    encoder: TokenEncoder | None
    index_folder: str

    def extent(self, given: BuildInput, files: Files) -> InputExtent:
        """The units into which an input can be cut, and the expected size of the output."""
        factor = self.encoder.bytes_per_byte if self.encoder is not None else 1.0
        return InputExtent(int(given.content_bytes * factor), self._num_units(given, files))

    def _num_units(self, given: BuildInput, files: Files) -> int:
        if given.kind in STORED:
            return len(self._store(given, files))
        if given.compression or given.kind == TAR or (given.kind == TEXT and self.settings.split == "file"):
            return 1
        return given.num_bytes

    def _store(self, given: BuildInput, files: Files) -> Records:
        return open_input_store(given, files, self.index_folder)

    def check_first(self, given: BuildInput, files: Files) -> None:
        settings = self.settings
        needs_utf8 = self.encoder is not None and self.encoder.needs_utf8
        options = InputReadOptions(settings.kind, settings.field, settings.split, needs_utf8)
        span = InputRange(0, 0, min(1, self._num_units(given, files)) if given.kind in STORED else given.num_bytes)
        items = read_range(given, files, span, options, lambda: self._store(given, files), _quiet)
        item = next(items, None)
        if given.kind == JSONL and (item is None or item.reason):
            self._refuse_array(given, files)
        if item is not None and item.reason and settings.on_bad == "stop":
            where = f"'{item.file}', {item.unit} {item.offset}"
            raise DataError(f"{where}: {item.reason}", _advice(given, settings))

    def _refuse_array(self, given: BuildInput, files: Files) -> None:
        """A JSON array of objects that fills the file is not JSON lines, whatever its first line looks like."""
        shown = files.full_name(given.name)
        with files.local_path(given.name) as path, open_stream(path, shown, given.compression) as stream:
            if not _ARRAY.match(stream.content.read(_PEEK_BYTES)):
                return
        convert = "import json, sys; [print(json.dumps(one)) for one in json.load(sys.stdin)]"
        read = {"": f"{shlex.quote(shown)} ", "gz": f"<(gunzip -c {shlex.quote(shown)}) "}.get(
            given.compression, "FILE "
        )
        what = f"'{shown}' is one JSON array, not one object per line"
        raise DataError(what, f"Convert it: python -c {shlex.quote(convert)} < {read}> converted.jsonl")


def _quiet(num_bytes: int) -> None:
    return None


def _advice(given: BuildInput, settings: BuildSettings) -> str:
    if settings.kind == "tokens" and given.kind != TEXT:
        return "Name the field that holds the text with --field, or keep records as they are with --kind records."
    return "Fix or remove it, say what it is with --format, or leave such records out with --on-bad skip."
