"""What a value is called, from its bytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from closeranks.cli.data.field_text import describe_field, file_of_field


@pytest.mark.parametrize("text", ["BMW is a car", "P5 and P6", "RIFF raff"])
def test_text_that_begins_like_an_image_is_text(text: str) -> None:
    assert describe_field(text.encode(), 80) == f"{len(text)} bytes: {text}"
    assert file_of_field("x", text.encode()).name == "x"


@pytest.mark.parametrize(("format", "ending"), [("JPEG", "jpg"), ("WEBP", "webp"), ("BMP", "bmp"), ("PPM", "ppm")])
def test_images_are_told_by_their_size(format: str, ending: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((4, 6, 3), dtype=np.uint8)).save(buffer, format)
    assert describe_field(buffer.getvalue(), 80).endswith(f"{format} 6x4 RGB")
    assert file_of_field("x", buffer.getvalue()).name == f"x.{ending}"
