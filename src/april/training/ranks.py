"""Process groups of the ranks that train one policy together.

Rank 0 leads: it alone has scheduler, journal and logs. The other ranks execute its commands together with it.

Invariants:
- all ranks call a collective operation in the same order, or none calls it;
- a rank waits for another rank no longer than the timeout, with two exceptions. Waiting for the leader's next command
  has no limit: a rollout lies between two training steps, and the supervisor notices the loss of the leader. Under
  torchrun, followers wait for the leader without limit at the start, because it first checks the run's files;
- all ranks compute shared decisions from the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from april.algorithms.corrections import Diagnostics
from april.algorithms.objective import UpdateSums
from april.config.error import ConfigError
from april.engines.rank_exchange import RankExchange, is_peer_loss
from april.training.context_parallel import ContextParallel
from april.training.rank_protocol import LISTENER, RENDEZVOUS, RankLostError
from april.training.rendezvous import rendezvous

FOREVER = timedelta(days=365)


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Division of some of a layer's parameters among ranks, as one rank sees it.

    Args:
        among: ranks that each compute with a different part.
        across: ranks that hold shards of the same part, as [copies, ranks of each] if there are copies.
    """

    among: DeviceMesh
    across: DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This process's rank and process groups, made by `join_ranks`.

    Ranks are numbered copy by copy, then team by team; in a team, ranks with the same tokens have adjacent numbers.

    Args:
        mesh: all ranks, as [copies of the policy, ranks of each]; one-dimensional if there is one copy.
        commands: process group of the leader's commands, without a timeout.
        exchange: orders to the ranks' engines and their replies, which other threads send.
        context: context parallelism: the ranks that share rows with this one; None without.
        tensor: tensor parallelism: division of matrices, possibly into one part; None if no layer is divided.
        expert: expert parallelism: division of experts; None without.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    commands: Any
    exchange: RankExchange
    context: ContextParallel | None = None
    tensor: Division | None = None
    expert: Division | None = None

    @property
    def context_size(self) -> int:
        """Number of ranks that share the tokens of a row; 1 without context parallelism."""
        return self.context.size if self.context else 1

    @property
    def team_size(self) -> int:
        """Number of ranks that receive the same micro-batches."""
        return self.context_size * (self.tensor.among.size() if self.tensor else 1)

    @property
    def team(self) -> tuple[int, int]:
        """Number of this rank's team, and number of teams; the ranks of a team receive the same micro-batches."""
        return self.rank // self.team_size, self.world // self.team_size

    @property
    def counts(self) -> bool:
        """Whether results of this rank enter sums over ranks: only those of the first rank of each team do."""
        return self.rank % self.team_size == 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def total(self, sums: UpdateSums) -> UpdateSums:
        """Add up the sums of all ranks."""
        own = [sums.loss, sums.value_loss, sums.entropy, sums.kl, float(sums.tokens)]
        # In float64, in which token counts are exact.
        loss, value_loss, entropy, kl, tokens = self.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        largest = sums.diagnostics.largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        of_tokens, k3, sequences = (
            self.sum(t.clone()) for t in (sums.diagnostics.sums, sums.diagnostics.k3, sums.diagnostics.sequences)
        )
        diagnostics = Diagnostics(of_tokens, k3, largest, sequences)
        return UpdateSums(loss, value_loss, entropy, kl, round(tokens), diagnostics)

    def send(self, command: Any) -> None:
        """Send a command to all other ranks; called by the leader."""
        dist.broadcast_object_list([command], src=0, group=self.commands, device=torch.device("cpu"))

    def receive(self) -> Any:
        """Wait for the leader's next command; called by the other ranks."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self.commands, device=torch.device("cpu"))
        return box[0]

    def gathered(self, what: Any) -> list[Any]:
        """Return the objects of all ranks, by rank, on every rank."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, what, group=self.commands)
        return found

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        dist.barrier()


@contextmanager
def join_ranks(
    device: str, timeout: float, replicas: int = 1, context: int = 1, tensor: int = 1, expert: int = 1
) -> Iterator[Ranks]:
    """Join the ranks named by torchrun's environment variables, and create the process groups.

    Args:
        device: "auto", "cpu" or "cuda"; on GPUs, a rank uses the GPU with the number of its local rank.
        timeout: seconds that ranks wait for one another.
        replicas: number of copies of the policy; a divisor of the number of ranks.
        context: ranks that share rows; `context` · `tensor` is a divisor of the number of ranks.
        tensor: ranks that divide matrices; a divisor of the number of ranks of a copy.
        expert: ranks that divide experts; a multiple of `tensor` and a divisor of the number of ranks of a copy.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
        RankLostError: a rank did not join in time.
    """
    cuda = device != "cpu" and torch.cuda.is_available()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and here > torch.cuda.device_count():
        raise ConfigError(
            f"{here} ranks start on this machine, which has {torch.cuda.device_count()} GPUs, and a rank takes one: "
            'lower trainer.processes, with torchrun its --nproc-per-node, or set model.device = "cpu"'
        )
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with rank_loss_translated():
        # With GPUs also gloo: objects and sums of Python numbers are exchanged on the CPU.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_store(rank, world, timeout),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        if replicas == 1:
            mesh = init_device_mesh(own.type, (world,), mesh_dim_names=("shard",))
        else:
            shape = replicas, world // replicas
            mesh = init_device_mesh(own.type, shape, mesh_dim_names=("replicate", "shard"))
        # A command or an order may follow after a whole rollout; replies to an order have to arrive in time.
        commands, orders = (dist.new_group(backend="gloo", timeout=FOREVER) for _ in range(2))
        replies = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        team = None
        if context > 1:
            size = context * tensor
            firsts = [first + part for first in range(0, world, size) for part in range(tensor)]
            # `new_group` requires that all ranks create all groups, in the same order.
            teams = {first: dist.new_group(range(first, first + size, tensor)) for first in firsts}
            team = ContextParallel(teams[rank - rank % size + rank % tensor], rank % size // tensor, context)
        divided = tensor > 1 or expert > 1
        matrices = _division(own.type, "tensor", world, replicas, tensor) if divided else None
        experts = _division(own.type, "expert", world, replicas, expert) if expert > 1 else None
    # Not destroyed after an error: another rank may wait in a collective operation, or be gone.
    exchange = RankExchange(rank, world, orders, replies, _rank_lost)
    yield Ranks(rank, world, own, mesh, commands, exchange, team, matrices, experts)
    dist.destroy_process_group()


def _store(rank: int, world: int, timeout: float) -> c10d.Store:
    """Return the store for the rendezvous: the supervisor's, new at each start, or a part of torchrun's."""
    url = urlsplit(os.environ.get(RENDEZVOUS, ""))
    if url.scheme == "tcp":
        assert url.hostname is not None
        # The supervisor has bound the port already, so no other process can take it before rank 0 listens.
        limit, listener = timedelta(seconds=timeout), int(os.environ[LISTENER]) if rank == 0 else None
        return c10d.TCPStore(url.hostname, url.port or 0, world, rank == 0, limit, False, master_listen_fd=listener)
    store: c10d.Store
    store, *_ = next(torch_rendezvous(os.environ.get(RENDEZVOUS, "env://"), rank, world))
    if RENDEZVOUS in os.environ:
        return store
    return rendezvous(store, rank, world, timeout if rank == 0 else FOREVER.total_seconds())


def _division(kind: str, name: str, world: int, replicas: int, parts: int) -> Division:
    shape = replicas, world // replicas // parts, parts
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard", name))
    return Division(mesh[name], mesh["shard"] if replicas == 1 else mesh["replicate", "shard"])


@contextmanager
def rank_loss_translated() -> Iterator[None]:
    """Translate torch's exceptions about other ranks to `RankLostError`."""
    try:
        yield
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        raise _rank_lost(error) from error


def _rank_lost(error: RuntimeError) -> RankLostError:
    return RankLostError(str(error).partition("\n")[0])
