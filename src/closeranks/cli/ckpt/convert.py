"""``closeranks ckpt convert``: writes weights in another program's format, or in ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from closeranks.cli.ckpt.transfer_progress import local_path
from closeranks.cli.terminal import safe_echo

HELP = """Write weights in another format: a closeranks checkpoint, a torch DCP folder, a torch or a safetensors file.

\b
  closeranks ckpt convert runs/tiny tiny-dcp --to dcp              for torch.distributed.checkpoint.load
  closeranks ckpt convert runs/tiny tiny.pt --to torch             for torch.load(weights_only=True)
  closeranks ckpt convert runs/tiny tiny.safetensors --to safetensors
  closeranks ckpt convert old-dcp start --to closeranks            then: checkpoint.weights = "start"

SOURCE is a run, its checkpoints folder or one checkpoint (or a URL of those), a torch DCP folder, a Hugging Face
folder, or a .pt, .pth, .bin or .safetensors file. Only weights are written; a checkpoint converted to DCP
also keeps the optimizer state. For a folder that transformers loads, see export-hf. Every chunk of a checkpoint is
verified as it is read; OUT appears complete or not at all, and is never overwritten.

Exit status: 0 written, 2 something needs fixing.
"""
Format = Literal["closeranks", "dcp", "torch", "safetensors"]


def register(app: typer.Typer) -> None:
    app.command("convert", help=HELP, short_help="Write weights in another format.")(convert)


def convert(
    source: Annotated[str, typer.Argument(help="What to read.", metavar="SOURCE")],
    out: Annotated[str, typer.Argument(help="What to write; must not exist yet.", metavar="OUT")],
    to: Annotated[Format, typer.Option(help="The format of OUT.")],
) -> None:
    from closeranks.checkpoint.dcp.conversion import convert as convert_weights

    path = local_path(out)
    with _progress(f"{source} -> {out}") as (on_total, on_bytes):
        done = convert_weights(source, path, to, on_total, on_bytes)
    for note in (*done.notes, *_suffix_note(path.suffix, to)):
        safe_echo(f"note: {note}", err=True)
    kind = "checkpoint with weights only" if to == "closeranks" else to
    safe_echo(f"{out}: {kind}, {done.num_tensors} tensors, {done.num_bytes:,} bytes, from {done.source}")


def _suffix_note(suffix: str, to: Format) -> tuple[str, ...]:
    """A note if OUT has a suffix by which ``checkpoint.weights`` and this command do not recognize its format."""
    known = {"torch": (".pt", ".pth", ".bin"), "safetensors": (".safetensors",)}.get(to, (suffix,))
    return () if suffix in known else (f"Call it {' or '.join(f'NAME{end}' for end in known)}, to read it here again.",)


@contextmanager
def _progress(title: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Callbacks that set the total and add to the bytes done: a progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda total: bar.update(task, total=total), lambda num_bytes: bar.update(task, advance=num_bytes)
