"""How new weights reach an engine.

Weights belong to the trainer. A learner has a `WeightTransfer` and offers the weights of each version through it; an
engine is handed the offer with `update_weights`, and refuses kinds that it does not take:

| transfer | offers | for |
|---|---|---|
| `SharedParameters` | None: there is nothing to move | an engine that computes with the trainer's parameters |
| `InProcess` | `Tensors` | an engine in this process with a copy of its own |
| `OnDisk` | the path of a directory of safetensors | servers that read the same disk |
| `servers.broadcast.Broadcast` | `Sending` | servers, over a process group that all of them join |
| `servers.same_device.SameDevice` | `Sending` | servers on the trainer's GPUs, which read its memory |

Invariants:
- tensors are of the version that they were offered as, or `WithdrawnError` is raised;
- tensors are iterated one by one, so no process needs a second whole copy of the weights;
- weights on disk are kept as long as an engine may still load them.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from april.disk import follow_umask
from april.rollout.engine import EngineError

if TYPE_CHECKING:
    from torch import Tensor

TensorSource = Callable[[], "Iterator[tuple[str, Tensor]]"]
"""Yields a policy's current tensors, one by one, by their names in the checkpoint."""
BUCKET_BYTES = 2**28
"""Bytes of tensors that are announced to servers and sent together; packing needs the same amount again."""


class WithdrawnError(EngineError):
    """The offered weights no longer exist: their tensors have been trained on since."""


class Offer:
    """State of an offer: valid until its tensors change."""

    def __init__(self) -> None:
        self._standing = True

    def withdraw(self) -> None:
        self._standing = False

    def require(self) -> None:
        if not self._standing:
            raise WithdrawnError("these weights are being trained on; the next update brings newer ones")


@dataclass(frozen=True, slots=True)
class Tensors:
    """Tensors for an engine in the trainer's process, as (name, tensor)."""

    source: TensorSource
    offer: Offer

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.offer.require()
        return self.source()


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of a process group: rank 0 sends, and one server's workers are the ranks from `first_rank` on."""

    address: str
    port: int
    world_size: int
    first_rank: int
    name: str
    backend: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, as their bytes in this order: names, types (`float32`, `bfloat16`, …), shapes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


Arguments = tuple[Any, ...]
"""Arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A bucket of tensors, packed into one tensor of bytes on each of the trainer's GPUs, which servers there read.

    Args:
        bucket: names, types and shapes; the tensors' bytes stand in this order, without gaps.
        handles: arguments that rebuild the packed tensor, by the UUID of the GPU it is on.
    """

    bucket: Bucket
    handles: Mapping[str, Arguments]


async def _untold() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Receiver:
    """Server that receives weights.

    Args:
        name: its name in messages.
        url: address at which it listens.
        life: number that changes when the server restarts.
        workers: its ranks in the group.
        join: makes its workers join a group.
        begin: prepares it for buckets.
        receive: makes it receive one bucket.
        end: activates the received weights.
        nccl_version: returns the version of its NCCL library; None if unknown.
        prepare: prepares a life of its process for buckets that it opens.
        open: makes it copy one bucket from the trainer's memory on its own GPUs, whose UUIDs are given by rank.
        gpus: UUID of the GPU of each of its ranks; empty if april did not start it.
    """

    name: str
    url: str
    life: int
    workers: int
    join: Callable[[Meeting], Awaitable[Any]]
    begin: Callable[[], Awaitable[Any]]
    receive: Callable[[Meeting, Bucket], Awaitable[Any]]
    end: Callable[[], Awaitable[Any]]
    nccl_version: Callable[[], Awaitable[str | None]] = _untold
    prepare: Callable[[], Awaitable[Any]] = _untold
    open: Callable[[Exported, tuple[str, ...]], Awaitable[Any]] | None = None
    gpus: tuple[str, ...] = ()


class Share(ABC):
    """One engine's part in a transfer of weights to several engines at once."""

    @abstractmethod
    async def take(self, receiver: Receiver) -> None:
        """Receive the weights. The transfer starts when every share has been taken or released."""

    @abstractmethod
    def release(self) -> None:
        """Take no part, unless it was taken already: the other engines do not wait for this one."""


class Sending(ABC):
    """Weights that are sent once to all engines that are updated together."""

    @abstractmethod
    def shares(self, count: int) -> Sequence[Share]:
        """Return one share per engine."""

    async def take(self, receiver: Receiver) -> None:
        """Send them to one server alone."""
        await self.shares(1)[0].take(receiver)

    async def again(self) -> Any:
        """Return the weights for an engine that gets them after the transfer: it has been restarted, or lost them.

        Raises:
            EngineError: they are not there.
        """
        return self


def shares_of(weights: Any, count: int) -> Sequence[Any]:
    """Return what each of `count` engines, updated together, is given as `weights`."""
    return weights.shares(count) if isinstance(weights, Sending) else [weights] * count


async def again(weights: Any) -> Any:
    """Return `weights` for an engine that gets them after all others; see `Sending.again`."""
    return await weights.again() if isinstance(weights, Sending) else weights


def directory_of(weights: Any) -> str:
    """Return the absolute path of a directory of safetensors. A server may crash on a missing directory, so it is
    checked here first.

    Raises:
        ValueError: there are no weights there.
    """
    path = Path(weights).absolute() if isinstance(weights, str | Path) else None
    if path is None or not any(path.glob("*.safetensors")):
        raise ValueError(f"weights = {weights!r}: must be a directory with safetensors in it")
    return str(path)


class WeightTransfer(Protocol):
    """How a learner transfers its weights to engines."""

    def offer(self, version: int) -> Any:
        """Return the current weights as `version`, for `update_weights` of the engine."""
        ...

    def withdraw(self) -> None:
        """Invalidate earlier offers: the tensors change from here on."""
        ...


class SharedParameters:
    """For an engine that computes with the trainer's parameters."""

    def offer(self, version: int) -> None:
        """There is nothing to move."""

    def withdraw(self) -> None:
        """Nothing was handed out."""


class InProcess:
    """For an engine in this process that has a copy of its own."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._latest = Offer()

    def offer(self, version: int) -> Tensors:
        self.withdraw()
        self._latest = Offer()
        return Tensors(self._source, self._latest)

    def withdraw(self) -> None:
        self._latest.withdraw()


class OnDisk:
    """For engines that read the same disk.

    Args:
        directory: gets a folder for each version.
        save: writes the policy into a folder.
    """

    def __init__(self, directory: Path, save: Callable[[Path], object]) -> None:
        self._directory = directory
        self._save = save

    def offer(self, version: int) -> Path:
        path = (self._directory / f"v{version}").resolve()
        self._save(path)
        follow_umask(path)
        # The version before stays: a replica that comes back in the middle of an update may be loading it.
        for old in self._directory.glob("v*"):
            if int(old.name[1:]) < version - 1:
                shutil.rmtree(old)
        return path

    def withdraw(self) -> None:
        """Files on disk do not change."""
