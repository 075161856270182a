"""One training step: from complete groups to an update of the policy.

Invariants:
- the gradient of a step is that of its loss over the whole batch, however it is cut into micro-batches;
- a group whose samples all have advantage 0 is not run through the model unless a term other than the policy loss
  needs it, and still counts in every denominator;
- parameters change in place, so an engine that shares them sees each update.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from april.algorithms import advantages as advantage_estimators
from april.algorithms.catalogue import Algorithm, algorithm
from april.algorithms.corrections import Diagnostics, correct, diagnostics
from april.algorithms.dapo import soft_overlong_penalty
from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from april.algorithms.losses import LOSSES, aggregate, kl
from april.config import AlgorithmSettings, Recipe, TrainingSettings
from april.step import Step
from april.training.batch import MicroBatch, micro_batches
from april.trajectory import FinishReason, Group, Sample


class TrainingError(Exception):
    """Training cannot go on: the loss or the gradient is not finite."""


class Learner:
    """Trains a causal LM on rollout steps.

    Args:
        model: a Hugging Face causal LM, trained in place.
        recipe: its sections `algorithm`, `training` and `rollout`.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model = model
        self.settings: TrainingSettings = recipe.training
        self.rollout = recipe.rollout
        self.algorithm = resolve_algorithm(recipe.algorithm)
        self.correction = recipe.algorithm.correction
        self.entropy_coef = recipe.algorithm.entropy_coef
        self.device = next(model.parameters()).device
        self.reference = self._frozen_copy() if self.algorithm.kl_coefficient else None
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        if self.settings.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()

    def _frozen_copy(self) -> Any:
        reference = copy.deepcopy(self.model).eval()
        return reference.requires_grad_(False)

    @property
    def temperature(self) -> float:
        """What the recorded log-probabilities were scaled with; greedy ones are those of temperature 1."""
        return self.rollout.temperature or 1.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of training step `step`, counted from 1."""
        peak, warmup, steps = self.settings.learning_rate, self.settings.warmup_steps, self.settings.steps
        if step <= warmup:
            return peak * step / warmup
        progress = (step - 1 - warmup) / max(steps - warmup, 1)
        if self.settings.lr_schedule == "linear":
            return peak * max(1 - progress, 0.0)
        if self.settings.lr_schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return peak

    def train(self, step: Step, number: int) -> dict[str, float]:
        """Train on the groups of a rollout step and return the step's metrics.

        Args:
            number: the training step, counted from 1.

        Raises:
            TrainingError: a gradient is not finite; the parameters are as they were before that update.
        """
        lr = self.learning_rate(number)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        advantages = self.advantages(step.groups)
        samples = [sample for group in step.groups for sample in group.samples]
        prox = self._logprobs_before(samples, advantages, step.version) if self.settings.updates_per_step > 1 else None
        size = len(samples) // self.settings.updates_per_step
        results = [
            self._update(samples, range(start, start + size), advantages, step.version, prox)
            for start in range(0, len(samples), size)
        ]
        total = results[0][1]
        for _, met in results[1:]:
            total = total + met
        metrics = {name: sum(r[name] for r, _ in results) / len(results) for name in results[0][0]}
        named = total.metrics()
        return {
            **metrics,
            "lr": lr,
            "clip_fraction": named["clipped"],
            "masked_fraction": named["masked"],
            "capped_fraction": named["capped"],
            "ratio_mean": named["w_mean"],
            "ratio_max": named["w_max"],
            "kl_behaviour": named["kl_k3"],
            **{f"by_age/{name}": value for name, value in named.items() if name.startswith("age_")},
        }

    def advantages(self, groups: Sequence[Group]) -> Tensor:
        """One advantage per sample of the groups, in order, [samples]."""
        rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups], dtype=torch.float32)
        if self.algorithm.soft_overlong_penalty:
            budget = self.rollout.max_response_length
            lengths = torch.tensor([[sample.length for sample in group.samples] for group in groups])
            rewards = rewards + soft_overlong_penalty(lengths, budget, max(budget // 5, 1))
        estimator = getattr(advantage_estimators, self.algorithm.advantage)
        result: Tensor = estimator(rewards)
        return result.flatten()

    def loss(
        self, batch: MicroBatch, samples: Sequence[Sample], denominator: float, prox: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Diagnostics]:
        """A micro-batch's part of the loss, the sum of its entropies, and what correction and clipping did.

        Args:
            samples: what the indices of `batch` refer to.
            denominator: of the whole batch (see `losses.aggregate`).
            prox: log-probabilities as the training step began, [B, T - 1]; the current ones if None.
        """
        chosen = self.algorithm
        logp, entropy = token_scores(self.model, batch, self.temperature)
        prox = logp.detach() if prox is None else prox
        mask = batch.mask
        if chosen.overlong_filter:
            truncated = [samples[i].finish is FinishReason.LENGTH for i in batch.indices]
            mask = mask & ~torch.tensor(truncated, device=mask.device)[:, None]
        correction = correct(self.correction, logp, prox, batch.behaviour, mask, batch.ages)  # type: ignore[arg-type]
        clip = {"eps_low": chosen.eps_low, "eps_high": chosen.eps_high}
        if chosen.dual_clip is not None:
            clip["dual_clip"] = chosen.dual_clip
        policy = LOSSES[chosen.loss](logp, correction.old_logprobs, batch.advantages, correction.mask, **clip)
        tokens = policy.loss * correction.weights
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = token_scores(self.reference, batch, self.temperature)
            tokens = tokens + chosen.kl_coefficient * kl(logp, reference, mask, chosen.kl_estimator or "k3")
        if self.entropy_coef:
            tokens = tokens - self.entropy_coef * entropy
        met = diagnostics(correction, prox, batch.behaviour, mask, batch.ages, policy.clipped)
        return aggregate(tokens, mask, chosen.aggregation, denominator), (entropy.detach() * mask).sum(), met

    def denominator(self, samples: Sequence[Sample]) -> float:
        """What the sum over the batch is divided by, so that micro-batches add up to the whole."""
        if self.algorithm.aggregation == "sequence-mean":
            return len(samples)
        if self.algorithm.aggregation == "constant":
            return len(samples) * self.rollout.max_response_length
        kept = [s for s in samples if not (self.algorithm.overlong_filter and s.finish is FinishReason.LENGTH)]
        return max(sum(int(sample.loss_mask.sum()) for sample in kept), 1)

    def _carrying_signal(self, indices: Sequence[int], advantages: Tensor) -> list[int]:
        if self.reference is not None or self.entropy_coef:
            return list(indices)
        return [i for i in indices if advantages[i] != 0]

    def _update(
        self,
        samples: Sequence[Sample],
        indices: Sequence[int],
        advantages: Tensor,
        version: int,
        prox: dict[int, Tensor] | None,
    ) -> tuple[dict[str, float], Diagnostics]:
        """One optimizer update on the samples at `indices`."""
        denominator = self.denominator([samples[i] for i in indices])
        chosen = self._carrying_signal(indices, advantages)
        total, entropy, tokens = 0.0, 0.0, 0
        met = Diagnostics(torch.zeros(6, 9), torch.zeros(9), torch.zeros(9))
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self._batches(samples, chosen, advantages, version):
            before = None if prox is None else _rows(prox, batch)
            loss, entropies, part = self.loss(batch, samples, denominator, before)
            loss.backward()  # type: ignore[no-untyped-call]
            met = met + Diagnostics(part.sums.cpu(), part.k3.cpu(), part.largest.cpu())
            total += loss.item()
            entropy += entropies.item()
            tokens += int(batch.mask.sum())
        norm = 0.0
        if tokens:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm))
            if not math.isfinite(norm):
                raise TrainingError(
                    f"the gradient's norm is {norm} (loss {total:g}): lower the learning rate, or look for rewards "
                    "or log-probabilities that are not plausible in this step"
                )
            self.optimizer.step()
        return {"loss": total, "grad_norm": norm, "entropy": entropy / max(tokens, 1)}, met

    def _batches(
        self, samples: Sequence[Sample], indices: Sequence[int], advantages: Tensor, version: int
    ) -> list[MicroBatch]:
        budget = self.settings.max_tokens_per_micro_batch
        return list(micro_batches(samples, advantages, version, budget, self.device, indices))

    @torch.no_grad()
    def _logprobs_before(self, samples: Sequence[Sample], advantages: Tensor, version: int) -> dict[int, Tensor]:
        """log π_prox of each sample's tokens, by the sample's index: π_prox stays put while several updates move π."""
        chosen = self._carrying_signal(range(len(samples)), advantages)
        scores: dict[int, Tensor] = {}
        for batch in self._batches(samples, chosen, advantages, version):
            logp, _ = token_scores(self.model, batch, self.temperature)
            scores |= dict(zip(batch.indices, logp, strict=True))
        return scores

    def state_dict(self) -> dict[str, Any]:
        reference = None if self.reference is None else self.reference.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "reference": reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])


def _rows(scores: dict[int, Tensor], batch: MicroBatch) -> Tensor:
    width = batch.mask.shape[1]
    rows = [scores[i][:width] for i in batch.indices]
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The named algorithm with the recipe's own values in place of the published ones.

    Raises:
        ValueError: there is no such algorithm, or it needs what `april train` does not have.
    """
    chosen = algorithm(settings.algorithm)
    own: dict[str, Any] = {
        "eps_low": settings.eps_low,
        "eps_high": settings.eps_high,
        "aggregation": settings.loss_aggregation,
        "kl_coefficient": settings.kl_coef,
    }
    chosen = dataclasses.replace(chosen, **{name: value for name, value in own.items() if value is not None})
    if chosen.value_head:
        raise ValueError(f'algorithm = "{chosen.name}" needs a value head, which april train does not have yet')
    if chosen.kl_coefficient and chosen.kl_place == "reward":
        raise ValueError(
            f'algorithm = "{chosen.name}" takes its KL penalty from the reward, which april train cannot do yet: set '
            "kl_coef = 0"
        )
    return chosen


def token_scores(model: Any, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """log p and entropy of each token under the policy, [B, T - 1] each, 0 outside the mask.

    The language-model head runs on the masked positions only, a chunk at a time.
    """
    mask = batch.mask
    targets = batch.input_ids[:, 1:][mask]
    head = model.get_output_embeddings()
    if has_plain_head(model):
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state[:, :-1][mask]
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
