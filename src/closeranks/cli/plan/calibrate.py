"""``closeranks plan calibrate``: measures this machine, so that plans for it rest on measurements.

Invariant: the file is written once, when everything was measured; nothing of it is written by a command that fails.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from closeranks.lab.calibrate.shapes import JobShapes

HELP = """Measure this machine for the planner: products by shape, memory, attention, links, disk; under two minutes.

\b
  closeranks plan calibrate                                 the device that is here, for any job
  closeranks plan calibrate examples/tiny.toml              with the shapes and some steps of a job
  closeranks plan calibrate --device cpu --out mine.json
  closeranks plan job.toml --cluster mine.toml --calibration mine.json

What was measured replaces the datasheet: the time of a product, of attention, of a pass over memory, of a collective
between the workers of one host, of an update of the optimizer, and of writing to the disk of the working folder. On a
CPU it also measures how much slower workers compute beside each other, up to two for each core. Of a named job a few
steps are trained: they show what steps take beyond their operations. Nothing else should run meanwhile. The file is
~/.cache/closeranks/calibration.json unless --out names another.
"""
DEFAULT_FILE = "~/.cache/closeranks/calibration.json"


def register(app: typer.Typer) -> None:
    app.command("calibrate", help=HELP, short_help="Measure this machine, for plans that rest on it.")(calibrate)


def calibrate(
    jobs: Annotated[
        list[Path] | None, typer.Argument(help="Job files whose shapes are measured first.", metavar="[JOB.toml]...")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The file to write.", metavar="FILE")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto.", metavar="DEVICE")] = "auto",
    seconds: Annotated[
        float, typer.Option("--seconds", help="How long products and attention are measured.", min=1)
    ] = 40.0,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Train some steps of the named jobs.")] = True,
) -> None:
    from closeranks.cli.terminal import safe_echo
    from closeranks.core.errors import ConfigError, Problem
    from closeranks.core.system.environment import num_gpus
    from closeranks.facts.calibration import calibration_text

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError([Problem("--device", f"'{device}' is no device that can be measured", "Use cpu or cuda.")])
    shapes = tuple(shape for path in jobs or () for shape in _shapes_of(path))
    path = (out or Path(DEFAULT_FILE)).expanduser()
    _write(path, None)

    from closeranks.lab.calibrate.calibrate import CalibrationRequest, summary
    from closeranks.lab.calibrate.calibrate import calibrate as measure

    chosen = device if device != "auto" else ("cuda" if num_gpus() else "cpu")
    precisions = ("bf16", "fp32") if chosen == "cuda" else ("fp32",)
    trained = tuple(path for path in jobs or () if steps and _shapes_of(path))
    request = CalibrationRequest("cuda" if chosen == "cuda" else "cpu", precisions, shapes, trained, seconds)
    found = measure(
        request, lambda line: typer.echo(line if line.startswith((" ", "not")) else f"measuring {line}", err=True)
    )
    _write(path, calibration_text(found))
    rows = summary(found)
    width = max(map(len, rows))
    safe_echo("\n".join(f"{name:<{width}}  {words}" for name, words in rows.items()))
    safe_echo(f"\nwritten to {path}; a plan uses it by --calibration {path}")


def _say(line: str) -> None:
    typer.echo(line if line.startswith((" ", "not")) else f"measuring {line}", err=True)


def _write(path: Path, text: str | None) -> None:
    """Whole or not at all. None: only whether it can be written, before minutes are spent on what goes into it."""
    from closeranks.core.errors import UserError

    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path == Path(DEFAULT_FILE).expanduser():
            path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text or "")
        if text is not None:
            unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "Name another with --out.") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _shapes_of(path: Path) -> list[JobShapes]:
    """Of a Llama; for other models the grid has to do."""
    from closeranks.lab.calibrate.shapes import JobShapes
    from closeranks.models.config import LlamaConfig
    from closeranks.run.job.job import load_job, micro_batch_size

    job = load_job(path).value
    if not isinstance(job.model, LlamaConfig):
        return []
    return [JobShapes(job.model.shape(), job.data.seq_len, micro_batch_size(job))]
