"""The configuration of an environment of the package verifiers.

Invariant: what april cannot play is refused by name before the run: a harness that needs a container on a machine
without one, and several agents that would all be the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from april.extras import missing_package
from april.gateway.containers import engine_fault, usable_engine
from april.loading import importable
from april.rollout.user_code.user_code import in_one_line

if TYPE_CHECKING:
    from verifiers.v1 import AgentConfig, EnvConfig

LOCAL_ENGINES = ("docker", "podman", "apptainer")
"""Container runtimes of verifiers that work on this machine."""


def environment_config(path: str, params: Mapping[str, Any], max_turns: int) -> EnvConfig:
    """Return the configuration of an environment, with april's defaults for its agent.

    The agent gets april's limit of turns unless it has its own, so that an episode that reaches the limit is rewarded.
    It works in a process of this machine, or in a container where its harness or its tasks need one.

    Args:
        path: setting `environment.path`: `verifiers:` and the name of an installed environment or a Python file.
        params: verifiers' own settings of an environment, its table `env`.
        max_turns: limit of turns.

    Raises:
        ValueError: the environment is unknown, its settings are wrong, or it cannot be played here.
    """
    name = path.removeprefix("verifiers:")
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import resolve_env_config
    except ModuleNotFoundError as error:
        raise ValueError(missing_package(error, f"environment.path = {path!r}")) from None
    taskset = {**params.get("taskset", {}), "id": importable(name)}
    try:
        config = resolve_env_config({**params, "taskset": taskset})
    except Exception as error:  # import errors of the user's module, and wrong settings
        raise ValueError(f"environment.path = {path!r}: {in_one_line(error)}") from None
    agents = {name: agent for name, agent in agent_config_fields(config).items() if agent.client is None}
    if len(agents) != 1:
        raise ValueError(
            f"environment.path = {path!r}: the policy would play {len(agents)} agents, {', '.join(agents)}; give all "
            "but one a client of their own in environment.params"
        )
    [(role, agent)] = agents.items()
    return config.model_copy(update={role: _playable(path, config, role, agent, max_turns)})


def _playable(path: str, config: EnvConfig, role: str, agent: AgentConfig, max_turns: int) -> AgentConfig:
    from verifiers.v1.configs.env import default_agent_harness
    from verifiers.v1.utils.loaders import load_harness, task_type

    harness = load_harness(agent.harness or default_agent_harness(config.taskset.id))
    task = task_type(config.taskset.id)
    needs = f"harness {harness.config.id!r}" if harness.NEEDS_CONTAINER else None
    if task.NEEDS_CONTAINER:
        needs = f"task {task.__name__!r}"
    chosen = "runtime" in agent.model_fields_set
    engine = getattr(agent.runtime, "type", "") if chosen else ""
    setting = f"environment.path = {path!r}: {needs or f'runtime {engine!r}'}"
    if engine == "subprocess" and needs is not None:
        raise ValueError(f"{setting} needs a container: remove {role}.runtime from environment.params")
    if engine in LOCAL_ENGINES and (fault := engine_fault(engine)) is not None:
        raise ValueError(f"{setting} needs {engine}, which this machine cannot use ({fault})")
    if chosen:
        runtime = agent.runtime
    else:
        runtime = _runtime(usable_engine(purpose=setting) if needs is not None else "subprocess")
    return agent.model_copy(update={"runtime": runtime, "max_turns": agent.max_turns or max_turns})


def _runtime(kind: str) -> Any:
    from verifiers.v1 import ApptainerConfig, DockerConfig, PodmanConfig, SubprocessConfig

    kinds = {"subprocess": SubprocessConfig, "docker": DockerConfig, "podman": PodmanConfig}
    return kinds.get(kind, ApptainerConfig)()
