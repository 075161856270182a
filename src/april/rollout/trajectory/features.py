"""Features: the images of a prompt.

The ids of a prompt with images are expanded already: each image has a range of placeholders, one for each embedding
that the model makes of it. A feature is opaque to the core: it names where the image is stored, the SHA-256 of its
bytes, and the range of its placeholders. Each part that computes with the model (embedded engine, trainer, client of a
server) gets ids and features together, reads the image by its name, and compares its bytes with the hash
(`april.images.store`).

    Prompt.token_ids   [ 7, 3, 9, 9, 9, 9, 4, 12, ... ]        9 is the placeholder
    Prompt.features    (Feature("shapes/1.png", "5c0e...", offset=2, length=4),)

Invariants:
- placeholders are expanded once, when a prompt is encoded: its ids never change afterwards, and a sample that is
  resumed is sent as the same ids, its response so far, and the same features;
- the ranges of a prompt's features lie inside its ids, in order, without overlap, and each holds one token id only;
- a placeholder outside of all ranges is text: a policy may sample that token;
- journal and checkpoints hold features, never pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Feature:
    """An image of a prompt, whose placeholders are the tokens from `offset` to before `end`.

    Args:
        source: place of the image, see `april.images.source`.
        digest: SHA-256 of the image's bytes as they are stored, in hexadecimal digits.
        offset: index of the first placeholder in the prompt's token ids.
        length: number of placeholders.
    """

    source: str
    digest: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def check_features(token_ids: Sequence[int], features: Iterable[Feature]) -> None:
    """Check the ranges of a prompt's features.

    Raises:
        ValueError: a range is empty, lies outside the prompt, overlaps another one, or holds several token ids.
    """
    end = 0
    for feature in features:
        if feature.length < 1 or feature.offset < end or feature.end > len(token_ids):
            raise ValueError(
                f"image {feature.source}: placeholders {feature.offset} to {feature.end} are outside the prompt of "
                f"{len(token_ids)} tokens, or overlap those of another image"
            )
        end = feature.end
        if len(set(token_ids[feature.offset : end])) != 1:
            raise ValueError(
                f"image {feature.source}: tokens {feature.offset} to {end} of the prompt are not all its placeholder"
            )


def features_to_json(features: Iterable[Feature]) -> list[list[Any]]:
    """Return features as JSON types."""
    return [[feature.source, feature.digest, feature.offset, feature.length] for feature in features]


def features_from_json(saved: Iterable[Sequence[Any]]) -> tuple[Feature, ...]:
    """Return the features of a result of `features_to_json`."""
    return tuple(Feature(*one) for one in saved)
