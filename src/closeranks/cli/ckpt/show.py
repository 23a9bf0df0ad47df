"""``closeranks ckpt show``: shows what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from closeranks.checkpoint.load.manifest_diff import TensorSummary

HELP = """Show what a checkpoint holds: every value of its tree, every tensor with shape, type and digest.

\b
  closeranks ckpt show runs/tiny
  closeranks ckpt show runs/tiny/checkpoints/step-00000040 "model/*.weight"
  closeranks ckpt show runs/tiny "*exp_avg*" --json

For a run: the checkpoint that it would resume from. The digest does not depend on the layout that saved the tensor.
Reads the manifest only: `closeranks ckpt verify` reads the bytes.
"""


def register(app: typer.Typer) -> None:
    app.command("show", help=HELP, short_help="Show the values and tensors of a checkpoint.")(show)


def show(
    place: Annotated[str, typer.Argument(help="A run, one checkpoint, or a URL of those.", metavar="CHECKPOINT")],
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help='Only tensors whose section/key matches, such as "model/*".', metavar="PATTERN"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.checkpoint.load.manifest_diff import tensor_summaries
    from closeranks.core.errors import CheckpointError
    from closeranks.run.state.checkpoint_lookup import matches_patterns, natural_sort_key, pick_checkpoint
    from closeranks.telemetry.terminal_table import size, stdout

    found, manifest = pick_checkpoint(place)
    tensors = {name: one for name, one in tensor_summaries(manifest).items() if matches_patterns(name, patterns or [])}
    if patterns and not tensors:
        raise CheckpointError(f"no tensor of {found.path} matches PATTERN", "Without a pattern, all are listed.")
    tensors = dict(sorted(tensors.items(), key=lambda item: natural_sort_key(item[0])))
    if as_json:
        rows = [_row(*name, one) for name, one in tensors.items()]
        header = {"path": found.path, "state": found.status, "step": manifest.step, "layout": manifest.layout}
        print(json.dumps({**header, "tree": manifest.tree, "tensors": rows}, indent=1))
        return
    console = stdout()
    kind = "full" if manifest.is_full else f"refers to {len(manifest.referenced_files())} files of earlier checkpoints"
    ranks = f"{manifest.num_ranks} {'rank' if manifest.num_ranks == 1 else 'ranks'}"  # torch DCP may save no layout
    what = f"step {manifest.step}, {size(manifest.num_bytes)}, {kind}, saved by {manifest.layout or ranks}"
    console.print(f"{found.path}: {what}", soft_wrap=True)
    if not patterns:
        console.print("\ntree")
        for line in _lines(manifest.tree):
            console.print(f"  {line}", soft_wrap=True)
    _print_tensors(tensors)


def _print_tensors(tensors: dict[tuple[str, str], TensorSummary]) -> None:
    from closeranks.telemetry.terminal_table import print_table, shape_text, size, stdout

    console = stdout()
    for section in dict.fromkeys(section for section, _ in tensors):
        held = {key: one for (of, key), one in tensors.items() if of == section}
        total = sum(one.num_bytes for one in held.values())
        console.print(f"\n{section}: {len(held)} {'tensor' if len(held) == 1 else 'tensors'}, {size(total)}")
        rows = [
            (
                f"  {key}",
                shape_text(one.shape),
                one.dtype,
                f"{one.num_bytes:,}",
                f"{one.digest:016x}",
                str(one.num_chunks),
            )
            for key, one in held.items()
        ]
        headings = ("  key", "shape", "dtype", "bytes", "digest", "chunks")
        print_table(headings, rows, right=("bytes", "chunks"), droppable=("chunks", "bytes", "digest"))


def _lines(value: Any, name: str = "") -> Iterator[str]:
    """A tree of plain values, one line for each leaf, indented."""
    if isinstance(value, dict) and value:
        if name:
            yield name
        for key, one in value.items():
            yield from (f"  {line}" if name else line for line in _lines(one, str(key)))
    else:
        yield f"{name} = {value if value != '' else repr('')}"


def _row(section: str, key: str, one: TensorSummary) -> dict[str, Any]:
    return {
        "section": section,
        "key": key,
        "shape": list(one.shape),
        "dtype": one.dtype,
        "num_bytes": one.num_bytes,
        "digest": f"{one.digest:016x}",
        "num_chunks": one.num_chunks,
    }
