"""Real nodes of a real Ray cluster on this machine, to be killed and hung: each has its raylet, and an address on the
loopback interface."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray.cluster_utils import Cluster

from tests.limits import HANG
from tests.processes import below, processes

RANK = "-m april.commands.rank"
ENGINES = ("ray::EngineActor", "ray::ServerActor")
CALLS = ("ray::CallActor",)
ATTEMPTS = 5


def started(start: Callable[[], Any], undo: Callable[[], None] = lambda: None) -> Any:
    """What `start` returns, in several attempts: Ray gives a raylet half a minute, which is little on a machine with
    much other work."""

    def children() -> set[int]:
        return {pid for pid, (parent, _) in processes().items() if parent == os.getpid()}

    for _ in range(ATTEMPTS):
        before = children()
        try:
            return start()
        except Exception as error:  # Ray raises no less
            failed = error
            for pid in children() - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            undo()
    raise failed


class Raylets:
    """A cluster. Its head has no CPUs by default, so that engines are on the nodes that are added.

    Args:
        reaped: it ends with this process, however that ends; then nodes are added in its main thread alone.
        network: the third number of its addresses, so that several are apart.
        dashboard: the head has one, which takes jobs.
        address: of all nodes; if there is none, each has one of its own.
        cpus: CPUs of the head.
    """

    def __init__(
        self, reaped: bool = True, network: int = 0, dashboard: bool = False, address: str = "", cpus: int = 0
    ) -> None:
        self._added, self._network, self._address = 0, network, address
        self._cluster = started(
            lambda: Cluster(
                initialize_head=True,
                shutdown_at_exit=reaped,
                head_node_args={
                    **self._settings(cpus),
                    "include_dashboard": dashboard,
                    "dashboard_port": 0,
                    "dashboard_agent_listen_port": 0,
                },
            )
        )

    def _settings(self, cpus: int, gpus: int = 0) -> dict[str, Any]:
        self._added += 1
        # Ray takes 127.0.0.1 for the machine's outer address.
        address = self._address or f"127.0.{self._network}.{1 + self._added}"
        return {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 80_000_000, "node_ip_address": address}

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def dashboard(self) -> str:
        """Where it takes jobs."""
        return f"http://{self.head.webui_url}"

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    @property
    def nodes(self) -> list[Any]:
        """Those that were added and are not gone."""
        return [node for node in self._cluster.list_all_nodes() if node is not self.head]

    def add(self, cpus: int = 1, gpus: int = 0) -> Any:
        """A node that joins; Ray believes in any GPUs."""
        known = self.nodes

        def undo() -> None:
            for node in self.nodes:
                if node not in known:
                    self._cluster.remove_node(node, allow_graceful=False)

        node = started(lambda: self._cluster.add_node(**self._settings(cpus, gpus)), undo)
        self._cluster.wait_for_nodes(timeout=HANG)
        return node

    def engines(self, *nodes: Any) -> list[int]:
        """The processes of the engines on these nodes; on all, if none are named."""
        return self._named(ENGINES, nodes)

    def callers(self, *nodes: Any) -> list[int]:
        """The processes that call rewards or environments on these nodes; on all, if none are named."""
        return self._named(CALLS, nodes)

    def holds(self, node: Any, pid: int) -> bool:
        """Whether a process runs on a node."""
        return pid in self._tree(node)

    def _named(self, names: tuple[str, ...], nodes: tuple[Any, ...]) -> list[int]:
        alive, places = processes(), nodes or self._cluster.list_all_nodes()
        return [pid for node in places for pid in self._tree(node) if alive.get(pid, (0, ""))[1].startswith(names)]

    def ranks(self, *nodes: Any) -> list[int]:
        """The processes of the trainer's ranks on these nodes."""
        alive = processes()
        return [pid for node in nodes for pid in self._tree(node) if alive.get(pid, (0, ""))[1].endswith(RANK)]

    def _tree(self, node: Any) -> list[int]:
        return [pid for each in node.all_processes.get("raylet", []) for pid in below(each.process.pid)]

    def signal(self, node: Any, number: int) -> None:
        """To everything that runs on a node, the raylet first."""
        for pid in self._tree(node):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, node: Any) -> None:
        """The node is gone at once, with all that ran there."""
        self.signal(node, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def remove(self, node: Any) -> None:
        """Remove the node in good order, which Ray detects at once; a stopped node is resumed first."""
        self.signal(node, signal.SIGCONT)
        self._cluster.remove_node(node, allow_graceful=True)

    def settle(self) -> None:
        """Wait until Ray has registered the death of all removed nodes."""
        self._cluster.wait_for_nodes(timeout=HANG)

    def kill_head(self) -> None:
        """The head is gone at once, and what Ray keeps there."""
        self.signal_head(signal.SIGKILL)

    def signal_head(self, number: int, *kinds: str) -> None:
        """To these kinds of the head's processes, as Ray names them; to all, if none are named."""
        running = self.head.all_processes
        for each in [one for kind in kinds or tuple(running) for one in running[kind]]:
            for pid in below(each.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        self.signal_head(signal.SIGCONT)
        for node in self._cluster.list_all_nodes():
            self.signal(node, signal.SIGCONT)
        self._cluster.shutdown()
