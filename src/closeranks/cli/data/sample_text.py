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

    decoder = open_decoder(tokenizer)
    return lambda tokens: str(decoder.decode(tokens.tolist(), skip_special_tokens=False))


def sample_of_job(arguments: DataArguments, position: int) -> SampleText:
    from closeranks.cli.data.job_data import draw_at, open_job_data

    job_data = open_job_data(arguments)
    sample = int(job_data.order.at(np.array([position], dtype=np.int64))[0])
    draw = draw_at(job_data, position)
    facts = {
        "sample": sample,
        "of": len(job_data.source),
        "epoch": position // job_data.order.num_samples,
        "part": "" if draw is None else f"{draw.part}: its sample {draw.sample} in its epoch {draw.epoch}",
        "read at": _when(job_data.schedule, position),
        "lies in": job_data.source.where(sample),
        "data": job_data.source.identity,
    }
    batch = job_data.source.read(np.array([sample], dtype=np.int64))
    vocab_size = int(getattr(job_data.source, "vocab_size", 0) or job_data.job.data.vocab_size)
    fields = {name: value[0].numpy() for name, value in batch.items()}
    return SampleText(f"{job_data.name}, position {position:,}", facts, fields, vocab_size)


def _when(schedule: BatchSchedule, position: int) -> str:
    end = schedule.position(schedule.num_steps)
    if position >= end:
        return f"never: the run ends after {end:,} positions"
    step, offset = divmod(position, schedule.global_batch)
    return f"step {step + 1}, micro-batch {offset // schedule.micro_batch}"


def sample_of_path(arguments: DataArguments, number: int, format_: str) -> SampleText:
    from closeranks.cli.data.stored_data import open_path

    if arguments.overrides:
        what = f"'{arguments.overrides[0]}' changes a value of a job, but '{arguments.place}' is not a job"
        raise UserError(what, "Values can be changed only in a job file (.toml).")
    stored = open_path(arguments.place, format_)
    if number >= stored.num_samples:
        what = f"'{arguments.place}' holds {stored.num_samples:,} {stored.noun}, and number {number:,} was asked for"
        raise UserError(what, f"Name one of 0 to {stored.num_samples - 1:,}.")
    facts = {"lies in": str(stored.where(number)), "data": stored.identity}
    title = f"{arguments.place}, {stored.noun[:-1]} {number:,} of {stored.num_samples:,}"
    return SampleText(title, facts, stored.read(number), stored.vocab_size)


def lines(sample: SampleText, decode: Decode | None, length: int) -> Iterator[str]:
    yield sample.title
    facts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in sample.facts.items()}
    if "sample" in facts:
        facts["sample"] += f" of {facts.pop('of')}"
    yield from (f"  {name:<8} {value}" for name, value in facts.items() if value)
    texts = dict(sample.texts(decode))
    for name, value in sample.fields.items():
        yield f"{name}: {describe_field(value, length if name not in texts else 0)}"
        if name in texts:
            yield _truncate(texts[name], length)


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} characters more)"


def save_fields(sample: SampleText, folder: Path, decode: Decode | None) -> list[Path]:
    """Write each field to a file: images as they are or as PNG, text as text, arrays as NumPy files."""
    texts = dict(sample.texts(decode))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in sample.fields.items():
            file = file_of_field(name, texts.get(name, value))
            (folder / file.name).write_bytes(file.data)
            written.append(folder / file.name)
    except OSError as error:
        raise SetupError(f"'{folder}' cannot be written: {error.strerror or error}", "Name another folder.") from error
    return written
