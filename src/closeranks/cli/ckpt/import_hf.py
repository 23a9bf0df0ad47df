"""``closeranks ckpt import-hf``: creates a checkpoint and a job from Hugging Face weights."""

from __future__ import annotations

from typing import Annotated

import typer

from closeranks.cli.ckpt.transfer_progress import local_path, print_result, transfer_bar

HELP = """Create a closeranks checkpoint, and a job for it, from a Llama in Hugging Face's format.

\b
  closeranks ckpt import-hf Llama-3.2-1B runs/llama
  closeranks train runs/llama/job.toml -n 4 layout.zero=3

Takes a folder with config.json and .safetensors or .bin files, or a .pt file with config.json beside it. To start a job
from such a folder once, set checkpoint.weights=FOLDER instead.
"""


def register(app: typer.Typer) -> None:
    app.command("import-hf", help=HELP, short_help="Create a checkpoint from Hugging Face weights.")(import_hf)


def import_hf(
    folder: Annotated[str, typer.Argument(help="The folder, or the file with weights.", metavar="HF_FOLDER")],
    out: Annotated[str, typer.Argument(help="The run folder to create.", metavar="OUT")],
) -> None:
    from closeranks.run.huggingface.convert import import_hf as take

    run = local_path(out)
    with transfer_bar() as watcher:
        moved = take(folder, run, listener=watcher)
    print_result(moved, f"Its job is {run / 'job.toml'}: fill in data and train, and start it with `closeranks train`.")
