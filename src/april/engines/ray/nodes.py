"""The nodes of the cluster that this process is connected to, as Ray and as they themselves say."""

from __future__ import annotations

from contextlib import closing

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.state import available_resources_per_node

from april.engines.ray.head import call_head
from april.engines.ray.placement import Node

ANSWERING = 8.0
"""Seconds that a node may take to answer, before it is asked for an engine."""

WATCH = 1.0
"""Seconds between two looks at the nodes."""
SUSPECT = 90.0
"""Seconds that a node is avoided on which something hung. Ray itself takes a little over a minute to call it dead."""


def home() -> str:
    """The node that this process is connected by."""
    return str(ray.get_runtime_context().get_node_id())


def home_address() -> str:
    """The address of that node, by which others know it."""
    return str(ray.util.get_node_ip_address())


def nodes_now() -> list[Node]:
    """The nodes that Ray calls alive, with what is free on them."""
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
    """Whether a node's raylet answers. Ray reserves on one node after the other, so one that hangs and is asked for an
    engine would hold up all others until Ray calls it dead."""
    with closing(init_grpc_channel(f"{node.address}:{node.port}")) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            check(b"", timeout=ANSWERING)
        except grpc.RpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True
