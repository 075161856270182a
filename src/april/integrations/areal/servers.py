"""AReaL's inference servers: SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from areal.api.cli_args import PPOConfig

from april.engines.servers.client import HTTPClient
from april.engines.servers.server_api import ServerAPI
from april.integrations.completions import VLLMCompletions
from april.integrations.servers import UnlabelledSGLang


def server_api(config: PPOConfig) -> Callable[[HTTPClient], ServerAPI]:
    """Return the API of the servers that AReaL starts."""
    if config.rollout.backend.startswith("vllm"):
        return partial(VLLMCompletions, slots=config.vllm.max_num_seqs)
    return UnlabelledSGLang
