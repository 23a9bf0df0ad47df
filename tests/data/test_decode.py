"""Bytes become what their names say, or the record is bad; nothing is ever unpickled."""

from __future__ import annotations

import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.decode import decode, decode_batch, image_error, is_image
from closeranks.data.timing import measure


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def picture(size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def saved(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(("field", "format"), [("png", "PNG"), ("left.BMP", "BMP"), ("image", "PNG"), ("ppm", "PPM")])
def test_images_keep_their_pixels(field: str, format: str) -> None:
    image = picture()
    found = decode({field: encoded(image, format)})[field]
    assert (found.shape, found.dtype) == ((4, 6, 3), np.uint8)
    np.testing.assert_array_equal(found, np.asarray(image))
    assert found.flags.writeable


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA"])
def test_every_kind_of_image_becomes_coloured(mode: str) -> None:
    image = picture(mode=mode)
    found = decode({"png": encoded(image)})["png"]
    np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))


def test_jpeg_and_webp_are_close(tmp_path: Path) -> None:
    smooth = Image.linear_gradient("L").convert("RGB")
    for field, format in (("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP")):
        found = decode({field: encoded(smooth, format)})[field]
        assert np.abs(found.astype(int) - np.asarray(smooth).astype(int)).max() < 8


@pytest.mark.parametrize("size", [(64, 64), (100, 60), (60, 100), (7, 300), (3, 3)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_images_are_cut_to_the_middle_and_scaled(size: tuple[int, int], format: str) -> None:
    """A picture that is black but for its centre square comes out white to the rim."""
    side = min(size)
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    pixels[top : top + side, left : left + side] = 255
    found = decode({"image": encoded(Image.fromarray(pixels), format)}, 16)["image"]
    assert found.shape == (16, 16, 3)
    assert found[4:12, 4:12].min() > 240
    assert np.median(found) > 240


def test_deep_images_are_refused() -> None:
    deep = Image.fromarray(np.full((4, 4), 40_000, np.uint16))
    with pytest.raises(BadRecordError, match="more than 8 bits"):
        decode({"png": encoded(deep)})


def test_broken_images_are_bad_records_whatever_is_broken() -> None:
    """Damage either cannot be seen in the pixels, or is a ``BadRecordError``: no other error comes through."""
    draw = random.Random(0)
    refused: list[str] = []
    for format in ("JPEG", "PNG", "WEBP", "BMP"):
        sound = encoded(picture((40, 30)), format)
        for _ in range(60):
            broken = bytearray(sound[: draw.randrange(len(sound))] if draw.random() < 0.3 else sound)
            for _ in range(draw.randrange(1, 20)):
                if broken:
                    broken[draw.randrange(len(broken))] = draw.randrange(256)
            try:
                assert decode({"image": bytes(broken)}, 8)["image"].shape == (8, 8, 3)
            except BadRecordError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert all("field 'image' is" in reason for reason in refused)
    with pytest.raises(BadRecordError, match=r"at 'a.tar', byte 7: field 'jpg' is a damaged image"):
        decode({"jpg": encoded(picture(), "JPEG")[:100]}, where="'a.tar', byte 7")


@pytest.mark.parametrize(("data", "words"), [(b"", "is empty"), (b"words", "is not a readable image")])
def test_bytes_that_are_no_image_are_told_in_words(data: bytes, words: str) -> None:
    with pytest.raises(BadRecordError) as caught:
        decode({"jpg": data})
    assert str(caught.value) == f"bad record: field 'jpg' {words}."
    assert image_error(data, in_full=False) == image_error(data, in_full=True) == words


def test_a_cut_image_is_found_in_full_and_a_sound_one_is_none() -> None:
    sound = encoded(picture((40, 30)), "JPEG")
    assert image_error(sound, in_full=True) == ""
    assert "is a damaged image" in image_error(sound[:-200], in_full=True)


def test_an_image_as_hugging_face_stores_it() -> None:
    found = decode({"image": {"bytes": encoded(picture()), "path": "x.png"}, "label": 3})
    assert found["image"].shape == (4, 6, 3)
    assert found["label"] == 3


@given(
    hnp.arrays(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]), hnp.array_shapes(min_dims=0, min_side=0))
)
def test_arrays_come_back(array: npt.NDArray[Any]) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, first=array, second=array)
    found = decode({"npy": saved(array), "npz": buffer.getvalue()})
    for name in ("npy", "npz.first", "npz.second"):
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("field", ["npy", "npz"])
def test_damaged_arrays_are_bad_records(field: str) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.arange(50))
    sound = saved(np.arange(50)) if field == "npy" else buffer.getvalue()
    for keep in (0, 5, 20, len(sound) // 2, len(sound) - 1):
        with pytest.raises(BadRecordError, match=f"field '{field}' is not a"):
            decode({field: sound[:keep]})


def test_plain_members() -> None:
    record = {
        "__key__": "k",
        "cls": b"7",
        "txt": "grün".encode(),
        "bin": b"\x01\x02",
        "f": 1.5,
        "none": None,
        "flag": True,
    }
    found = decode(record)
    assert (found["__key__"], found["cls"], found["txt"], found["f"], found["none"]) == ("k", 7, "grün", 1.5, None)
    assert found["flag"] is True
    assert found["bin"].tolist() == [1, 2]
    assert found["bin"].dtype == np.uint8


def test_what_is_nested_gets_names_with_dots() -> None:
    value = {"label": 3, "box": [[1, 2], [3, 4]], "who": {"name": "x"}, "words": ["a", "b"], "ragged": [[1], [2, 3]]}
    found = decode({"json": json.dumps(value).encode(), "meta": {"a": 1}})
    assert (found["json.label"], found["json.who.name"], found["meta.a"]) == (3, "x", 1)
    assert found["json.box"].tolist() == [[1, 2], [3, 4]]
    assert found["json.words"] == ["a", "b"]
    assert found["json.ragged"] == [[1], [2, 3]]


def test_fields_are_chosen_and_named() -> None:
    record = {"jpg": b"not looked at", "cls": b"3", "json": b'{"a": {"b": [1.5]}}', "seg.txt": b"x"}
    found = decode(record, fields={"y": "cls", "deep": "json.a.b", "t": "seg.txt"})
    assert found["y"] == 3
    assert found["deep"].tolist() == [1.5]
    assert found["t"] == "x"
    assert sorted(found) == ["deep", "t", "y"]
    with pytest.raises(BadRecordError, match=r"field 'png' is missing; found cls, jpg, json, seg.txt"):
        decode(record, fields={"x": "png"})
    with pytest.raises(BadRecordError, match=r"field 'json.a.c' is missing: nothing in 'json' is called 'c'"):
        decode(record, fields={"x": "json.a.c"})


@pytest.mark.parametrize(
    ("field", "data", "reason"),
    [
        ("cls", b"seven", "is not a number"),
        ("json", b"{", "is not JSON: .* at character 1 of the record"),
        ("json", b"[" * 100_000, "is not JSON"),
        ("txt", b"ab\xff", r"is not UTF-8 \(byte 2\)"),
    ],
)
def test_bytes_that_are_not_what_they_are_called(field: str, data: bytes, reason: str) -> None:
    with pytest.raises(BadRecordError, match=f"field '{field}' {reason}"):
        decode({field: data})


@pytest.mark.parametrize("field", ["pkl", "pickle", "pt", "pth", "joblib", "x.PKL", "pyd", "npy", "npz"])
def test_nothing_is_unpickled(field: str, tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    objects = np.array([Trap(trapped)], dtype=object)
    data = {"npy": saved(objects), "npz": io.BytesIO()}.get(field, pickle.dumps(Trap(trapped)))
    if isinstance(data, io.BytesIO):
        np.savez(data, x=objects)
        data = data.getvalue()
    with pytest.raises(DataError, match=rf"the record at 'a.tar', byte 512 holds field '{field}'.*unpickled") as caught:
        decode_batch([{field: data}], where=lambda _: "'a.tar', byte 512")
    assert type(caught.value) is DataError, "no job gets further by skipping it"
    assert not trapped.exists()


def test_a_pickle_called_an_array_is_a_bad_record(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    with pytest.raises(BadRecordError):
        decode({"npy": pickle.dumps(Trap(trapped))})
    with pytest.raises(BadRecordError):
        decode({"npz": pickle.dumps(Trap(trapped))})
    assert not trapped.exists()


def test_arrays_of_objects_in_records_are_refused() -> None:
    with pytest.raises(DataError, match="an array of objects"):
        decode({"x": np.array([{}], dtype=object)})


def test_a_pickle_that_is_not_asked_for_does_no_harm() -> None:
    assert decode({"pkl": b"...", "cls": b"1"}, fields={"y": "cls"}) == {"y": 1}


def test_places_are_looked_up_only_when_needed() -> None:
    asked = []

    def where(number: int) -> str:
        asked.append(number)
        return f"place {number}"

    assert [row["cls"] for row in decode_batch([{"cls": b"1"}, {"cls": b"2"}], where=where)] == [1, 2]
    assert asked == []
    with pytest.raises(BadRecordError, match="bad record at place 1: field 'cls'"):
        decode_batch([{"cls": b"1"}, {"cls": b"x"}], where=where)


def test_the_time_counts_as_decoding() -> None:
    records = [{"png": encoded(picture((300, 300)))}] * 4
    with measure() as times:
        decode_batch(records)
    assert times.decode_s > times.read_s + times.fetch_s + times.collate_s


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_images_are_known_by_their_bytes_where_the_name_says_nothing(format: str, wrapped: bool) -> None:
    data = encoded(picture(), format)
    value: Any = {"bytes": data, "path": None} if wrapped else data
    assert is_image("drawn", value)
    assert decode({"drawn": value})["drawn"].shape == (4, 6, 3)
    assert decode({"drawn": value}, 2)["drawn"].shape == (2, 2, 3)


@pytest.mark.parametrize(
    "data",
    [b"", b"BM", b"BMW is a car, " * 20, b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\x00\x10" + bytes(50), b"RIFF1234WAVE" * 9],
)
def test_what_only_begins_like_an_image_stays_bytes(data: bytes) -> None:
    assert not is_image("x", data)
    assert decode({"x": data})["x"].tobytes() == data


def test_a_name_that_says_something_is_believed() -> None:
    assert not is_image("npy", encoded(picture()))
    with pytest.raises(BadRecordError, match="field 'npy' is not a NumPy array"):
        decode({"npy": encoded(picture())})
    with pytest.raises(BadRecordError, match="field 'txt' is not UTF-8"):
        decode({"txt": encoded(picture())})
