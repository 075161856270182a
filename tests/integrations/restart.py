"""What holds of every framework's restart, and how the tests start a Ray of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from april.rollout.trajectory.sample import Sample

PROMPTS = 16
"""Of an epoch, in these tests."""

Tokens = dict[tuple[int, int], list[int]]
"""The response of each sample, by its group and its place in it."""


def begun_in(groups: Iterable[Mapping[str, Any]]) -> Tokens:
    """What a checkpoint's groups had sampled."""
    begun = {
        (group["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in groups
        for sample in group["samples"]
    }
    assert sum(map(len, begun.values())) > 0, "nothing was under way: the test saw nothing"
    return begun


def goes_on(begun: Tokens, first: Iterable[Sample], second: Iterable[Sample]) -> None:
    """The second run trains on responses that continue the first run's tokens, and no group is trained on in both runs.
    A group's number counts admissions, so it distinguishes the epochs of a prompt."""
    before, after = (
        {(sample.group_id, sample.index): sample.response_ids for sample in run} for run in (first, second)
    )
    assert begun.keys() & after.keys()
    for name in begun.keys() & after.keys():
        assert after[name][: len(begun[name])] == begun[name]
    assert not before.keys() & after.keys()
    assert len({group for group, _ in before | after}) == PROMPTS, "an epoch's groups, over the restart"


def once_an_epoch(trained: Iterable[tuple[int, str]]) -> None:
    """Each prompt is trained on at most once an epoch.

    Args:
        trained: the number of each group, and its prompt.
    """
    seen = [(group // PROMPTS, prompt) for group, prompt in trained]
    assert len(set(seen)) == len(seen)


@contextmanager
def own_ray(stand_ins: Path, setup: str | None = None, **variables: str) -> Iterator[None]:
    """A Ray instance of the test, whose workers find april and the stand-ins. They request GPUs, and Ray accepts the
    configured number; the GPUs of every test stay reserved.

    Args:
        setup: path of a function that each worker calls first.
    """
    root = Path(__file__).parents[2]
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's variable; Ray would wait for other instances
    environment = {"PYTHONPATH": f"{stand_ins}:{root}:{root / 'src'}", "OMP_NUM_THREADS": "1", **variables}
    ray.init(
        address="local",
        num_cpus=32,
        num_gpus=32,
        include_dashboard=False,
        runtime_env={"env_vars": environment, **({"worker_process_setup_hook": setup} if setup else {})},
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
