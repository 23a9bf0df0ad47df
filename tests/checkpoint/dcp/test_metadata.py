"""What may a pickled ``.metadata`` ask for, and what becomes of one that asks for more?"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as real
from torch.distributed.checkpoint.filesystem import _StorageInfo

from closeranks.checkpoint.dcp.index import parse_index
from closeranks.checkpoint.dcp.metadata import ALLOWED, PickledRecord, read_metadata
from closeranks.core.errors import CheckpointError


def metadata(**changed: Any) -> real.Metadata:
    properties = real.TensorProperties(dtype=torch.bfloat16)
    size, half = torch.Size([4, 3]), torch.Size([2, 3])
    chunks = [real.ChunkStorageMetadata(torch.Size([first, 0]), half) for first in (0, 2)]
    state = {
        "model.w": real.TensorStorageMetadata(properties, size, chunks),
        "step": real.BytesStorageMetadata(),
    }
    where = {
        real.MetadataIndex("model.w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 90),
        real.MetadataIndex("model.w", [2, 0], 1): _StorageInfo("__1_0.distcp", 10, 90),
        real.MetadataIndex("step"): _StorageInfo("__0_0.distcp", 90, 7),
    }
    meta = real.StorageMeta(checkpoint_id=Path("/somewhere"), save_id="x")
    fields = {"state_dict_metadata": state, "planner_data": {"model.w": ("model", "w")}, "storage_data": where}
    return real.Metadata(**{**fields, "storage_meta": meta, "version": "1.0.0", **changed})


def test_what_dcp_writes_is_understood() -> None:
    index = parse_index(read_metadata(pickle.dumps(metadata()), "m"), "m")
    (tensor,) = index.tensors.values()
    assert (tensor.name, tensor.path, tensor.dtype, tensor.shape) == ("model.w", ("model", "w"), "bfloat16", (4, 3))
    assert [(piece.start, slot.file, slot.offset) for piece, slot in tensor.chunks] == [
        ((0, 0), "__0_0.distcp", 0),
        ((2, 0), "__1_0.distcp", 10),
    ]
    assert index.values["step"].num_bytes == 7


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_a_python_may_use(protocol: int) -> None:
    assert read_metadata(pickle.dumps(metadata(), protocol), "m").kind == "Metadata"


def test_a_member_of_an_enumeration_may_be_written_as_getattr() -> None:
    class ByName:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (real._MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")

    found = read_metadata(pickle.dumps(metadata(storage_meta=ByName())), "m")
    assert isinstance(found.get("storage_meta"), PickledRecord)


# Hostile ones. Each would leave a mark if it were run.


class Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pair = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._pair


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    touch = f"touch {mark}"
    code = f"__import__('os').system('{touch}')"
    return {
        "os.system": (Call(os.system, touch), "posix.system"),
        "builtins.eval": (Call(eval, code), "builtins.eval"),
        "builtins.exec": (Call(exec, code), "builtins.exec"),
        "builtins.__import__": (Call(__import__, "antigravity"), "builtins.__import__"),
        "subprocess": (Call(subprocess.Popen, ["touch", str(mark)]), "subprocess.Popen"),
        "torch.load": (Call(torch.load, str(mark)), "torch.serialization.load"),
        "a call in a key": ({Call(os.system, touch): 1}, "posix.system"),
        "getattr of a module": (Call(getattr, Call(__import__, "os"), "system"), "builtins.__import__"),
        "copyreg": (Call(copyreg._reconstructor, object, object, None), "copyreg._reconstructor"),
    }


@pytest.mark.parametrize("name", list(attacks(Path("mark"))))
def test_a_hostile_pickle_is_refused_by_name_and_not_run(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payload, named = attacks(mark)[name]
    data = pickle.dumps(metadata(planner_data=payload))
    with pytest.raises(CheckpointError, match=f"asks for '{re.escape(named)}', which torch DCP metadata"):
        read_metadata(data, "m")
    assert not mark.exists()


def test_getattr_reaches_nothing(tmp_path: Path) -> None:
    """``getattr`` of an allowed class, step by step to the builtins, and a call of what is found there."""

    class Nested:
        def __init__(self, of: Any, name: str) -> None:
            self._of, self._name = of, name

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (self._of, self._name)

    chain: Any = real.Metadata
    for name in ("__init__", "__globals__", "__getitem__"):
        chain = Nested(chain, name)
    found = read_metadata(pickle.dumps(metadata(planner_data=chain)), "m")
    assert isinstance(found.get("planner_data"), PickledRecord)
    # Calling what such a chain gave: REDUCE on a record, which cannot be called.
    body = pickle.dumps(chain, 4)[:-1]
    with pytest.raises(CheckpointError, match="is damaged"):
        read_metadata(body + b"(\x8c\x08builtinst" + b"R.", "m")


def test_a_dotted_name_is_no_way_in() -> None:
    """Protocol 4 lets a name walk through attributes: ``Metadata.__init__.__globals__``."""
    data = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x1dMetadata.__init__.__globals__\x93."
    pickletools.dis(data, io.StringIO())
    with pytest.raises(CheckpointError, match=r"asks for 'torch.distributed.checkpoint.metadata.Metadata.__init__"):
        read_metadata(data, "m")


def test_nothing_that_a_pickle_sets_outlives_it() -> None:
    """BUILD with a pair of states sets attributes on whatever is on the stack: here on the class itself."""
    setting = (None, {"__setstate__": 1, "kind": "Metadata"})
    data = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n" + pickle.dumps(setting, 4)[2:-1] + b"b."
    with pytest.raises(CheckpointError):
        read_metadata(data, "m")
    assert read_metadata(pickle.dumps(metadata()), "m").kind == "Metadata"
    assert not hasattr(real.Metadata, "kind")


def test_what_is_outside_of_the_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match="refers to something outside"):
        read_metadata(b"\x80\x04\x8c\x01xQ.", "m")


def test_no_allowed_name_is_the_real_thing() -> None:
    for module, name in ALLOWED:
        data = f"c{module}\n{name}\n.".encode()
        with pytest.raises(CheckpointError, match="not torch DCP metadata"):
            read_metadata(data, "m")  # the class alone, as a record's class


# Damaged ones.


def test_damage_is_refused_in_one_sentence() -> None:
    """Every cut and a flip of every byte: understood, or a ``CheckpointError``; never another exception."""
    whole = pickle.dumps(metadata())
    refused: list[str] = []
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for data in (whole[:place], bytes(flipped)):
            try:
                parse_index(read_metadata(data, "m"), "m")
            except CheckpointError as error:
                refused.append(str(error))
    assert len(refused) > len(whole)
    assert not any("\n" in words for words in refused)


STATE = metadata().state_dict_metadata
WHERE = metadata().storage_data


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"storage_data": None}, "the storage data is of type NoneType"),
        ({"storage_data": {}}, "the metadata does not say where 'model.w' lies"),
        (
            {"storage_data": {**WHERE, real.MetadataIndex("step"): _StorageInfo("../../etc/passwd", 0, 7)}},
            "file beside",
        ),
        ({"storage_data": {**WHERE, real.MetadataIndex("step"): _StorageInfo("/etc/passwd", 0, 7)}}, "file beside"),
        ({"storage_data": {**WHERE, real.MetadataIndex("step"): _StorageInfo("a", -1, 7)}}, "offset is not a number"),
        ({"storage_data": {**WHERE, real.MetadataIndex("step"): _StorageInfo("a", 0, 7, ["zstd"])}}, "an extension"),
        ({"state_dict_metadata": {**STATE, "step": 3}}, "entry of 'step'"),
        ({"state_dict_metadata": {**STATE, "step": WHERE}}, "entry of 'step'"),
        ({"state_dict_metadata": {**STATE, "x": real.StorageMeta()}}, "neither a tensor nor a value"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_index(read_metadata(pickle.dumps(metadata(**changed)), "m"), "m")


@pytest.mark.parametrize(
    ("start", "size", "words"),
    [((2, 0), (3, 3), "reaches out"), ((2, 0), (1, 3), "do not add up"), ((2,), (2,), "a different number of dims")],
)
def test_chunks_must_fit_their_tensor(start: tuple[int, ...], size: tuple[int, ...], words: str) -> None:
    tensor = STATE["model.w"]
    assert isinstance(tensor, real.TensorStorageMetadata)
    chunks = [tensor.chunks[0], real.ChunkStorageMetadata(torch.Size(start), torch.Size(size))]
    odd = real.TensorStorageMetadata(tensor.properties, tensor.size, chunks)
    with pytest.raises(CheckpointError, match=words):
        parse_index(read_metadata(pickle.dumps(metadata(state_dict_metadata={"model.w": odd})), "m"), "m")
