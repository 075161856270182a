"""AReaL's single controller on a CPU: its scheduler starts processes that train and processes that hold servers.

What stands in: SGLang's servers, each on a thread of its worker. They keep the weights that they load.
"""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from areal.api import LocalInfServerInfo
from areal.engine import RemoteSGLangEngine
from areal.infra import LocalScheduler
from areal.infra.scheduler import local
from areal.trainer import rl_trainer
from areal.utils.network import find_free_ports
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.integrations.areal.trainer import Trainer
from tests.integrations.model_server import SGLangServer, adapted

WEIGHTS = "weights"
"""Folder of the weights that servers have loaded, by their version."""


class KeepingServer(SGLangServer):
    loads = 0

    async def _load(self, request: web.Request) -> web.Response:
        path = Path((await request.json())["model_path"])
        shutil.copyfile(path / "model.safetensors", self._next_file())
        return await super()._load(request)

    def use_adapter(self, name: str, path: Path) -> None:
        super().use_adapter(name, path)
        save_file(adapted(self.path, path), self._next_file())

    def _next_file(self) -> Path:
        """Return the path of a file for the weights of one more load."""
        folder = self.path.parent / WEIGHTS
        folder.mkdir(exist_ok=True)
        self.loads += 1
        return folder / f"{self.loads:04}-of-{id(self)}"


class ServedEngine(RemoteSGLangEngine):  # type: ignore[misc]
    """AReaL's engine of a worker, whose server is not SGLang's."""

    def launch_server(self, server_args: dict[str, Any]) -> LocalInfServerInfo:
        model = Path(self.config.fileroot).parent / "model"
        server = KeepingServer(model, context_length=server_args["context_length"])
        for named in server_args.get("lora_paths") or ():
            name, _, path = named.partition("=")
            server.use_adapter(name, Path(path))
        host, port = server.address.split(":")
        ended = SimpleNamespace(poll=lambda: 0)  # no process that AReaL would end
        self._engine.local_server_processes.append(LocalInfServerInfo(host, int(port), ended))
        return LocalInfServerInfo(host, int(port), None)


def free_ports(*arguments: Any, **named: Any) -> list[int]:
    """Choose free ports as AReaL does, but not by its fixed seed: runs at the same time would choose the same ports."""
    state = random.getstate()
    random.seed()
    try:
        return list(find_free_ports(*arguments, **named))
    finally:
        random.setstate(state)


rl_trainer.RemoteSGLangEngine = ServedEngine
local.find_free_ports = free_ports
# Workers import AReaL before they answer: slowly, on a busy machine.
rl_trainer.LocalScheduler = functools.partial(LocalScheduler, startup_timeout=600.0)
LocalScheduler._wait_for_fork_ready = staticmethod(
    functools.partial(LocalScheduler._wait_for_fork_ready, timeout=600.0)
)


class ControlledTrainer(Trainer):
    def _served(self) -> dict[str, torch.Tensor]:
        folder = Path(self.config.stats_logger.fileroot).parent / WEIGHTS
        loaded = sorted(folder.iterdir()) if folder.exists() else []
        if not loaded:
            return {name: value.clone() for name, value in tiny.model().state_dict().items()}
        served: dict[str, torch.Tensor] = load_file(loaded[-1])
        return served
