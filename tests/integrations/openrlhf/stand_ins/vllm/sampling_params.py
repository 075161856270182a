"""See `vllm`."""

from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(DELTA="delta")
