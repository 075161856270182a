"""Rules for the settings of an inference engine, in a recipe or given in Python.

Invariant: every problem is one line that names the setting and the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import get_type_hints
from urllib.parse import urlsplit

from pydantic import ValidationError

from april.config.error import ConfigError
from april.config.ranges import range_problems
from april.config.reading import messages
from april.config.recipe import typed
from april.config.settings.engine_settings import API_KEY, EngineSettings
from april.engines.servers.address import is_loopback


def check_engine(settings: EngineSettings) -> None:
    """Convert settings given in Python to their types, and check them.

    Raises:
        ConfigError: with a line for each wrong setting.
    """
    problems = []
    for name, kind in get_type_hints(type(settings)).items():
        try:
            setattr(settings, name, typed(kind, getattr(settings, name)))
        except ValidationError as error:
            problems.append(f"{name} = {getattr(settings, name)!r}: {messages(error.errors())}")
    if not problems:
        broken = (
            *range_problems("engine", settings),
            *engine_problems(settings),
            *speculation_problems(settings),
            *exposure_problems(settings),
        )
        problems = [line.removeprefix("engine.") for line in broken]
    if problems:
        raise ConfigError("\n".join(problems))


def engine_problems(engine: EngineSettings, on_cluster: bool = False) -> Iterator[str]:
    servers = engine.engine in ("vllm", "sglang")
    if engine.urls and not servers:
        yield f'engine.urls is set but engine = "{engine.engine}": choose "vllm" or "sglang", or remove urls'
    for url in engine.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f'engine.urls has {url!r}: write each as "http://host:port"'
    if servers and not engine.urls and engine.server_python and shutil.which(engine.server_python) is None:
        yield f"engine.server_python = {engine.server_python!r}: no such interpreter"
    if engine.gpus_per_replica != "auto" and (engine.engine in ("embedded", "vllm-inproc") and not on_cluster):
        yield (
            f'engine.gpus_per_replica = {engine.gpus_per_replica} with engine = "{engine.engine}": it is for servers '
            "that april starts, and for engines on a cluster; remove it"
        )
    named = engine.gpus_by_arguments
    if named is not None and engine.gpus_per_replica not in ("auto", named):
        yield (
            f"engine.gpus_per_replica = {engine.gpus_per_replica}, but server_args divide a server among {named} GPUs: "
            "remove one of them"
        )
    if engine.on_update == "redraft" and engine.engine != "embedded":
        yield f'engine.on_update = "redraft": {engine.engine} verifies no drafts; use "recompute"'
    for name in ("gpu_memory_utilization", "enforce_eager"):
        value = getattr(engine, name)
        if engine.engine != "vllm-inproc" and value != getattr(EngineSettings, name):
            yield f'engine.{name} = {value} with engine = "{engine.engine}": it is for "vllm-inproc"; remove it'
    if engine.own_process and engine.engine != "embedded":
        yield f'engine.own_process is set but engine = "{engine.engine}": it is for "embedded"; remove it'
    if engine.engine == "vllm-inproc":
        if engine.on_update == "keep":
            yield 'engine.on_update = "keep": vLLM in this process computes anew only; use "recompute"'
        if find_spec("vllm") is None:
            yield (
                'engine.engine = "vllm-inproc" needs vLLM in this environment: install it here, or use "vllm", whose '
                "server may have an environment of its own (engine.server_python)"
            )


def speculation_problems(engine: EngineSettings, min_p: float = 0.0) -> Iterator[str]:
    asked = engine.speculative_option
    if engine.engine == "vllm" and min_p and asked:
        yield f"rollout.min_p = {min_p:g}: vLLM takes none while it speculates; set 0, or remove {asked}"
    if engine.engine == "sglang" and asked:
        yield (
            f"engine.server_args names {asked}: SGLang is not known to draw drafted tokens from the policy's "
            'distribution (docs/engines.md, Speculation); remove it, or use "vllm"'
        )


def exposure_problems(engine: EngineSettings) -> Iterator[str]:
    """Check settings that would expose a server or a key."""
    for url in engine.urls:
        if "@" in urlsplit(url).netloc:
            yield f"engine.urls holds a password: leave it out, and put the servers' key into {API_KEY} instead"
    for option in (argument.partition("=")[0] for argument in engine.server_args):
        if option == "--host":
            yield "engine.server_args names --host: set engine.server_host instead"
        elif re.fullmatch(r"--(\w+-)?api-key|--hf-token|--.*password", option):
            yield (
                f"engine.server_args names {option}: everybody on the machine sees the options of a process; put the "
                f"key into the environment (the servers' own as {API_KEY})"
            )
    if not is_loopback(engine.server_host) and not os.environ.get(API_KEY):
        yield (
            f"engine.server_host = {engine.server_host!r} can be reached from other machines: set the environment "
            f'variable {API_KEY} to a key that the servers ask for, or server_host to "127.0.0.1"'
        )
