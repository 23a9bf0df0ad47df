"""The figures of the source tree are counted, and stay within what they were."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests import house


def test_a_step_a_save_and_a_resume_are_counted(tmp_path: Path) -> None:
    found = house.entered_by_actions(tmp_path)
    assert list(found) == ["step", "save", "resume"]
    for one in found.values():
        assert one.calls > one.changes >= one.files - 1 > 0
    assert found["step"].files <= 62
    assert not dist.is_initialized(), "the next tests would find a group"


def test_no_file_and_no_function_is_too_long() -> None:
    assert max(len(path.read_text().splitlines()) for path in house.sources()) <= 500
    assert house.longest_functions()[0][0] <= 58


def test_every_public_class_has_a_name_of_its_own() -> None:
    assert house.repeated_classes() == {}


def test_no_folder_is_too_long_to_read() -> None:
    assert max(house.folders().values()) <= 20
