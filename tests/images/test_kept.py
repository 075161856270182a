"""Images that a run keeps: what is refused, and what the event loop need not do."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

from april.images import kept as module
from april.images import store as store_module
from april.images.kept import KeptImages
from april.images.source import ImageError
from tests import vision


def stored(form: str, size: tuple[int, int] = (24, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_the_event_loop_reads_no_file_to_place_an_image(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = vision.image_store()
    source = KeptImages(tmp_path, images).keep(stored(form))
    expected = vision.image_store(kept=tmp_path / "images").expand([vision.PLACEHOLDER], [source])
    monkeypatch.setattr(store_module, "read_image", lambda source: pytest.fail(f"{source} was read"))
    assert images.expand([vision.PLACEHOLDER], [source]) == expected


def test_an_image_that_another_program_decodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **settings: pytest.fail("a program was started"))
    with pytest.raises(ImageError, match="cannot be decoded"):
        KeptImages(tmp_path, vision.image_store()).keep(stored("EPS"))
    assert not (tmp_path / "images").exists()


def test_an_image_with_too_many_pixels_is_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = stored("PNG", (20, 20))
    monkeypatch.setattr(module, "MOST_PIXELS", 399)
    with pytest.raises(ImageError, match="cannot be decoded: 400 pixels, more than 399"):
        KeptImages(tmp_path, vision.image_store()).keep(content)
    assert not (tmp_path / "images").exists()


def test_an_image_of_a_shape_that_the_processor_refuses_is_an_error_of_its_message(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="aspect ratio"):
        KeptImages(tmp_path, vision.image_store()).keep(stored("PNG", (2000, 4)))


def test_a_file_that_a_killed_process_did_not_finish_is_removed_at_the_next_start(tmp_path: Path) -> None:
    content = Path(vision.picture(tmp_path / "1.png")).read_bytes()
    images = KeptImages(tmp_path, vision.image_store())
    images.keep(content)
    [kept] = (tmp_path / "images").iterdir()
    kept.with_name(f"{kept.name}.0a1b2c3d").write_bytes(content[:9])
    KeptImages(tmp_path, vision.image_store())
    assert list(kept.parent.iterdir()) == [kept]


def test_images_that_no_episode_needs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, journal = KeptImages(tmp_path, vision.image_store()), tmp_path / "events"
    sources = [kept.keep(stored("PNG", (24, 16 + 8 * number))) for number in range(4)]

    def images() -> set[str]:
        return {f"run:{path.name}" for path in (tmp_path / "images").iterdir()}

    journal.write_bytes(b"\xff" * 50 + sources[0].encode() + b'"')
    monkeypatch.setattr(module, "WINDOW", 64)
    with kept.held([sources[1]]):
        kept.prune([journal])
        assert images() == set(sources), "the events of these images may not be on disk yet"
        kept.keep(stored("PNG", (24, 32)))
        kept.prune([journal])
        assert images() == set(sources[:3]), "named, held, and kept again"
        kept.prune([journal])
        assert images() == set(sources[:2])
    kept.prune([journal])
    assert images() == set(sources[:2]), "the event of a request may not be on disk when it ends"
    kept.prune([journal])
    assert images() == set(sources[:1])
    assert kept.keep(stored("PNG", (24, 40))) == sources[3]
    assert images() == {sources[0], sources[3]}


def test_user_code_gets_the_paths_of_kept_images(tmp_path: Path) -> None:
    kept = KeptImages(tmp_path, vision.image_store())
    shown = [{"type": "text", "text": "now"}, {"type": "image", "image": Image.new("RGB", (24, 16))}]
    [message, plain] = kept.received([{"role": "user", "content": shown}, {"role": "user", "content": "text"}])
    [named, same] = kept.with_paths([message, plain])
    assert same == plain
    assert named["content"][0] == shown[0]
    assert Image.open(named["content"][1]["image"]).size == (24, 16)
