"""Serves a resources server of the real package nemo-gym; runs in an environment of its own.

python tests/gateway/nemo_gym_server.py MODULE CLASS PORT
"""

from __future__ import annotations

import sys
from importlib import import_module
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient


def main(module: str, name: str, port: str) -> None:
    kind = getattr(import_module(module), name)
    config_class = kind.model_fields["config"].annotation
    config = config_class(host="127.0.0.1", port=int(port), entrypoint="app.py", name="tested", domain="other")
    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
