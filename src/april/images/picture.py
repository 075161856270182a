"""From the pixels of an image as a model's input back to a picture, for servers that process images themselves.

The picture is resized already, so that a server's own image processor has nothing to interpolate: libraries resize in
different ways, but a picture of whole patches, within the limits of the processor, keeps its size. The server
only scales each channel, which is the same arithmetic everywhere.

Invariant: the image processor makes of the picture the pixels that the picture was made from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WHOLE = 0.01
"""Largest distance of a colour from a whole number: rounding of float32 stays far below."""


def picture_of(patches: NDArray[np.float32], grid: tuple[int, int, int], processor: Any) -> NDArray[np.uint8]:
    """Return the resized picture of an image, [height, width, 3].

    Args:
        patches: pixels of each patch, [patches, values].
        grid: patches in time, height and width.
        processor: transformers' image processor that made the pixels.

    Raises:
        ValueError: the processor did not make the pixels from colours of 0 to 255.
    """
    _, rows, columns = grid
    patch, merge = int(processor.patch_size), int(processor.merge_size)
    blocks = patches.reshape(rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
    frame = blocks[:, :, :, :, :, 0]  # a still image is repeated in time
    scaled = frame.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
    if processor.do_normalize:
        scaled = scaled * np.float32(processor.image_std) + np.float32(processor.image_mean)
    colours = scaled / np.float32(processor.rescale_factor) if processor.do_rescale else scaled
    whole = np.rint(colours)
    if not (np.abs(colours - whole).max() < WHOLE and whole.min() >= 0 and whole.max() <= 255):
        raise ValueError("its pixels are no colours of 0 to 255, rescaled and normalised")
    return whole.astype(np.uint8)
