"""Tensor and expert parallelism, by transformers' plans for an architecture.

With tensor parallelism each rank has a part of every matrix of a layer (heads of attention, columns of the MLP), and
the ranks sum their results. With expert parallelism each rank has whole experts, and tokens are sent to them and back.

Invariants:
- ranks that divide matrices receive the same tokens; ranks that divide only experts may have different tokens;
- parameters that no plan divides (norms, routers, embedding, head) are sharded as without model parallelism;
- a part is a range of rows or columns, or whole experts, so its place in a file is known.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from april.config.error import ConfigError
from april.config.settings.trainer_settings import TrainerSettings
from april.engines.pretrained import EXPERTS
from april.training.ranks import Ranks

STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Supported styles of tensor-parallel plans."""
DISPATCH = "ep_dispatch_experts"


def divide(model: Any, ranks: Ranks) -> list[nn.Module]:
    """Divide the layers of `model` in place, and return its experts.

    Args:
        model: a transformers model with or without a head, whole and equal on all ranks.
    """
    if ranks.tensor is None:
        return []
    # Imported here: older versions of transformers, which an environment with vLLM may have, lack these modules.
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    matrices, experts = plans(model, ranks.tensor.among.size(), ranks.expert.among.size() if ranks.expert else 1)
    apply_tensor_parallelism(model, ranks.tensor.among, matrices)
    if ranks.expert is not None:
        apply_expert_parallelism(model, ranks.expert.among, ranks.tensor.among, experts)
    return [model.get_submodule(name) for name, style in experts.items() if style == DISPATCH]


def layers_of(model: nn.Module) -> list[str]:
    """Return the names of a model's layers."""
    return [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


def plans(model: Any, tensor: int, expert: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the styles of the layers' divided modules and parameters, by name: of matrices, and of experts."""
    layers = tuple(f"{name}." for name in layers_of(model))
    experts = model._expand_parallel_plan(model.ep_plan) if expert > 1 else {}
    matrices = model._expand_parallel_plan(model.tp_plan) if tensor > 1 else {}
    own = {name for name in matrices if name.startswith(layers)}
    # Expert parallelism divides these modules already; their matrices are not divided a second time.
    own -= {name for name in own for part in experts if f"{name}.".startswith(f"{part}.")}
    return {name: style for name, style in matrices.items() if name in own}, experts


def check_layout(trainer: TrainerSettings, path: str) -> None:
    """Check that the policy's layers can be divided by `trainer`, from the model's configuration alone.

    Args:
        path: path or hub name of the model.

    Raises:
        ConfigError: the layers cannot be divided like this.
    """
    context, tensor, expert = trainer.context_parallel, trainer.tensor_parallel, trainer.expert_parallel
    megatron = trainer.backend == "megatron"
    if context == tensor == expert == 1 and not megatron:
        return
    if max(tensor, expert) > 1 and not megatron and find_spec("transformers.distributed.expert_parallel") is None:
        raise ConfigError(
            f"trainer.{'tensor' if tensor > 1 else 'expert'}_parallel needs a newer transformers than the "
            f"{transformers.__version__} that is installed: 5.23 has what divides layers"
        )
    try:
        config: Any = AutoConfig.from_pretrained(str(Path(path).expanduser()), trust_remote_code=False)
    except (OSError, ValueError):
        return  # loading the policy reports the error
    sharing = {"context_parallel": context, "tensor_parallel": tensor}
    named = " · ".join(name for name, size in sharing.items() if size > 1)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % (context * tensor):
            raise ConfigError(
                f"trainer.{named} = {context * tensor} does not divide the {heads} {name} of {path}: each rank takes "
                "as many heads"
            )
    width = getattr(config, "intermediate_size", None)
    if isinstance(width, int) and width % tensor:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor} does not divide intermediate_size = {width} of {path}: each rank "
            "takes as many columns"
        )
    experts = next((found for name in EXPERTS if (found := getattr(config, name, None))), 0)
    if megatron and experts:
        raise ConfigError(
            f'trainer.backend = "megatron": {path} is a mixture of experts, which april has not trained by Megatron: '
            'choose "fsdp2"'
        )
    if megatron:
        return
    plan = getattr(config, "base_model_ep_plan", None) or {}
    if expert > 1 and (not experts or DISPATCH not in plan.values()):
        raise ConfigError(
            f"trainer.expert_parallel = {expert}: {path} is no mixture of experts that transformers can divide among "
            "ranks; leave it out"
        )
    if expert > 1 and experts % expert:
        raise ConfigError(
            f"trainer.expert_parallel = {expert} does not divide the {experts} experts of {path}: each rank takes as "
            "many"
        )
    if tensor > 1 and experts and expert == 1:
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor}: {path} is a mixture of experts, and those are divided by "
            f"expert_parallel alone: set it to a multiple of {tensor}"
        )
    found = getattr(config, "base_model_tp_plan", None) or {}
    styles = {style for name, style in found.items() if not any(f"{name}.".startswith(f"{part}.") for part in plan)}
    if tensor > 1 and (not styles or styles - STYLES):
        how = f"by {', '.join(sorted(styles - STYLES))}, which april does not know" if styles else "not at all"
        raise ConfigError(
            f"trainer.tensor_parallel = {tensor}: transformers divides the layers of {path} {how}; leave it out, and "
            "let processes share the policy by FSDP2 alone"
        )
