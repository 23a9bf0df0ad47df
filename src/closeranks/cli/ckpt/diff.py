"""``closeranks ckpt diff``: lists the tensors in which two checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.checkpoint.load.catalogue import FoundCheckpoint
    from closeranks.checkpoint.load.manifest_diff import TensorDifference
    from closeranks.checkpoint.load.value_diff import LargestDifference

HELP = """Compare two checkpoints tensor by tensor, whatever layouts saved them.

\b
  closeranks ckpt diff runs/a runs/b
  closeranks ckpt diff runs/a/checkpoints/step-00000040 runs/a/checkpoints/step-00000060 --values
  closeranks ckpt diff runs/a runs/b "model/*" --json

Digests in the manifests tell what is equal: nothing is read and torch is not imported, unless --values asks by how much
tensors differ. Exit status: 0 all tensors are equal, 1 some differ, 2 there is nothing to compare.
"""


def register(app: typer.Typer) -> None:
    app.command("diff", help=HELP, short_help="Compare two checkpoints tensor by tensor.")(diff)


def diff(
    a: Annotated[str, typer.Argument(help="A run, one checkpoint, or a URL of those.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another.", metavar="B")],
    patterns: Annotated[
        list[str] | None,
        typer.Argument(help='Only tensors whose section/key matches, such as "model/*".', metavar="PATTERN"),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Read what differs, and say by how much.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="List equal tensors too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
) -> None:
    import json

    from closeranks.checkpoint.load.manifest_diff import diff_manifests as compare
    from closeranks.checkpoint.load.manifest_diff import tree_differences
    from closeranks.core.errors import CheckpointError
    from closeranks.run.state.checkpoint_lookup import matches_patterns, natural_sort_key, pick_checkpoint

    (one, first), (other, second) = pick_checkpoint(a), pick_checkpoint(b)
    found = [row for row in compare(first, second) if matches_patterns((row.section, row.key), patterns or [])]
    if not found:
        raise CheckpointError(f"no tensor of {a} or {b} matches PATTERN", "`closeranks ckpt show` lists their names.")
    found.sort(key=lambda row: natural_sort_key((row.section, row.key)))
    differences = _measure(one, other, found) if values else {}
    trees = tree_differences(first.tree, second.tree)
    is_equal = all(row.verdict == "equal" for row in found)
    if as_json:
        rows = [_row(row, differences.get((row.section, row.key))) for row in found]
        header = {"a": one.path, "b": other.path, "is_equal": is_equal, "tree": trees}
        print(json.dumps({**header, "tensors": rows}, indent=1))
    else:
        _print(one, other, [row for row in found if show_all or row.verdict != "equal"], differences, trees)
        num_equal = sum(row.verdict == "equal" for row in found)
        safe_echo(f"{num_equal} of {len(found)} tensors are equal")
    if not is_equal:
        raise typer.Exit(1)


def _measure(
    one: FoundCheckpoint, other: FoundCheckpoint, rows: list[TensorDifference]
) -> dict[tuple[str, str], LargestDifference]:
    """The largest difference of each tensor that differs and can be compared."""
    from closeranks.checkpoint.load.resharding_reader import CheckpointReader
    from closeranks.checkpoint.load.value_diff import largest_difference

    a, b = CheckpointReader(one.storage, one.name), CheckpointReader(other.storage, other.name)
    return {
        (row.section, row.key): largest_difference(a, b, row.section, row.key)
        for row in rows
        if row.verdict in ("differs", "dtype")
    }


def _print(
    one: FoundCheckpoint,
    other: FoundCheckpoint,
    rows: list[TensorDifference],
    differences: dict[tuple[str, str], LargestDifference],
    trees: list[str],
) -> None:
    from closeranks.telemetry.terminal_table import print_table, stdout

    console = stdout()
    console.print(f"A  {one.path}\nB  {other.path}\n", soft_wrap=True)
    for line in trees:
        console.print(f"tree  {line}", soft_wrap=True)
    if trees:
        console.print()
    if rows:
        numbers = ("different", "largest", "relative") if differences else ()
        cells = [
            (f"{row.section}/{row.key}", row.verdict, *_sides(row), *_numbers(row, differences)[: len(numbers)])
            for row in rows
        ]
        # Two digests add nothing to the verdict "differs"; shapes and dtypes do.
        is_told = all(row.verdict in ("differs", "equal") for row in rows)
        spare = ("B", "A") if is_told else ()
        print_table(("tensor", "verdict", "A", "B", *numbers), cells, right=numbers, droppable=spare)
        console.print()


def _numbers(row: TensorDifference, differences: dict[tuple[str, str], LargestDifference]) -> tuple[str, str, str]:
    largest = differences.get((row.section, row.key))
    if largest is None:
        return "", "", ""
    return f"{largest.num_different:,}", f"{largest.absolute:.3g}", f"{largest.relative:.3g}"


def _sides(row: TensorDifference) -> tuple[str, str]:
    """The digests of both sides, or their shapes and dtypes if they differ in those."""
    from closeranks.telemetry.terminal_table import shape_text

    def side(one: Any) -> str:
        if one is None:
            return ""
        shown = f"{shape_text(one.shape)} {one.dtype}"
        return f"{one.digest:016x}" if row.verdict in ("differs", "equal") else shown

    return side(row.a), side(row.b)


def _row(row: TensorDifference, largest: LargestDifference | None) -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(row)
    for side in ("a", "b"):
        if fields[side] is not None:
            fields[side]["digest"] = f"{fields[side]['digest']:016x}"
    if largest is not None:
        # A NaN on one side only gives infinity, which JSON does not have.
        shown = {name: value if value != float("inf") else "inf" for name, value in asdict(largest).items()}
        fields["largest"] = shown
    return fields
