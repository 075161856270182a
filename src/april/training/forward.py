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
from april.training.packing import Packing, attends_packed


def hidden_states(trunk: Any, batch: Batch) -> Tensor:
    """Last hidden states at the positions that predict a trained token, [tokens, D], row after row."""
    if not attends_packed(trunk):
        padded: Tensor = trunk(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return padded[:, :-1][batch.mask]
    device = batch.mask.device
    real = torch.arange(batch.input_ids.shape[1], device=device) < torch.tensor(batch.lengths, device=device)[:, None]
    packing = Packing(batch.lengths, device)
    packed: Tensor = trunk(
        input_ids=batch.input_ids[real][None],
        position_ids=packing.position_ids,
        use_cache=False,
        april_packing=packing,
    ).last_hidden_state[0]
    return packed[torch.nn.functional.pad(batch.mask, (0, 1))[real]]


def token_scores(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """log p and entropy of each token under the policy, [B, T - 1] each, 0 outside the mask.

    The language-model head runs on the masked positions only, a chunk at a time.
    """
    mask, head = batch.mask, model.get_output_embeddings()
    hidden = hidden_states(model.base_model, batch)
    softcap = getattr(model.config, "final_logit_softcapping", None)
    scaled = temperature / _logit_scale(model)
    targets = batch.input_ids[:, 1:][mask]
    scores = token_logprobs(hidden, head.weight, targets, scaled, bias=head.bias, softcap=softcap)
    logp, entropy = (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, x) for x in scores)
    return logp, entropy


def _logit_scale(model: Any) -> float:
    """What an architecture multiplies its head's output with (Cohere, Granite)."""
    multiplied, divided = (getattr(model.config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    return float(multiplied / divided)


@torch.no_grad()
def check_head(model: Any) -> None:
    """See that `token_scores` are those of the model's own logits.

    Raises:
        ValueError: the architecture computes logits in a way not known here.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    ids = (torch.arange(1, 9, device=device) * 7 % vocabulary)[None]
    mask = torch.ones(1, ids.shape[1] - 1, dtype=torch.bool, device=device)
    zeros = torch.zeros(mask.shape, device=device)
    found, _ = token_scores(model, Batch(ids, (ids.shape[1],), mask, zeros, zeros.long()), 1.0)
    expected, _ = logprobs_from_logits(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])
    tolerance = 1e-3 if model.get_output_embeddings().weight.dtype == torch.float32 else 0.1
    if not float((found - expected).abs().max()) <= tolerance * (1 + float(expected.abs().max())):
        raise ValueError(
            f"{type(model).__name__}: its logits are not its head's output on its last hidden states, scaled or "
            "softcapped; april does not know how this architecture computes them"
        )
