"""Which GPU of this machine does what.

Invariants:
- no two engines and no two training processes have the same GPU, and an engine has none of a training process's
  unless they share devices;
- everything that was asked for gets all of its GPUs, or nothing starts;
- the same counts on the same machine give the same map, in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from april.engines.gpus import Gpu, variables_for


class GpuShortageError(ValueError):
    """There are fewer GPUs than were asked for."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """GPUs of training processes and engines.

    Args:
        training: GPU of each training process, by its local rank.
        engines: GPUs of each engine with dedicated GPUs, in its own order; an engine without GPUs works on the CPU.
        unused: remaining GPUs.
    """

    training: tuple[Gpu, ...]
    engines: tuple[tuple[Gpu, ...], ...]
    unused: tuple[Gpu, ...] = ()

    def environment(self, engine: int) -> dict[str, str]:
        """Variables that have the process of an engine see its own GPUs alone."""
        return variables_for(self.engines[engine], any(gpu.rocm for gpu in self.all))

    @property
    def all(self) -> tuple[Gpu, ...]:
        given = (*self.training, *(gpu for own in self.engines for gpu in own), *self.unused)
        return tuple(dict.fromkeys(given))

    def rows(self, engines: Sequence[str], generates: int = 0) -> Iterator[tuple[str, str]]:
        """What does what, for people: each GPU and its task.

        Args:
            engines: names of the engines.
            generates: training processes that have an engine, the first ones.
        """
        served = {gpu: name for name, own in zip(engines, self.engines, strict=True) for gpu in own}
        for rank, gpu in enumerate(self.training):
            task = f"trains{f' (rank {rank})' if len(self.training) > 1 else ''}"
            if (name := served.pop(gpu, None)) is not None:
                yield str(gpu), f"{task} and generates ({name}) in turn"
            else:
                yield str(gpu), f"{task} and generates" if rank < generates else task
        for gpu, name in served.items():
            yield str(gpu), f"generates ({name})"
        for gpu in self.unused:
            yield str(gpu), "unused"


def assign(
    gpus: Sequence[Gpu], training: Sequence[int], engines: int, gpus_per_engine: int, shared: bool = False
) -> DeviceMap:
    """Give training processes the GPUs that they name, and engines the next ones, neighbours together.

    Args:
        gpus: those that this process sees.
        training: the place among them of each training process's GPU.
        engines: engines with GPUs of their own.
        gpus_per_engine: 0 for engines on the CPU.
        shared: engines get the GPUs of training processes first, and use them in turn.

    Raises:
        GpuShortageError: there are too few.
    """
    assert len(set(training)) == len(training), "a training process has a GPU of its own"
    if any(place >= len(gpus) for place in training):
        raise GpuShortageError
    trained = [gpus[place] for place in training]
    others = [gpu for place, gpu in enumerate(gpus) if place not in training]
    left = [*trained, *others] if shared else others
    needed = engines * gpus_per_engine
    if needed > len(left):
        raise GpuShortageError
    own = tuple(tuple(left[i * gpus_per_engine : (i + 1) * gpus_per_engine]) for i in range(engines))
    return DeviceMap(tuple(trained), own, tuple(gpu for gpu in left[needed:] if gpu not in trained))
