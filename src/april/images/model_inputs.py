"""From token ids and features to the inputs of a model's text layers; engine and trainer both use `ModelImages.inputs`.

Models of the Qwen-VL family replace the embeddings of placeholders by the embeddings of an image, add further ones
behind the first layers (Qwen3-VL, DeepStack), and give placeholders positions in time, height and width. The text
layers are called directly, because transformers takes every placeholder id for a part of an image, also one that a
policy has sampled.

Invariants:
- only tokens in the range of a feature get embeddings of an image. Token i of the range gets embedding i, in whichever
  pieces a sequence is computed;
- positions depend on the ranges and the grids of a prompt's images alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from april.images.store import ImageStore, Pixels
from april.rollout.trajectory.features import Feature

KEPT_BYTES = 256 << 20
"""Embeddings of images that are kept between forward passes."""

KEPT_POSITIONS = 64 << 20
"""Bytes of positions that are kept: each pass needs the positions of its prompts."""

KEPT_DISTANCES = 1 << 16
"""Prompts whose distance is kept: engines need it for each token of a response."""


class Run(NamedTuple):
    """Consecutive tokens of a sequence, `start` to `start + length`, at a row and column of the model's input."""

    row: int
    column: int
    start: int
    length: int
    features: tuple[Feature, ...]


class _Embedded(NamedTuple):
    """Embeddings of an image, [placeholders, D], and those that are added behind the first layers."""

    image: Tensor
    layers: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.image, *self.layers))


class _Positions(NamedTuple):
    """Positions [3, tokens] up to the last placeholder, and the distance from a later token's index to its position."""

    prefix: NDArray[np.int64]
    distance: int


class ModelImages:
    """Inputs of a model for prompts with images.

    Args:
        trunk: the model without its head; its images are computed with the weights of the moment.
        store: pixels.
        keeps: keep embeddings between calls, without gradients, until `forget`.
        together: compute an image in each call, a black one of a single embedding if there is no other: ranks that
            shard a model gather its parameters together.
    """

    def __init__(self, trunk: Any, store: ImageStore, keeps: bool = False, together: bool = False) -> None:
        self.trunk = trunk
        self.store = store
        self._keeps = keeps
        self._together = together
        self._kept: OrderedDict[str, _Embedded] = OrderedDict()
        self._prepared: dict[str, Pixels] = {}
        self._positions: OrderedDict[tuple[Feature, ...], _Positions] = OrderedDict()
        self._positions_bytes = 0
        self._distances: dict[tuple[Feature, ...], int] = {}

    def forget(self) -> None:
        """Drop kept embeddings: the weights have changed, or their memory is needed."""
        self._kept.clear()

    async def prepare(self, runs: Sequence[Run]) -> None:
        """Have threads make the pixels that the next call of `inputs` needs for these runs."""
        inside = {feature for _, _, feature, _ in _pieces(runs) if feature.digest not in self._kept}
        # Positions need the grids of all images of a prompt, which are known once an image was processed.
        every = dict.fromkeys(feature for run in runs for feature in run.features)
        wanted = [feature for feature in every if feature in inside or not self.store.knows_grid(feature)]
        made = zip(wanted, await self.store.fetch(wanted), strict=True)
        # Held until the next call: the store keeps a few only.
        self._prepared = {feature.digest: pixels for feature, pixels in made if feature in inside}

    def inputs(self, token_ids: Tensor, runs: Sequence[Run]) -> dict[str, Any]:
        """Return the arguments of the text layers for token ids [B, T], in place of the ids.

        Args:
            runs: all sequences with images in the batch, and those without whose positions matter; by row and column.

        Raises:
            ImageError: an image is missing or has changed.
        """
        embeddings = self.trunk.get_input_embeddings()(token_ids)
        given: dict[str, Any] = {"position_ids": self._position_ids(token_ids, runs)}
        pieces = list(_pieces(runs))
        if not pieces and self._together:
            # As a term of 0 it is in the graph, so the ranks' backward passes are alike too.
            black = _sum(self._black(token_ids.device))
            embeddings = embeddings + 0 * black.to(embeddings.dtype)
        if pieces:
            images = self._embedded([feature for _, _, feature, _ in pieces], token_ids.device)
            mask = np.zeros(tuple(token_ids.shape), bool)
            for row, column, _, part in pieces:
                mask[row, column : column + part.stop - part.start] = True
            placed = torch.from_numpy(mask).to(token_ids.device)
            found = [(images[feature.digest], part) for _, _, feature, part in pieces]
            values = torch.cat([image.image[part] for image, part in found]).to(embeddings.dtype)
            embeddings = embeddings.masked_scatter(placed[..., None], values)
            if found[0][0].layers:
                layers = zip(*([tensor[part] for tensor in image.layers] for image, part in found), strict=True)
                given["visual_pos_masks"] = placed
                given["deepstack_visual_embeds"] = [torch.cat(list(layer)) for layer in layers]
        return {"inputs_embeds": embeddings, **given}

    def _embedded(self, features: Sequence[Feature], device: torch.device) -> dict[str, _Embedded]:
        wanted = {feature.digest: feature for feature in features}
        found = {digest: self._kept[digest] for digest in wanted if digest in self._kept}
        missing = [feature for digest, feature in wanted.items() if digest not in found]
        if missing:
            made = dict(zip([feature.digest for feature in missing], self._compute(missing, device), strict=True))
            found |= made
            if self._keeps:
                self._keep(made)
        return found

    def _keep(self, made: dict[str, _Embedded]) -> None:
        self._kept |= made
        size = sum(image.nbytes for image in self._kept.values())
        while size > KEPT_BYTES and len(self._kept) > 1:
            size -= self._kept.popitem(last=False)[1].nbytes

    def _compute(self, features: Sequence[Feature], device: torch.device) -> Iterator[_Embedded]:
        pixels = [self._prepared.get(feature.digest) or self.store.pixels(feature) for feature in features]
        patches = torch.from_numpy(np.concatenate([one.patches for one in pixels])).to(device)
        return self._of_patches(patches, torch.tensor([one.grid for one in pixels], device=device))

    def _black(self, device: torch.device) -> _Embedded:
        parts = self.trunk.config.vision_config
        side: int = parts.spatial_merge_size
        grid = torch.tensor([[1, side, side]], device=device)
        return next(self._of_patches(torch.zeros(side * side, patch_values(parts), device=device), grid))

    def _of_patches(self, patches: Tensor, grids: Tensor) -> Iterator[_Embedded]:
        output = self.trunk.get_image_features(patches, grids, return_dict=True)
        layers = getattr(output, "deepstack_features", None) or ()
        for index, image in enumerate(output.pooler_output):
            yield _Embedded(image, tuple(layer[index] for layer in layers))

    def _position_ids(self, token_ids: Tensor, runs: Sequence[Run]) -> Tensor:
        positions = np.zeros((3, *token_ids.shape), np.int64)
        for run in runs:
            positions[:, run.row, run.column : run.column + run.length] = self.positions(run)
        return torch.from_numpy(positions).to(token_ids.device)

    def positions(self, run: Run) -> NDArray[np.int64]:
        """Return the positions of a run's tokens in time, height and width, [3, length]."""
        indices = np.arange(run.start, run.start + run.length)
        if not run.features:
            return np.broadcast_to(indices, (3, run.length))
        if run.start >= run.features[-1].end:
            return np.broadcast_to(indices + self._distance(run.features), (3, run.length))
        known = self._known(run.features)
        within = known.prefix[:, run.start : run.start + run.length]
        after = indices[within.shape[1] :] + known.distance
        return np.concatenate((within, np.broadcast_to(after, (3, len(after)))), 1)

    def _distance(self, features: tuple[Feature, ...]) -> int:
        if (distance := self._distances.get(features)) is None:
            distance = self._distances[features] = self._known(features).distance
            if len(self._distances) > KEPT_DISTANCES:
                del self._distances[next(iter(self._distances))]
        return distance

    def _known(self, features: tuple[Feature, ...]) -> _Positions:
        if (known := self._positions.get(features)) is not None:
            return known
        kinds = torch.zeros(1, features[-1].end, dtype=torch.int)
        for feature in features:
            kinds[0, feature.offset : feature.end] = 1
        grids = torch.tensor([self.store.grid(feature) for feature in features])
        # Only the kinds of tokens matter, not their ids.
        found, distance = self.trunk.get_rope_index(kinds.long(), kinds, image_grid_thw=grids)
        known = self._positions[features] = _Positions(found[:, 0].numpy(), int(distance))
        self._positions_bytes += known.prefix.nbytes
        while self._positions_bytes > KEPT_POSITIONS and len(self._positions) > 1:
            self._positions_bytes -= self._positions.popitem(last=False)[1].prefix.nbytes
        return known


def patch_values(config: Any) -> int:
    """Return the number of values of a patch, from the configuration of a vision tower."""
    return int(3 * config.temporal_patch_size * config.patch_size**2)


def _sum(image: _Embedded) -> Tensor:
    total: Tensor = sum((layer.sum() for layer in image.layers), image.image.sum())
    return total


def _pieces(runs: Sequence[Run]) -> Iterator[tuple[int, int, Feature, slice]]:
    """Yield the parts of images inside runs: row and column of the first placeholder, image, and its embeddings."""
    for run in runs:
        end = run.start + run.length
        for feature in run.features:
            first, last = max(feature.offset, run.start), min(feature.end, end)
            if first < last:
                part = slice(first - feature.offset, last - feature.offset)
                yield run.row, run.column + first - run.start, feature, part
