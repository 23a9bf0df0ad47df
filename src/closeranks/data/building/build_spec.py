"""The values that define a build and the results of its parts.

All of them can be pickled. Invariant: two builds with the same inputs and settings write the same bytes, wherever and
whenever they run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from closeranks.data.building.part_plan import BuildPart, InputExtent
from closeranks.data.building.readers.input_files import BuildInput
from closeranks.data.building.tokenizer import EncoderSpec
from closeranks.data.files.protocol import Files

LISTED = 20
"""Maximum number of skipped records that are listed, per part and in total."""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """The user's settings, as far as they affect the result."""

    kind: str = "tokens"
    field: str = ""
    split: str = "file"
    format: str = ""
    shard_bytes: int = 256_000_000
    on_bad: str = "stop"
    encoder: EncoderSpec | None = None
    """None if records are kept as they are."""

    def as_options(self) -> dict[str, Any]:
        """As command-line options, for messages and comparisons."""
        encoder = self.encoder
        options: dict[str, Any] = {"kind": self.kind, "field": self.field, "split": self.split, "format": self.format}
        options |= {"shard-size": self.shard_bytes, "on-bad": self.on_bad}
        if encoder is None:
            return options
        name = encoder.tokenizer.rpartition("/")[2]
        return {**options, "tokenizer": name, "tokenizer's digest": encoder.digest, "eos": encoder.eos}


@dataclass(frozen=True, slots=True)
class BuildSpec:
    given_paths: tuple[str, ...]
    """The inputs, as the user named them."""
    input_folders: tuple[Files, ...]
    inputs: tuple[BuildInput, ...]
    extents: tuple[InputExtent, ...]
    parts: tuple[BuildPart, ...]
    settings: BuildSettings
    out: Path
    index_folder: str
    """For the indexes of formats that have none, during the build: input folders are not modified."""

    @property
    def identity(self) -> str:
        """What is written into the shards: names and sizes of the inputs, nothing about time or location."""
        digest = blake3(repr(sorted(self.settings.as_options().items())).encode())
        for given in self.inputs:
            digest.update(f"{given.name}\0{given.kind}\0{given.num_bytes}\0".encode(errors="surrogateescape"))
        return digest.hexdigest(length=16)

    @property
    def input_bytes(self) -> int:
        return sum(given.num_bytes for given in self.inputs)


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A record that was left out."""

    file: str
    offset: int
    unit: str
    reason: str

    def __str__(self) -> str:
        return f"'{self.file}', {self.unit} {self.offset}: {self.reason}"


@dataclass(slots=True)
class PartCounts:
    """Counts over the items of a part so far. The shard writer stores them with every document, so that a build that
    was killed inside a part can restore them."""

    num_items: int = 0
    """Items read from the inputs, including bad ones."""
    text_bytes: int = 0
    """Bytes of documents before they were encoded."""
    num_skipped: int = 0
    skipped: tuple[tuple[str, int, str, str], ...] = ()
    """The first ``LISTED`` skipped records, as plain values."""

    def skip(self, one: SkippedRecord) -> None:
        self.num_items += 1
        self.num_skipped += 1
        if len(self.skipped) < LISTED:
            self.skipped = (*self.skipped, (one.file, one.offset, one.unit, one.reason))

    def encode(self) -> tuple[Any, ...]:
        """Plain values for JSON; cheap, since it is called for every document."""
        return self.num_items, self.text_bytes, self.num_skipped, self.skipped

    @classmethod
    def decode(cls, value: Any) -> PartCounts:
        num_items, text_bytes, num_skipped, named = value
        return cls(num_items, text_bytes, num_skipped, tuple((file, at, unit, why) for file, at, unit, why in named))

    def __add__(self, other: PartCounts) -> PartCounts:
        return PartCounts(
            self.num_items + other.num_items,
            self.text_bytes + other.text_bytes,
            self.num_skipped + other.num_skipped,
            (*self.skipped, *other.skipped)[:LISTED],
        )


@dataclass(frozen=True, slots=True)
class PartDone:
    """The result of a part."""

    index: int
    shards: tuple[str, ...]
    """Names of its files, in order."""
    tally: PartCounts
