"""This process as a driver of a running Ray cluster."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any, Literal

import grpc
import ray
from ray._private import worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import AuthenticationError

from april.engines.ray.head import HEAD_SILENCE, call_head, release
from april.engines.ray.placement import Demand
from april.rollout.engine import EngineError

raylets = logging.getLogger("raylet")

CONNECTING = 60.0
"""Seconds in which a head lets this process in."""
TOKEN = "put that of the cluster into RAY_AUTH_TOKEN, or the file's name into RAY_AUTH_TOKEN_PATH"


def demand_of(cpus: int, gpus: int | Literal["auto"]) -> Demand:
    """Return the resources of an engine or a rank on the cluster that this process is connected to."""
    return Demand(cpus, int("GPU" in ray.cluster_resources()) if gpus == "auto" else gpus)


def connect(address: str) -> None:
    """Make this process a driver of the cluster at `address`, "auto" or host:port.

    Raises:
        EngineError: no cluster answers there, or it requires another token.
    """
    head = _listening(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "april"}
    try:
        _require_entry(address, head)
        worker.print_to_stdstream = _log_raylets
        ray.init(address, **options)
    except AuthenticationError:
        raise EngineError(f"RAY_AUTH_MODE=token, but there is no token: {TOKEN}") from None
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        why = str(error).splitlines()[0]
        raise _no_entry(address, why) from None


def _log_raylets(data: dict[str, Any], **_: Any) -> None:
    """Log messages of raylets, such as long ones about each worker that dies. Ray would print them on the console."""
    raylets.warning("%s", "\n".join(data["lines"]))


async def join(address: str) -> None:
    """`connect`, with a time limit for the head."""
    await call_head(connect, address, seconds=CONNECTING)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler replaced this process's, and would abort the process three seconds after a SIGTERM.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def disconnect() -> None:
    """End everything that this process has started on the cluster."""
    ray.shutdown()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[None]:
    """`join`; disconnected afterwards."""
    await join(address)
    try:
        yield
    finally:
        await release(disconnect)


def _listening(address: str) -> str:
    """Return the head's host and port if something listens there; Ray itself would retry for minutes."""
    try:
        head: str | None = canonicalize_bootstrap_address(address)
    except ConnectionError:
        head = None
    if head is None:
        raise _not_there(address, "none runs on this machine")
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_SILENCE).close()
    except OSError as error:
        raise _not_there(address, f"{head}: {error.strerror or error}") from None
    return head


def _require_entry(address: str, head: str) -> None:
    """Check that the listener is a head that admits this process; Ray itself would retry for half a minute."""
    with closing(init_grpc_channel(head)) as channel:
        try:
            # The request has no fields, so its protobuf encoding is empty.
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=HEAD_SILENCE)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise _no_entry(address, "it asks for a token, and this process has none or another") from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise EngineError(f"the head of the Ray cluster has not answered for {HEAD_SILENCE:g} s") from None
            raise _not_there(address, f"what listens at {head} is no head of one") from None


def _no_entry(address: str, why: str) -> EngineError:
    return EngineError(
        f"cluster.address = {address!r}: the cluster does not let this process in ({why}); where it has a token, set "
        f"RAY_AUTH_MODE=token here, too, and {TOKEN}"
    )


def _not_there(address: str, why: str) -> EngineError:
    return EngineError(
        f"cluster.address = {address!r}: no Ray cluster answers there ({why}); start one with ray start --head, or "
        "name the address that ray start printed"
    )
