"""A data set's description that is sealed and holds what no writer wrote is refused in one sentence, or read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from closeranks.core.errors import DataError
from closeranks.data.shards.manifest import decode_manifest
from tests.checkpoint.forging import seal_text, to_text, variants
from tests.cli.calling import call

SEED = int(os.environ.get("SEED", "0"))


def test_every_forged_description_is_refused_or_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 50)
    assert call("data", "build", tmp_path / "a.txt", "--out", tmp_path / "built").code == 0
    path = tmp_path / "built" / "dataset.json"
    first, _, text = path.read_bytes().partition(b"\n")
    kind, version = json.loads(first)["closeranks"], json.loads(first)["version"]
    body = json.loads(text)
    decode_manifest(seal_text(kind, to_text(body), version), "dataset.json")
    sound, refused = [], 0
    for what, forged in variants(body, SEED):
        data = seal_text(kind, to_text(forged), version)
        try:
            decode_manifest(data, "dataset.json")
        except DataError:
            refused += 1
        else:
            sound.append((what, data))
    assert refused > 100
    for what, data in sound[:: max(1, len(sound) // 12)]:
        path.write_bytes(data)
        for words in (["stats"], ["verify"], ["show", "0"]):
            said = call("data", *words, tmp_path / "built")
            assert said.code in (0, 1, 2), (what, said)
            assert "\x1b" not in said.out + said.err, what
