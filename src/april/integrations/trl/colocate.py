"""TRL's `vllm_mode = "colocate"`: each process drives TRL's own `vllm.LLM` on the device that it trains on.

TRL's code builds the `LLM` and loads the weights; april adds, steps and aborts its requests, so that samples can be
interrupted and resumed.

Invariants:
- the order is TRL's: generate, sleep, train, wake the weights, load them, reset the prefix cache, wake the KV cache;
  without `vllm_enable_sleep_mode` sleeping and waking are left out;
- all processes load weights together and in their main threads: TRL gathers shards and merges adapters there;
- while vLLM sleeps, no sample is in flight;
- processes that compute one engine together (`vllm_tensor_parallel_size`) draw from the same random numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from april.engines.device_turns import TurnState
from april.engines.servers.installed import installed
from april.engines.vllm_inproc import VLLMInProcess
from april.integrations.requirement import ANY_VERSION
from april.rollout.event_loop import EventLoop

FIRST, BEFORE = "0.22", "0.33"
"""Versions of vLLM: the first that TRL supports, and the first that has not been tested."""


class ColocatedVLLM(VLLMInProcess):
    """TRL's `LLM` as an engine.

    Args:
        trainer: TRL's trainer, complete except for vLLM, which this builds as TRL does.
        slots: samples that decode together.
        stream_interval: decode steps between two polls.
    """

    def __init__(self, trainer: Any, slots: int, stream_interval: int) -> None:
        args = trainer.args
        self.ranks_per_engine: int = args.vllm_tensor_parallel_size
        trainer.vllm_generation = self._generation = _generation(trainer, slots)
        super().__init__(self._generation.llm, stream_interval=stream_interval)
        self._sleeps: bool = self._generation.enable_sleep_mode
        self._seed = (args.seed, trainer.accelerator.process_index // self.ranks_per_engine)
        self._blocks = 0
        if self._sleeps:
            # TRL has put vLLM to sleep at once.
            self.turns.state = TurnState.ASLEEP

    async def update_weights(self, version: int, weights: Any = None) -> None:
        """Record the version of the weights that `generating` has loaded."""
        assert not self._requests, "weights change only while nothing is in flight"
        self._switch(version)

    @contextmanager
    def generating(self, stale: bool, step: int, loop: EventLoop) -> Iterator[None]:
        """Have the trainer's current weights and a KV cache in the block. All processes enter and leave together.

        Args:
            stale: whether the weights have changed since the last block.
            step: optimizer step of the weights.
            loop: event loop of the engine.
        """
        if self._sleeps:
            with self.turns.to(TurnState.WEIGHTS_AWAKE):
                self._generation.sync_weights()  # wakes the weights, loads them, and resets the prefix cache
            with self.turns.to(TurnState.UPDATED):
                self._generation._llm_weights_sleeping = False
            loop.run(self.wake_kv_cache())
        elif stale:
            self._generation.sync_weights()
            if torch.cuda.is_initialized():  # vLLM's steps run in another thread, on a stream of their own
                torch.cuda.current_stream().synchronize()
        with self._same_random_numbers(step):
            yield
        # Not after an error: the engine may still be at work.
        if self._sleeps:
            loop.run(self.sleep())
            self._generation._llm_weights_sleeping = True

    @contextmanager
    def _same_random_numbers(self, step: int) -> Iterator[None]:
        """Let all processes of one engine draw the same tokens in the block: vLLM draws from the generator that the
        trainer seeds and uses, differently in each process."""
        if self.ranks_per_engine == 1:
            yield
            return
        accelerator = self._generation.accelerator
        on_gpu = accelerator.device.type == "cuda"
        if on_gpu:
            # As in TRL: its gradients' communication must not overlap with vLLM's (TRL issue 3671).
            torch.distributed.barrier(device_ids=[accelerator.local_process_index])
        self._blocks += 1
        seed = np.random.SeedSequence((*self._seed, step, self._blocks)).generate_state(1)
        with torch.random.fork_rng([accelerator.device] if on_gpu else []):
            torch.manual_seed(int(seed[0]))
            yield


def _generation(trainer: Any, slots: int) -> Any:
    """Return TRL's `VLLMGeneration`, built from the trainer's arguments as `trl.GRPOTrainer` does."""
    from trl.generation.vllm_generation import VLLMGeneration

    args = trainer.args
    return VLLMGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        mode="colocate",
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=slots,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        generation_kwargs=args.generation_kwargs,
    )


def require_vllm() -> None:
    """Check vLLM in this environment, without importing it.

    Raises:
        ValueError: it is missing, or has a version that was not tested.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            'vllm_mode = "colocate": vLLM is not in this environment; pip install "trl[vllm]", or drive a server with '
            'vllm_mode="server"'
        )
    found = installed().get("vllm")
    if found is None or os.environ.get(ANY_VERSION):
        return
    if not Version(FIRST) <= Version(Version(found).base_version) < Version(BEFORE):
        raise ValueError(
            f'vllm_mode = "colocate": vLLM {found} is installed, and april takes {FIRST} up to but not including '
            f"{BEFORE}: install one of these, or set {ANY_VERSION}=1 to try"
        )
