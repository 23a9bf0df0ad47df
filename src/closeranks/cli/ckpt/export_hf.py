"""``closeranks ckpt export-hf``: writes a trained Llama as a Hugging Face folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from closeranks.cli.ckpt.transfer_progress import local_path, parse_size, print_result, transfer_bar

HELP = """Write the weights of a run as a folder that transformers loads.

\b
  closeranks ckpt export-hf runs/tiny tiny-hf
  closeranks ckpt export-hf runs/tiny/checkpoints/step-00000040 tiny-hf --dtype bfloat16 --shard-size 2GB

The newest sound checkpoint is exported, or the one that is named. It is written tensor by tensor: the model need not
fit in memory. The folder appears when it is complete.
"""


class ExportDtype(StrEnum):
    """The dtypes that weights can be written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


def register(app: typer.Typer) -> None:
    app.command("export-hf", help=HELP, short_help="Write weights that transformers loads.")(export_hf)


def export_hf(
    run: Annotated[str, typer.Argument(help="A run, its checkpoints, one of them, or a URL of those.", metavar="RUN")],
    out: Annotated[str, typer.Argument(help="The folder to create.", metavar="OUT")],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Dtype to write; default: as saved.")] = None,
    shard_size: Annotated[str, typer.Option(help="Maximum size of one file.")] = "5GB",
) -> None:
    shard_bytes, folder = parse_size(shard_size), local_path(out)
    from closeranks.run.huggingface.convert import export_hf as export

    with transfer_bar() as watcher:
        moved = export(run, folder, dtype=dtype.value if dtype else "", shard_bytes=shard_bytes, listener=watcher)
    print_result(moved, f"Load it with transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).")
