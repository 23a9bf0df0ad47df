"""Of what hosts wrote down, the newest state that is whole is found, and nothing else."""

from pathlib import Path

import pytest

from closeranks.capture.slots import SlotHeader, SnapshotSlot, encode_entries, encode_index
from closeranks.run.state.rescued_files import find_rescued, remove_rescued


def write(run: Path, host: str, number: int, about: SlotHeader) -> Path:
    path = run / "rescued" / host / f"box-{number:05d}-0"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    slot = SnapshotSlot(str(path))
    index = encode_index(encode_entries([]), b"{}", [])
    slot.reserve(0, len(index))
    slot.seal(about, 0, index)
    slot.close()
    return path


def about(step: int, image: str, num_images: int = 2, generation: int = 0) -> SlotHeader:
    return SlotHeader(generation, step, image, num_images)


def test_images_of_several_hosts_make_one_state(tmp_path: Path) -> None:
    first, second = write(tmp_path, "h1", 0, about(7, "b")), write(tmp_path, "h2", 0, about(7, "a"))
    write(tmp_path, "h1", 1, about(7, "b"))
    found = find_rescued(tmp_path)
    assert found is not None
    assert (found.step, found.files) == (7, (str(second), str(first)))


def test_a_newer_state_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, "h1", 0, about(8, "a"))
    write(tmp_path, "h1", 1, about(8, "b", generation=1))
    write(tmp_path, "h1", 2, about(6, "a"))
    write(tmp_path, "h2", 0, about(6, "b"))
    found = find_rescued(tmp_path)
    assert found is not None
    assert found.step == 6


def test_what_is_half_written_or_damaged_is_not_taken(tmp_path: Path) -> None:
    whole = write(tmp_path, "h1", 0, about(7, "a", num_images=1))
    write(tmp_path, ".h2.77", 0, about(9, "a", num_images=1))
    found = find_rescued(tmp_path)
    assert found is not None
    assert found.step == 7
    data = bytearray(whole.read_bytes())
    data[20] ^= 1
    whole.write_bytes(data)
    assert find_rescued(tmp_path) is None


@pytest.mark.parametrize("place", [".", "nowhere"])
def test_without_any_there_is_none(tmp_path: Path, place: str) -> None:
    assert find_rescued(tmp_path / place) is None


def test_it_is_forgotten_when_a_checkpoint_as_new_stands(tmp_path: Path) -> None:
    write(tmp_path, "h1", 0, about(7, "a", num_images=1))
    remove_rescued(tmp_path, 6)
    assert find_rescued(tmp_path) is not None
    remove_rescued(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []
    remove_rescued(tmp_path, 8)
