"""An SGLang server for slime's tests, and the requests that slime sends to its router."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import requests
from slime.ray.rollout import _start_router
from slime.utils.http_utils import init_http_client

from april.engines.servers.launch import Launch, Server, launch_sglang
from tests.servers.conftest import ENVIRONMENT, SGLANG, python_of


def start_sglang(
    model: Path, log_dir: Path, context: int, tokens: int, environment: Mapping[str, str] | None = None
) -> AbstractAsyncContextManager[Server]:
    """Start a server.

    Args:
        context: its context length.
        tokens: tokens of its KV cache.
        environment: further variables.
    """
    how = Launch(
        log_dir=log_dir,
        python=python_of("sglang"),
        arguments=[
            *(*SGLANG, "--dtype", "float32", "--max-running-requests", "8"),
            *("--context-length", str(context), "--max-total-tokens", str(tokens)),
        ],
        environment={**ENVIRONMENT, "SGLANG_USE_CPU_ENGINE": "1", **(environment or {})},
    )
    return launch_sglang(model, how)


def use_router(args: Namespace, server: Server) -> None:
    """Start slime's own router and client, as its rollout manager does, and wait until the router lists the server."""
    args.sglang_router_ip, args.sglang_router_port = _start_router(args)
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    requests.post(f"{router}/workers", json={"url": server.url, "worker_type": "regular"}).raise_for_status()
    while not requests.get(f"{router}/workers").json()["workers"]:
        time.sleep(0.05)
    init_http_client(args)
