"""The processes that train one policy together, seen from each of them.

Rank 0 leads: it alone has scheduler, engine, journal and logs. The others do what it says, as it does it itself.

Invariants:
- a collective operation is called by all ranks in the same order, or by none;
- nobody waits for another rank longer than the timeout, except for the leader's next command: between two training
  steps lies a rollout, and whoever started the ranks sees it if the leader is gone;
- what several ranks decide on is computed from the same numbers on each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from april.algorithms.corrections import Diagnostics
from april.algorithms.objective import Sums
from april.config.error import ConfigError
from april.training.context import Context
from april.training.rank_process import RENDEZVOUS, RankLostError

FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This process's place among the ranks. `join` makes one.

    Args:
        mesh: all ranks, as [copies of the policy, ranks of each]; one-dimensional if there is one copy.
        commands: the group over which the leader speaks, which may wait for long.
        context: those that share rows with this one, neighbours by number; None if nobody does.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    commands: Any
    context: Context | None = None

    @property
    def team_size(self) -> int:
        """How many ranks share rows: 1 if none do."""
        return self.context.size if self.context else 1

    @property
    def team(self) -> tuple[int, int]:
        """Which of the teams that share rows this rank is in, and how many there are."""
        return self.rank // self.team_size, self.world // self.team_size

    @property
    def counts(self) -> bool:
        """Whether what this rank computes is summed: of a team, the first one's is."""
        return self.context is None or self.context.rank == 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def total(self, sums: Sums) -> Sums:
        """What all ranks' sums add up to."""
        own = [sums.loss, sums.value_loss, sums.entropy, sums.kl, float(sums.tokens)]
        loss, value_loss, entropy, kl, tokens = self.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        largest = sums.met.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        of_tokens, k3, sequences = (self.sum(t.clone()) for t in (sums.met.sums, sums.met.k3, sums.met.sequences))
        met = Diagnostics(of_tokens, k3, largest, sequences)
        return Sums(loss, value_loss, entropy, kl, round(tokens), met)

    def send(self, command: Any) -> None:
        """Of the leader: send a command to all others."""
        dist.broadcast_object_list([command], src=0, group=self.commands, device=torch.device("cpu"))

    def receive(self) -> Any:
        """Of the others: the leader's next command."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self.commands, device=torch.device("cpu"))
        return box[0]

    def gathered(self, what: Any) -> list[Any]:
        """What each rank has brought, by rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, what, group=self.commands)
        return found

    def wait(self) -> None:
        """Until all ranks have come as far."""
        dist.barrier()


@contextmanager
def joined(device: str, timeout: float, replicas: int = 1, context: int = 1) -> Iterator[Ranks]:
    """This process among the ranks that its environment names, as torchrun sets it.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        RankLostError: a rank did not come.

    Args:
        device: its kind, `auto`, `cpu` or `cuda`; on GPUs a rank takes the one of its number on its machine.
        timeout: seconds that ranks wait for one another.
        replicas: copies of the policy, which divide the ranks.
        context: ranks that share rows; they divide the ranks, too.
    """
    cuda = device != "cpu" and torch.cuda.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and here > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.processes = {here}, but this machine has {torch.cuda.device_count()} GPUs, and a rank takes one: "
            'lower processes, or set model.device = "cpu"'
        )
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with translated():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=os.environ.get(RENDEZVOUS, "env://"),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        if replicas == 1:
            mesh = init_device_mesh(own.type, (world,), mesh_dim_names=("shard",))
        else:
            shape = replicas, world // replicas
            mesh = init_device_mesh(own.type, shape, mesh_dim_names=("replicate", "shard"))
        commands = dist.new_group(backend="gloo", timeout=FOREVER)
        team = None
        if context > 1:
            teams = [dist.new_group(range(first, first + context)) for first in range(0, world, context)]
            team = Context(teams[rank // context], rank % context, context)
    # Not destroyed if something was raised: another rank may wait in it, or be gone.
    yield Ranks(rank, world, own, mesh, commands, team)
    dist.destroy_process_group()


@contextmanager
def translated() -> Iterator[None]:
    """Inside, torch's exceptions about other ranks are `RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise RankLostError(str(error).partition("\n")[0]) from error


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective operation failed because of another rank. Of gloo only the message says so."""
    text = str(error)
    said = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "gloo")
    return isinstance(error, dist.DistError) or any(words in text for words in said)
