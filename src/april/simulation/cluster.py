"""The hardware that a recipe is simulated on: engines, their costs, and the time of training.

Invariant: every statement about a GPU, a training time or a price rests on an option or a measurement.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from april.simulation.cost_model import CostModel
from april.simulation.hardware import (
    GPU,
    NODE,
    TRAINER_BYTES,
    ModelShape,
    Roofline,
    check_trainer,
    roofline,
    training_seconds_per_token,
)
from april.simulation.turn_over import TurnOver

PARAMETER_BYTES = 6.0
"""Bytes of a parameter and of its rounded copy on a training GPU."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Engines, and the devices of the trainer.

    Args:
        name: shown to the user.
        engines: number of engines, on one or several GPUs each if GPUs were named.
        cost: costs of one engine.
        gpus: total number, including GPUs that only train; 0 if none were named.
        training_gpus: GPUs that only train; 0 if all GPUs generate and train in turn.
        train_token_seconds: training time for each consumed token; 0 leaves training out.
        training: the source of the training time, a sentence.
        price: price of a GPU for an hour, in any currency; None if none was named.
    """

    name: str
    engines: int
    cost: CostModel
    gpus: int = 0
    training_gpus: int = 0
    train_token_seconds: float = 0.0
    training: str = "Training is left out: it was not measured, and no hardware was named."
    price: float | None = None

    @property
    def separate(self) -> bool:
        """Whether training has a known time and its own devices, so that generation can overlap with it."""
        return self.train_token_seconds > 0 and (self.training_gpus > 0 or not self.gpus)

    def trained_as_in(self, run: str, token_seconds: float) -> Cluster:
        """Return this cluster with the training time of a run."""
        sentence = f"Training takes {_million(token_seconds)}, as it did in {run}."
        return replace(self, train_token_seconds=token_seconds, training=sentence)


def gpu_cluster(
    gpu: GPU,
    shape: ModelShape,
    gpus: int,
    *,
    slots: int,
    training_gpus: int = 0,
    engine_gpus: int = 1,
    trainer_bytes: float = TRAINER_BYTES,
    price: float | None = None,
    measured: CostModel | None = None,
    turn_over: TurnOver | None = None,
) -> Cluster:
    """Return a cluster of GPUs that generate and train in turn; with `training_gpus`, that number of them only train.

    Args:
        slots: samples that decode together on one engine.
        engine_gpus: GPUs of each engine; a remainder generates nothing.
        trainer_bytes: bytes of the trainer's state on GPUs, for each parameter.
        measured: measured costs of an engine, in place of the roofline.
        turn_over: times of a turn, if the trainer's state is in host memory while the GPUs generate, and engines sleep
            while they train; None if both stay on the GPUs.

    Raises:
        ValueError: model and trainer do not fit the GPUs, or no GPU is left for an engine.
    """
    if gpus - training_gpus < engine_gpus:
        raise ValueError(f"{gpus} GPUs, {training_gpus} of which train, leave none for an engine on {engine_gpus}")
    if training_gpus:
        check_trainer(gpu, shape, training_gpus, trainer_bytes)
    shared = 0 if training_gpus or turn_over else gpus
    shared_bytes = engine_gpus * trainer_bytes  # on each of an engine's GPUs
    cost = measured or roofline(
        gpu.times(engine_gpus), shape, Roofline(slots=slots), trainer_gpus=shared, trainer_bytes=shared_bytes
    )
    turns = ""
    if turn_over and not training_gpus:
        check_turns(gpu, shape, gpus, engine_gpus, trainer_bytes)
        more = turn_over.seconds(shape, gpus, trainer_bytes)
        cost = replace(cost, update_seconds=cost.update_seconds + more)
        turns = f" The change of places takes {cost.update_seconds:.1f} s a step, with the weight update."
    seconds = training_seconds_per_token(gpu, shape, training_gpus or gpus)
    own = f"{training_gpus} GPU{'s' * (training_gpus > 1)} of its own, and alternates with rollouts unless they overlap"
    place = own if training_gpus else "the same GPUs, and alternates with rollouts"
    return Cluster(
        name=f"{shape.name} on {gpus} × {gpu.name}",
        engines=(gpus - training_gpus) // engine_gpus,
        cost=cost,
        gpus=gpus,
        training_gpus=training_gpus,
        train_token_seconds=seconds,
        training=f"Training takes {_million(seconds)} on {place}.{turns}",
        price=price,
    )


def check_turns(gpu: GPU, shape: ModelShape, gpus: int, engine_gpus: int, trainer_bytes: float = TRAINER_BYTES) -> None:
    """Check that trainer and engines fit GPUs that they use in turn: training, and parameters and weights in an update.

    Raises:
        ValueError: they do not fit; the message names the phase.
    """
    ranks = min(gpus, NODE)
    room = gpu.memory * Roofline().memory_share
    training = trainer_bytes * shape.parameters / ranks
    parameters = min(trainer_bytes, PARAMETER_BYTES) * shape.parameters / ranks
    update = parameters + 2 * shape.parameters / engine_gpus
    for phase, held in (("training", training), ("a weight update", update)):
        if held > room:
            raise ValueError(
                f"{shape.name} on {gpus} × {gpu.name}, shared: {phase} holds {held / 1e9:.0f} GB of each GPU's "
                f"{room / 1e9:.0f} GB"
            )


def least_training_gpus(
    gpu: GPU, shape: ModelShape, gpus: int, trainer_bytes: float = TRAINER_BYTES, engine_gpus: int = 1
) -> int:
    """Return the smallest number of GPUs that a separate trainer fits, leaving at least one engine's GPUs of `gpus`.

    Raises:
        ValueError: there is no such number.
    """
    if (most := gpus - engine_gpus) < 1:
        engine = "a GPU" if engine_gpus == 1 else f"{engine_gpus} GPUs"
        raise ValueError(f"overlap takes {engine} for engines and one for the trainer at least: raise --gpus")
    for training_gpus in range(1, most):
        with suppress(ValueError):
            check_trainer(gpu, shape, training_gpus, trainer_bytes)
            return training_gpus
    # Not suppressed: if even these do not suffice, its error explains why.
    check_trainer(gpu, shape, most, trainer_bytes)
    return most


def _million(token_seconds: float) -> str:
    return f"{token_seconds * 1e6:.3g} s for a million tokens"
