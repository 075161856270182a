"""What a recipe is simulated on: engines, what their work costs, and what training costs.

Invariant: nothing is said about a GPU, a training time or a price that was neither named nor measured.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from april.simulation.cost_model import CostModel
from april.simulation.hardware import (
    GPU,
    TRAINER_BYTES,
    ModelShape,
    Roofline,
    check_trainer,
    roofline,
    training_seconds_per_token,
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Engines that generate, and what trains beside them.

    Args:
        name: for people.
        engines: on a GPU each, or on several, if there are GPUs.
        cost: of one engine.
        gpus: in all, those that only train included; 0 if none were named.
        training_gpus: those that only train; 0 if all of them do both in turn.
        train_token_seconds: training time for each consumed token; 0 leaves training out.
        training: what that rests on, a sentence.
        price: of a GPU for an hour, in any currency; None if none was named.
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
        """Whether training has a time and devices of its own, so that generation may go on meanwhile."""
        return self.train_token_seconds > 0 and (self.training_gpus > 0 or not self.gpus)

    def trained_as_in(self, run: str, token_seconds: float) -> Cluster:
        """The same with the training time that a run had."""
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
) -> Cluster:
    """GPUs that generate and train in turn, or, with `training_gpus`, some of them only train.

    Args:
        slots: samples that decode together on one engine.
        engine_gpus: of each engine; what is left of the others generates nothing.
        trainer_bytes: of the trainer's state on GPUs, for each parameter.
        measured: what an engine costs, in place of the roofline.

    Raises:
        ValueError: model and trainer do not fit the GPUs, or there is none left for an engine.
    """
    if gpus - training_gpus < engine_gpus:
        raise ValueError(f"{gpus} GPUs, {training_gpus} of which train, leave none for an engine on {engine_gpus}")
    if training_gpus:
        check_trainer(gpu, shape, training_gpus, trainer_bytes)
    shared = 0 if training_gpus else gpus
    beside = engine_gpus * trainer_bytes  # on each of an engine's GPUs
    cost = measured or roofline(
        gpu.times(engine_gpus), shape, Roofline(slots=slots), trainer_gpus=shared, trainer_bytes=beside
    )
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
        training=f"Training takes {_million(seconds)} on {place}.",
        price=price,
    )


def least_training_gpus(
    gpu: GPU, shape: ModelShape, gpus: int, trainer_bytes: float = TRAINER_BYTES, engine_gpus: int = 1
) -> int:
    """The fewest of `gpus` GPUs, an engine's left out, that a trainer of its own fits.

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
    check_trainer(gpu, shape, most, trainer_bytes)
    return most


def _million(token_seconds: float) -> str:
    return f"{token_seconds * 1e6:.3g} s for a million tokens"
