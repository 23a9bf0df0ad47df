"""Memory by kind: each storage counts once, for the first kind that names it."""

from __future__ import annotations

import torch

from closeranks.telemetry.memory_kinds import StorageBytes, with_activations


def test_views_share_a_storage_and_the_first_kind_has_it() -> None:
    bucket = torch.zeros(100)
    views = [bucket[:40], bucket[40:90]]
    storages = StorageBytes(torch.device("cpu"))
    assert storages.add(views) == 400, "with the padding at its end"
    assert storages.add([bucket, torch.zeros(3)]) == 12
    assert storages.add(views) == 0


def test_what_is_elsewhere_is_not_counted() -> None:
    assert StorageBytes(torch.device("cuda")).add([torch.zeros(4)]) == 0
    assert StorageBytes(torch.device("cpu")).add([torch.zeros(4, device="meta")]) == 0


def test_activations_are_the_peak_without_the_rest() -> None:
    kinds = with_activations({"parameters": 10, "gradients": 10, "snapshots": 99}, allocated_bytes=25, peak_bytes=65)
    assert kinds == {"parameters": 10, "gradients": 10, "snapshots": 99, "workspace": 5, "activations": 40}
