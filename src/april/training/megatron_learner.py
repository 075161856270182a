"""Learner of several ranks that compute the policy with Megatron-Core.

Invariants of `sharded.ShardedLearner`, with two differences:
- parameters, gradients and moments are divided among the ranks of a team, and every team has all of them;
- ranks without a micro-batch skip the pass: teams communicate only to sum gradients, at the end of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from april.algorithms.batch import Batch
from april.algorithms.objective import UpdateSums
from april.config.error import ConfigError
from april.training.checkpoint import TRAINING
from april.training.forward import PolicyModel, alike, probe
from april.training.local import LocalLearner
from april.training.megatron_policy import MegatronPolicy
from april.training.optimizer import moments
from april.training.sharded import ShardedLearner
from april.training.sharded_files import opened, stored, write

POLICY = "policy_optimizer.model"
"""Prefix of the names of moments."""


class MegatronLearner(ShardedLearner):
    """One rank's part of a learner; all ranks call its methods together, in the same order."""

    policy: Any
    reference: Any

    def _divide(self) -> None:
        held = self.model.state_dict(keep_vars=True)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._kept = {name: tensor for name, tensor in held.items() if id(tensor) not in names}
        # Tied weights have several names in files, but one parameter and one pair of moments.
        self._stands_for = {name: names[id(tensor)] for name, tensor in held.items() if name not in self._kept}
        self._tensors = {name: tensor.detach().to("meta") for name, tensor in self.model.named_parameters()}
        whole, recompute = self.policy, self.settings.training.gradient_checkpointing
        self.policy = MegatronPolicy(self.model, self.ranks, whole.temperature, recompute, dtype=self.dtype)
        self.masters = self.policy.masters
        check_computation(self.policy, whole, self.ranks.device)
        if self.reference is not None:
            frozen = self.reference.model
            self.reference = MegatronPolicy(frozen, self.ranks, whole.temperature, dtype=self.dtype, trains=False)
        self.model.to("meta")  # keeps only configuration, names and shapes

    def _adamw(self, module: Any) -> torch.optim.AdamW:
        return LocalLearner._adamw(self, module)

    def _passes(self, batch: Batch, rows: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        return ((part, micro) for part, micro in super()._passes(batch, rows) if part)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Do not pack: Megatron's layers do not support packed rows here."""
        yield

    def gradient(self, batch: Batch) -> UpdateSums:
        sums = super().gradient(batch)
        self.policy.reduce_gradient()
        return sums

    @torch.no_grad()
    def _clip_gradient(self, module: Any) -> float:
        norm: float = module.squared_norm() ** 0.5
        # 1e-6 as in torch's clip_grad_norm_, which the other backends follow.
        scale = min(self.settings.training.max_grad_norm / (norm + 1e-6), 1.0)
        for parameter in self.masters.trained(module):
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        return norm

    def _counts(self) -> Iterator[tuple[str, int]]:
        """Yield Megatron's names, each of which may stand for several of transformers' parameters."""
        for name in self.policy.tasks:
            yield name, sum(self._tensors[own].numel() for own in self.policy.names(name))
        yield from ((name, tensor.numel()) for name, tensor in self._kept.items())

    @torch.no_grad()
    def gather(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        divided = [name for name in names if name not in self._kept]
        parts = ((name, self._on_device(self.policy.parameter(name).detach()).to(self.dtype)) for name in divided)
        kept = [(name, self._kept[name].to(self.ranks.device)) for name in names if name in self._kept]
        return [found for name, part in parts for found in self.policy.whole(name, part).items()] + kept

    @torch.no_grad()
    def _write_policy(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        masters = self.masters.of
        tensor = self.policy.translated(
            lambda own: self._on_device(masters(own) if dtype is None else own).to(dtype or masters(own).dtype)
        )

        def make(name: str) -> Tensor:
            kept: Tensor | None = self._kept.get(name)
            return tensor(name) if kept is None else kept

        write(
            directory,
            "model",
            {**self._tensors, **self._kept},
            self.ranks.rank,
            make,
            dtype,
            self.parts,
            self._kept,
        )

    def save_state(self, directory: Path, rank: int = 0) -> None:
        write(directory / TRAINING, "state", self.state(), rank, self._state_tensor())

    def state(self) -> dict[str, Tensor]:
        """Return the state's names and shapes as of one process; tensors of divided parameters have no values."""
        held = {"random": torch.get_rng_state()}
        if self.reference is not None:
            own = {name: self._tensors[tensor] for name, tensor in self._stands_for.items()} | self._kept
            held |= {f"reference.{name}": tensor for name, tensor in own.items()}
        for name, tensor in self._tensors.items():
            held |= {f"{POLICY}.{name}.step": torch.tensor(0.0)}
            held |= {f"{POLICY}.{name}.{key}": tensor for key in ("exp_avg", "exp_avg_sq")}
        return held

    def _state_tensor(self) -> Callable[[str], Tensor]:
        """Return a function that returns each tensor of the state by name."""
        keys = ("step", "exp_avg", "exp_avg_sq")
        of_key = {key: self.policy.translated(self._moment_on_device(key)) for key in keys[1:]}
        frozen = self.reference.translated(self._on_device) if self.reference is not None else None
        updates = self._readable(self._moment("step")(next(self.policy.parameters())))

        def tensor(name: str) -> Tensor:
            kind, _, own = name.partition(".")
            if kind == "random":
                return torch.get_rng_state()
            if kind == "reference":
                assert frozen is not None
                kept: Tensor | None = self._kept.get(own)
                return frozen(self._stands_for[own]) if kept is None else kept
            own, _, key = name.removeprefix(f"{POLICY}.").rpartition(".")
            return updates if key == "step" else of_key[key](own)

        return tensor

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values for a conversion, which communicates on the device."""
        return self._readable(tensor).to(self.ranks.device)

    def _moment_on_device(self, key: str) -> Callable[[Tensor], Tensor]:
        return lambda parameter: self._on_device(self._moment(key)(parameter))

    def _moment(self, key: str) -> Callable[[Tensor], Tensor]:
        return lambda parameter: moments(self.optimizer, self.masters.of(parameter))[key]

    def _read_state(self, directory: Path, state: dict[str, Tensor]) -> None:
        found = stored(directory, "state")
        if found.keys() != state.keys():
            other = sorted(found.keys() ^ state.keys())[0]
            raise ValueError(f"{other} is {'not asked for' if other in found else 'missing'}")

        def whole(name: str) -> Tensor:
            with opened(found[name]) as file:
                tensor: Tensor = file.get_tensor(name)
            if tensor.shape != state[name].shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, not {list(state[name].shape)}")
            return tensor

        for key in ("exp_avg", "exp_avg_sq"):
            self.policy.load(lambda own, key=key: whole(f"{POLICY}.{own}.{key}"), self._moment(key))
        updates = whole(f"{POLICY}.{next(iter(self._tensors))}.step")
        for parameter in self.masters.trained(self.policy):
            moments(self.optimizer, parameter)["step"].copy_(updates)
        if self.reference is not None:
            self.reference.load(lambda own: whole(f"reference.{own}"))
        state["random"].copy_(whole("random"))


@torch.no_grad()
def check_computation(policy: MegatronPolicy, whole: PolicyModel, device: torch.device) -> None:
    """Check that Megatron computes the same log-probabilities as transformers.

    Raises:
        ConfigError: they differ.
    """
    batch, dtype = probe(whole.model), next(policy.module.parameters()).dtype
    for found, expected in zip(policy(batch.rows([0], device)), whole(batch), strict=True):
        if not alike(found.cpu(), expected, dtype):
            raise ConfigError(
                f'trainer.backend = "megatron": {type(whole.model).__name__} has other log-probabilities in Megatron '
                'than in transformers; choose "fsdp2"'
            )
