"""The policy's forward pass over a training batch, as one module.

Invariants:
- all computation with the policy's parameters happens inside one call of the module, so that the hooks of a wrapper
  that shards or replicates it (FSDP2's `fully_shard`, DDP) see every use of a parameter;
- tensors of the vocabulary's size exist for one chunk of positions at a time, and the language-model head computes only
  positions that are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from april.algorithms.batch import Batch
from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from april.algorithms.truncation import WHOLE, Truncation
from april.engines.embedded.probe import in_float32
from april.engines.routers import RouterReplay
from april.images.model_inputs import ModelImages, Run
from april.images.store import ImageStore
from april.training.context_parallel import current_context_parallel
from april.training.lora import head_weight
from april.training.packing import Packing, attends_packed
from april.training.policy import trunk_of


class PolicyModel(nn.Module):
    """A causal LM, trunk and head, that scores tokens instead of returning logits.

    Args:
        model: a Hugging Face causal LM.
        temperature: divisor of logits where the batch has none of its own; positive.
        truncation: truncation with which tokens were sampled.
    """

    def __init__(self, model: Any, temperature: float = 1.0, truncation: Truncation = WHOLE) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.truncation = truncation
        self._whole = False
        self.replay: RouterReplay | None = None
        """Replays the batch's routes, if given."""
        self.images: ModelImages | None = None

    def take_images(self, images: ImageStore, together: bool = False) -> None:
        """Compute images of prompts with the model; see `ModelImages`."""
        self.images = ModelImages(trunk_of(self.model), images, together=together)

    @contextmanager
    def whole_distribution(self) -> Iterator[None]:
        """Score at temperature 1 without truncation inside the block."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log p and entropy (nats) of each token under the policy, [B, T - 1] each, 0 outside the mask.

        The language-model head computes only masked positions, a chunk at a time.
        """
        mask, head, config = batch.mask, self.model.get_output_embeddings(), self.model.config.get_text_config()
        hidden = hidden_states(trunk_of(self.model), batch, self.replay, self.images)
        softcap = getattr(config, "final_logit_softcapping", None)
        temperature = 1.0 if self._whole else batch.trained_temperatures(self.temperature)
        truncation = WHOLE if self._whole else self.truncation
        scaled = temperature / _logit_scale(config)
        targets = batch.input_ids[:, 1:][mask]
        own = {"bias": head.bias, "softcap": softcap, "truncation": truncation}
        scores = token_logprobs(hidden, head_weight(self.model), targets, scaled, **own)
        logp, entropy = (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, x) for x in scores)
        return logp, entropy


def hidden_states(
    trunk: Any, batch: Batch, replay: RouterReplay | None = None, images: ModelImages | None = None
) -> Tensor:
    """Return the last hidden states at the positions that predict a trained token, [tokens, D], in row order."""
    if not attends_packed(trunk):
        if replay is not None:
            replay.routes = routes_of(batch, replay, [batch.input_ids.shape[1]] * len(batch))
        places = [(row, 0) for row in range(len(batch))]
        computed, inputs = _inputs(trunk, batch, batch.input_ids, places, images)
        padded: Tensor = computed(**inputs, use_cache=False).last_hidden_state
        return padded[:, :-1][batch.mask]
    device = batch.mask.device
    real = torch.arange(batch.input_ids.shape[1], device=device) < torch.tensor(batch.lengths, device=device)[:, None]
    row, context = batch.input_ids[real][None], current_context_parallel()
    extra = -row.shape[1] % context.size if context else 0  # padding, so that all ranks have equal shares
    widths = [*batch.lengths, extra] if extra else batch.lengths
    packing = Packing(widths, device, context)
    ids, positions = torch.nn.functional.pad(row, (0, extra)), packing.position_ids
    routes = None if replay is None else routes_of(batch, replay, widths)
    if context:
        ids, positions = context.own(ids), context.own(positions)
        routes = None if routes is None else context.own(routes[None])[0]
    if replay is not None:
        replay.routes = routes
    places = [(0, end - length) for end, length in zip(accumulate(batch.lengths), batch.lengths, strict=True)]
    computed, inputs = _inputs(trunk, batch, ids, places, images)
    inputs = {"position_ids": positions, **inputs}
    packed: Tensor = computed(**inputs, use_cache=False, april_packing=packing).last_hidden_state[0]
    if context:
        packed = context.whole(packed)[: row.shape[1]]
    # Column t of the mask describes token t + 1, so the last position of a row predicts no trained token.
    return packed[torch.nn.functional.pad(batch.mask, (0, 1))[real]]


def _inputs(
    trunk: Any, batch: Batch, ids: Tensor, places: Sequence[tuple[int, int]], images: ModelImages | None
) -> tuple[Any, dict[str, Any]]:
    """Return the module that computes a batch, and its inputs: with images the trunk's text layers.

    Args:
        places: row and column of each sequence in `ids`.
    """
    if batch.features is None:
        return trunk, {"input_ids": ids}
    assert images is not None, "prompts with images were refused"
    sequences = zip(places, batch.lengths, batch.features, strict=True)
    runs = [Run(row, column, 0, length, features) for (row, column), length, features in sequences]
    return trunk.language_model, images.inputs(ids, runs)


def routes_of(batch: Batch, replay: RouterReplay, widths: Sequence[int]) -> Tensor | None:
    """Return the routes of a batch's tokens, [tokens, layers, top k]; None if its routers choose.

    Args:
        widths: tokens of each row, padding included; a row of padding may follow the last one.
    """
    if batch.routes is None:
        return None
    return torch.from_numpy(replay.joined(batch.routes, widths)).to(batch.mask.device)


def _logit_scale(config: Any) -> float:
    """Return the factor of an architecture on its head's output (Cohere, Granite)."""
    multiplied, divided = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return float(multiplied / divided)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Check that `PolicyModel` computes the log-probabilities of the model's own logits; the model is not sharded.

    Raises:
        ValueError: the architecture computes logits in an unknown way.
    """
    batch = probe(model)
    ids = batch.input_ids
    with in_float32(model):
        found, _ = PolicyModel(model)(batch)
        expected, _ = logprobs_from_logits(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
    if not expected.isfinite().all():
        raise ValueError(
            f"{type(model).__name__}: its logits are not finite: its weights hold NaN or infinite values, or "
            "values that overflow; copy the model again from where it comes from"
        )
    if not alike(found, expected, torch.float32):
        raise ValueError(
            f"{type(model).__name__}: its logits are not its head's output on its last hidden states, scaled or "
            "softcapped; april does not know how this architecture computes them"
        )


def probe(model: Any) -> Batch:
    """Return a small batch on the model's device, for checks that two computations of the model agree."""
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(1, 9, device=device) * 7 % vocabulary)[None]
    mask = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool, device=device)
    zeros = torch.zeros(mask.shape, device=device)
    return Batch(ids, (ids.shape[1],), mask, zeros, zeros.long())


def alike(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results computed in `dtype` differ only by rounding."""
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    return float((found - expected).abs().max()) <= tolerance * (1 + float(expected.abs().max()))
