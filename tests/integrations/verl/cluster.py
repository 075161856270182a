"""A Ray cluster of this machine, for verl's actors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_cluster() -> Iterator[None]:
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    # Ray would start a process for each CPU in its configuration.
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112
    # With only this machine's CPUs, actors would wait for one another without end.
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(address="local", num_cpus=32, include_dashboard=False, runtime_env=environment)
    yield
    ray.shutdown()
