"""Learner in one process on one device.

Invariants:
- the gradient of an update is the gradient of its loss over all its samples, for any division into micro-batches;
- decisions (advantages, corrections, denominators, whether an update is made) use the whole batch or update; only
  forward and backward passes are per micro-batch, and all of them use `_passes`;
- an update consists of whole groups;
- a sample with zero advantage is not run through the model unless a term other than the policy loss needs it;
- an update whose loss or gradient is not finite is skipped;
- parameters change in place, so an engine that shares them sees each update;
- models run without dropout, so that training computes the probabilities of the policy that samples.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from april.algorithms.batch import Batch
from april.algorithms.corrections import Diagnostics
from april.algorithms.objective import UpdateSums
from april.engines.embedded.model import convert
from april.engines.pretrained import LEFT_OUT
from april.engines.weight_transfer import WeightTransfer
from april.images.store import ImageStore
from april.rollout.batch import RolloutBatch
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.sample import Sample
from april.training.checkpoint import ADAPTER, TRAINING
from april.training.context import context_of
from april.training.critic import Critic
from april.training.forward import PolicyModel, check_head
from april.training.learner import Interrupted
from april.training.learner_objective import AS_BEGUN, build_objective, sampling_distribution
from april.training.learner_settings import LearnerSettings
from april.training.lora import Adapters
from april.training.lr_schedule import lr_factor
from april.training.master_weights import MasterWeights
from april.training.micro_batches import plan
from april.training.offload import EVERY_PART, Offload, Part, tensors_of
from april.training.optimizer import adamw, moments, set_learning_rate
from april.training.packing import attends_packed, can_pack, packed_attention
from april.training.policy import save_policy, stop_tokens
from april.training.recovery import MicroBatchBudget, SkippedUpdates
from april.training.router_replay import missing_routes, replayed_routes, router_replay
from april.training.sharded_files import read, write
from april.training.update_share import UpdateShare
from april.training.weight_transfer import model_transfer


class LocalLearner:
    """Trains a causal LM on rollout steps.

    Args:
        model: a Hugging Face causal LM, trained in place.
        settings: algorithm, optimisation, adapters, and the engine that gets the weights.
        tokenizer: the model's tokenizer, saved with checkpoints.
        directory: the run's directory, for batches of skipped updates and for weights that servers load.
        images: images of prompts; None for a policy without images.

    Raises:
        ConfigError, ValueError: the model cannot be trained with these settings.
    """

    computes_together: ClassVar[bool] = False
    """Whether ranks gather parameters together, and so have to compute the same modules in each pass."""

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        tokenizer: Any = None,
        directory: Path | None = None,
        images: ImageStore | None = None,
    ) -> None:
        check_head(model.eval())
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings
        self.objective = build_objective(settings.algorithm, settings.rollout.max_response_length)
        self.policy = PolicyModel(model, *sampling_distribution(settings.rollout))
        self.replay = self.policy.replay = router_replay(model, settings.training.router_replay)
        self.memory = MicroBatchBudget(settings.training.max_tokens_per_micro_batch)
        self.skipped = SkippedUpdates(directory and directory / "skipped", settings.training.max_skipped_updates)
        self.device = next(model.parameters()).device
        # With adapters, the reference policy is the policy with the adapters disabled.
        self.reference = self._frozen_copy() if self.objective.regularised and not settings.lora.rank else None
        # Copies the trunk before adapters are added in place: the critic trains all of its own parameters.
        self.critic = Critic(model) if self.objective.algorithm.value_head else None
        self.adapters = Adapters(model, settings.lora) if settings.lora.rank else None
        self.dtype = settings.dtype
        for computed in (self.policy, self.reference, self.critic):
            if computed is not None and images is not None:
                computed.take_images(images, together=self.computes_together)
        self.masters = self._master_weights()
        self.packs = can_pack(model)
        # Before optimizers are made: sharding replaces the parameters that an optimizer would hold.
        self._place()
        self.optimizer = self._adamw(self.policy)
        self.critic_optimizer = self._adamw(self.critic) if self.critic else None
        self.update_share = UpdateShare(self.masters.trained(self.policy))
        self._transfer = None if directory is None else self._weight_transfer(directory)
        self._interrupted = threading.Event()
        if self.settings.training.gradient_checkpointing:
            for trunk in (model, self.critic.trunk) if self.critic else (model,):
                checkpoint_layers(trunk)

    def _master_weights(self) -> MasterWeights:
        """Convert all models to the compute type; trained models keep master weights."""
        if self.reference is not None:
            convert(self.reference, self.dtype)
        return MasterWeights(self._trained(), self.dtype)

    def _place(self) -> None:
        """Hook for subclasses that shard the parameters, which are whole and checked here."""

    def _weight_transfer(self, directory: Path) -> WeightTransfer | None:
        given = self.settings
        return model_transfer(
            given.engine,
            self.model,
            self.tokenizer,
            directory,
            self.adapters,
            self._readable,
            given.cluster_dtype,
        )

    def _frozen_copy(self) -> PolicyModel:
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return PolicyModel(frozen, self.policy.temperature, self.policy.truncation)

    def _adamw(self, module: Any) -> torch.optim.AdamW:
        return adamw(self.masters.trained(module), self.settings.training, self.device)

    @property
    def context_length(self) -> int | None:
        return context_of(self.model.config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_tokens(self.model, self.tokenizer)

    @property
    def left_out(self) -> Sequence[str]:
        return getattr(self.model.config, LEFT_OUT, ())

    @property
    def served(self) -> Any:
        """The policy itself, or with adapters a copy with merged adapters that `weights` updates."""
        return self.adapters.merged_model() if self.adapters else self.model

    @functools.cached_property
    def offload(self) -> Offload:
        """Moves the learner's memory between device and host."""
        models = [model for model in (self.policy, self.reference, self.critic) if model is not None]
        optimizers = [optimizer for optimizer in (self.optimizer, self.critic_optimizer) if optimizer is not None]
        return Offload(lambda part: tensors_of(part, models, self.masters.tensors, optimizers), self.device)

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.offload.to_host(parts)

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.offload.to_device(parts)

    def _readable(self, tensor: Tensor) -> Tensor:
        """Return a tensor for a reader, in host memory if it is away from the device."""
        return self.offload.of(tensor)

    def _values(self, parameter: Tensor) -> Tensor:
        """Return the values of a parameter for a reader, of its master if it has one."""
        return self._readable(self.masters.of(parameter))

    def weights(self, version: int) -> Any:
        assert self._transfer is not None, "weights reach engines by way of the run's directory"
        return self._transfer.offer(version)

    def interrupt(self) -> None:
        self._interrupted.set()

    def train(self, step: RolloutBatch, number: int) -> dict[str, float]:
        """Train on the groups of a rollout step and return the step's metrics; see `Learner.train`."""
        assert not self.offload.away, "tensors of the trainer are in host memory"
        if self._transfer is not None:
            self._transfer.withdraw()
        share = lr_factor(self.settings.training, number)
        set_learning_rate(self.optimizer, self.settings.training.learning_rate * share)
        if self.critic_optimizer:
            set_learning_rate(self.critic_optimizer, self.settings.training.critic_learning_rate * share)
        samples = [sample for group in step.groups for sample in group.samples]
        lengths = [len(sample.prompt_ids) + sample.length for sample in samples]
        shortages = self.memory.shortages
        with self.packed():
            batch = self.memory.fit(lambda: self.prepare(step), lengths)
            results = [
                self.update(f"step-{number:06d}-{index}", batch.rows(rows), [samples[row] for row in rows])
                for index, rows in enumerate(self.updates(step.groups))
            ]
        self.release_gradients()
        names = dict.fromkeys(name for made, _ in results for name in made)
        measured = {name: [made[name] for made, _ in results if name in made] for name in names}
        metrics = {name: sum(values) / len(values) for name, values in measured.items()}  # fmean refuses inf - inf
        # A count of the step, whereas the other metrics are means over its updates.
        metrics["skipped_updates"] *= len(results)
        own: dict[str, float] = {"out_of_memory": self.memory.shortages - shortages}
        if (updated := self._updated_share()) is not None:
            own["updated_share"] = updated
        if self.replay is not None:
            own |= missing_routes(samples)
        return metrics | own | _off_policy(functools.reduce(operator.add, (diagnostics for _, diagnostics in results)))

    def _updated_share(self) -> float | None:
        return self.update_share.take()

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Run models on packed sequences inside, if the policy's architecture allows it."""
        trunks = (self.model, self.reference and self.reference.model, self.critic and self.critic.trunk)
        replaying = self.replay.installed() if self.replay else nullcontext()
        with packed_attention(*(trunk for trunk in trunks if self.packs and trunk is not None)), replaying:
            yield

    @torch.no_grad()
    def prepare(self, step: RolloutBatch) -> Batch:
        """Return the step's samples with advantages and all other tensors computed before the first update."""
        samples = [sample for group in step.groups for sample in group.samples]
        batch = Batch.of(samples, step.version, self.policy.temperature)
        truncated = torch.tensor([sample.truncated for sample in samples])
        batch = dataclasses.replace(batch, mask=self.objective.mask(batch.mask, truncated))
        if self.objective.regularised:
            batch = dataclasses.replace(batch, reference_logprobs=self._score(self._reference_logprobs, batch))
        if self.critic is not None:
            batch = dataclasses.replace(batch, values=self._score(self.critic, batch))
        if self.replay is not None:  # the routes are of the policy: reference and critic have scored without them
            batch = dataclasses.replace(batch, routes=replayed_routes(samples, self.replay))
        # A penalty on rewards enters the advantages, so π_prox is needed for all rows before they are known.
        if self.objective.penalised:
            batch = dataclasses.replace(batch, proximal_logprobs=self._score(self.logprobs, batch))
        batch = self.objective.with_advantages(batch, self.rewards(step.groups), samples)
        # With one update per step π_prox equals π_θ: the loss detaches its own log-probabilities and saves this pass.
        if batch.proximal_logprobs is None and self.settings.training.updates_per_step > 1:
            signal = self.objective.rows_with_gradient(batch)
            batch = dataclasses.replace(batch, proximal_logprobs=self._score(self.logprobs, batch, signal))
        return batch

    def rewards(self, groups: Sequence[Group]) -> Tensor:
        """Return the rewards to train on, [groups, episodes]."""
        rewards = torch.tensor([[sample.reward for sample in group.outcomes] for group in groups], dtype=torch.float32)
        # The budget is that of a sequence.
        lengths = torch.tensor(
            [[max(sample.policy_tokens for sample in episode) for episode in group.episodes] for group in groups]
        )
        return self.objective.rewards(rewards, lengths)

    def updates(self, groups: Sequence[Group]) -> Iterator[range]:
        """Yield the rows of each optimizer update: whole groups, in equal numbers."""
        sizes = [len(group.samples) for group in groups]
        count = self.settings.training.updates_per_step
        bounds = [len(groups) * k // count for k in range(count + 1)]
        for first, last in itertools.pairwise(bounds):
            yield range(sum(sizes[:first]), sum(sizes[:last]))

    def update(self, name: str, batch: Batch, samples: Sequence[Sample]) -> tuple[dict[str, float], Diagnostics]:
        """Make one optimizer update on all rows of `batch`; `samples` are the same rows."""
        sums = self.memory.fit(lambda: self.gradient(batch), batch.lengths)
        measured = {"loss": sums.loss} | ({"value_loss": sums.value_loss} if self.critic else {})
        norms = {"grad_norm": 0.0} | ({"value_grad_norm": 0.0} if self.critic else {})
        if sums.tokens:
            norms = {norm: self._clip_gradient(module) for norm, module in zip(norms, self._trained(), strict=True)}
        measured |= norms
        finite = all(map(math.isfinite, measured.values()))
        if not finite:
            self.skipped.skip(name, batch, samples, measured)
        # Without a trained token there is no gradient, and weight decay and moments must not move the parameters.
        if finite and sums.tokens:
            self._step_optimizers(batch.lengths)
        means = {"entropy": sums.entropy} | ({"kl_reference": sums.kl} if self.objective.regularised else {})
        means = {term: total / sums.tokens for term, total in means.items() if sums.tokens}
        rate = self.optimizer.param_groups[0]["lr"]
        more = {"ess": sums.diagnostics.effective_sample_size, "lr": rate, "skipped_updates": float(not finite)}
        return means | measured | more, sums.diagnostics

    def _trained(self) -> tuple[Any, ...]:
        return (self.policy, self.critic) if self.critic else (self.policy,)

    def _step_optimizers(self, lengths: Sequence[int]) -> None:
        """Make a step of each optimizer.

        If memory runs out, only the optimizer that failed is repeated: the other one must not update twice.
        """
        with self.update_share.of():
            self.memory.fit(self.optimizer.step, lengths)
        if self.critic_optimizer:
            self.memory.fit(self.critic_optimizer.step, lengths)
        self.masters.write()
        self.skipped.made()

    def _clip_gradient(self, module: Any) -> float:
        """Clip the gradient of `module` and return its norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self.masters.trained(module), self.settings.training.max_grad_norm))

    def gradient(self, batch: Batch) -> UpdateSums:
        """Compute the gradient of an update's loss, and return the sums over the update's tokens."""
        denominator, trained = self.objective.denominator(batch), int(batch.mask.sum())
        # A repetition after an out-of-memory error must not add to the gradient of the attempt that failed.
        self.release_gradients()
        sums = UpdateSums()
        for _, micro in self._passes(batch, self.objective.rows_with_gradient(batch)):
            sums += self._backward(micro, denominator, trained)
        return sums

    def release_gradients(self) -> None:
        """Free the gradients, whose memory generation needs."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic_optimizer:
            self.critic_optimizer.zero_grad(set_to_none=True)

    def _backward(self, micro: Batch, denominator: float, trained: int) -> UpdateSums:
        """Add the gradient of a micro-batch."""
        logp, entropy = self.policy(micro)
        terms = self.objective.loss(micro, logp, entropy, denominator)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        value_loss = 0.0
        if self.critic:
            loss = self.objective.value_loss(micro, self.critic(micro), trained)
            loss.backward()  # type: ignore[no-untyped-call]
            value_loss = loss.item()
        entropy_sum, kl_sum, tokens = terms.entropy.item(), terms.kl.item(), int(micro.mask.sum())
        return UpdateSums(terms.loss.item(), value_loss, entropy_sum, kl_sum, tokens, terms.diagnostics.to("cpu"))

    def _passes(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        """Yield micro-batches of the batch's `rows`, each with its rows' indices."""
        for part in plan(batch.lengths, rows, self.memory.tokens, attends_packed(self.model)):
            if self._interrupted.is_set():
                raise Interrupted
            yield part, batch.rows(part, self.device)

    def logprobs(self, batch: Batch) -> Tensor:
        logp: Tensor = self.policy(batch)[0]
        return logp

    @torch.no_grad()
    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score tokens with the policy; see `Learner.token_logprobs`. All ranks score the same sequences."""
        ids = torch.tensor(sequences, device=self.device)
        mask = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool, device=self.device)
        zeros = torch.zeros(mask.shape, device=self.device)
        batch = Batch(ids, (ids.shape[1],) * len(ids), mask, zeros, zeros.long())
        with self.packed(), self.policy.whole_distribution():
            scores: list[list[float]] = self.logprobs(batch).float().tolist()
        return scores

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        if self.adapters:
            with self.adapters.disabled():
                return self.logprobs(batch)
        assert self.reference is not None
        logp: Tensor = self.reference(batch)[0]
        return logp

    @torch.no_grad()
    def _score(self, score: Callable[[Batch], Tensor], batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
        """Compute `score` of `rows` per micro-batch, by default of all rows with trained tokens; [B, T - 1], 0
        elsewhere."""
        result = torch.zeros(batch.mask.shape)
        chosen = batch.mask.any(-1).nonzero()[:, 0].tolist() if rows is None else rows
        for part, micro in self._passes(batch, chosen):
            scores = score(micro)
            result[part, : scores.shape[1]] = scores.cpu()
        return result

    def save(self, directory: Path) -> None:
        self.save_policy(directory)
        if self.adapters:
            self.adapters.save(directory / ADAPTER, masters=self._values)
        self.save_state(directory)

    def save_policy(self, directory: Path) -> None:
        """Write the policy in transformers' format."""
        save_policy(directory, self.model, self.tokenizer, self.adapters, self._values)

    def save_state(self, directory: Path, rank: int = 0) -> None:
        """Write the state of training, without the policy."""
        (directory / TRAINING).mkdir(exist_ok=True)
        write(directory / TRAINING, "state", self.state(), rank)

    def load(self, directory: Path) -> None:
        assert not self.offload.away, "tensors of the trainer are in host memory"
        state = self.state()
        try:
            self._read_state(directory / TRAINING, state)
        except ValueError as error:
            raise ValueError(f"the checkpoint is of other settings ({error}): {AS_BEGUN}") from None
        torch.set_rng_state(state["random"])
        # The state has float32 masters; the modules compute with rounded copies of them.
        self.masters.write()

    def _read_state(self, directory: Path, state: dict[str, Tensor]) -> None:
        read(directory, "state", state)

    def state(self) -> dict[str, Tensor]:
        """Return the state of training by name, without copies: optimizers, critic, reference, adapters, random
        state."""
        held = {"random": torch.get_rng_state()}
        parts: dict[str, Any] = {
            "critic": self.critic,
            "reference": self.reference and self.reference.model,
            "adapters": self.adapters,
        }
        for kind, part in parts.items():
            if part is not None:
                # The parameters themselves, because masters are found by parameter.
                own = part.state_dict(keep_vars=True)
                held |= {f"{kind}.{name}": self._values(tensor).detach() for name, tensor in own.items()}
        for kind, module, optimizer in (
            ("policy_optimizer", self.policy, self.optimizer),
            ("critic_optimizer", self.critic, self.critic_optimizer),
        ):
            if module is not None and optimizer is not None:
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad:
                        own = moments(optimizer, self.masters.of(parameter))
                        held |= {f"{kind}.{name}.{key}": self._readable(moment) for key, moment in own.items()}
        return held


def _off_policy(diagnostics: Diagnostics) -> dict[str, float]:
    """Metrics of off-policy tokens and of their correction, overall and by staleness."""
    named = diagnostics.metrics()
    return {
        "clip_fraction": named["clipped"],
        "masked_fraction": named["masked"],
        "capped_fraction": named["capped"],
        "ratio_mean": named["w_mean"],
        "ratio_max": named["w_max"],
        "kl_behaviour": named["kl_k3"],
        **{f"by_age/{name}": value for name, value in named.items() if name.startswith("age_")},
    }


def checkpoint_layers(trunk: Any) -> None:
    """Enable gradient checkpointing of a model's layers."""
    # Older versions of transformers, which an environment with vLLM may have, have only the second name.
    enable = getattr(trunk, "activation_checkpointing_enable", None) or trunk.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in trunk.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # transformers checkpoints only layers in training mode; modules inside the layer stay without dropout.
            module.training = True
