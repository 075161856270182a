"""Memory plan of a run by part, from the recipe and the model's configuration, before anything is loaded.

Parameters are counted on the model's modules, and activations in a forward pass of its trunk with tensors that have
shapes but no values. So the plan is right for every architecture, except for workspaces of kernels and waste of the
allocator, which it does not contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from april.algorithms.logprobs import CHUNK_ELEMENTS
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.config.settings.model_settings import ModelSettings
from april.config.settings.trainer_settings import TrainerSettings
from april.engines.pretrained import EXPERTS, auto_class, experts_of
from april.engines.routers import route_shape
from april.rollout.admission.admission import largest_target
from april.training.activations import activation_bytes, layer_bytes
from april.training.image_memory import engine_image_bytes, training_image_bytes
from april.training.learner_objective import build_objective
from april.training.lora import is_target, outside_language_model
from april.training.model_parallel import check_layout, layers_of, plans
from april.training.policy import trunk_of

RESIDENT = ("parameters", "rounded copy", "optimizer")
"""Parts of a rank's memory that exist between training steps, too."""
STATE = (*RESIDENT, "gradients")
"""Parts of a rank's memory that are in main memory with `cpu_offload`."""
ATTENTION = 8
"""Tensors of the size of a layer's queries in attention's backward pass: queries, outputs, keys and values of all query
heads, and their gradients."""
USABLE = 0.92
"""Share of a GPU's memory that a run can plan with; contexts, kernels' own workspaces and fragmentation take the rest.
An assumption: not measured."""
MOMENTS = 2
"""Moments of AdamW per parameter."""
LOGITS = 3
"""Copies of a chunk of logits in float32 while its gradient is computed."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part."""

    rank: dict[str, int]
    """Memory of each rank."""
    first: dict[str, int]
    """Additional memory of each rank that generates, or memory of an engine's own devices."""
    parameters: int
    """Number of the policy's parameters."""
    token: int
    """KV cache of one token on an engine's device."""
    engine_pass: int
    """Temporary memory of the engine's forward pass."""
    host: dict[str, int] = field(default_factory=dict)
    """Memory of each rank in main memory instead of on a GPU."""
    experts: str = ""
    """Implementation of a layer's experts; empty without experts."""
    largest: int = 0
    """The largest tensor in the engines' type."""
    routes: dict[str, int] = field(default_factory=dict)
    """Routes of samples of full length, with router replay: main memory of the first rank, and journal."""

    @property
    def transient_bytes(self) -> int:
        """Memory of a rank that exists only during a training step."""
        return sum(size for name, size in self.rank.items() if name not in RESIDENT)


def plan_memory(recipe: Recipe) -> MemoryPlan:
    """Return the memory plan of the recipe's run.

    Raises:
        ConfigError: the model's configuration cannot be read, or does not match the layout.
    """
    training, engine, trainer = recipe.training, recipe.engine, recipe.trainer
    check_layout(recipe.trainer, recipe.model.path)
    own, computed = (getattr(torch, name).itemsize for name in (recipe.model.dtype, recipe.compute_dtype))
    megatron = trainer.backend == "megatron"
    holders = _holders(trainer)
    # The grids of images have values.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(recipe.model)
        model.requires_grad_(not recipe.lora.rank)
        count = sum(p.numel() for p in model.parameters())
        largest = max(p.numel() for p in model.parameters()) * computed
        parts = trainer.tensor_parallel, trainer.expert_parallel
        divided = _matrices(model) if megatron else plans(model, *parts)
        sizes = _sizes(model, holders, *parts, *divided)
        shard = sum(held for held, _ in sizes.values())
        names = layers_of(model)
        of_layers = {layer: sum(part for n, (_, part) in sizes.items() if n.startswith(f"{layer}.")) for layer in names}
        layer = max(of_layers.values(), default=0)
        root = sum(part for _, part in sizes.values()) - sum(of_layers.values())
        unfused = megatron and recipe.model.device == "cpu"  # Megatron's own layers, without Transformer Engine
        attention = "eager" if unfused else None  # which holds the scores of every pair of tokens
        part = _model(recipe.model, trainer.tensor_parallel, getattr(torch, recipe.compute_dtype), attention)
        text = part.config.get_text_config()
        width = text.intermediate_size if unfused else 0  # one more copy than transformers keeps
        activations = _activations(part, recipe, computed, width)
        cache = _cache_bytes(model.config.get_text_config(), computed)
    pictures = recipe.task.image_column is not None
    images = training_image_bytes(part, recipe, computed, activations) if pictures else 0
    objective = build_objective(recipe.algorithm, recipe.rollout.max_response_length)
    critics = int(objective.algorithm.value_head)
    frozen = int(objective.regularised and not recipe.lora.rank)
    trained = 1 + critics if not recipe.lora.rank else critics
    adapters = _adapters(model, recipe) // holders
    wide, narrow = (1 + critics + frozen) * shard + adapters, 0
    if has_master_weights(recipe):
        wide, narrow = trained * shard + adapters, wide
    head = 0 if recipe.lora.rank else model.get_output_embeddings().weight.numel() // parts[0]
    logits = LOGITS * 4 * min(CHUNK_ELEMENTS, training.max_tokens_per_micro_batch * text.vocab_size)
    # The head's gradient accumulates in float32 and is cast once at the end (`logprobs`), so both copies exist.
    head_gradient = head * (4 + (computed if computed != 4 else 0))
    # FSDP2 gathers the next layer while one layer computes, and holds whole gradients until they are reduced.
    gathers = (holders > 1 or trainer.cpu_offload) and not megatron
    rank = {
        "parameters": wide * own,
        "rounded copy": narrow * computed,
        "gradients": trained * shard * own + adapters * own,
        "optimizer": MOMENTS * (trained * shard + adapters) * own,
        "gathered layers": (2 * layer + root) * computed + (layer + root) * own if gathers else 0,
        "activations": activations // trainer.context_parallel,
        **({"images": images} if pictures else {}),
        "logits": logits,
        "head's gradient": head_gradient,
        # A layer's backward pass runs after the head's, whose memory is free by then.
        "attention": max(0, _attention_bytes(text, recipe, computed) - logits - head_gradient),
    }
    host = {name: rank.pop(name) for name in STATE if rank[name]} if trainer.cpu_offload else {}
    tokens = recipe.slots * (engine.context_length or recipe.rollout.max_response_length)
    kv = int(engine.kv_cache_gb * 1e9) if engine.kv_cache_gb else tokens * cache
    # The engine cannot compute with shards or unmerged adapters: it then has a whole, merged copy.
    own_copy = trainer.sharded or bool(recipe.lora.rank) or not recipe.generates_inside
    whole = own_copy or engine.engine != "embedded"
    devices = max(recipe.gpus_per_engine, 1)
    first = {"engine's weights": count * computed // devices if whole else 0, "KV": kv // devices}
    return MemoryPlan(
        rank,
        first,
        count,
        cache // devices,
        _pass_bytes(model.config, recipe),
        host,
        experts_of(model),
        largest,
        _routes(model, recipe) if training.router_replay != "off" else {},
    )


def _routes(model: Any, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of routes by what holds them.

    Raises:
        ConfigError: the model has no routers that april knows.
    """
    try:
        shape = route_shape(model)
    except ValueError as error:
        raise ConfigError(f'training.router_replay = "{recipe.training.router_replay}": {error}') from None
    token = shape.layers * shape.top_k * shape.dtype.itemsize
    rollout, length = recipe.rollout, recipe.engine.context_length or recipe.rollout.max_response_length
    group = token * length * rollout.n_samples_per_prompt
    step = group * rollout.rollout_batch_size
    return {"groups in flight": group * _groups_in_flight(recipe), "a step's batch": step, "journal, a step": step}


def _groups_in_flight(recipe: Recipe) -> int:
    """Return the largest number of groups in flight, whose samples decode, wait or have finished."""
    params = recipe.rollout_params()
    target, most = params.over_sampling_batch_size, largest_target(params.rollout_batch_size, params.max_staleness)
    if isinstance(target, int) and (most is None or not recipe.trainer.overlap):
        return target
    return most or params.rollout_batch_size


def has_master_weights(recipe: Recipe) -> bool:
    """Return whether modules compute with rounded copies of the parameters that optimizers update. FSDP2 keeps shards
    of the parameters' type and rounds when it gathers them."""
    return recipe.compute_dtype != recipe.model.dtype and recipe.trainer.backend_name != "fsdp2"


def _holders(trainer: TrainerSettings) -> int:
    """Return the number of ranks that share a copy of the policy."""
    if trainer.backend == "megatron":
        return trainer.tensor_parallel  # the others hold copies
    return trainer.processes // trainer.policy_replicas if trainer.sharded else 1


def _matrices(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return Megatron's division in the format of `plans`: all matrices of the layers."""
    return {name: "colwise" for name, parameter in model.named_parameters() if parameter.dim() > 1}, {}


def _sizes(
    model: Any, holders: int, tensor: int, expert: int, matrices: dict[str, str], experts: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """Return each parameter's number of elements on a rank, and its number while its layer computes."""
    layers = tuple(f"{name}." for name in layers_of(model))
    sizes = {}
    for name, parameter in model.named_parameters():
        parts, over = 1, holders
        if name in experts:
            parts, over = expert, holders // expert
        elif tensor > 1 and name.startswith(layers):
            parts = tensor if matrices.get(name) in ("colwise", "rowwise") else 1
            over = holders // tensor
        part = parameter.numel() // parts
        rows = parameter.shape[0] // (1 if matrices.get(name) == "rowwise" else parts)
        sizes[name] = (-(-rows // over) * (part // rows), part)
    return sizes


def table(plan: MemoryPlan, recipe: Recipe) -> Iterator[str]:
    """Yield the lines of the plan's table."""
    trainer, devices = recipe.trainer, max(recipe.gpus_per_engine, 1)
    layout = ("policy_replicas", "context_parallel", "tensor_parallel", "expert_parallel")
    named = "".join(f", {name} = {size}" for name in layout if (size := getattr(trainer, name)) > 1)
    computes = f", computed in {recipe.compute_dtype}" if recipe.compute_dtype != recipe.model.dtype else ""
    kind = f"{recipe.model.dtype}{computes}"
    yield f"{plan.parameters / 1e9:.3f} B parameters, {kind}, on {trainer.processes} process(es){named}"
    for name, size in plan.rank.items():
        yield f"  {name:<18}{size / 1e9:10.3f} GB"
    yield f"  {'each rank':<18}{sum(plan.rank.values()) / 1e9:10.3f} GB"
    if plan.host:
        yield "in the machine's memory, of each rank:"
        for name, size in plan.host.items():
            yield f"  {name:<18}{size / 1e9:10.3f} GB"
        every = trainer.processes * sum(plan.host.values())
        yield f"  {'all ranks':<18}{every / 1e9:10.3f} GB"
    if recipe.generates_inside:
        where = "on each rank" if recipe.engines_inside == trainer.processes else "on the first rank"
    else:
        where = "on each engine" if devices == 1 else f"on each of an engine's {devices} GPUs"
    yield f"engine, {where}, with {recipe.slots} samples of full length:"
    for name, size in plan.first.items():
        yield f"  {name:<18}{size / 1e9:10.3f} GB"

    if plan.routes:
        yield "routes, in the first rank's main memory and on disk, of samples of full length:"
        for name, size in plan.routes.items():
            yield f"  {name:<18}{size / 1e9:10.3f} GB"


def read_configuration(path: str) -> Any:
    """Return the configuration of the model at `model.path`.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(str(Path(path).expanduser()), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0]
    return ConfigError(f"model.path = {path!r}: no configuration of a causal LM: {reason}")


def _model(
    settings: ModelSettings, parts: int = 1, dtype: torch.dtype | None = None, attention: str | None = None
) -> Any:
    """Return the policy without values, or one rank's share of it if `parts` ranks divide its matrices.

    Args:
        dtype: overrides the recipe's type; a mixture of experts uses bfloat16 then, as its kernels need it.
        attention: transformers' attention implementation; None for a kernel that does not materialise scores.
    """
    config = read_configuration(settings.path)
    try:
        if parts > 1:
            # Fixed before heads are divided, because the default size is hidden_size / num_attention_heads.
            config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
                setattr(config, name, getattr(config, name) // parts)
        mixed = any(getattr(config, name, None) for name in EXPERTS)
        own = torch.bfloat16 if dtype and mixed else dtype or getattr(torch, settings.dtype)
        return auto_class(config).from_config(config, dtype=own, attn_implementation=attention)
    except (OSError, ValueError) as error:
        raise _unreadable(settings.path, error) from None


def _activations(model: nn.Module, recipe: Recipe, computed: int, more: int) -> int:
    """Return the activation bytes of a micro-batch for its backward pass; with checkpointing, those of one layer.

    Args:
        more: elements per token and layer in addition to those that transformers keeps.
    """
    length = min(recipe.rollout.max_response_length, recipe.training.max_tokens_per_micro_batch)
    ids = torch.zeros(max(recipe.training.max_tokens_per_micro_batch // length, 1), length, dtype=torch.long)
    trunk: Any = trunk_of(model)
    part = getattr(trunk, "language_model", trunk)

    def forward() -> Tensor:
        hidden: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    return activation_bytes(trunk, part, forward, computed, recipe.training.gradient_checkpointing, ids.numel() * more)


def _attention_bytes(config: Any, recipe: Recipe, computed: int) -> int:
    """Return the bytes of a layer's attention on a rank: its heads, and its tokens of a micro-batch."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = recipe.training.max_tokens_per_micro_batch // recipe.trainer.context_parallel
    return int(ATTENTION * tokens * config.num_attention_heads * size * computed)


def active_parameters(settings: ModelSettings) -> int:
    """Return the number of parameters used per token: the layers with the token's experts only, and the head."""
    config = read_configuration(settings.path).get_text_config()
    experts = next((found for name in EXPERTS if (found := getattr(config, name, None))), 0)
    share = config.num_experts_per_tok / experts if experts else 1.0
    with FakeTensorMode():
        model = _model(settings)
        head = model.get_output_embeddings().weight
        table = model.get_input_embeddings().weight
        # An embedding lookup multiplies nothing, unless the head is tied to the embedding.
        own = [(name, p) for name, p in model.named_parameters() if p is not table or p is head]
        return int(sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in own))


def pass_bytes(recipe: Recipe) -> int:
    """Return the temporary memory of a forward pass of the recipe's embedded engine."""
    return _pass_bytes(read_configuration(recipe.model.path), recipe)


def _pass_bytes(config: Any, recipe: Recipe) -> int:
    """Return the bytes of all samples' logits, of a layer's activations for their tokens and a prefill chunk, and of
    images."""
    computed, text = getattr(torch, recipe.compute_dtype).itemsize, config.get_text_config()
    logits = LOGITS * 4 * recipe.slots * text.vocab_size
    layer = layer_bytes(text, recipe.slots + recipe.engine.prefill_chunk, computed)
    images = engine_image_bytes(config, recipe, computed) if recipe.task.image_column is not None else 0
    return int(logits + layer + images)


def _cache_bytes(config: Any, computed: int) -> int:
    """Return the KV-cache bytes of one token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * computed)


def _adapters(model: nn.Module, recipe: Recipe) -> int:
    """Parameters of the adapters on every linear layer but the head and a vision tower, or on those that are named."""
    wanted, rank = recipe.lora.target_modules, recipe.lora.rank
    excluded = set(outside_language_model(model, wanted))
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")]
    named = [(name, m) for name, m in linear if name not in excluded]
    chosen = [m for name, m in named if not wanted or is_target(name, wanted)]
    return sum(rank * (m.in_features + m.out_features) for m in chosen)
