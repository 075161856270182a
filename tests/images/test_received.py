"""Images of messages, as environments give them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from april.images.received import image_bytes
from april.images.source import ImageError

PICTURE = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3))


def png(picture: Image.Image = PICTURE) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def test_each_form_has_the_pixels_of_the_image(tmp_path: Path) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(png())
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    for given in (PICTURE, np.asarray(PICTURE), png(), path, str(path), f"file://{path}", uri, {"bytes": png()}):
        content = image_bytes({"url": given} if given is uri else given)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), np.asarray(PICTURE))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.png", "image nowhere.png: cannot be read: No such file"),
        ("records.parquet#1/image", "image records.parquet#1/image: cannot be read: No such file"),
        (base64.b64encode(bytes(1_000_000)).decode(), "image AAAA.*: cannot be read: File name too long"),
        ("nul\0.png", "cannot be read: embedded null byte"),
        ("https://example.org/1.png", "april fetches no addresses"),
        ("data:image/png,abc", "is no data URI in base64"),
        (3, "is a int: give a PIL image"),
        (np.zeros((2, 2, 9)), "an array is no image"),
    ],
)
def test_what_is_no_image_is_named_in_a_short_line(given: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=said) as caught:
        image_bytes(given)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
