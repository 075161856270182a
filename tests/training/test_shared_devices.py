"""Engine and trainer on the same devices in turn, with servers that enforce the rules of vLLM and SGLang.

`tests/engines/servers/played_turns.py` has the rules; `make test-shared-servers` runs real servers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from april.engines import member, weight_sync
from april.engines.cuda_ipc import exports_of
from april.engines.device_turns import TurnState
from april.engines.freed_memory import FreedMemory
from april.engines.pool import EnginePool
from april.engines.servers.same_device import SameDevice
from april.engines.servers.server import ServerEngine
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm
from april.engines.start_gate import StartGate
from april.engines.weight_transfer import Exported, OnDisk, WeightTransfer
from april.rollout.engine import EngineError
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from april.training.canary import Canary
from april.training.offload import EVERY_PART, Part
from april.training.recovery import TrainingError
from april.training.shared_devices import SharedDevices
from tests.engines.ipc_files import SharedFiles
from tests.engines.servers.played_turns import LOST, TEXT, WEIGHTS, Crash, Device, PlayedServer, playback, score

CONNECT: dict[str, Callable[..., Any]] = {"vllm": connect_vllm, "sglang": connect_sglang}
FLAGS = {"vllm": "--enable-sleep-mode", "sglang": "--enable-memory-saver"}
TOKENS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
BUCKET = 25
"""Bytes of a bucket of weights on each of the trainer's devices."""
SIZES = {Part.PARAMETERS: 20, Part.ROUNDED: 5, Part.GRADIENTS: 20, Part.OPTIMIZER: 40}
"""Bytes of the trainer's memory."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "RESTART_CHECK", 0.002)
    monkeypatch.setattr(member, "RECOVERY_DELAY", 0.002)
    logging.getLogger("april").setLevel(logging.ERROR)


class PlayedLearner:
    """The trainer's memory on the device, and the scores of its policy."""

    def __init__(self, devices: Sequence[Device], directory: Path) -> None:
        self.version = 0
        self.away: set[Part] = set(EVERY_PART)
        self.gpus = [SharedFiles(directory, number) for number in range(len(devices))]
        self._devices, self._device, self._directory = devices, devices[0], directory
        self.directory(0)

    def _hold(self) -> None:
        self._device.hold("trainer", sum(size for part, size in SIZES.items() if part not in self.away))

    def to_device(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.away -= set(parts)
        self._hold()

    def to_host(self, parts: Collection[Part] = EVERY_PART) -> None:
        self.away |= set(parts)
        self._hold()

    def train(self) -> None:
        assert not self.away
        self.version += 1

    def token_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        assert not self.away & {Part.PARAMETERS, Part.ROUNDED}
        return [[score(f"policy {self.version}", token) for token in sequence[1:]] for sequence in sequences]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "norm", torch.ones(3)
        yield TEXT, torch.tensor(list(f"policy {self.version}".encode()), dtype=torch.uint8)
        yield "head", torch.ones(2, 2)

    def exports(self) -> Generator[Exported, None, None]:
        """The policy's tensors, in buckets on every device."""
        try:
            yield from exports_of(self.tensors, torch.device("cpu"), 1, self._share)
        finally:
            self._hold_bucket(0)

    def _share(self, packed: Tensor) -> dict[str, Any]:
        self._hold_bucket(BUCKET)
        return {name: handle for gpu in self.gpus for name, handle in gpu(packed).items()}

    def _hold_bucket(self, size: int) -> None:
        for device in self._devices:
            device.hold("bucket", size)

    def directory(self, version: int) -> Path:
        path = self._directory / f"v{version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_text(f"policy {version}")
        return path


class World:
    """A run: servers, a pool, a trainer, and their turns."""

    def __init__(self, device: Device, learner: PlayedLearner, gate: StartGate, servers: list[PlayedServer]) -> None:
        self.device, self.learner, self.gate, self.servers = device, learner, gate, servers
        self.pool: EnginePool
        self.turns: SharedDevices
        self.canary: Canary
        self.transfer: WeightTransfer

    async def update(self) -> None:
        version = self.learner.version
        assert not self.learner.away & {Part.PARAMETERS, Part.ROUNDED}, "weights are read from the device"
        await self.pool.update_weights(version, self.transfer.offer(version))

    async def step(self) -> None:
        await self.turns.take()
        with self.turns.phase("training"):
            self.transfer.withdraw()
            self.learner.train()
        await self.turns.give_back(self.update)

    def check(self) -> None:
        """Check the state between two turns."""
        assert not self.device.violations
        assert self.pool.turns.state is TurnState.SERVING
        assert self.learner.away == EVERY_PART
        ready = {replica.name.partition(" ")[0] for replica in self.pool.replicas}
        for server in self.servers:
            if server.name in ready and server.down is None:
                assert server.weights == f"policy {self.learner.version}"
                assert not server.asleep


async def in_this_thread(work: Callable[..., Any], *args: object) -> Any:
    await asyncio.sleep(0)
    return work(*args)


@asynccontextmanager
async def running(
    kind: str,
    directory: Path,
    replicas: int = 1,
    crashes: Callable[[str], Crash] = lambda _: "no",
    frees: float = 1.0,
    resumed: int | None = None,
    transfer: str = "disk",
) -> AsyncIterator[World]:
    """A run up to its first step, on one device per replica; the trainer's share is on the first one.

    Args:
        transfer: "disk" or "ipc".
        resumed: version of the policy that a resumed run has.
    """
    device, gate, clock = Device(), StartGate(), playback.Clock(2000.0)
    devices = [device, *(Device() for _ in range(replicas - 1))]
    learner = PlayedLearner(devices, directory / "weights")
    learner.version = resumed or 0
    servers = [
        PlayedServer(
            kind, clock, own, gate, "policy 0", name=f"played-{index}", frees=frees, gpu=learner.gpus[index].uuid
        )
        for index, own in enumerate(devices)
    ]
    world = World(device, learner, gate, servers)
    disk = OnDisk(directory / "weights", lambda path: learner.directory(int(path.name[1:])))
    world.transfer = SameDevice(learner.exports, disk) if transfer == "ipc" else disk
    ticking = asyncio.create_task(clock.run())
    memory = FreedMemory(lambda: {"0": device.used}, WEIGHTS, FLAGS[kind], settle_seconds=0.02)
    engines: list[ServerEngine] = []
    try:
        await asyncio.gather(*(server.start() for server in servers))
        for server in servers:
            settings = {"vocab_size": playback.VOCABULARY, "process": server, "shares_devices": True, "patience": 5.0}
            engines.append(await CONNECT[kind](server.url, **settings))
        for server in servers:  # a server that dies before april has connected to it ends the run
            server.crashes = crashes
        world.pool = EnginePool(engines, health_interval=0.05, health_timeout=5.0, patience=20.0)
        world.canary = Canary(TOKENS, directory, resumed is not None)
        parts: Any = learner
        world.turns = SharedDevices(world.pool, parts, gate, memory, world.canary, in_this_thread, EVERY_PART)
        await world.turns.begin(world.update)
        yield world
        await world.pool.close()
    finally:
        ticking.cancel()
        for engine in engines:
            await engine.close()
        for server in servers:
            await server.close()
        for other in devices:
            assert not other.violations


class Crashes:
    """Kills a server at a call that is drawn, or makes a call of a turn fail halfway, again and again."""

    def __init__(self, draw: random.Random, every: int) -> None:
        self._draw, self._every = draw, every
        self.left = 0
        self.hit: list[str] = []

    def arm(self) -> None:
        self.left = self._draw.randrange(1, self._every)

    def __call__(self, call: str) -> Crash:
        if self.left:
            self.left -= 1
            if not self.left:
                self.hit.append(call.partition("?")[0])
                turn = any(part in call for part in ("sleep", "wake", "memory_occupation"))
                return "refuse" if turn and self._draw.random() < 0.5 else "die"
        return "no"


async def generate(world: World, samples: list[Sample], polls: int) -> None:
    """Generate, and interrupt after some polls. Samples whose requests failed are submitted in the next rollout."""
    by_id = {sample.id: sample for sample in samples}
    for sample in samples:
        if sample.finish is None:
            world.pool.submit(sample)
    for _ in range(polls):
        for chunk in await world.pool.poll():
            by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    for chunk in await world.pool.interrupt():
        by_id[chunk.sample_id].extend(chunk.token_ids, chunk.logprobs, chunk.version, chunk.finish)
    for sample in samples:
        first = sample.prompt_ids[0]
        assert sample.response_ids == [playback.token_at(first, i) for i in range(sample.length)]


async def interleaving(seed: int, directory: Path) -> list[str]:
    """A run with random lengths of rollouts, evaluations, crashes of servers at random calls, and resumptions of the
    run. Return the calls at which servers died."""
    draw = random.Random(seed)
    kind = draw.choice(("vllm", "sglang"))
    crashes = Crashes(draw, 25)
    samples = [Group.start(i, Prompt((i, 4, 2, 3)), 1, SamplingParams(400), 0).samples[0] for i in range(3)]
    version = None
    for _ in range(draw.randint(1, 2)):
        replicas, transfer = draw.choice((1, 1, 2)), draw.choice(("disk", "ipc"))
        async with running(kind, directory, replicas, crashes, resumed=version, transfer=transfer) as world:
            for _ in range(draw.randint(1, 2)):
                if draw.random() < 0.6:
                    crashes.arm()
                await generate(world, samples, draw.randint(0, 2))
                if draw.random() < 0.2:  # an evaluation
                    other = Group.start(9, Prompt((9, 4, 2, 3)), 1, SamplingParams(3), 0).samples
                    await generate(world, list(other), 1)
                if draw.random() < 0.1:
                    draw.choice(world.servers).die("between two calls")
                await world.step()
                world.check()
            version = world.learner.version
            # A run that dies takes its servers with it, in whatever state they are.
            if draw.random() < 0.3:
                await world.turns.take()
    return crashes.hit


@pytest.mark.parametrize("block", range(10))
async def test_a_thousand_interleavings(block: int, tmp_path: Path) -> None:
    hit: set[str] = set()
    for seed in range(100 * block, 100 * block + 100):
        directory = tmp_path / str(seed)
        directory.mkdir()
        try:
            async with asyncio.timeout(30):
                hit.update(await interleaving(seed, directory))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        shutil.rmtree(directory)
    states = {"sleep", "release", "wake", "resume", "collective", "update"}
    assert any(state in call for call in hit for state in states), "servers died in turns"


async def test_a_server_keeps_weights_that_are_not_sent_to_it(tmp_path: Path) -> None:
    device, gate = Device(), StartGate()
    server = PlayedServer("vllm", playback.Clock(2000.0), device, gate, "with a vision tower")
    await server.start()
    settings: dict[str, Any] = {"vocab_size": playback.VOCABULARY, "process": server, "shares_devices": True}
    for keeps, left in ((True, "with a vision tower"), (False, LOST)):
        engine = await connect_vllm(server.url, keeps_weights=keeps, **settings)
        await engine.sleep()
        await engine.wake_weights()
        assert server.weights == left
        server.resume(["kv_cache"])
        await engine.close()
    await server.close()


@pytest.mark.parametrize("kind", CONNECT)
async def test_a_server_that_frees_nothing_is_found_before_training(kind: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"GPU 0 .* nothing was released .*: start its server with {FLAGS[kind]}"):
        async with running(kind, tmp_path, frees=0.0):
            pass


async def test_a_server_that_frees_too_little_is_found(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"of GPU 0 .* were released .* where at least .* were expected"):
        async with running("vllm", tmp_path, frees=0.3):
            pass


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_replica_with_wrong_weights_is_updated_again_then_restarted(failures: int, tmp_path: Path) -> None:
    async with running("vllm", tmp_path, replicas=2) as world:
        world.servers[1].fails_updates = failures
        await world.step()
        world.check()
        assert world.servers[1].deaths == failures - 1
        while len(world.pool.replicas) < 2:
            await asyncio.sleep(0.01)
        world.check()
        assert [server.weights for server in world.servers] == ["policy 1"] * 2


@pytest.mark.parametrize("kind", CONNECT)
@pytest.mark.parametrize("call", ["start", "update", "finish"])
async def test_a_server_that_dies_in_an_update_by_ipc_stops_no_other(kind: str, call: str, tmp_path: Path) -> None:
    sglang = {"start": "begin_weight_update", "update": "update_weights_from_tensor", "finish": "end_weight_update"}
    path = {"vllm": {"start": "start_weight", "update": "/update_weights", "finish": "finish"}, "sglang": sglang}
    async with running(kind, tmp_path, replicas=2, transfer="ipc") as world:
        victim = world.servers[1]
        victim.crashes = lambda moment: "die" if path[kind][call] in moment and not victim.deaths else "no"
        await world.step()
        assert victim.deaths == 1
        world.check()
        assert [replica.name.partition(" ")[0] for replica in world.pool.replicas] == ["played-0"]
        assert world.servers[0].deaths == 0, "the server that is left takes up the update once more"
        await world.step()
        world.check()
        while len(world.pool.replicas) < 2:
            await asyncio.sleep(0.01)
        await world.step()
        world.check()
        assert not victim.refused, "the new process has no update to end"


async def test_a_server_that_comes_back_between_updates_by_ipc_loads_from_disk(tmp_path: Path) -> None:
    """The other server fills its GPU then: nothing can be exported on it."""
    async with running("vllm", tmp_path, replicas=2, transfer="ipc") as world:
        await world.step()
        assert {how for server in world.servers for how in server.updates} == {"ipc"}
        samples = [Group.start(i, Prompt((i, 4, 2, 3)), 1, SamplingParams(4000), 0).samples[0] for i in range(4)]
        world.servers[1].die("killed while it generated")
        await generate(world, samples, 3)
        while len(world.pool.replicas) < 2:
            await asyncio.sleep(0.01)
        world.check()
        assert world.servers[1].updates[-1] == "disk"
        await world.step()
        assert world.servers[1].updates[-1] == "ipc"
        world.check()


async def test_a_run_ends_if_no_replica_computes_the_policy(tmp_path: Path) -> None:
    async with running("sglang", tmp_path) as world:
        world.servers[0].fails_updates = 99
        with pytest.raises(EngineError, match=r"another policy than the trainer .* differ by [0-9.]+ nats"):
            await world.step()


async def test_a_pool_that_sleeps_takes_no_samples(tmp_path: Path) -> None:
    sample = Group.start(0, Prompt((0, 4, 2, 3)), 1, SamplingParams(4), 0).samples[0]
    async with running("vllm", tmp_path) as world:
        await world.turns.take()
        with pytest.raises(AssertionError, match="the pool is asleep: it takes no samples"):
            world.pool.submit(sample)
        await world.turns.give_back(world.update)
        await generate(world, [sample], 1)


async def test_a_server_that_dies_in_training_starts_only_when_the_trainer_is_off_the_device(tmp_path: Path) -> None:
    async with running("vllm", tmp_path) as world:
        await world.turns.take()
        world.servers[0].die("killed while it slept")
        await asyncio.sleep(0.05)
        assert world.servers[0].down is not None
        await world.turns.give_back(world.update)
        assert world.servers[0].down is None
        world.check()
        phases = [name for name, _, _ in world.turns.take_phases()]
        assert "restart of servers" in phases
        assert phases.count("engine asleep") == 2


async def test_a_trainer_that_does_not_fit_beside_the_sleeping_engine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(parts: Collection[Part]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with running("vllm", tmp_path) as world:
        monkeypatch.setattr(world.learner, "to_device", full)
        expected = r"^the trainer's .*optimizer.* do not fit on a GPU beside the sleeping engine, which keeps 0\.0 GB"
        with pytest.raises(TrainingError, match=expected) as refused:
            await world.turns.take()
        assert "\n" not in str(refused.value)


async def test_phases_of_a_turn(tmp_path: Path) -> None:
    async with running("sglang", tmp_path) as world:
        await world.step()
        phases = world.turns.take_phases()
        assert [name for name, _, _ in phases] == [
            "wait for starts of servers",
            "engine interrupted",
            "engine asleep",
            "trainer to devices",
            "training",
            "canary",
            "gradients and optimizer to host",
            "engine weights awake",
            "engine updated",
            "parameters to host",
            "engine serving",
        ]
        assert all(began <= ended for _, began, ended in phases)
        found = world.turns.metrics()
        assert found["canary_gap"] == 0
        assert phases[-1][2] <= found["exchange_seconds"]
        assert "canary_gap" not in world.turns.metrics(), "no replica was scored since"


async def test_the_band_of_a_run_survives_its_resumption(tmp_path: Path) -> None:
    async with running("vllm", tmp_path) as world:
        band = world.canary.band
        assert band is not None
    async with running("vllm", tmp_path, resumed=3) as world:
        assert world.canary.band == band
        assert world.servers[0].weights == "policy 3"
    (tmp_path / "canary.json").unlink()
    async with running("vllm", tmp_path, resumed=3) as world:
        assert world.canary.band == band, "measured after the first update, as the servers began with older weights"


async def test_machines_without_gpus_log_that_memory_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("april").setLevel(logging.INFO)
    memory = FreedMemory(dict, 10, "--enable-sleep-mode")
    assert "is not checked" in caplog.text
    memory.before()
    await memory.alone()
    await memory.require()


async def test_servers_of_a_run_that_crashed_are_waited_for_before_others_start() -> None:
    """Else the memory of the old servers would hide that new ones release nothing."""
    held = {"old server": 60, "trainer": 5}

    async def end() -> None:
        await asyncio.sleep(0.05)
        held.clear()
        held["trainer"] = 5

    memory = FreedMemory(lambda: {"0": sum(held.values())}, 30, "--flag", own=10, settle_seconds=0.0)
    ending = asyncio.create_task(end())
    await memory.alone()
    assert ending.done()
    held["new server"] = 60
    memory.before()
    with pytest.raises(EngineError, match="nothing was released"):
        await memory.require()


async def test_processes_that_stay_on_a_gpu_and_checks_that_were_not_made_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("april").setLevel(logging.INFO)
    held = {"other": 60_000_000_000, "trainer": 5_000_000_000}
    memory = FreedMemory(lambda: {"0": sum(held.values())}, 30_000_000_000, "--flag", own=10_000_000_000)
    await memory.alone(0.0)
    assert "GPU 0: other processes hold 55.0 GB" in caplog.text
    held["other"] = 0
    held["server"] = 60_000_000_000
    memory.before()
    await memory.require()
    assert "GPU 0: the engine held 0.0 GB before it was put to sleep" in caplog.text
    assert "was not checked" in caplog.text
