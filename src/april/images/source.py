"""Sources: names of stored images, and the bytes that they name.

    shapes/1.png                                 a file
    train.parquet#12/image                       record 12 (from 1) of a Parquet file, column `image`
    train.parquet#12/prompt/0/content/1/image    an image within a column: keys and indices, one after the other
    owner/name?main&train#12/images/0            a record of a split of a data set of the hub, or of a directory
    run:5c0e...                                  an image that the run keeps, by the SHA-256 of its bytes

A stored image is a path, or bytes alone or in an object `{"bytes": ..., "path": ...}`, as the library datasets writes
them.

Invariants:
- a source names the same image in each process and in each run;
- images that a run keeps are found wherever the directory of the run lies;
- one thread at a time reads data sets, and the part that was read last is kept in memory: threads that need images of
  the same part would each read the whole of it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

KEYS = ("image", "image_url", "url", "path")
"""Keys of a message's part of type `image` or `image_url` that may hold the image."""
FOLDER = "images"
"""Folder of a run's directory with the images that the run keeps (`april.images.kept`)."""
KEPT = "run:"
"""Beginning of the sources of images that a run keeps."""
_READING = threading.Lock()
"""Held while a record of a data set is read."""


class ImageError(ValueError):
    """An image that is missing, cannot be read, or has changed; the message is one line that names it."""


def source_in_data(place: str, row: int, path: Sequence[str | int]) -> str:
    """Return the source of an image that is part of a data set.

    Args:
        place: a Parquet file, or see `data_set`.
        row: number of the record, from 1.
        path: column, and keys and indices inside it.
    """
    return f"{place}#{row}/{'/'.join(quote(str(part), safe='') for part in path)}"


def data_set(path: str, subset: str | None, split: str) -> str:
    """Return the place of a split of a data set of the hub."""
    return f"{path}?{subset or ''}&{split}"


def kept_folder(directory: Path) -> Path:
    """Return the folder of the images that a run keeps in its directory."""
    return directory.resolve() / FOLDER


def located(source: str, kept: Path | None) -> str:
    """Return a source, or the path of an image that the run keeps in the folder `kept`."""
    return str(kept / source.removeprefix(KEPT)) if kept is not None and source.startswith(KEPT) else source


def read_image(source: str) -> bytes:
    """Return the bytes of an image as they are stored.

    Raises:
        ImageError: there is none.
    """
    place, mark, item = source.rpartition("#")
    try:
        if not mark or os.path.isfile(source):
            with open(source, "rb") as file:
                return file.read()
        row, *path = item.split("/")
        with _READING:
            value = _record(place, int(row), unquote(path[0]))
        for part in map(unquote, path[1:]):
            value = value[int(part)] if isinstance(value, Sequence) else value[part]
        stored = bytes_of(value)
    except ImageError:
        raise
    except Exception as error:  # of the file system, pyarrow and datasets; each means that there is no image
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise ImageError(f"image {source}: cannot be read: {reason or type(error).__name__}") from None
    if stored is None:
        raise ImageError(f"image {source}: the data set has no image there")
    return stored


def bytes_of(value: Any) -> bytes | None:
    """Return the bytes of an image that is stored as bytes, alone or in an object; None if it is not."""
    if isinstance(value, Mapping):
        value = value.get("bytes")
    return value if isinstance(value, bytes) else None


def open_image(
    content: bytes, source: str, formats: tuple[str, ...] | None = None, most_pixels: int | None = None
) -> Any:
    """Return the image as a PIL image, decoded, and upright: cameras store orientation as a tag.

    Args:
        formats: formats of Pillow that are tried; None: all.
        most_pixels: width times height of the largest image that is decoded.

    Raises:
        ImageError: the bytes are no image that Pillow reads, or a part of one, or the image is too large.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(content), formats=formats)
        if most_pixels is not None and (pixels := image.width * image.height) > most_pixels:
            raise ValueError(f"{pixels:,} pixels, more than {most_pixels:,}")
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
    except UnidentifiedImageError:  # its message shows an object of Python
        raise ImageError(
            f"image {source}: cannot be decoded: cannot identify its format as one that Pillow reads"
        ) from None
    except Exception as error:  # each plug-in of Pillow raises its own types
        raise ImageError(f"image {source}: cannot be decoded: {' '.join(str(error).split())}") from None
    return image


def _record(place: str, row: int, column: str) -> Any:
    if place.lower().endswith(".parquet"):
        return _of_parquet(place, row - 1, column)
    path, _, which = place.rpartition("?")
    subset, _, split = which.partition("&")
    return _rows(path, subset or None, split)[row - 1][column]


def _of_parquet(path: str, row: int, column: str) -> Any:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row < rows:
            return _row_group(path, group, column)[column][row].as_py()
        row -= rows
    raise IndexError("the file has fewer records")


@lru_cache(maxsize=1)
def _row_group(path: str, group: int, column: str) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read_row_group(group, columns=[column])


@lru_cache(maxsize=1)
def _rows(path: str, subset: str | None, split: str) -> Any:
    """Return the rows of a data set; they are mapped from the disk, so that a record is read without the others."""
    import datasets

    return undecoded(datasets.load_dataset(path, subset, split=split))


def undecoded(rows: Any) -> Any:
    """Return the rows of a data set with images as they are stored, not decoded."""
    import datasets

    if not any(_holds_images(feature) for feature in rows.features.values()):
        return rows
    return rows.cast(datasets.Features({name: _stored(feature) for name, feature in rows.features.items()}))


def _holds_images(feature: Any) -> bool:
    return "Image(" in repr(feature)


def _stored(feature: Any) -> Any:
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_stored(feature.feature), length=feature.length)
    if isinstance(feature, Mapping):
        return {name: _stored(item) for name, item in feature.items()}
    if isinstance(feature, list):
        return [_stored(item) for item in feature]
    return feature
