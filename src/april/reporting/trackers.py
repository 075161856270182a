"""Trackers that receive the metrics of `metrics.jsonl`: TensorBoard, wandb, trackio, MLflow, Prometheus.

Invariants:
- a tracker is a view of `metrics.jsonl`: `tracker_feed.Feed` gives it each record once, in order;
- a new run never adds to an older run of the same name;
- a tracker's package is imported only if the recipe names the tracker.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from april.extras import install_command

Ending = Literal["finished", "stopped", "failed"]
"""How a run has ended for now; one that was stopped may be resumed."""
Position = tuple[int, int]
"""A record of `metrics.jsonl`: its step, and its number among the records of that step, from 1 on."""
BEFORE_ALL: Position = (-1, 0)


class Tracker(Protocol):
    """Any method, and the constructor, may raise anything or take for ever: `tracker_feed.Feed` copes."""

    @property
    def run_id(self) -> str:
        """Identifies the run in the tracker."""
        ...

    @property
    def position(self) -> Position | None:
        """Latest record that the tracker itself reports to hold; None if it does not report any."""
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Completions of `step`, which is the latest that was logged, or the one before."""
        ...

    def close(self, ending: Ending) -> None: ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Description of a run for a tracker.

    Args:
        project: name of the project, in trackers with projects.
        recipe: the resolved recipe.
        resume_step: step to resume from; None for a new run.
        run_id: the `Tracker.run_id` that the run had before it was resumed; None if it had none.
        moved_from: the run's directory then.
        sent: the latest record that was sent.
    """

    directory: Path
    project: str
    recipe: Mapping[str, Any]
    resume_step: int | None
    run_id: str | None = None
    moved_from: Path | None = None
    sent: Position = BEFORE_ALL

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as JSON types."""
        config: dict[str, Any] = json.loads(json.dumps(self.recipe, default=str))
        return config


class Names:
    """Names of metrics as a tracker accepts them: one rule for all trackers.

    Args:
        allowed: characters that the tracker accepts, as in a regular expression's brackets; others become "_".
        longest: characters of a name.
    """

    def __init__(self, allowed: str, longest: int = 250) -> None:
        self._refused = re.compile(f"[^{allowed}]")
        self._longest = longest
        self._known: dict[str, str] = {}
        self._taken: set[str] = set()

    def __getitem__(self, name: str) -> str:
        """The accepted name, different for different names."""
        if name not in self._known:
            # A part of dots alone would be a relative path, which MLflow refuses.
            parts = [part if part.strip(".") else "_" for part in self._refused.sub("_", name).split("/")]
            accepted = base = "/".join(parts)[: self._longest]
            number = 1
            while accepted in self._taken:
                number += 1
                accepted = f"{base[: self._longest - len(str(number)) - 1]}_{number}"
            self._known[name] = accepted
            self._taken.add(accepted)
        return self._known[name]


EVERYWHERE = "time/seconds"
"""A metric that every record has."""
COLUMNS = ("step", "prompt", "answer", "completion", "reward", "length", "finish", "staleness", "prompt_id")
"""Of a completion, what trackers show."""


def kind_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return "held_out" if rows[0]["held_out"] else "trained"


class TensorBoard:
    """Steps that a resumed run does again replace those that were lost."""

    run_id = ""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._names = Names(r"\w.\-/")
        self.position: Position | None = None
        if run.resume_step is not None:
            # The writer purges later steps from the event files, so they have to be sent again.
            self.position = min(run.sent, (run.resume_step, sys.maxsize))
        step, _ = self.position or run.sent
        started = step + 1
        purge = None if started == 0 else started
        # Event files are named by the second: the suffix keeps a run resumed at once from writing over its first file.
        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=purge, filename_suffix=f".from-{started}"
        )
        text = json.dumps(run.recipe, indent=2, default=str)
        self._writer.add_text("recipe", "\n".join("    " + line for line in text.splitlines()), started)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(self._names[name], value, step)
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [f"reward {row['reward']}, {row['length']} tokens\n\n{row['completion']}" for row in rows]
        text = "\n\n".join("\n".join("    " + line for line in part.splitlines()) for part in lines)
        self._writer.add_text(f"completions/{kind_of(rows)}", text, step)

    def close(self, ending: Ending) -> None:
        self._writer.close()


class Wandb:
    position = None

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
        )
        self.run_id = str(self._run.id)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[[row[name] for name in COLUMNS] for row in rows])
        # Without a step of its own: wandb drops values of a step before its latest.
        self._run.log({f"completions/{kind_of(rows)}": table}, commit=False)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "failed" else 0)


class Trackio:
    """Knows runs by their names: each gets a name of its own."""

    position = None

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.run_id = run.run_id or f"{run.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(project=run.project, name=self.run_id, config=run.config, resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        import pandas as pd
        import trackio

        frame = pd.DataFrame([{name: row[name] for name in COLUMNS} for row in rows])
        self._run.log({f"completions/{kind_of(rows)}": trackio.Table(dataframe=frame)}, step=step)

    def close(self, ending: Ending) -> None:
        self._run.finish()


class MLflow:
    """A run of the server that MLFLOW_TRACKING_URI names, or of `mlflow.db` in the run directory."""

    ENDINGS: Mapping[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._names = Names(r"\w.\- :/")
        self._recipe: dict[str, Any] | None = run.config
        self._server = os.environ.get("MLFLOW_TRACKING_URI")
        database = (run.directory / "mlflow.db").resolve()
        if run.moved_from is not None and not self._server:
            _move_artifacts(database, run.moved_from, run.directory.resolve())
        self._client = mlflow.MlflowClient(self._server or f"sqlite:///{database}")
        if run.run_id is not None and self._is_there(run.run_id):
            self.run_id = run.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = str(self._client.create_run(self._experiment(run), run_name=run.name).info.run_id)

    @property
    def position(self) -> Position:
        # A batch may be stored although its call failed, so the server's own count decides which records are sent.
        steps = [value.step for value in self._client.get_metric_history(self.run_id, self._names[EVERYWHERE])]
        return (max(steps), steps.count(max(steps))) if steps else BEFORE_ALL

    def _is_there(self, run_id: str) -> bool:
        """Whether the run, and the experiment that it is in, have not been deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
            experiment = self._client.get_experiment(run.info.experiment_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return bool(run.info.lifecycle_stage == experiment.lifecycle_stage == "active")

    def _experiment(self, run: TrackedRun) -> str:
        """The id of the project's experiment, of a new one if a deleted one has its name."""
        name, number = run.project, 1
        while (found := self._client.get_experiment_by_name(name)) is not None and found.lifecycle_stage != "active":
            number += 1
            name = f"{run.project}-{number}"
        if found is not None:
            return str(found.experiment_id)
        own = None if self._server else (run.directory / "mlflow").resolve().as_uri()
        return str(self._client.create_experiment(name, artifact_location=own))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric as Value

        if self._recipe is not None:
            self._client.log_dict(self.run_id, self._recipe, "recipe.json")
            self._recipe = None
        now = round(1000 * time.time())
        values = [Value(self._names[name], value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run_id, metrics=values)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {name: [row[name] for row in rows] for name in COLUMNS}
        self._client.log_table(self.run_id, columns, f"completions/step-{step:06d}-{kind_of(rows)}.json")

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self.run_id, self.ENDINGS[ending])


def _move_artifacts(database: Path, before: Path, now: Path) -> None:
    """Update absolute addresses in the database of a moved run directory."""
    old, new = before.as_uri(), now.as_uri()
    with sqlite3.connect(database) as connection:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (new, len(old) + 1, len(old), old),
            )


class Prometheus:
    """Serves the latest values at `reporting.prometheus_address` for a Prometheus server during the run.

    Raises:
        ValueError: nothing can listen at that address.
    """

    run_id = ""
    position: Position | None = BEFORE_ALL

    def __init__(self, run: TrackedRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        address = str(run.recipe["reporting"]["prometheus_address"])
        host, _, port = address.rpartition(":")
        self._labels = {"run": run.name, "project": run.project}
        self._registry = CollectorRegistry()
        self._names = Names("a-zA-Z0-9_")
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
            known = f"april_{self._names[name]}"
            if known not in self._gauges:
                what = name.rpartition("/")[2].replace("_", " ")
                self._gauges[known] = Gauge(known, what, list(self._labels), registry=self._registry)
            self._gauges[known].labels(**self._labels).set(value)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prometheus has no text."""

    def close(self, ending: Ending) -> None:
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
