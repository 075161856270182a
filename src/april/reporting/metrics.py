"""The run's metrics, one flat record per step: `metrics.jsonl` in the run directory, and the trackers beside it.

Invariants:
- `metrics.jsonl` is the record of the run; trackers are views of it and never hold what it lacks;
- a resumed run holds each step once, in the file and in every tracker;
- a tracker's package is imported only if it was asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from april.reporting.step_log import StepLog, scan

FILE_NAME = "metrics.jsonl"

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""The package behind each tracker's name. All but the first are extras of the same name."""

SECTIONS = {
    "reward": ("reward", "reward_std", "accuracy", "reward_failures"),
    "response": ("response_length_mean", "response_length_p50", "response_length_p99", "response_length_max"),
    "throughput": ("consumed_tokens_per_second", "generated_tokens_per_second", "engine_occupancy"),
    "staleness": ("staleness_mean", "staleness_max", "off_policy_token_share"),
    "optimisation": ("loss", "grad_norm", "lr", "clip_fraction", "kl_behaviour", "ratio_mean", "ratio_max", "entropy"),
    "time": ("seconds", "rollout_seconds", "train_seconds", "reward_wait_seconds", "eval_seconds"),
}
"""Where a tracker shows which metric; what is not named here is shown under `rollout`."""

_SECTION_OF = {name: section for section, names in SECTIONS.items() for name in names}


class Tracker(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step's metrics to `metrics.jsonl` and its numbers to the trackers.

    Args:
        directory: the run directory.
        trackers: any of "tensorboard" (event files under `tensorboard/`), "wandb" and "trackio".
        project: the project the run is filed under in wandb and trackio.
        run_name: the run's name there; by default that of the directory.
        config: the resolved recipe, kept by the trackers beside the run.
        resume_step: the step to go on from, cutting later ones; None starts a new run.

    Raises:
        ValueError: a tracker's name is not known.
        ModuleNotFoundError: a tracker's package is not installed; the message names the extra that brings it.
        FileExistsError: the directory holds a run and `resume_step` is None.
    """

    def __init__(
        self,
        directory: Path | str,
        trackers: Sequence[str] = ("tensorboard",),
        project: str = "april",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        check_trackers(trackers)
        directory = Path(directory)
        already_tracked = _last_step(directory / FILE_NAME)
        self._log = StepLog(directory / FILE_NAME, resume_step)
        name = run_name or directory.resolve().name
        recipe = json.loads(json.dumps(config or {}, default=str))
        self._trackers: list[Tracker] = []
        for tracker in trackers:
            if tracker == "tensorboard":
                self._trackers.append(_TensorBoard(directory, recipe, resume_step))
            elif tracker == "wandb":
                self._trackers.append(_Wandb(directory, project, name, recipe, already_tracked))
            else:
                self._trackers.append(_Trackio(directory, project, name, recipe, already_tracked))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics. A second record of the same step adds to the first.

        Args:
            metrics: flat, with an integer `step` no smaller than the one before. Numbers go to the trackers, lists of
                numbers element by element; everything goes to the file.
        """
        self._log.write(metrics)
        numbers = scalars(metrics)
        for tracker in self._trackers:
            tracker.log(metrics["step"], numbers)

    def sync(self) -> None:
        """Wait until every line of the file is on disk."""
        self._log.sync()

    def close(self) -> None:
        self._log.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(directory: Path | str) -> list[dict[str, Any]]:
    """The run's metrics in step order, one record per step; records of the same step are merged, the later winning.

    Raises:
        FileNotFoundError: the directory holds no metrics.
    """
    path = Path(directory) / FILE_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {directory} is not the directory of a run")
    steps: dict[int, dict[str, Any]] = {}
    for _, _, record in scan(path):
        steps.setdefault(record["step"], {}).update(record)
    return [steps[step] for step in sorted(steps)]


def check_trackers(trackers: Sequence[str]) -> None:
    """Raise, before anything is loaded, if a tracker is not known or its package is not installed."""
    for name in trackers:
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(PACKAGES)}"
            raise ValueError(f"trackers names {name!r}, which is not a tracker: {hint}")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            extra = "april-rl" if name == "tensorboard" else f"april-rl[{name}]"
            raise ModuleNotFoundError(
                f"trackers names {name!r}, whose package {PACKAGES[name]} is not installed: pip install '{extra}'",
                name=PACKAGES[name],
            )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker can plot: each number as `section/name`, each list of numbers as `name/index`."""
    plotted: dict[str, float] = {}
    for name, value in metrics.items():
        if name == "step":
            continue
        if isinstance(value, numbers.Real):
            plotted[f"{_SECTION_OF.get(name, 'rollout')}/{name}"] = float(value)
        elif isinstance(value, list | tuple):
            plotted |= {f"{name}/{index}": float(item) for index, item in enumerate(value)}
    return plotted


def _last_step(path: Path) -> int:
    return max((record["step"] for _, _, record in scan(path)), default=-1) if path.exists() else -1


class _TensorBoard:
    def __init__(self, directory: Path, recipe: dict[str, Any], resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        # Event files are named by the second: the suffix keeps a run resumed at once from writing over its first file.
        started = 0 if resume_step is None else resume_step + 1
        purge = None if resume_step is None else started
        self._writer = SummaryWriter(
            str(directory / "tensorboard"), purge_step=purge, filename_suffix=f".from-{started}"
        )
        text = json.dumps(recipe, indent=2)
        self._writer.add_text("recipe", "\n".join("    " + line for line in text.splitlines()), started)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Steps that were sent before a crash cannot be taken back, so a resumed run sends only later ones."""

    def __init__(self, directory: Path, project: str, name: str, recipe: dict[str, Any], already_tracked: int) -> None:
        import wandb

        id_file = directory / "wandb_run_id"
        known = id_file.read_text().strip() if already_tracked >= 0 and id_file.exists() else None
        self._already_tracked = already_tracked if known else -1
        self._run = wandb.init(project=project, name=name, id=known, resume="allow", dir=str(directory), config=recipe)
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step > self._already_tracked:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Steps that were sent before a crash cannot be taken back, so a resumed run sends only later ones."""

    def __init__(self, directory: Path, project: str, name: str, recipe: dict[str, Any], already_tracked: int) -> None:
        import trackio

        self._already_tracked = already_tracked
        self._run = trackio.init(project=project, name=name, config=recipe, resume="allow")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step > self._already_tracked:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
