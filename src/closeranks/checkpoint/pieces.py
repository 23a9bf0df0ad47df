"""How is a state that is spread over the ranks saved without gathering it, and read back under any other layout?

Every rank writes one file with its own pieces; rank 0's also holds what is no tensor of the model. All files of a save
carry one name, which rank 0 draws anew each time: no file is ever written over, and ranks whose jobs differ in a word
still write one save. Old files go only when all new ones are there. Invariants: a save counts when all of its files are
there, and else the one before it does; what a reader gives was checked against its digest and is whole, or is refused
by name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.checkpoint.files import FILE_NAME, StateFile, write_file
from closeranks.checkpoint.overlaps import Box, Overlap, Run, plan
from closeranks.checkpoint.trees import Tree, rebuild, skeleton, tensors
from closeranks.core.errors import CheckpointError, SetupError
from closeranks.core.pieces import Piece

FOLDER_NAME = "state"
_FORMAT = "closeranks-pieces-1"
_FILE = re.compile(r"state-([0-9a-f]{8})-(\d{5})-of-(\d{5})\.safetensors")

Item = tuple[str, str, Piece, Tensor]
"""Section, key within it, what the tensor is a piece of, and the tensor."""


@dataclass(frozen=True, slots=True)
class _FileName:
    save: str
    rank: int
    num_ranks: int

    def __str__(self) -> str:
        return f"state-{self.save}-{self.rank:05d}-of-{self.num_ranks:05d}.safetensors"


def everywhere(is_well: bool) -> bool:
    """Whether all ranks of torch's default group say so; each of them must ask."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return is_well
    said: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, is_well)
    return all(said)


def draw_name() -> str:
    """A name for a save: rank 0's draw, on all ranks of torch's default group; each of them must ask.

    From the system's randomness: the generators are seeded alike in every run.
    """
    drawn = torch.tensor([secrets.randbits(32)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(drawn, src=0)
    return f"{int(drawn):08x}"


def save_pieces(
    folder: Path,
    rank: int,
    num_ranks: int,
    items: Iterable[Item],
    tree: Tree,
    *,
    draw_name: Callable[[], str] = draw_name,
    everywhere: Callable[[bool], bool] = everywhere,
) -> int:
    """Write this rank's file; every rank calls it, and returns when all files are there. Rank 0's ``tree`` is kept.

    Returns the size of the own file in bytes. Where one rank fails, all raise, and what was saved before still counts.
    """
    name = _FileName(draw_name(), rank, num_ranks)
    failure: Exception | None = None
    num_bytes = 0
    try:
        num_bytes = _write(folder, name, items, tree if rank == 0 else None)
    except Exception as error:  # raised below, once the others know
        failure = error
    is_complete = everywhere(failure is None)
    if failure is not None:
        raise failure
    if not is_complete:
        raise SetupError(f"another worker could not save its part of the state to {folder}", "Look for its own words.")
    if rank == 0:
        _drop_replaced(folder, name.save, num_ranks)
    return num_bytes


def _drop_replaced(folder: Path, save: str, num_ranks: int) -> None:
    """Remove what stood here before a save, a whole state beside it included, if the save can be seen to be whole.

    Where that fails, more than one stands and the later counts: no reason to fail a run that has saved its state.
    """
    with suppress(OSError):
        found = _files(folder)
        if sum((name.save, name.num_ranks) == (save, num_ranks) for name in found) < num_ranks:
            return
        for name in found:
            if name.save != save:
                (folder / str(name)).unlink(missing_ok=True)
        if folder.name == FOLDER_NAME:
            (folder.parent / FILE_NAME).unlink(missing_ok=True)


def remove_pieces(folder: Path) -> None:
    """Remove the pieces of a folder, since a whole state has replaced them; whatever else lies there stays."""
    with suppress(OSError):  # the later counts where both stand
        for name in _files(folder):
            (folder / str(name)).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _write(folder: Path, file: _FileName, items: Iterable[Item], tree: Tree | None) -> int:
    entries: dict[str, Any] = {}
    bones = None if tree is None else skeleton(tree)
    held = {f"tree/{name}": tensor for name, tensor in tensors(tree or {})}
    for section, key, piece, tensor in items:
        if tuple(tensor.shape) != piece.local_shape:
            raise ValueError(f"{section}/{key}: a piece of {piece.local_shape}, but a tensor of {tuple(tensor.shape)}")
        name = f"{section}/{key}#{len(entries)}"
        entries[name] = {"section": section, "key": key, "piece": asdict(piece)}
        held[name] = tensor
    return write_file(folder / str(file), _FORMAT, {"file": str(file), "entries": entries, "tree": bones}, held)


def is_pieces(path: Path) -> bool:
    """Whether the state at a path (a run's folder, or what it was saved to) is one in pieces.

    A save leaves one form alone; where its end was cut off and both stand, the later one that is complete counts.
    """
    folder = _folder(path)
    single = path / FILE_NAME
    if folder is None or not single.exists():
        return folder is not None
    return any(_time_ns(folder, names) > single.stat().st_mtime_ns for names in _complete(_files(folder)))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A piece in one of the files."""

    file: StateFile
    name: str
    piece: Piece


class PieceReader:
    """A state in pieces, open for reading under any layout. Holds no tensor: each ``read`` touches what it needs.

    ``tree`` is everything but the pieces.
    """

    def __init__(self, path: Path) -> None:
        folder = _folder(path)
        if folder is None:
            raise CheckpointError(f"there is no state in pieces at {path}", "Name a run folder of an earlier run.")
        self.path = folder
        self._stored: dict[str, dict[str, list[_Stored]]] = {}
        files = [StateFile(folder / str(name), _FORMAT) for name in _latest(folder)]
        try:
            for file in files:
                self._index(file)
            first = files[0]
            found = {name.removeprefix("tree/"): first.tensor(name) for name in first if name.startswith("tree/")}
            self.tree: dict[str, Any] = rebuild(first.document["tree"], found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} is damaged: its parts do not fit together", "Use an earlier one."
            ) from error

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        """Whole shapes of what a section holds, by key."""
        return {key: stored[0].piece.shape for key, stored in self._stored.get(section, {}).items()}

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """Any piece of what was saved under a key, in ``dtype`` or as it was saved.

        Every saved piece that has a part in it is read once in full for its digest, through the file's own pages.
        """
        stored = self._stored.get(section, {}).get(key, [])
        if not stored:
            raise CheckpointError(f"{self.path} has no '{section}/{key}'", "Use the model the state was saved from.")
        if piece.shape != stored[0].piece.shape:
            what = f"'{section}/{key}' has shape {piece.shape} here and {stored[0].piece.shape} in the saved state"
            raise CheckpointError(what, "Resume with the model the state was saved from.")
        found = plan(piece, [one.piece for one in stored])
        if found.missing:
            what = (
                f"{self.path} is not whole: of '{section}/{key}' the elements from {found.missing[0].start} are missing"
            )
            raise CheckpointError(what, "Use an earlier one.")
        return self._assemble(piece, stored, found.overlaps, dtype)

    def whole_tree(self) -> dict[str, Any]:
        """The tree with every section as whole tensors by key: for one process with room for all of it."""
        sections = {
            section: {
                key: self.read(section, key, Piece.whole(key, shape)) for key, shape in self.shapes(section).items()
            }
            for section in self._stored
        }
        return {**self.tree, **sections}

    def _index(self, file: StateFile) -> None:
        if file.document["file"] != file.path.name:
            raise CheckpointError(f"{file.path} was saved as {file.document['file']}", "Use an earlier one.")
        for name, entry in file.document["entries"].items():
            piece = _piece(entry["piece"])
            self._stored.setdefault(entry["section"], {}).setdefault(entry["key"], []).append(
                _Stored(file, name, piece)
            )

    def _assemble(
        self, piece: Piece, stored: list[_Stored], overlaps: Sequence[Overlap], dtype: torch.dtype | None
    ) -> Tensor:
        sources = {number: stored[number] for number in {overlap.saved for overlap in overlaps}}
        kind = next(iter(sources.values()), stored[0])
        made = torch.empty(piece.numel, dtype=dtype or kind.file.tensor(kind.name).dtype)
        for number, one in sources.items():
            values = one.file.tensor(one.name).reshape(-1)
            for overlap in overlaps:
                if overlap.saved == number:
                    _part(made, overlap.target, overlap.box).copy_(_part(values, overlap.source, overlap.box))
        return made.view(piece.local_shape)


def _part(memory: Tensor, run: Run, box: Box) -> Tensor:
    """A box as a view of a piece's memory."""
    view = memory[run.first : run.first + run.box.numel].view(run.box.size)
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        view = view.narrow(dim, start - run.box.start[dim], size)
    return view


def _piece(fields: Mapping[str, Any]) -> Piece:
    shape, start, size = (tuple(fields[name]) for name in ("shape", "start", "size"))
    flat = fields["flat"]
    return Piece(fields["name"], shape, start, size, None if flat is None else (flat[0], flat[1]))


def _folder(path: Path) -> Path | None:
    """Where the files lie: at the path itself, or under it where it is a run's folder."""
    return next((place for place in (path, path / FOLDER_NAME) if _files(place)), None)


def _files(folder: Path) -> list[_FileName]:
    if not folder.is_dir():
        return []
    found = (_FILE.fullmatch(path.name) for path in sorted(folder.iterdir()))
    return [_FileName(match[1], int(match[2]), int(match[3])) for match in found if match]


def _saves(files: Iterable[_FileName]) -> list[list[_FileName]]:
    saves: dict[tuple[str, int], list[_FileName]] = {}
    for name in files:
        saves.setdefault((name.save, name.num_ranks), []).append(name)
    return list(saves.values())


def _complete(files: Iterable[_FileName]) -> list[list[_FileName]]:
    return [names for names in _saves(files) if len(names) == names[0].num_ranks]


def _time_ns(folder: Path, names: Iterable[_FileName]) -> int:
    """When a save was done."""
    return max((folder / str(name)).stat().st_mtime_ns for name in names)


def _latest(folder: Path) -> list[_FileName]:
    """The files of the latest complete save, by rank."""
    files = _files(folder)
    complete = _complete(files)
    if not complete:
        names = max(_saves(files), key=len)
        lacking = sorted(set(range(names[0].num_ranks)) - {name.rank for name in names})
        what = f"{folder} is not whole: the part of rank {lacking[0]} of {names[0].num_ranks} is missing"
        raise CheckpointError(what, "Use an earlier one.")
    return max(complete, key=lambda names: _time_ns(folder, names))
