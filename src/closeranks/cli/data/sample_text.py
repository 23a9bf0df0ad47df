"""Formats a sample as text.

Invariant: a sample is read through the source, order and store that a run uses; this module only formats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.cli.data.field_text import describe_field, file_of_field, is_tokens, plain
from closeranks.cli.data.job_data import DataArguments
from closeranks.core.errors import SetupError, UserError

if TYPE_CHECKING:
    from closeranks.data.sampling.order import BatchSchedule

Decode: TypeAlias = Callable[[npt.NDArray[Any]], str]
_BYTES = 256


@dataclass(frozen=True, slots=True)
class SampleText:
    """A sample and what is known about it: ``facts`` in the order in which they are printed."""

    title: str
    facts: Mapping[str, Any]
    fields: Mapping[str, Any]
    vocab_size: int = 0

    def as_dict(self, decode: Decode | None) -> dict[str, Any]:
        texts = dict(self.texts(decode))
        return {
            "title": self.title,
            **self.facts,
            "fields": {k: plain(v) for k, v in self.fields.items()},
            "text": texts,
        }

    def texts(self, decode: Decode | None) -> Iterator[tuple[str, str]]:
        """Fields of tokens as text, if they can be decoded."""
        decode = decode or (bytes_as_text if self.vocab_size == _BYTES else None)
        for name, value in self.fields.items():
            if decode is not None and is_tokens(name, value):
                yield name, decode(np.asarray(value))


def bytes_as_text(tokens: npt.NDArray[Any]) -> str:
    return tokens.astype(np.uint8).tobytes().decode(errors="replace")


def decoder_of(tokenizer: str) -> Decode | None:
    if not tokenizer:
        return None
    if tokenizer == "bytes":
        return bytes_as_text
    from closeranks.data.building.tokenizer import open_decoder

    opened = open_decoder(tokenizer)
    return lambda tokens: str(opened.decode(tokens.tolist(), skip_special_tokens=False))


def sample_of_job(words: DataArguments, position: int) -> SampleText:
    from closeranks.cli.data.job_data import draw_at, open_job_data

    reading = open_job_data(words)
    sample = int(reading.order.at(np.array([position], dtype=np.int64))[0])
    turn = draw_at(reading, position)
    facts = {
        "sample": sample,
        "of": len(reading.source),
        "epoch": position // reading.order.num_samples,
        "part": "" if turn is None else f"{turn.part}: its sample {turn.sample} in its epoch {turn.epoch}",
        "read at": _when(reading.schedule, position),
        "lies in": reading.source.where(sample),
        "data": reading.source.identity,
    }
    batch = reading.source.read(np.array([sample], dtype=np.int64))
    vocab_size = int(getattr(reading.source, "vocab_size", 0) or reading.job.data.vocab_size)
    fields = {name: value[0].numpy() for name, value in batch.items()}
    return SampleText(f"{reading.name}, position {position:,}", facts, fields, vocab_size)


def _when(schedule: BatchSchedule, position: int) -> str:
    end = schedule.position(schedule.num_steps)
    if position >= end:
        return f"never: the run ends after {end:,} positions"
    step, place = divmod(position, schedule.global_batch)
    return f"step {step + 1}, micro-batch {place // schedule.micro_batch}"


def sample_of_path(words: DataArguments, number: int, format_: str) -> SampleText:
    from closeranks.cli.data.stored_data import open_path

    if words.overrides:
        what = f"'{words.overrides[0]}' changes a value of a job, but '{words.place}' is not a job"
        raise UserError(what, "Values can be changed only in a job file (.toml).")
    opened = open_path(words.place, format_)
    if number >= opened.num_samples:
        what = f"'{words.place}' holds {opened.num_samples:,} {opened.noun}, and number {number:,} was asked for"
        raise UserError(what, f"Name one of 0 to {opened.num_samples - 1:,}.")
    facts = {"lies in": str(opened.where(number)), "data": opened.identity}
    title = f"{words.place}, {opened.noun[:-1]} {number:,} of {opened.num_samples:,}"
    return SampleText(title, facts, opened.read(number), opened.vocab_size)


def lines(shown: SampleText, decode: Decode | None, length: int) -> Iterator[str]:
    yield shown.title
    facts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in shown.facts.items()}
    if "sample" in facts:
        facts["sample"] += f" of {facts.pop('of')}"
    yield from (f"  {name:<8} {value}" for name, value in facts.items() if value)
    texts = dict(shown.texts(decode))
    for name, value in shown.fields.items():
        yield f"{name}: {describe_field(value, length if name not in texts else 0)}"
        if name in texts:
            yield _cut(texts[name], length)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} characters more)"


def save_fields(shown: SampleText, folder: Path, decode: Decode | None) -> list[Path]:
    """Write each field to a file: images as they are or as PNG, text as text, arrays as NumPy files."""
    texts = dict(shown.texts(decode))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in shown.fields.items():
            file = file_of_field(name, texts.get(name, value))
            (folder / file.name).write_bytes(file.data)
            written.append(folder / file.name)
    except OSError as error:
        raise SetupError(f"'{folder}' cannot be written: {error.strerror or error}", "Name another folder.") from error
    return written
