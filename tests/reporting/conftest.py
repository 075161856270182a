"""A run directory as a training loop leaves it, from a small deterministic simulation of partial rollouts."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BUDGET = 1024
TOKENS_PER_SECOND = 60.0


@dataclass
class Rollout:
    """A sample of known length: `tokens[v]` counts what version v sampled."""

    group: int
    index: int
    length: int
    tokens: Counter[int] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return sum(self.tokens.values())


def simulate(
    steps: int = 24, groups: int = 8, in_flight: int = 14, samples: int = 8, slots: int = 64, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """(metrics, traces, summary) of a run whose responses are long-tailed and shrink as it learns."""
    rng = np.random.default_rng(seed)
    buffer: list[list[Rollout]] = []
    metrics: list[dict[str, Any]] = [
        {"step": 0, "seconds": 4.0, "eval_reward": 0.53, "accuracy": 0.51, "eval_seconds": 4.0}
    ]
    traces: list[dict[str, Any]] = []
    seconds, consumed, generated, next_group = 4.0, 0, 0, 0
    for step in range(1, steps + 1):
        version, progress = step - 1, step / max(steps, 2)
        resumed_groups = {rollouts[0].group for rollouts in buffer}
        while len(buffer) < in_flight:
            centre = rng.normal(4.4 + 0.2 * progress, 0.75)
            lengths = np.exp(rng.normal(centre, 0.35, samples)).astype(int) + 8
            buffer.append([Rollout(next_group, i, int(min(n, BUDGET))) for i, n in enumerate(lengths)])
            next_group += 1
        spans, finished, now = run_step(buffer, resumed_groups, groups, slots, version)
        buffer = [rollouts for rollouts in buffer if rollouts not in finished]

        used = [rollout for rollouts in finished for rollout in rollouts]
        ages: Counter[int] = Counter()
        for rollout in used:
            for sampled_by, count in rollout.tokens.items():
                ages[version - sampled_by] += count
        by_age = [ages[age] for age in range(max(ages) + 1)]
        staleness = [version - min(v for rollout in rollouts for v in rollout.tokens) for rollouts in finished]
        lengths = np.array([rollout.length for rollout in used])
        step_generated = sum(span["after"] - span["before"] for span in spans)
        decoding = sum(span["end"] - span["start"] - span["queued"] for span in spans if span["queued"] is not None)
        train_seconds = float(0.35 * now + rng.normal(0, 0.05))
        consumed, generated = consumed + int(lengths.sum()), generated + step_generated
        accuracy = 0.5 + 0.42 / (1 + np.exp(-9 * (progress - 0.45)))
        evaluated = step % 5 == 0 or step == steps
        seconds += now + train_seconds + (2.0 if evaluated else 0.0)
        record = {
            "step": step,
            "seconds": round(seconds, 3),
            "epoch": 0,
            "policy_version": step,
            "reward": round(float(np.clip(accuracy + rng.normal(0, 0.03), 0, 1)), 4),
            "reward_std": 0.42,
            "response_length_mean": float(lengths.mean()),
            "response_length_p50": float(np.percentile(lengths, 50)),
            "response_length_p99": float(np.percentile(lengths, 99)),
            "response_length_max": int(lengths.max()),
            "truncated_share": float((lengths >= BUDGET).mean()),
            "consumed_tokens": consumed,
            "generated_tokens": generated,
            "discarded_tokens": 0,
            "step_consumed_tokens": int(lengths.sum()),
            "consumed_tokens_per_second": float(lengths.sum() / now),
            "generated_tokens_per_second": step_generated / now,
            "engine_occupancy": decoding / (slots * now),
            "staleness_mean": float(np.mean(staleness)),
            "staleness_max": int(max(staleness)),
            "off_policy_token_share": 1 - by_age[0] / sum(by_age),
            "over_sampling_batch_size": in_flight,
            "groups_consumed": groups,
            "groups_buffered": len(buffer),
            "samples_interrupted": sum(span["outcome"] == "interrupted" for span in spans),
            "samples_resumed": sum(span["resumed"] for span in spans),
            "rollout_seconds": now,
            "train_seconds": train_seconds,
            "reward_wait_seconds": 0.01,
            "loss": float(rng.normal(0, 0.01)),
            "grad_norm": float(0.4 + 0.2 * rng.random()),
            "lr": 1e-4 * min(1.0, step / 5),
            "clip_fraction": float(0.02 * rng.random()),
            "kl_behaviour": float(0.004 * rng.random()),
            "ratio_mean": 1.0,
            "ratio_max": float(1.5 + rng.random()),
            "entropy": float(0.5 - 0.3 * progress),
            "tokens_by_age": by_age,
        }
        if evaluated:
            held_out = {"eval_reward": round(float(accuracy) + 0.02, 4), "accuracy": round(float(accuracy), 4)}
            record |= {**held_out, "eval_seconds": 2.0}
        metrics.append(record)
        traces.append(
            {
                "step": step,
                "lengths": [rollout.length for rollout in used],
                "truncated": [rollout.length >= BUDGET for rollout in used],
                "tokens_by_age": by_age,
                "slots": slots,
                "spans": spans,
                "interrupt_at": now,
                "end": now,
            }
        )
    summary = {
        "steps": steps,
        "versions": {"april-rl": "0.1.0", "torch": "2.13.0"},
        "recipe": {
            "rollout": {"rollout_batch_size": groups, "over_sampling_batch_size": in_flight, "partial_rollout": True},
            "task": {"name": "gcd", "range": [2, 99]},
            "seed": seed,
        },
    }
    return metrics, traces, summary


def run_step(
    buffer: list[list[Rollout]], resumed: set[int], target: int, slots: int, version: int
) -> tuple[list[dict[str, Any]], list[list[Rollout]], float]:
    """Decode buffered samples, oldest first, until `target` groups are complete: (spans, those groups, seconds)."""
    queue = [rollout for rollouts in buffer for rollout in rollouts if rollout.done < rollout.length]
    waiting, running, spans = list(reversed(queue)), [], []
    unfinished = {rollouts[0].group: sum(r.done < r.length for r in rollouts) for rollouts in buffer}
    finished = [rollouts for rollouts in buffer if not unfinished[rollouts[0].group]]
    now = 0.0

    def span(rollout: Rollout, started: float, sampled: int, outcome: str) -> None:
        spans.append(
            {
                "sample": f"{rollout.group}.{rollout.index}",
                "group": rollout.group,
                "start": 0.0,
                "end": round(now, 4),
                "before": rollout.done,
                "after": rollout.done + sampled,
                "queued": None if outcome == "waiting" else round(started, 4),
                "outcome": outcome,
                "resumed": rollout.group in resumed,
            }
        )
        if sampled:
            rollout.tokens[version] += sampled

    while len(finished) < target:
        while waiting and len(running) < slots:
            rollout = waiting.pop()
            end = now + (rollout.length - rollout.done) / TOKENS_PER_SECOND
            heapq.heappush(running, (end, rollout.group, rollout.index, now, rollout))
        now, _, _, started, rollout = heapq.heappop(running)
        span(rollout, started, rollout.length - rollout.done, "finished")
        unfinished[rollout.group] -= 1
        if not unfinished[rollout.group]:
            finished.append(next(rollouts for rollouts in buffer if rollouts[0].group == rollout.group))
    for _, _, _, started, rollout in sorted(running):
        span(rollout, started, int((now - started) * TOKENS_PER_SECOND), "interrupted")
    for rollout in reversed(waiting):
        span(rollout, 0.0, 0, "waiting")
    return spans, finished, now


def write_run(
    directory: Path, metrics: list[dict[str, Any]], traces: list[dict[str, Any]], summary: dict[str, Any] | None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (directory / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in traces))
    if summary is not None:
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture(scope="session")
def simulated() -> Callable[..., tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]]:
    return simulate


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 24 steps; tests only read it, apart from the report page that is written into it."""
    return write_run(tmp_path_factory.mktemp("runs") / "gcd", *simulate())
