"""Policy computed by Megatron-Core, with layers and vocabulary divided among ranks; Megatron-Bridge converts weights.

Invariants:
- weights, moments and files have transformers' names and shapes outside this class, so checkpoints are independent of
  backend and number of ranks;
- conversions gather or scatter one parameter at a time, and all ranks convert in the same order.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.model_bridge import get_model_bridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor, nn

from april.algorithms.batch import Batch
from april.config.error import ConfigError
from april.training.master_weights import MasterWeights
from april.training.ranks import Ranks
from april.training.vocab_parallel import vocab_parallel_logprobs

NEEDS_CUDA = (
    *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("persist_layer_norm", "apply_rope_fusion", "cross_entropy_loss_fusion"),
)
"""Settings of a model provider that need CUDA kernels."""
PARTIAL = ("q_layernorm", "k_layernorm")
"""Parameters that are whole on each rank, which uses them only for its own heads: their gradients have to be summed."""


class MegatronPolicy(nn.Module):
    """`forward.PolicyModel` computed by Megatron.

    Args:
        model: transformers' model of the policy, whole and in main memory; it is not changed.
        ranks: process groups; the ranks of a team divide the layers.
        temperature: divisor of logits where the batch has none of its own; positive.
        recompute: recompute activations of layers in the backward pass.
        dtype: compute type. A trained policy also has master weights in the model's type (`masters`).
        trains: whether parameters require gradients.

    Raises:
        ConfigError: Megatron-Bridge does not know the architecture.
    """

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        temperature: float = 1.0,
        recompute: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        trains: bool = True,
    ) -> None:
        super().__init__()
        _initialize(ranks)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        self.temperature = temperature
        self._whole = False
        self.vocabulary = int(config.vocab_size)
        self.group = parallel_state.get_tensor_model_parallel_group()
        # In the model's type at first: `MasterWeights` keeps these tensors as masters and casts the module.
        self.module = _built(config, ranks, dtype, recompute).to(next(model.parameters()).dtype).requires_grad_(trains)
        self.masters = MasterWeights([self.module], dtype)
        self._bridge = get_model_bridge(type(model), hf_config=config)
        tasks = self._bridge.build_conversion_tasks(config, [self.module])
        self.tasks: dict[str, Any] = {task.param_name: task for task in tasks}
        """Conversion of each of Megatron's parameters, by its name."""
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        """Shapes of transformers' whole parameters."""
        self.load(dict(model.named_parameters()).__getitem__, self.masters.of)

    @contextmanager
    def whole_distribution(self) -> Iterator[None]:
        """Score at temperature 1 inside the block; the backend does not truncate."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log p and entropy (nats) of each token under the policy, [B, T - 1] each, 0 outside the mask."""
        rows, length = batch.input_ids.shape
        positions = torch.arange(length, device=batch.input_ids.device).expand(rows, -1)
        hidden = None  # Transformer Engine's attention is causal by itself
        if batch.input_ids.device.type == "cpu":
            hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

        def scores(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Any:
            def head(states: Tensor) -> Tensor:
                logits: Tensor = output_layer(states[:, None], weight=output_weight)[0][:, 0]
                return logits

            chosen = hidden_states.transpose(0, 1)[:, :-1][batch.mask]
            targets = batch.input_ids[:, 1:][batch.mask]
            temperature = 1.0 if self._whole else batch.trained_temperatures(self.temperature)
            columns = self._columns(output_layer.output_size_per_partition)
            return vocab_parallel_logprobs(head, chosen, targets, columns, self.group, temperature)

        found = self.module(batch.input_ids, positions, hidden, output_processor=scores)
        logp, entropy = (torch.zeros(batch.mask.shape, device=x.device).masked_scatter(batch.mask, x) for x in found)
        return logp, entropy

    def _columns(self, held: int) -> tuple[int, int]:
        first = held * dist.get_rank(self.group)
        return first, max(0, min(held, self.vocabulary - first))

    def parameter(self, name: str) -> Tensor:
        """Return this rank's part of a parameter of Megatron's."""
        own: Tensor = self.tasks[name].param_weight
        return own

    def names(self, name: str) -> list[str]:
        """Return transformers' names of the parts of a parameter of Megatron's."""
        known = self.tasks[name].mapping.hf_param
        return [known] if isinstance(known, str) else list(known.values())

    def whole(self, name: str, part: Tensor) -> dict[str, Tensor]:
        """Convert a parameter of Megatron's, or a tensor of its shape, to transformers' whole tensors, on every rank.

        Args:
            part: this rank's part of the parameter or tensor. All ranks have to call this.
        """
        task = self.tasks[name]
        found = task.mapping.megatron_to_hf(part.detach(), task.megatron_module)
        found = self._bridge.maybe_modify_converted_hf_weight(task, found, {})
        return {own: tensor[: self.shapes[own][0]] for own, tensor in found.items()}  # without padding

    def translated(self, part_of: Callable[[Tensor], Tensor]) -> Callable[[str], Tensor]:
        """Return a function that returns transformers' tensors by name; all ranks call it for the same names in order.

        Args:
            part_of: maps a parameter of Megatron's to this rank's part of the tensor to convert.
        """
        origin = {own: name for name in self.tasks for own in self.names(name)}
        waiting: dict[str, Tensor] = {}

        def tensor(own: str) -> Tensor:
            if own not in waiting:
                name = origin[own]
                waiting.update(self.whole(name, part_of(self.parameter(name))))
            return waiting.pop(own)

        return tensor

    @torch.no_grad()
    def load(self, tensor: Callable[[str], Tensor], part_of: Callable[[Tensor], Tensor] = lambda own: own) -> None:
        """Fill this rank's parts of all parameters.

        Args:
            tensor: returns a whole tensor by transformers' name.
            part_of: maps a parameter of Megatron's to the tensor of its shape to fill; by default the parameter itself.
        """
        with self.masters.exposed():
            for name, task in self.tasks.items():
                own = self.parameter(name)
                found = {part: tensor(part).to(own.device) for part in self.names(name)}
                stored = self._bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, found)
                part = task.mapping.hf_to_megatron(stored, task.megatron_module)
                # Megatron pads the vocabulary: its part may have more rows than the converted tensor. The rest is 0.
                filled = part_of(own)
                filled.zero_()[: part.shape[0]] = part

    @torch.no_grad()
    def reduce_gradient(self) -> None:
        """Sum gradients over ranks with other tokens, and those of `PARTIAL` parameters over ranks with other heads."""
        others = parallel_state.get_data_parallel_group()
        for name, parameter in self.module.named_parameters():
            own = self.masters.of(parameter)
            # A team without a micro-batch has no gradient but takes part in the sums.
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            if any(part in name for part in PARTIAL):
                dist.all_reduce(own.grad, group=self.group)
            dist.all_reduce(own.grad, group=others)

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Return the squared norm of the whole gradient, after `reduce_gradient`."""
        # Parameters that are not divided are equal on all ranks of the group: only the first rank counts them.
        counts = dist.get_rank(self.group) == 0
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in self.module.parameters():
            if counts or getattr(parameter, "tensor_model_parallel", False):
                gradient = self.masters.of(parameter).grad
                assert gradient is not None
                squares = squares.to(parameter.device) + torch.linalg.vector_norm(gradient).double() ** 2
        dist.all_reduce(squares, group=self.group)
        return float(squares)


def _initialize(ranks: Ranks) -> None:
    """Create Megatron's process groups: tensor parallel in a team, data parallel over teams."""
    if parallel_state.is_initialized():
        return
    parallel_state.initialize_model_parallel(ranks.team_size)
    if ranks.device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)  # Megatron needs it, although there is no dropout


def _built(config: Any, ranks: Ranks, dtype: torch.dtype, recompute: bool) -> Any:
    """Return Megatron's model for a transformers configuration, with arbitrary weights."""
    try:
        provider: Any = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f'trainer.backend = "megatron": no Megatron-Bridge for this policy: {reason}') from None
    provider.tensor_model_parallel_size = ranks.team_size
    provider.should_pad_vocab = True
    # No mixed precision by Megatron: april casts the module and keeps the master weights.
    provider.params_dtype, provider.bf16, provider.fp16 = dtype, False, False
    provider.gradient_accumulation_fusion = False  # gradients are torch's own
    provider.attention_dropout = provider.hidden_dropout = 0.0
    if recompute:
        provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers = "full", "uniform", 1
    if ranks.device.type == "cpu":
        norm, layers = provider.normalization, get_gpt_layer_local_spec
        provider.transformer_layer_spec = layers(qk_layernorm=provider.qk_layernorm, normalization=norm)
        provider.use_cpu_initialization = True
        for name in NEEDS_CUDA:
            setattr(provider, name, False)
    provider.finalize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        (module,) = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=ranks.device.type == "cpu", mixed_precision_wrapper=None
        )
    return module.to(ranks.device, dtype)
