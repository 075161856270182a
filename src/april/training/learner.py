"""One training step: from complete groups to an update of the policy.

Invariants:
- the gradient of an update is that of its loss over all of its samples, however they are cut into micro-batches;
- what is defined over a whole batch (advantages, whitening, M2PO's choice of tokens) is computed over all of it;
- an update takes whole groups;
- a sample without advantage is not run through the model unless a term other than the policy loss needs it, and still
  counts in every denominator;
- an update whose loss or gradient is not finite is not made;
- parameters change in place, so an engine that shares them sees each update;
- models run without dropout, so that the probabilities trained on are those of the policy that samples.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from april.algorithms import advantages as estimators
from april.algorithms.catalogue import CORRECTIONS, UNBOUNDED, Algorithm, algorithm
from april.algorithms.corrections import Correction, Diagnostics, correct, diagnostics
from april.algorithms.dapo import overlong_filter, soft_overlong_penalty
from april.algorithms.losses import LOSSES, aggregate, entropy_bonus, kl, value_clip
from april.config.recipe import AlgorithmSettings, Recipe, TrainingSettings
from april.rollout.step import Step
from april.rollout.trajectory import FinishReason, Group, Sample
from april.training.batch import Batch, micro_batches
from april.training.critic import Critic
from april.training.forward import check_head, token_scores
from april.training.lora import Adapters
from april.training.packing import attends_packed, can_pack, packed_attention
from april.training.recovery import Memory, Skipped


class PolicyTerms(NamedTuple):
    """What a micro-batch adds to an update."""

    loss: Tensor
    entropy: Tensor
    """Sum over the tokens, in nats."""
    kl: Tensor
    """Sum over the tokens of the estimate of KL(π_θ ‖ π_ref); 0 without a reference policy."""
    met: Diagnostics


class Learner:
    """Trains a causal LM on rollout steps.

    Args:
        model: a Hugging Face causal LM, trained in place.
        recipe: its sections `algorithm`, `training`, `lora` and `rollout`.
        skipped: where the batches of updates are kept that are not made.

    Raises:
        ConfigError, ValueError: the model cannot be trained like this; the message says why.
    """

    def __init__(self, model: Any, recipe: Recipe, skipped: Path | None = None) -> None:
        check_head(model.eval())
        self.model = model
        self.settings: TrainingSettings = recipe.training
        self.rollout = recipe.rollout
        self.algorithm = resolve_algorithm(recipe.algorithm)
        self.correction = recipe.algorithm.correction
        self.correction_bounds = recipe.algorithm.correction_bounds
        self.entropy_coef = recipe.algorithm.entropy_coef
        self.value_clip = recipe.algorithm.value_clip
        self.memory = Memory(recipe.training.max_tokens_per_micro_batch)
        self.skipped = Skipped(skipped, recipe.training.max_skipped_updates)
        self.device = next(model.parameters()).device
        self.regularised = self.algorithm.kl_coefficient > 0
        # With adapters the reference is the policy without them.
        self.reference = self._frozen_copy() if self.regularised and not recipe.lora.rank else None
        self.critic = Critic(model) if self.algorithm.value_head else None
        self.adapters = Adapters(model, recipe.lora) if recipe.lora.rank else None
        self.packs = can_pack(model)
        self.optimizer = self._adamw(model)
        self.critic_optimizer = self._adamw(self.critic) if self.critic else None
        if self.settings.gradient_checkpointing:
            for trunk in (model, self.critic.trunk) if self.critic else (model,):
                _checkpoint_layers(trunk)

    def _frozen_copy(self) -> Any:
        return copy.deepcopy(self.model).requires_grad_(False)

    def _adamw(self, module: Any) -> torch.optim.AdamW:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.0, betas=self.settings.betas, weight_decay=self.settings.weight_decay)

    @property
    def served(self) -> Any:
        """The model that an engine in this process can run: the policy's own parameters, or adapters merged in."""
        return self.adapters.merged_model() if self.adapters else self.model

    @property
    def temperature(self) -> float:
        """What the recorded log-probabilities were scaled with; greedy ones are those of temperature 1."""
        return self.rollout.temperature or 1.0

    @property
    def penalised(self) -> bool:
        """Whether the KL penalty is taken from the reward."""
        return self.regularised and self.algorithm.kl_place == "reward"

    def learning_rate(self, step: int) -> float:
        """The policy's learning rate in training step `step`, counted from 1."""
        return self.settings.learning_rate * self._schedule(step)

    def _schedule(self, step: int) -> float:
        """The share of the peak learning rate in `step`."""
        warmup, steps = self.settings.warmup_steps, self.settings.steps
        if step <= warmup:
            return step / warmup
        progress = (step - 1 - warmup) / max(steps - warmup, 1)
        if self.settings.lr_schedule == "linear":
            return max(1 - progress, 0.0)
        if self.settings.lr_schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return 1.0

    def train(self, step: Step, number: int) -> dict[str, float]:
        """Train on the groups of a rollout step and return the step's metrics.

        Args:
            number: the training step, counted from 1.

        Raises:
            TrainingError: too many updates in a row had no finite loss and gradient, or memory runs out with one
                sample at a time. The parameters are as they were before that update.
        """
        _set_learning_rate(self.optimizer, self.learning_rate(number))
        if self.critic_optimizer:
            _set_learning_rate(self.critic_optimizer, self.settings.critic_learning_rate * self._schedule(number))
        samples = [sample for group in step.groups for sample in group.samples]
        lengths = [len(sample.prompt_ids) + sample.length for sample in samples]
        shortages = self.memory.shortages
        with self.packed():
            batch = self.memory.fit(lambda: self.prepare(step), lengths)
            results = [
                self._update(f"step-{number:06d}-{index}", batch.rows(rows), [samples[row] for row in rows])
                for index, rows in enumerate(self._updates(step.groups))
            ]
        total = results[0][1]
        for _, met in results[1:]:
            total = total + met
        metrics = {name: sum(r[name] for r, _ in results) / len(results) for name in results[0][0]}
        metrics["skipped_updates"] *= len(results)
        named = total.metrics()
        return {
            **metrics,
            "lr": self.learning_rate(number),
            "out_of_memory": self.memory.shortages - shortages,
            "clip_fraction": named["clipped"],
            "masked_fraction": named["masked"],
            "capped_fraction": named["capped"],
            "ratio_mean": named["w_mean"],
            "ratio_max": named["w_max"],
            "kl_behaviour": named["kl_k3"],
            **{f"by_age/{name}": value for name, value in named.items() if name.startswith("age_")},
        }

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Inside, models run over packed sequences, if the policy's architecture allows it."""
        trunks = (self.model, self.reference, self.critic and self.critic.trunk) if self.packs else ()
        with packed_attention(*(trunk for trunk in trunks if trunk is not None)):
            yield

    @torch.no_grad()
    def prepare(self, step: Step) -> Batch:
        """The step's samples with their advantages, and with whatever else is of the moment before any update."""
        samples = [sample for group in step.groups for sample in group.samples]
        batch = Batch.of(samples, step.version)
        if self.algorithm.overlong_filter:
            truncated = torch.tensor([sample.finish is FinishReason.LENGTH for sample in samples])
            batch = dataclasses.replace(batch, mask=overlong_filter(batch.mask, truncated))
        if self.regularised:
            batch = dataclasses.replace(batch, reference=self._score(self._reference_logprobs, batch))
        if self.penalised:
            batch = dataclasses.replace(batch, prox=self._score(self._logprobs, batch))
        if self.critic is not None:
            batch = dataclasses.replace(batch, values=self._score(self.critic, batch))
        batch = self._with_advantages(batch, self.rewards(step.groups))
        if batch.prox is None and self.settings.updates_per_step > 1:
            batch = dataclasses.replace(batch, prox=self._score(self._logprobs, batch, self._carrying_signal(batch)))
        return batch

    def rewards(self, groups: Sequence[Group]) -> Tensor:
        """The rewards trained on, [groups, samples]."""
        rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups], dtype=torch.float32)
        if not self.algorithm.soft_overlong_penalty:
            return rewards
        budget = self.rollout.max_response_length
        lengths = torch.tensor([[sample.length for sample in group.samples] for group in groups])
        return rewards + soft_overlong_penalty(lengths, budget, max(budget // 5, 1))

    def _with_advantages(self, batch: Batch, rewards: Tensor) -> Batch:
        """`batch` with one advantage per sample or per token, from rewards [groups, samples]."""
        chosen, mask = self.algorithm, batch.mask
        penalty = torch.zeros(mask.shape)
        if self.penalised:
            assert batch.prox is not None
            assert batch.reference is not None
            estimate = kl(batch.prox, batch.reference, mask, chosen.kl_estimator or "k1")
            penalty = chosen.kl_coefficient * estimate
        if chosen.value_head:
            assert batch.values is not None
            token_rewards = estimators.outcome_rewards(rewards.flatten(), mask) - penalty
            advantages, returns = estimators.gae(token_rewards, batch.values, mask, chosen.gamma, chosen.lam)
            return dataclasses.replace(batch, advantages=estimators.whiten(advantages, mask), returns=returns)
        if chosen.advantage == "reinforce_plus_plus":
            advantages = estimators.reinforce_plus_plus_per_token(rewards.flatten(), mask, penalty)
        else:
            # A response is one action: its penalty is the sum over its tokens.
            penalised = rewards - penalty.sum(-1).view_as(rewards)
            advantages = estimators.ADVANTAGES[chosen.advantage](penalised).flatten()
        return dataclasses.replace(batch, advantages=advantages)

    def loss(self, batch: Batch, denominator: float) -> PolicyTerms:
        """What a micro-batch adds to the policy's loss.

        Args:
            denominator: of the whole update (see `losses.aggregate`).
        """
        chosen, mask = self.algorithm, batch.mask
        assert batch.advantages is not None
        logp, entropy = token_scores(self.model, batch, self.temperature)
        prox = logp.detach() if batch.prox is None else batch.prox
        correction = batch.correction or self._correct(batch, logp, prox)
        clip = {"eps_low": chosen.eps_low, "eps_high": chosen.eps_high}
        if chosen.dual_clip is not None:
            clip["dual_clip"] = chosen.dual_clip
        policy = LOSSES[chosen.loss](logp, correction.old_logprobs, batch.advantages, correction.mask, **clip)
        tokens = policy.loss * correction.weights
        divergence = torch.zeros(mask.shape, device=mask.device)
        if batch.reference is not None:
            divergence = kl(logp, batch.reference, mask, chosen.kl_estimator or "k3")
        if not self.penalised:
            tokens = tokens + chosen.kl_coefficient * divergence
        if self.entropy_coef:
            tokens = tokens + self.entropy_coef * entropy_bonus(entropy, mask)
        met = diagnostics(correction, prox, batch.behaviour, mask, batch.ages, policy.clipped)
        loss = aggregate(tokens, mask, chosen.aggregation, denominator)
        return PolicyTerms(loss, (entropy.detach() * mask).sum(), divergence.detach().sum(), met)

    def value_loss(self, batch: Batch, tokens: int) -> Tensor:
        """What a micro-batch adds to the critic's loss, the mean over the update's trained `tokens`."""
        assert self.critic is not None
        assert batch.values is not None
        assert batch.returns is not None
        terms = value_clip(self.critic(batch), batch.values, batch.returns, batch.mask, self.value_clip)
        return aggregate(terms, batch.mask, "token-mean", tokens)

    def denominator(self, batch: Batch) -> float:
        """What the sum over an update's rows is divided by, so that micro-batches add up to the whole."""
        if self.algorithm.aggregation == "sequence-mean":
            return len(batch)
        if self.algorithm.aggregation == "constant":
            return len(batch) * self.rollout.max_response_length
        return max(int(batch.mask.sum()), 1)

    def _update(self, name: str, batch: Batch, samples: Sequence[Sample]) -> tuple[dict[str, float], Diagnostics]:
        """One optimizer update on all rows of `batch`, which are these `samples`."""
        total, tokens, met = self.memory.fit(lambda: self._gradient(batch), batch.lengths)
        measured = {"loss": total["loss"], "grad_norm": 0.0}
        if self.critic:
            measured |= {"value_loss": total["value_loss"], "value_grad_norm": 0.0}
        finite = True
        if tokens:
            measured["grad_norm"] = self._clip_gradient(self.model)
            if self.critic:
                measured["value_grad_norm"] = self._clip_gradient(self.critic)
            finite = all(map(math.isfinite, measured.values()))
            if finite:
                self.optimizer.step()
                if self.critic_optimizer:
                    self.critic_optimizer.step()
                self.skipped.made()
            else:
                self.skipped.skip(name, batch, samples, measured)
        for term in ("entropy", "kl_reference"):
            total[term] /= max(tokens, 1)
        if not self.regularised:
            del total["kl_reference"]
        if self.critic is None:
            del total["value_loss"]
        return total | measured | {"skipped_updates": float(not finite)}, met

    def _gradient(self, batch: Batch) -> tuple[dict[str, float], int, Diagnostics]:
        """The gradient of an update's loss, added up over its micro-batches; sums over its tokens, and their number."""
        if CORRECTIONS[self.correction].tau is not None:
            now = self._score(self._logprobs, batch)
            correction = self._correct(batch, now, now if batch.prox is None else batch.prox)
            batch = dataclasses.replace(batch, correction=correction)
        denominator, trained = self.denominator(batch), int(batch.mask.sum())
        total = {"loss": 0.0, "entropy": 0.0, "kl_reference": 0.0, "value_loss": 0.0}
        tokens = 0
        met = Diagnostics(torch.zeros(6, 9), torch.zeros(9), torch.zeros(9))
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic_optimizer:
            self.critic_optimizer.zero_grad(set_to_none=True)
        for _, micro in self._micro_batches(batch, self._carrying_signal(batch)):
            terms = self.loss(micro, denominator)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            if self.critic:
                value_loss = self.value_loss(micro, trained)
                value_loss.backward()  # type: ignore[no-untyped-call]
                total["value_loss"] += value_loss.item()
            met = met + Diagnostics(terms.met.sums.cpu(), terms.met.k3.cpu(), terms.met.largest.cpu())
            total["loss"] += terms.loss.item()
            total["entropy"] += terms.entropy.item()
            total["kl_reference"] += terms.kl.item()
            tokens += int(micro.mask.sum())
        return total, tokens, met

    def _clip_gradient(self, module: Any) -> float:
        """Clip the gradient of `module` and return its norm before that."""
        return float(torch.nn.utils.clip_grad_norm_(module.parameters(), self.settings.max_grad_norm))

    def _updates(self, groups: Sequence[Group]) -> Iterator[range]:
        """The rows of each optimizer update: whole groups, as many in each."""
        sizes = [len(group.samples) for group in groups]
        count = self.settings.updates_per_step
        bounds = [len(groups) * k // count for k in range(count + 1)]
        for first, last in itertools.pairwise(bounds):
            yield range(sum(sizes[:first]), sum(sizes[:last]))

    def _carrying_signal(self, batch: Batch) -> list[int]:
        """The rows that can have a gradient."""
        assert batch.advantages is not None
        trained = batch.mask.any(-1)
        if not self.regularised and self.critic is None and not self.entropy_coef:
            advantages = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
            trained &= (advantages != 0).any(-1)
        return trained.nonzero()[:, 0].tolist()

    def _micro_batches(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        for part in micro_batches(batch.lengths, rows, self.memory.tokens, attends_packed(self.model)):
            yield part, batch.rows(part, self.device)

    def _correct(self, batch: Batch, logp: Tensor, prox: Tensor) -> Correction:
        bounds: dict[str, Any] = self.correction_bounds
        return correct(self.correction, logp, prox, batch.behaviour, batch.mask, batch.ages, **bounds)  # type: ignore[arg-type]

    def _logprobs(self, batch: Batch) -> Tensor:
        return token_scores(self.model, batch, self.temperature)[0]

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        if self.adapters:
            with self.adapters.disabled():
                return self._logprobs(batch)
        return token_scores(self.reference, batch, self.temperature)[0]

    @torch.no_grad()
    def _score(self, score: Callable[[Batch], Tensor], batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
        """`score` of `rows`, a micro-batch at a time, or of all that are trained on; [B, T - 1], 0 elsewhere."""
        result = torch.zeros(batch.mask.shape)
        chosen = batch.mask.any(-1).nonzero()[:, 0].tolist() if rows is None else rows
        for part, micro in self._micro_batches(batch, chosen):
            scores = score(micro)
            result[part, : scores.shape[1]] = scores.cpu()
        return result

    def state_dict(self) -> dict[str, Any]:
        """All that training has changed but the policy's own parameters; of adapters, those too."""
        states = {name: part.state_dict() for name, part in self._stateful().items()}
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return {**states, "random": [torch.get_rng_state(), *devices]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: it is of a run with other settings.
        """
        parts, saved = self._stateful(), state.keys() - {"random"}
        if parts.keys() != saved:
            raise ValueError(
                f"the checkpoint holds {', '.join(sorted(saved))}, but these settings need {', '.join(sorted(parts))}: "
                "resume with the algorithm, kl_coef and lora settings that the run was begun with"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])
        random = state.get("random", ())
        if random:
            torch.set_rng_state(random[0])
        if len(random) == 1 + torch.cuda.device_count():
            torch.cuda.set_rng_state_all(random[1:])

    def _stateful(self) -> dict[str, Any]:
        names = ("adapters", "optimizer", "reference", "critic", "critic_optimizer")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


def _checkpoint_layers(trunk: Any) -> None:
    trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in trunk.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers checkpoints only a layer that is in training; what is inside it stays without dropout.
            module.training = True


def _set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for parameters in optimizer.param_groups:
        parameters["lr"] = lr


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The named algorithm with the recipe's own values in place of the published ones.

    Raises:
        ValueError: there is no such algorithm.
    """
    chosen = algorithm(settings.algorithm)
    if CORRECTIONS[settings.correction].tau is not None and chosen.loss == "ppo_clip":
        # M2PO's choice of tokens takes the place of the clip.
        chosen = dataclasses.replace(chosen, eps_low=UNBOUNDED, eps_high=UNBOUNDED)
    own: dict[str, Any] = {
        "eps_low": settings.eps_low,
        "eps_high": settings.eps_high,
        "dual_clip": settings.dual_clip,
        "aggregation": settings.loss_aggregation,
        "kl_coefficient": settings.kl_coef,
        "gamma": settings.gamma,
        "lam": settings.gae_lambda,
    }
    return dataclasses.replace(chosen, **{name: value for name, value in own.items() if value is not None})
