"""Routes in the replies of vLLM's and SGLang's servers.

Servers return the routes of a request when it ends: rows of all its tokens but the last one, for all layers of the
model, with meaningless entries for layers without experts. Tokens that were streamed before a server died have none.

    vLLM    `--enable-return-routed-experts`; base64 of an `.npy` file, [rows, layers, top k], uint8, uint16 or int32
    SGLang  `--enable-return-routed-experts`, `return_routed_experts`; base64 of int32, [rows · layers · top k]
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from april.engines.servers.client import RequestError
from april.engines.servers.stream import Finish, Stream
from april.rollout.sampling import FinishReason
from april.rollout.trajectory.routes import Experts, RouteRows, route_dtype

FLAG = "--enable-return-routed-experts"


@dataclass(frozen=True, slots=True)
class ServerRoutes:
    """Which routes to request, and the shape of the model's routes.

    Args:
        layers: places of the layers with routers among all layers.
        all_layers: number of the model's layers.
        latest: request the routes of all tokens, and not only of those whose routes are missing.
    """

    layers: tuple[int, ...]
    all_layers: int
    top_k: int
    experts: int
    latest: bool = False

    @classmethod
    def of(cls, model: str, latest: bool) -> ServerRoutes:
        """Read the shape from the configuration of a model, a directory or a hub name.

        Raises:
            ValueError: the model has no routers that april knows.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from april.engines.routers import is_named_router, no_routers

        config = AutoConfig.from_pretrained(str(Path(model).expanduser()), trust_remote_code=False)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        routers = {name: module for name, module in whole.named_modules() if is_named_router(module)}
        layers = tuple(int(place[1]) for name in routers if (place := re.search(r"\.(\d+)\.", name)))
        if not layers:
            raise ValueError(no_routers(whole))
        text, router = config.get_text_config(), next(iter(routers.values()))
        # Routers of transformers before 5.15 lack attributes that replay needs: april's trainer refuses these itself.
        top_k = getattr(router, "top_k", None) or text.num_experts_per_tok
        experts = len(router.weight)  # type: ignore[arg-type]
        return cls(layers, int(text.num_hidden_layers), int(top_k), experts, latest)

    def start(self, stream: Stream) -> int:
        """Return the first token of a request whose routes are wanted."""
        return 0 if self.latest else stream.routes_from

    def of_vllm(self, encoded: str | None, stream: Stream, finish: Finish | None) -> RouteRows | None:
        """Decode the routes of vLLM's event; None if it has none.

        Args:
            finish: end of the request that the event reports.

        Raises:
            RequestError: they are malformed, of another model, or missing from the last event of a response.
        """
        if encoded is None:
            _check_absent(finish)
            return None
        try:
            rows = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise RequestError(f"routes came that cannot be read: {error}") from None
        return self.rows(rows, self.start(stream))

    def of_sglang(self, encoded: str | None, stream: Stream, finish: Finish | None) -> RouteRows | None:
        """Decode the routes of SGLang's event; see `of_vllm`."""
        if encoded is None:
            _check_absent(finish)
            return None
        try:
            flat = np.frombuffer(base64.b64decode(encoded), "<i4")
            rows = flat.reshape(-1, self.all_layers, self.top_k)
        except ValueError as error:
            raise RequestError(
                f"routes came that are not of {self.all_layers} layers with {self.top_k} experts a token: {error}"
            ) from None
        return self.rows(rows, self.start(stream))

    def rows(self, rows: Any, start: int) -> RouteRows:
        """Return the routes in a server's array, of the layers with routers alone.

        Args:
            rows: [rows, layers, top k] for all layers.
            start: token of the first row.

        Raises:
            RequestError: they are of another model.
        """
        if rows.ndim != 3 or rows.shape[1:] != (self.all_layers, self.top_k) or rows.dtype.kind not in "iu":
            raise RequestError(
                f"routes of shape {list(rows.shape)} came where the policy has {self.all_layers} layers with "
                f"{self.top_k} experts a token: the server has another model"
            )
        own = rows[:, list(self.layers)]
        if own.size and not 0 <= int(own.min()) <= int(own.max()) < self.experts:
            wrong = int(own.max() if own.max() >= self.experts else own.min())
            raise RequestError(
                f"expert {wrong} came where the policy has {self.experts} experts: the server has another model"
            )
        experts: Experts = own.astype(route_dtype(self.experts))
        return RouteRows(start, experts)


MISSING = f"a response ended without its routes: start the server with {FLAG}, or turn router replay off"
"""Error message for a server that returns no routes at the end of a response."""


def _check_absent(finish: Finish | None) -> None:
    # An aborted request may have lost its routes: another request continues the response, and supplies them.
    if isinstance(finish, FinishReason):
        raise RequestError(MISSING)
