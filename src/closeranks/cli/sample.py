"""``closeranks sample``: generates text with a trained model."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import typer

from closeranks.core.printable import printable

HELP = """Let the model of a run continue a text.

\b
  closeranks sample runs/tiny "import "
  closeranks sample runs/tiny "def " --tokens 400 --temperature 0.5 --seed 3
"""


def register(app: typer.Typer) -> None:
    app.command("sample", help=HELP, short_help="Let a trained model continue a text.")(sample)


def sample(
    run: Annotated[Path, typer.Argument(help="The run's folder, or its state file.", metavar="RUN")],
    prompt: Annotated[str, typer.Argument(help="What the model continues.", show_default=False)] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to draw.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest; higher is more random.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest only; 0: from all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")] = 0,
) -> None:
    from closeranks.run.sample import sample as draw

    drawn = draw(run, prompt, num_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    typer.echo(prompt, nl=False)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # each token is a byte, and may not be valid UTF-8 yet
    for piece in drawn:
        typer.echo(printable(decoder.decode(piece)), nl=False)
    typer.echo(printable(decoder.decode(b"", final=True)))
