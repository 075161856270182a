"""vLLM's own `LLM` in the size of a test on a CPU, with what tests read of the stand-in: `calls` and `steps`.

vLLM's CPU build refuses sleep mode, so sleep is played: its state machine is vLLM's own, and the weights are zeroed.
The build also packs the weights of linear layers for its kernels, once, at the start; here the layers compute with
their parameters, as on a GPU, since TRL loads weights into parameters.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would bind the trainer's threads, too

import vllm
import vllm._custom_ops

vllm._custom_ops._supports_onednn = False


class SmallLLM(vllm.LLM):
    def __init__(self, *arguments: Any, enable_sleep_mode: bool, **settings: Any) -> None:
        self.calls: list[str] = []
        self.steps = 0
        super().__init__(
            *arguments,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            kv_cache_memory_bytes=2**24,
            **settings,
        )
        self.model = self.llm_engine.model_executor.driver_worker.model_runner.get_model()
        self._note_calls(self.model, "load_weights")
        self._note_calls(self.llm_engine, "add_request")
        step = self.llm_engine.step

        def counted() -> Any:
            self.steps += self.llm_engine.has_unfinished_requests()
            return step()

        self.llm_engine.step = counted

    def _note_calls(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def noted(*arguments: Any, **settings: Any) -> Any:
            self._note(name)
            return method(*arguments, **settings)

        setattr(owner, name, noted)

    def _note(self, call: str) -> None:
        if self.calls[-1:] != [call]:
            self.calls.append(call)

    def sleep(self, level: int = 1, **settings: Any) -> None:
        assert not self.llm_engine.has_unfinished_requests(), "vLLM was put to sleep with requests in flight"
        self._note("sleep")
        super().sleep(level=level, **settings)
        for parameter in self.model.parameters():
            parameter.data.zero_()

    def wake_up(self, tags: list[str] | None = None) -> Any:
        for tag in tags or ():
            self._note(f"wake {tag}")
        return super().wake_up(tags)

    def reset_prefix_cache(self, *arguments: Any, **settings: Any) -> Any:
        self._note("reset_prefix_cache")
        return super().reset_prefix_cache(*arguments, **settings)
