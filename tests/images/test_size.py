"""The size of an image by its header is the size of the decoded image."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, PngImagePlugin

from april.images.size import upright_size
from april.images.source import ImageError, open_image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")


def stored(form: str, size: tuple[int, int] = (30, 20), **settings: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(file, form, **settings)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@settings(deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 40), st.integers(1, 40), st.integers(0, 8))
def test_headers_give_the_size_of_the_upright_image(form: str, width: int, height: int, orientation: int) -> None:
    settings = {"exif": turned(orientation)} if orientation and form not in ("BMP", "GIF") else {}
    content = stored(form, (width, height), **settings)
    assert upright_size(content, "a") == open_image(content, "a").size


def test_no_pixels_of_png_files_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = [stored("PNG"), stored("PNG", exif=turned(1))]
    for kind in (ImageFile.ImageFile, PngImagePlugin.PngImageFile):
        monkeypatch.setattr(kind, "load", lambda self: pytest.fail("decoded"))
    assert [upright_size(each, "a") for each in content] == [(30, 20)] * 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_part_of_a_file_is_refused(form: str) -> None:
    content = stored(form)
    for end in (0, 10, len(content) // 2, len(content) - 40):
        with pytest.raises(ImageError, match="image a: cannot be decoded"):
            upright_size(content[:end], "a")


def test_damage_in_the_middle_of_a_png_file_is_found_at_the_start() -> None:
    content = bytearray(stored("PNG"))
    content[content.find(b"IDAT") + 8] ^= 0xFF
    with pytest.raises(ImageError, match="image a: cannot be decoded"):
        upright_size(bytes(content), "a")


def decodes(content: bytes) -> bool:
    try:
        open_image(content, "a")
    except ImageError:
        return False
    return True


@settings(deadline=None)
@given(st.sampled_from(["JPEG", "progressive", "WEBP"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
@example("JPEG", 40, b"\xff\xd8")
def test_an_image_that_passes_the_start_can_be_decoded_later(form: str, place: int, damage: bytes) -> None:
    content = stored("JPEG", progressive=True) if form == "progressive" else stored(form)
    begin = content.find(b"VP8" if form == "WEBP" else b"\xff\xda")
    at = begin + place % (len(content) - begin - len(damage) - 2)
    damaged = content[:at] + damage + content[at + len(damage) :]
    with nullcontext() if decodes(damaged) else pytest.raises(ImageError, match="image a: cannot be decoded"):
        upright_size(damaged, "a")


def test_an_image_of_unknown_format_is_named_without_an_object_of_python() -> None:
    with pytest.raises(
        ImageError, match=r"^image a: cannot be decoded: cannot identify its format as one that Pillow reads$"
    ):
        upright_size(b"no image", "a")


def test_a_file_with_bytes_behind_its_end_has_its_size() -> None:
    for form in FORMATS:
        assert upright_size(stored(form) + b"more", "a") == (30, 20)
