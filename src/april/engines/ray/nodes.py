"""The nodes of the cluster that this process is connected to, as reported by Ray and by the nodes."""

from __future__ import annotations

from contextlib import closing

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.state import available_resources_per_node

from april.engines.ray.head import call_head
from april.engines.ray.placement import Node

ANSWERING = 8.0
"""Seconds that a node may take to answer before an engine is placed on it."""

WATCH = 1.0
"""Seconds between two queries of the nodes."""
SUSPECT = 90.0
"""Seconds for which a node is avoided after a hang. Ray itself takes a little over a minute to declare it dead."""


def home() -> str:
    """Return the id of the node that this process is connected through."""
    return str(ray.get_runtime_context().get_node_id())


def home_address() -> str:
    """Return the address of that node."""
    return str(ray.util.get_node_ip_address())


def nodes_now() -> list[Node]:
    """Return the nodes that Ray counts as alive, with their free resources."""
    free = available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            free.get(node["NodeID"], {}).get("CPU", 0.0),
            free.get(node["NodeID"], {}).get("GPU", 0.0),
            free.get(node["NodeID"], {}).get("object_store_memory", 0.0),
            node["NodeManagerPort"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


async def alive_nodes() -> list[Node]:
    """As `nodes_now`.

    Raises:
        EngineError: the head does not answer.
    """
    return await call_head(nodes_now)


def answers(node: Node) -> bool:
    """Return whether a node's raylet answers. Ray reserves resources on one node after the other, so a reservation on a
    node that hangs would block all others until Ray declares the node dead."""
    with closing(init_grpc_channel(f"{node.address}:{node.port}")) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            check(b"", timeout=ANSWERING)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True
