"""Comparison of a run's memory plan with its devices, by phase, with advice if it does not fit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from april.config.checking import check_recipe
from april.config.error import ConfigError
from april.config.recipe import Recipe
from april.engines.weight_transfer import BUCKET_BYTES as SENT
from april.training.memory_plan import RESIDENT, USABLE, MemoryPlan, plan_memory
from april.training.offload import Part
from april.training.offload_plan import SLEEPING, check_host_memory, host_parts, parts_away, shares_parameters
from april.training.sharded import BUCKET_BYTES as GATHERED

log = logging.getLogger(__name__)

ESTIMATED = ("activations", "images", "logits", "attention")
"""Parts that shrink when micro-batches are halved, as they are when memory runs out."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of the fullest device in a phase of a step, in bytes by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the size of micro-batches."""
        return sum(size for name, size in self.parts.items() if name not in ESTIMATED)


def phases(plan: MemoryPlan, recipe: Recipe, memory: float | None = None) -> list[Phase]:
    """Return generation, training and weight update, each on the device that holds most in it.

    The KV cache counts with the size of `kv_cache_gb`, or of one sample of full length: samples wait if it is full.

    Args:
        memory: bytes of a device, for the choice of what leaves shared devices; None moves everything that may leave.
    """
    resident = {name: plan.rank[name] for name in RESIDENT if name in plan.rank}
    weights = {"engine's weights": plan.first["engine's weights"]}
    length = recipe.engine.context_length or recipe.rollout.max_response_length
    cache = {"KV cache": int(recipe.engine.kv_cache_gb * 1e9) if recipe.engine.kv_cache_gb else length * plan.token}
    # An engine that computes with the trainer's own parameters receives no weights.
    computes_with_parameters = recipe.generates_inside and not weights["engine's weights"]
    bucket = {} if computes_with_parameters else {"bucket": _bucket_bytes(plan, recipe)}
    generation = {**weights, "pass": plan.engine_pass, **cache}
    if recipe.shares_devices:
        return _in_turns(plan, recipe, generation, bucket, memory)
    if not recipe.generates_inside:
        training, update = plan.rank, {**resident, **bucket}
    else:
        kept = cache if recipe.keeps_cache_in_training else {}
        generation = {**resident, **generation}
        training, update = {**plan.rank, **weights, **kept}, {**resident, **weights, **kept, **bucket}
    return [Phase("generation", generation), Phase("training", training), Phase("weight update", update)]


def _in_turns(
    plan: MemoryPlan, recipe: Recipe, generation: dict[str, int], bucket: dict[str, int], memory: float | None
) -> list[Phase]:
    """Return the phases of engines and trainer that use the same devices in turn."""
    away = parts_away(recipe, plan, memory)
    kept = {name: plan.rank[name] for name in RESIDENT if plan.rank.get(name) and name not in away}
    sent = {name: plan.rank[name] for name in RESIDENT if plan.rank.get(name) and name != Part.OPTIMIZER}
    embedded = recipe.generates_inside and recipe.engine.engine == "embedded"
    sleeping = {} if embedded else {"sleeping engine": SLEEPING}
    weights = {"engine's weights": generation["engine's weights"]}
    # Ranks discard the engine's copy when their parameters return; the merged copy of one process stays.
    copied = embedded and (shares_parameters(recipe) or Part.PARAMETERS not in away)
    training = {**plan.rank, **sleeping, **(weights if copied else {})}
    return [
        Phase("generation", {**kept, **generation, **sleeping}),
        Phase("training", training),
        Phase("weight update", {**sent, **kept, **weights, **sleeping, **bucket}),
    ]


def _bucket_bytes(plan: MemoryPlan, recipe: Recipe) -> int:
    """Return the size of a bucket of whole parameters and its shards; a broadcast packs a bucket of its own.

    A tensor is never divided: a bucket is at least as large as the largest one.
    """
    packed = 2 * max(SENT, plan.largest) if recipe.engine.weight_transfer in ("broadcast", "ipc") else 0
    return 2 * max(GATHERED, plan.largest) + packed


def verdict(plan: MemoryPlan, recipe: Recipe, memory: float) -> Iterator[str]:
    """Yield a line for each phase: its share of `memory` bytes, and the setting to change first if it does not fit."""
    room = memory * USABLE
    yield f"of {memory / 1e9:.0f} GB, {room / 1e9:.1f} GB to plan with:"
    for phase in phases(plan, recipe, memory):
        line = f"  {phase.name:<18}{phase.total / 1e9:10.3f} GB: "
        if phase.total > room:
            yield f"{line}does not fit; {first_change(recipe, phase.name, room)}"
        elif phase.name == "generation" and recipe.engine.kv_cache_gb is None:
            yield f"{line}fits; {_slots(plan, recipe, room - phase.total)}"
        else:
            yield f"{line}fits"
    if recipe.shares_devices and (parts := host_parts(recipe, plan, memory)):
        every = recipe.trainer.processes * sum(parts.values())
        yield (
            f"in host memory while engines generate: {', '.join(parts)}: {sum(parts.values()) / 1e9:.3f} GB of each "
            f"rank, {every / 1e9:.3f} GB of all"
        )
    yield from _other_layout(recipe, memory)


def _other_layout(recipe: Recipe, memory: float) -> Iterator[str]:
    """Yield whether the recipe also fits with engine and trainer in the other layout, or what april refuses in it."""
    other = copy.deepcopy(recipe)
    other.trainer.layout = "split" if recipe.shares_devices else "shared"
    try:
        check_recipe(other, loads=False)
    except ConfigError as error:
        yield f'with trainer.layout = "{other.trainer.layout}": other settings are needed: {str(error).splitlines()[0]}'
        return
    too_large = [each.name for each in phases(plan_memory(other), other, memory) if each.total > memory * USABLE]
    fits = f"{' and '.join(too_large)} would not fit" if too_large else "every phase would fit"
    yield f'with trainer.layout = "{other.trainer.layout}": {fits}; april simulate --layouts compares their speed'


def _slots(plan: MemoryPlan, recipe: Recipe, left: float) -> str:
    length = recipe.engine.context_length or recipe.rollout.max_response_length
    cache = left + length * plan.token
    samples = int(cache / (length * plan.token))
    held = f"{samples} of {recipe.slots}" if samples < recipe.slots else f"all {recipe.slots}"
    return f"{cache / 1e9:.1f} GB remain for the KV cache: {held} samples of full length"


def first_change(recipe: Recipe, phase: str, room: float) -> str:
    """Return the first setting that makes a phase fit, alone or with those before it; all of them if none does."""
    tried, made = copy.deepcopy(recipe), list[str]()
    for name, change in _changes(tried):
        change()
        # A later change of a setting replaces an earlier change of the same setting in the advice.
        made = [other for other in made if other.split(" = ")[0] != name.split(" = ")[0]] + [name]
        fits = (
            next(each for each in phases(plan_memory(tried), tried, room / USABLE) if each.name == phase).total <= room
        )
        if fits:
            return f"set {' and '.join(made)}"
    return f"not even with {' and '.join(made)}: take larger devices, a smaller policy, or lora.rank"


def _changes(recipe: Recipe) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield changes of `recipe` that save memory, the cheapest first."""
    engine, training, trainer = recipe.engine, recipe.training, recipe.trainer

    def setting(owner: object, name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    if engine.kv_cache_gb:
        yield "engine.kv_cache_gb lower, or left out", setting(engine, "kv_cache_gb", None)
    if engine.on_update == "keep" and recipe.generates_inside:
        yield 'engine.on_update = "recompute"', setting(engine, "on_update", "recompute")
    if not training.gradient_checkpointing:
        yield "training.gradient_checkpointing = true", setting(training, "gradient_checkpointing", True)
    least = recipe.rollout.max_response_length
    if training.max_tokens_per_micro_batch > least:
        name = f"training.max_tokens_per_micro_batch = {least}"
        yield name, setting(training, "max_tokens_per_micro_batch", least)
    if trainer.backend_name == "megatron":
        return
    for more in (2, 4, 8):
        if more > trainer.processes and trainer.backend != "local":
            yield f"trainer.processes = {more}", setting(trainer, "processes", more)
    if not trainer.cpu_offload and trainer.backend != "local":
        yield "trainer.cpu_offload = true", setting(trainer, "cpu_offload", True)


def planned(recipe: Recipe) -> MemoryPlan | None:
    """Return the recipe's memory plan; None if this architecture cannot be planned. The plan is advice: a run starts
    without it."""
    try:
        return plan_memory(recipe)
    # Some architectures cannot run on tensors without values.
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
        log.warning("memory was not planned: %s", str(error).partition("\n")[0])
        return None


def check_memory(recipe: Recipe, plan: MemoryPlan, memory: float | None) -> None:
    """Compare a run's memory plan with its machine before anything is loaded; warn if estimates exceed it.

    Args:
        memory: bytes of a device; None on CPUs, where only host memory that parts move to is checked.

    Raises:
        ConfigError: a phase does not fit whatever the micro-batches are.
    """
    if recipe.shares_devices:
        check_host_memory(recipe, plan, memory)
    if memory is None:
        return
    room = memory * USABLE
    for phase in phases(plan, recipe, memory):
        if phase.total <= room:
            continue
        shortage = (
            f"{phase.name} takes {phase.total / 1e9:.1f} GB of a GPU with {memory / 1e9:.1f} GB, of which "
            f"{room / 1e9:.1f} GB can be planned with: {first_change(recipe, phase.name, room)}"
        )
        if phase.fixed > room:
            raise ConfigError(f"memory: {shortage} (april memory shows the parts)")
        log.warning("%s, or micro-batches are halved when memory runs out", shortage)
