"""Where metrics go beside `metrics.jsonl`: TensorBoard, wandb, trackio, MLflow, Prometheus.

Invariants:
- a tracker is a view of `metrics.jsonl` and never holds what it lacks;
- a resumed run holds each step once in every tracker;
- a tracker's package is imported only if it was asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from april.extras import install_command


class Tracker(Protocol):
    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Completions of `step`, which is the latest that was logged, or the one before."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run.

    Args:
        project: what the run is filed under, where there are projects.
        recipe: the resolved recipe, kept beside the run.
        resume_step: the step to go on from; None for a new run.
        already_tracked: the last step that was sent before; -1 if there was none.
    """

    directory: Path
    project: str
    recipe: Mapping[str, Any]
    resume_step: int | None
    already_tracked: int

    @property
    def name(self) -> str:
        return self.directory.resolve().name


COLUMNS = ("step", "prompt", "completion", "reward", "length", "finish", "staleness", "prompt_id")
"""Of a completion, what trackers show."""


def kind_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return "held_out" if rows[0]["held_out"] else "trained"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        # Event files are named by the second: the suffix keeps a run resumed at once from writing over its first file.
        started = 0 if run.resume_step is None else run.resume_step + 1
        purge = None if run.resume_step is None else started
        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=purge, filename_suffix=f".from-{started}"
        )
        text = json.dumps(run.recipe, indent=2, default=str)
        self._writer.add_text("recipe", "\n".join("    " + line for line in text.splitlines()), started)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [f"reward {row['reward']}, {row['length']} tokens\n\n{row['completion']}" for row in rows]
        text = "\n\n".join("\n".join("    " + line for line in part.splitlines()) for part in lines)
        self._writer.add_text(f"completions/{kind_of(rows)}", text, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Steps that were sent before a crash cannot be taken back, so a resumed run sends only later ones."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        id_file = run.directory / "wandb_run_id"
        known = id_file.read_text().strip() if run.already_tracked >= 0 and id_file.exists() else None
        self._already_tracked = run.already_tracked if known else -1
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=known,
            resume="allow",
            dir=str(run.directory),
            config=json.loads(json.dumps(run.recipe, default=str)),
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._already_tracked:
            self._run.log(dict(numbers), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step > self._already_tracked:
            import wandb

            table = wandb.Table(columns=list(COLUMNS), data=[[row[name] for name in COLUMNS] for row in rows])
            # Without a step of its own: wandb drops what comes for a step before its latest.
            self._run.log({f"completions/{kind_of(rows)}": table}, commit=False)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Steps that were sent before a crash cannot be taken back, so a resumed run sends only later ones."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._already_tracked = run.already_tracked
        config = json.loads(json.dumps(run.recipe, default=str))
        self._run = trackio.init(project=run.project, name=run.name, config=config, resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._already_tracked:
            self._run.log(dict(numbers), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step > self._already_tracked:
            import pandas as pd
            import trackio

            frame = pd.DataFrame([{name: row[name] for name in COLUMNS} for row in rows])
            self._run.log({f"completions/{kind_of(rows)}": trackio.Table(dataframe=frame)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the server that MLFLOW_TRACKING_URI names, or of `mlflow.db` in the run directory."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        self._client = mlflow.MlflowClient(address)
        id_file = run.directory / "mlflow_run_id"
        if run.already_tracked >= 0 and id_file.exists():
            self._id = id_file.read_text().strip()
            self._already_tracked = run.already_tracked
            self._client.update_run(self._id, status="RUNNING")
            return
        self._already_tracked = -1
        self._id = self._client.create_run(self._experiment(run), run_name=run.name).info.run_id
        id_file.write_text(self._id + "\n")
        self._client.log_dict(self._id, json.loads(json.dumps(run.recipe, default=str)), "recipe.json")

    def _experiment(self, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(run.project)
        if found is not None:
            return str(found.experiment_id)
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else (run.directory / "mlflow").resolve().as_uri()
        return str(self._client.create_experiment(run.project, artifact_location=own))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._already_tracked:
            from mlflow.entities import Metric as Value

            now = round(1000 * time.time())
            self._client.log_batch(self._id, metrics=[Value(name, value, now, step) for name, value in numbers.items()])

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if step > self._already_tracked:
            columns = {name: [row[name] for row in rows] for name in COLUMNS}
            self._client.log_table(self._id, columns, f"completions/step-{step:06d}-{kind_of(rows)}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Prometheus:
    """The latest numbers, for a Prometheus server to fetch from `reporting.prometheus_address` while the run goes on.

    Raises:
        ValueError: nothing can listen at that address.
    """

    def __init__(self, run: TrackedRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        address = str(run.recipe["reporting"]["prometheus_address"])
        host, _, port = address.rpartition(":")
        self._labels = {"run": run.name, "project": run.project}
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), self._registry)
        except (OSError, OverflowError) as error:  # the latter for a port that no machine has
            reason = getattr(error, "strerror", error)
            raise ValueError(
                f"reporting.prometheus_address = {address!r}: {reason}; name another port, or another address "
                "of this machine"
            ) from None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from prometheus_client import Gauge

        for name, value in {"step": float(step), **numbers}.items():
            known = "april_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)  # two names may be one to Prometheus
            if known not in self._gauges:
                what = name.rpartition("/")[2].replace("_", " ")
                self._gauges[known] = Gauge(known, what, list(self._labels), registry=self._registry)
            self._gauges[known].labels(**self._labels).set(value)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prometheus has no text."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


TRACKERS: Mapping[str, tuple[Callable[[TrackedRun], Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboardX", "train"),
    "wandb": (Wandb, "wandb", "wandb"),
    "trackio": (Trackio, "trackio", "trackio"),
    "mlflow": (MLflow, "mlflow", "mlflow"),
    "prometheus": (Prometheus, "prometheus_client", "prometheus"),
}
"""Each tracker by name, with its package and the extra that brings it."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise, before anything is loaded, if a tracker is not known or its package is not installed.

    Raises:
        ValueError: a tracker's name is not known.
        ModuleNotFoundError: a tracker's package is not installed; the message names the extra that brings it.
    """
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(TRACKERS)}"
            raise ValueError(f"trackers names {name!r}, which is not a tracker: {hint}")
        _, package, extra = TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"trackers names {name!r}, whose package {package} is not installed: {install_command(extra)}",
                name=package,
            )


def start_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """The named trackers, begun; see `check_trackers` for what is raised."""
    check_trackers(names)
    return [TRACKERS[name][0](run) for name in names]
