"""The real servers, each started once, on tiny models made from a config.

`scripts/setup_vllm.sh` and `scripts/setup_sglang.sh` make the environments; APRIL_VLLM_PYTHON and APRIL_SGLANG_PYTHON
name other ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from april.engines.servers.launch import Launch, Server, free_port, launch, launch_sglang, launch_vllm
from april.engines.servers.server import ServerEngine
from april.engines.servers.sglang import connect_sglang
from april.engines.servers.vllm import connect_vllm
from april.rollout.sampling import SamplingParams
from april.rollout.trajectory.group import Group
from april.rollout.trajectory.prompt import Prompt
from april.rollout.trajectory.sample import Sample
from tests.servers.documented import documented
from tests.servers.proxy import FaultProxy
from tests.servers.tiny import Oracle, tiny_model

ROOT = Path(__file__).parents[2]
SLOTS = 8
CONTEXT = 512
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The number of this process among those that run the tests at the same time."""
CPU_CORES = sorted(os.sched_getaffinity(0))
CPU_CORES = [*CPU_CORES[PROCESS:], *CPU_CORES[:PROCESS]]
"""The cores for servers. Tests start with the first one, which is another one in each process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.servers)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, one runs the tests of a kind of server, which share one; other tests run file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            kind = re.search(r"\[(vllm|sglang)\b", nodeid)
            return kind[1] if kind else nodeid.partition("::")[0]

    return Scheduling(config, log)


@dataclass(frozen=True)
class Kind:
    """A kind of server: the title of its command in docs/engines.md, how it is connected to, and how april
    starts it.

    `layers` make its policies slow enough that sampling a token takes longer than sending it, on whichever machine:
    or a request would be over before a test has seen its first token.
    """

    name: str
    title: str
    layers: int
    connect: Callable[..., Awaitable[ServerEngine]]
    start: Callable[..., AbstractAsyncContextManager[Server]]


def python_of(name: str) -> Path:
    """The interpreter of a server's environment, which is set up first if need be."""
    if python := os.environ.get(f"APRIL_{name.upper()}_PYTHON"):
        return Path(python)
    subprocess.run([ROOT / "scripts" / f"setup_{name}.sh"], check=True)
    return ROOT / ".servers" / name / "bin" / "python"


# The requirements of a server of this size on a CPU, with any launcher.
VLLM = ["--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(2**25)]
SGLANG = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.5"),
]


# What keeps them small in these tests.
SMALL = {
    "vllm": [*VLLM, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)],
    "sglang": [*SGLANG, "--context-length", str(CONTEXT), "--max-running-requests", str(SLOTS)],
}


def environment(core: int) -> dict[str, str]:
    """Variables of a server on a CPU, and the core that vLLM runs on: each would take the first one."""
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(CPU_CORES[core % len(CPU_CORES)]), "SGLANG_USE_CPU_ENGINE": "1"}
    return {**ENVIRONMENT, **bound}


def start_by_hand(name: str, title: str, model: Path, log_dir: Path) -> AbstractAsyncContextManager[Server]:
    """A server started with the command under `title` in docs/engines.md, as a user types it."""
    variables, command = documented(title, model, python_of(name))
    port = free_port()
    command += [*SMALL[name], "--skip-tokenizer-init", "--dtype", "float32", "--port", str(port)]
    own = str(ROOT / "src")  # where the server's environment finds april
    given = {**environment(0), **variables, "PYTHONPATH": own}
    return launch(command, Launch(name=name, port=port, log_dir=log_dir, environment=given))


def start_vllm(model: Path, log_dir: Path, core: int = 0, **settings: Any) -> AbstractAsyncContextManager[Server]:
    return launch_vllm(model, small_launch("vllm", log_dir, core, **settings), broadcast=True)


def start_sglang(model: Path, log_dir: Path, core: int = 0, **settings: Any) -> AbstractAsyncContextManager[Server]:
    return launch_sglang(model, small_launch("sglang", log_dir, core, **settings))


def small_launch(name: str, log_dir: Path, core: int = 0, **settings: Any) -> Launch:
    """How april starts a small server of a kind."""
    return Launch(
        log_dir=log_dir,
        python=python_of(name),
        arguments=[*SMALL[name], "--skip-tokenizer-init", "--dtype", "float32", *settings.pop("arguments", ())],
        environment={**environment(core), **settings.pop("variables", {})},
        **settings,
    )


KINDS = [
    Kind("vllm", "vLLM with april's worker extension", 24, connect_vllm, start_vllm),
    Kind("sglang", "SGLang", 10, connect_sglang, start_sglang),
]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="session")
def models(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Directories of three policies: the same shapes, other weights."""
    root = tmp_path_factory.mktemp("models")
    yield [tiny_model(root / f"policy-{seed}", seed, kind.layers) for seed in range(3)]
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def oracles(models: list[Path], kind: Kind) -> list[Oracle]:
    """Forward passes of the same policies with Hugging Face."""
    return [Oracle(path, joint=kind.name == "sglang") for path in models]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(kind: Kind, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """The session's server of each kind, started by hand on policy 0."""
    async with start_by_hand(kind.name, kind.title, models[0], tmp_path_factory.mktemp("logs")) as server:
        yield server


Connect = Callable[..., Awaitable[ServerEngine]]


@pytest_asyncio.fixture
async def connect(kind: Kind, server: Server, models: list[Path]) -> AsyncIterator[Connect]:
    """Connects to the session's server, on policy 0 as version 0; `url` goes another way (a proxy)."""
    engines = []

    async def connect(url: str = server.url, **settings: Any) -> ServerEngine:
        engine = await kind.connect(url, **settings)
        engines.append(engine)
        await engine.update_weights(0, models[0])
        return engine

    yield connect
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture
async def engine(connect: Connect) -> ServerEngine:
    return await connect()


@pytest_asyncio.fixture
async def proxy(server: Server) -> AsyncIterator[FaultProxy]:
    """Another way to the session's server, which can be broken."""
    async with FaultProxy(server.url).run() as proxy:
        yield proxy


@pytest.fixture
def agrees_with_the_server(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every stream has the end that the server counts: equal numbers of tokens, of the same versions."""
    yield
    assert not warnings_in(caplog)


def make_samples(
    n: int, sampling: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (5, 6, 7), first: int = 0
) -> list[Sample]:
    """`n` samples of one prompt each, whose prompts differ in one token; their groups are numbered from `first`."""
    return [Group.start(first + i, Prompt((*prompt, 10 + i)), 1, sampling, seed).samples[0] for i in range(n)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what april has logged, but for late answers, which a busy machine may give."""
    said = [record.getMessage() for record in caplog.records if record.name.startswith("april")]
    return [line for line in said if not line.startswith("waiting for ")]
