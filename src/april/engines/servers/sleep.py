"""Whether a server can share devices with the trainer: its version and its options."""

from __future__ import annotations

from april.engines.servers.server_api import ServerInfo, Sleeping
from april.rollout.engine import EngineError


async def require_sleep(name: str, sleeping: Sleeping | None, info: ServerInfo) -> None:
    """Check that a server releases its memory when it sleeps, as far as the server reports it.

    Raises:
        EngineError: it does not; the message names the remedy.
    """
    if sleeping is None:
        raise EngineError(f'{name} cannot release its memory: set trainer.layout = "split", or use vLLM or SGLang')
    version = await sleeping.version()
    if not version.startswith(sleeping.tested):
        tested = " or ".join(f"{prefix}*" if prefix.endswith(".") else prefix for prefix in sleeping.tested)
        raise EngineError(
            f"{name} has version {version}, but sleeping was tested with {tested}: install that "
            'version, or set trainer.layout = "split"'
        )
    if info.releases_memory is False:
        raise EngineError(f"{name} would release no memory: it was started without {sleeping.flag}")
