"""How new weights reach an engine.

Weights belong to who trains. A learner has a `WeightTransfer` and offers the weights of each version through it; an
engine is handed the offer with `update_weights`, and refuses kinds that it does not take:

| transfer | offers | for |
|---|---|---|
| `SharedParameters` | None: there is nothing to move | an engine that computes with the trainer's parameters |
| `InProcess` | `Tensors` | an engine in this process with a copy of its own |
| `OnDisk` | the path of a directory of safetensors | servers that read the same disk |
| `servers.broadcast.Broadcast` | `Sending` | servers, over a process group that all of them join |

Invariants:
- what is handed out is of the version that it was offered as, or `WithdrawnError` is raised;
- tensors come one after the other, by an iterator: nobody needs a second whole copy of the weights;
- weights on disk are kept as long as an engine may still be asked to load them.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from april.disk import follow_umask
from april.rollout.engine import EngineError

if TYPE_CHECKING:
    from torch import Tensor

TensorSource = Callable[[], "Iterator[tuple[str, Tensor]]"]
"""Gives a policy's tensors by their names in the checkpoint, as they are now, one after the other."""
BUCKET_BYTES = 2**28
"""Bytes of tensors that are announced to servers and sent together; packing holds as many again."""


class WithdrawnError(EngineError):
    """These weights are gone: their tensors have been trained on since."""


class Offer:
    """Whether tensors are still those of the version that they were offered as."""

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
    """Where a process group meets: rank 0 sends, and one server's workers are the ranks from `first_rank` on."""

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


async def _untold() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Receiver:
    """A server, as one side of a sending.

    Args:
        name: what messages call it.
        url: where it listens.
        life: tells the server from the one that was there before it was restarted.
        workers: its ranks in the group.
        join: has its workers join a group.
        begin: has it get ready for buckets.
        receive: has it receive one.
        end: has it compute with what it received.
        nccl_version: asks for the version of its nccl library; None if the server does not tell.
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


class Share(ABC):
    """What one engine is handed of weights that are sent to several at the same time."""

    @abstractmethod
    async def take(self, receiver: Receiver) -> None:
        """Returns when the weights have been received, once everybody who has a share takes it or has let it go."""

    @abstractmethod
    def release(self) -> None:
        """The engine takes no part after all, if it has not yet: nobody waits for it."""


class Sending(ABC):
    """Weights that are sent: once, however many engines go over together."""

    @abstractmethod
    def shares(self, count: int) -> Sequence[Share]:
        """One for each engine."""

    async def take(self, receiver: Receiver) -> None:
        """Send them to one server alone."""
        await self.shares(1)[0].take(receiver)


def shares_of(weights: Any, count: int) -> Sequence[Any]:
    """What each of `count` engines that go over together is handed of `weights`."""
    return weights.shares(count) if isinstance(weights, Sending) else [weights] * count


def directory_of(weights: Any) -> str:
    """The absolute path of a directory of safetensors. A server may not survive one that is not there, so it is looked
    at here first.

    Raises:
        ValueError: there are no weights there.
    """
    path = Path(weights).absolute() if isinstance(weights, str | Path) else None
    if path is None or not any(path.glob("*.safetensors")):
        raise ValueError(f"weights = {weights!r}: must be a directory with safetensors in it")
    return str(path)


class WeightTransfer(Protocol):
    """A learner's way to hand its weights over."""

    def offer(self, version: int) -> Any:
        """The weights as they are now, as those of `version`: what `update_weights` of the engine is given."""
        ...

    def withdraw(self) -> None:
        """The tensors change from here on: an offer that would read them hands nothing out any more."""
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
        """What is on disk stays as it is."""
