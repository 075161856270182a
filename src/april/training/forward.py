"""A model's forward pass over a training batch.

Invariant: nothing of the vocabulary's size is held for more than a chunk of positions, and nothing is computed by the
language-model head for positions that are not trained on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from april.training.batch import Batch


def hidden_states(trunk: Any, batch: Batch) -> Tensor:
    """Last hidden states at the positions that predict a trained token, [tokens, D], row after row."""
    hidden: Tensor = trunk(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][batch.mask]


def token_scores(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """log p and entropy of each token under the policy, [B, T - 1] each, 0 outside the mask.

    The language-model head runs on the masked positions only, a chunk at a time.
    """
    mask = batch.mask
    targets = batch.input_ids[:, 1:][mask]
    head = model.get_output_embeddings()
    if has_plain_head(model):
        hidden = hidden_states(model.base_model, batch)
        softcap = getattr(model.config, "final_logit_softcapping", None)
        scores = token_logprobs(hidden, head.weight, targets, temperature, bias=head.bias, softcap=softcap)
    else:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1][mask]
        scores = logprobs_from_logits(logits, targets, temperature)
    logp, entropy = (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, x) for x in scores)
    return logp, entropy


def has_plain_head(model: Any) -> bool:
    """Whether logits are head(hidden), softcapped at most; some architectures scale them."""
    scales = ("logit_scale", "logits_scaling")
    return not any(getattr(model.config, name, None) not in (None, 1.0) for name in scales)
