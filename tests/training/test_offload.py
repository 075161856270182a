"""The trainer's memory leaves its device and comes back bit for bit."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from april.config.recipe import Recipe
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_check import phases
from april.training.memory_plan import plan_memory
from april.training.offload import ALIGNMENT, EVERY_PART, Offload, Part, pinned, unpinned
from april.training.recovery import TrainingError
from tests import tiny
from tests.ranks.launch import run
from tests.training.steps import recipe, rollout

CASES: dict[str, dict[str, Any]] = {
    "one type": {},
    "master weights": {"compute_dtype": "bfloat16"},
    "critic and reference": {"algorithm": "ppo", "kl_coef": 0.1, "compute_dtype": "bfloat16"},
    "adapters": {"lora_rank": 4},
}


def chosen(tmp_path: Path, compute_dtype: Any = "float32", lora_rank: int = 0, **algorithm: Any) -> Recipe:
    made = recipe(**algorithm)
    made.model.compute_dtype, made.lora.rank = compute_dtype, lora_rank
    made.model.path = str(tmp_path / "policy")
    if not Path(made.model.path).exists():
        tiny.save(Path(made.model.path), sharpness=1.0)
    return made


def learner_of(made: Recipe, directory: Path | None = None) -> LocalLearner:
    torch.manual_seed(0)
    # Loaded, as a run does it: on CPUs its parameters are parts of a mapped file, which cannot be resized.
    model = type(tiny.model()).from_pretrained(made.model.path)
    return LocalLearner(model, LearnerSettings.of(made), tiny.tokenizer(), directory)


def fingerprint(learner: LocalLearner) -> dict[str, int]:
    tensors = {**dict(learner.model.named_parameters()), **learner.state()}
    held = {name: learner.offload.of(tensor).detach() for name, tensor in tensors.items()}
    return {name: zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in held.items()}


class Buffers:
    """Host buffers, counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return unpinned(size)


def counted(learner: LocalLearner) -> Buffers:
    buffers = Buffers()
    learner.offload._allocate = buffers
    return buffers


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_leaves_the_device_after_each_step_is_the_run_that_stays(case: str, tmp_path: Path) -> None:
    made = chosen(tmp_path, **CASES[case])
    stays, leaves = learner_of(made), learner_of(made)
    buffers = counted(leaves)
    for step in range(1, 4):
        expected, found = (learner.train(rollout(step), step) for learner in (stays, leaves))
        assert found == pytest.approx(expected, nan_ok=True, rel=0)
        before = fingerprint(leaves)
        leaves.to_host()
        assert fingerprint(leaves) == before, "readable in host memory"
        leaves.to_device()
        assert fingerprint(leaves) == before == fingerprint(stays)
    assert len(buffers.sizes) <= len(Part), "buffers are kept"


@pytest.mark.parametrize("case", ["one type", "master weights", "critic and reference"])
def test_the_device_is_empty_and_host_memory_matches_the_plan(case: str, tmp_path: Path) -> None:
    made = chosen(tmp_path, **CASES[case])
    plan, learner = plan_memory(made), learner_of(made)
    learner.train(rollout(1), 1)
    learner.to_host()
    held = [tensor for part in Part for tensor in learner.offload._tensors(part)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    moved = {part: sum(copy.bytes.nbytes for copy in learner.offload._copies[part].values()) for part in Part}
    # The critic has a head of one output, and AdamW a count of steps for each tensor.
    more = 4 * 33 if learner.critic else 0
    steps = 4 * sum(len(optimizer.state) for optimizer in filter(None, (learner.optimizer, learner.critic_optimizer)))
    assert moved[Part.PARAMETERS] == plan.rank["parameters"] + more
    assert moved[Part.ROUNDED] == plan.rank["rounded copy"] + more // 2 * bool(learner.masters.tensors)
    assert moved[Part.OPTIMIZER] == plan.rank["optimizer"] + 2 * more + steps
    assert moved[Part.GRADIENTS] == 0, "freed after the step"
    assert 0 <= learner.offload.host_bytes - sum(moved.values()) < ALIGNMENT * len(held)


class Ledger(TorchDispatchMode):
    """Bytes of the storages that operations have made and of `resident` ones, at most."""

    def __init__(self, resident: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self.peak = 0
        self._resident = resident
        self._known = {storage._cdata for storage in resident}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: held for key, held in self._made.items() if not held[0].expired()}
        held = sum(size for _, size in self._made.values()) + sum(storage.nbytes() for storage in self._resident)
        self.peak = max(self.peak, held)
        return result


@pytest.mark.parametrize("case", ["one type", "master weights"])
def test_each_phase_uses_at_most_the_planned_memory(case: str, tmp_path: Path) -> None:
    made = chosen(tmp_path, **CASES[case])
    made.engine.engine = "vllm"
    step = rollout(1)
    made.rollout.max_response_length = max(len(s.prompt_ids) + s.length for group in step.groups for s in group.samples)
    made.training.max_tokens_per_micro_batch = 4 * made.rollout.max_response_length
    learner, plan = learner_of(made), plan_memory(made)
    *_, training, update = phases(plan, made)
    learner.to_host()
    learner.to_device()
    storages = [tensor.untyped_storage() for part in EVERY_PART for tensor in learner.offload._tensors(part)]
    resident = list({storage._cdata: storage for storage in storages}.values())
    with Ledger(resident) as ledger:
        learner.train(step, 1)
    assert training.fixed < ledger.peak < 1.25 * training.total
    learner.to_host((Part.GRADIENTS, Part.OPTIMIZER))
    with Ledger(resident) as ledger:
        for _, tensor in learner.model.named_parameters():
            learner.offload.of(tensor).detach().clone()
    assert ledger.peak <= update.total - plan.rank["optimizer"]
    learner.to_host()
    assert sum(storage.nbytes() for storage in resident) == 0
    assert learner.offload.away == EVERY_PART


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_and_offered_weights_are_the_same_from_host_memory(case: str, tmp_path: Path) -> None:
    made = chosen(tmp_path, **CASES[case])
    learner = learner_of(made, tmp_path / "run")
    learner.train(rollout(1), 1)
    for name in ("device", "host"):
        (tmp_path / name).mkdir()
        learner.save(tmp_path / name)
        if name == "device":
            learner.to_host()
    there, here = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in ("device", "host")
    )
    assert there == here
    assert len(there) == 2 + (case == "adapters")
    again = learner_of(made)
    with pytest.raises(AssertionError, match="in host memory"):
        learner.load(tmp_path / "host")
    again.load(tmp_path / "host")


@pytest.mark.parametrize("case", ["one type", "adapters"])
def test_tensors_that_were_offered_before_are_read_from_host_memory(case: str, tmp_path: Path) -> None:
    """A server that restarts while the trainer is away is given the weights again."""
    made = chosen(tmp_path, **CASES[case])
    made.engine.engine, made.engine.weight_transfer = "vllm", "broadcast"
    learner = learner_of(made, tmp_path / "run")
    learner.train(rollout(1), 1)
    source = learner._transfer.source  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in source()}
    learner.to_host()
    after = dict(source())
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_parts_move_independently(tmp_path: Path) -> None:
    learner = learner_of(chosen(tmp_path, "bfloat16"))
    learner.train(rollout(1), 1)
    learner.to_host({Part.PARAMETERS, Part.OPTIMIZER})
    assert learner.offload.away == {Part.PARAMETERS, Part.OPTIMIZER}
    with learner.packed(), torch.no_grad():
        assert torch.isfinite(learner.logprobs(learner.prepare(rollout(2)))).all(), "an engine computes with the copy"
    with pytest.raises(AssertionError, match="in host memory"):
        learner.train(rollout(2), 2)
    learner.to_host()
    learner.to_device({Part.ROUNDED})
    assert learner.offload.away == EVERY_PART - {Part.ROUNDED}
    learner.to_device()
    learner.train(rollout(2), 2)


def test_existing_gradients_are_moved(tmp_path: Path) -> None:
    learner = learner_of(chosen(tmp_path, "bfloat16"))
    learner.release_gradients = lambda: None  # type: ignore[method-assign]
    learner.train(rollout(1), 1)
    held = [master.grad for master in learner.masters.tensors]
    before = [gradient.clone() for gradient in held if gradient is not None]
    assert before
    learner.to_host({Part.GRADIENTS})
    assert all(gradient.untyped_storage().nbytes() == 0 for gradient in held if gradient is not None)
    learner.to_device()
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True) if b is not None)


def test_shared_storages_are_moved_once_and_other_devices_are_unchanged() -> None:
    whole = torch.arange(10.0)
    parts = [whole[:4], whole[4:], whole.view(5, 2).T, torch.empty(5, device="meta"), torch.empty(0)]
    offload = Offload(lambda part: parts if part is Part.PARAMETERS else (), torch.device("cpu"))
    offload.to_host()
    assert offload.moved_bytes == 40
    assert offload.of(parts[1]).tolist() == [4, 5, 6, 7, 8, 9]
    assert offload.of(parts[2]).tolist() == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    offload.to_host()
    assert offload.moved_bytes == 40, "moved already"
    offload.to_device()
    assert whole.tolist() == list(range(10))


def test_too_little_host_memory_moves_no_tensor(tmp_path: Path) -> None:
    learner = learner_of(chosen(tmp_path))
    before = fingerprint(learner)

    def allocate(size: int) -> torch.Tensor:
        if learner.offload._buffers:
            raise MemoryError(f"CUDA cannot lock {size} bytes of host memory (error 2)")
        return unpinned(size)

    learner.offload._allocate = allocate
    with pytest.raises(TrainingError, match=r"host memory runs out: \w+ takes .* while the engine uses the device"):
        learner.to_host()
    assert not learner.offload.away
    assert fingerprint(learner) == before
    learner.train(rollout(1), 1)


def test_shards_of_two_ranks_are_offloaded_and_restored(tmp_path: Path) -> None:
    cases = ["grpo", "lora"]
    for said in run("tests.ranks.offload:round_trips", 2, tmp_path, cases=cases, directory=str(tmp_path)):
        assert [f"{case}: ok" in said for case in cases] == [True] * len(cases), said


def test_cached_memory_is_returned_also_if_nothing_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have read the last bucket by then, and plan with what is free: garbage goes before they first start."""
    released: list[bool] = []
    monkeypatch.setattr("april.training.offload.release_cached", lambda garbage=True: released.append(garbage))
    learner = learner_of(chosen(tmp_path))
    for parts in ({Part.OPTIMIZER}, {Part.OPTIMIZER}, ()):
        learner.to_host(parts)
    assert released == [True, False, False]


def test_a_failed_lock_of_host_memory_leaves_no_error_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    absorbed: list[None] = []
    monkeypatch.setattr("april.training.offload._absorb_error", lambda: absorbed.append(None))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(MemoryError, match=r"CUDA cannot lock 8 bytes of host memory \(error 2\)"):
        pinned(8)
    assert len(absorbed) == 1


def test_nothing_of_the_root_module_stays_on_the_device_after_the_canary(tmp_path: Path) -> None:
    assert all("ok" in said for said in run("tests.ranks.offload:root", 2, tmp_path))


def test_ranks_write_the_same_files_from_host_memory(tmp_path: Path) -> None:
    run("tests.ranks.offload:save", 2, tmp_path, directory=str(tmp_path / "files"))
    there, here = (
        {
            path.relative_to(tmp_path / "files" / name): path.read_bytes()
            for path in (tmp_path / "files" / name).rglob("*.safetensors")
        }
        for name in ("device", "host")
    )
    assert len(there) == 2
    assert there == here


def test_ranks_share_whole_buckets_with_servers_on_their_devices(tmp_path: Path) -> None:
    run("tests.ranks.offload:export", 2, tmp_path, directory=str(tmp_path))
