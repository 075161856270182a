"""Features: the images of a prompt, and of the messages that follow it in an episode.

The ids of a message with images are expanded already: each image has a range of placeholders, one for each embedding
that the model makes of it. A feature is opaque to the core: it names where the image is stored, the SHA-256 of its
bytes, and the range of its placeholders. Each part that computes with the model (embedded engine, trainer, client of a
server) gets ids and features together, reads the image by its name, and compares its bytes with the hash
(`april.images.store`).

    Prompt.token_ids   [ 7, 3, 9, 9, 9, 9, 4, 12, ... ]        9 is the placeholder
    Prompt.features    (Feature("shapes/1.png", "5c0e...", offset=2, length=4),)

Invariants:
- placeholders are expanded once, when a prompt or a message is encoded: its ids never change afterwards, and a sample
  that is resumed is sent as the same ids, its response so far, and the same features;
- the ranges of features lie inside the ids of prompt and response, in order, without overlap, and each holds one token
  id only;
- a placeholder outside of all ranges is text: a policy may sample that token. Messages contain none;
- equal ids may stand for different images: sequences are compared by ids and hashes;
- journal and checkpoints hold features, never pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Feature:
    """An image of a sequence, whose placeholders are the tokens from `offset` to before `end`.

    Args:
        source: place of the image, see `april.images.source`.
        digest: SHA-256 of the image's bytes as they are stored, in hexadecimal digits.
        offset: index of the first placeholder in the token ids of prompt and response.
        length: number of placeholders.
    """

    source: str
    digest: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class PromptImages(Protocol):
    """What the encoding of a message needs to know about images."""

    @property
    def placeholder(self) -> int | None:
        """Token id that stands for an embedding of an image; None if the policy takes no images."""
        ...

    def read_ahead(self, sources: Iterable[str]) -> None:
        """Read images that `expand` will need, in threads; `expand` names those that cannot be read."""
        ...

    def expand(self, token_ids: Sequence[int], sources: Sequence[str]) -> tuple[list[int], tuple[Feature, ...]]:
        """Return ids in which each image has all its placeholders, and the images as features.

        Args:
            token_ids: ids with one placeholder for each image.
            sources: the images, in order.

        Raises:
            ValueError: an image cannot be read, or placeholders and images differ in number.
        """
        ...


def sources_in(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the sources of the images of chat messages, in order."""
    images = (part for message in messages for part in parts_of(message) if part.get("type") == "image")
    return [part.get("image") or "" for part in images]


def parts_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a chat message whose content is a list."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        yield from (part for part in content if isinstance(part, Mapping))


def expanded(
    token_ids: Sequence[int], messages: Iterable[Mapping[str, Any]], images: PromptImages | None, offset: int = 0
) -> tuple[Sequence[int], tuple[Feature, ...]]:
    """Return the ids of messages in which each image has all its placeholders, and the images as features.

    Args:
        token_ids: ids with one placeholder for each image.
        images: None if the policy takes none.
        offset: tokens of the sequence before these.

    Raises:
        ValueError: see `PromptImages.expand`.
    """
    sources = sources_in(messages)
    placeholder = None if images is None else images.placeholder
    if not sources and (placeholder is None or placeholder not in token_ids):
        return token_ids, ()
    if images is None:
        raise ValueError("the policy takes no images")
    ids, features = images.expand(token_ids, sources)
    return ids, moved(features, offset)


def moved(features: Iterable[Feature], by: int) -> tuple[Feature, ...]:
    """Return features with other offsets."""
    return tuple(replace(feature, offset=feature.offset + by) for feature in features)


def alike(one: Sequence[Feature], other: Sequence[Feature], tokens: int) -> int:
    """Return how many of the first tokens of two sequences stand for the same, given that `tokens` ids are equal: those
    before the first image that only one of them has there."""
    for mine, theirs in zip_longest(one, other):
        first = min(feature.offset for feature in (mine, theirs) if feature is not None)
        if first >= tokens:
            break
        if mine is None or theirs is None or _place(mine) != _place(theirs):
            return first
    return tokens


def _place(feature: Feature) -> tuple[str, int, int]:
    return feature.digest, feature.offset, feature.length


def collapsed(token_ids: Sequence[int], features: Iterable[Feature]) -> list[int]:
    """Return token ids with one placeholder for each image."""
    ids = list(token_ids)
    for feature in reversed(tuple(features)):
        del ids[feature.offset + 1 : feature.end]
    return ids


def ranges_of(token_ids: Iterable[int], placeholder: int | None) -> Iterator[tuple[int, int]]:
    """Yield the first index and the length of each range of placeholders."""
    start = 0
    for token, run in groupby(token_ids):
        length = sum(1 for _ in run)
        if token == placeholder:
            yield start, length
        start += length


def check_features(token_ids: Sequence[int], features: Iterable[Feature]) -> None:
    """Check the ranges of features in a prompt, or in a message whose ids begin at 0.

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
