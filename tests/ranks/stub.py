"""A rank that follows a script: its actions in each life are in `plan.json` of the run's directory.

No rank acts before all have started: a rank that starts slowly still has the same life as the other ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from april.training.rank_protocol import EXIT_RANK_LOST, RENDEZVOUS, StatusReporter


def main() -> int:
    report = StatusReporter()
    told = json.load(sys.stdin)
    run, rank = Path(told["recipe"]["reporting"]["output"]), os.environ["RANK"]
    lives = run / f"lives-{rank}"
    lived = int(lives.read_text()) if lives.exists() else 0
    lives.write_text(str(lived + 1))
    with (run / "told.jsonl").open("a") as file:
        seen = {"rank": rank, "resume": told["resume"], "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
        file.write(json.dumps({**seen, **told["recipe"]["training"]}) + "\n")
    does = json.loads((run / "plan.json").read_text())[lived][int(rank)]
    if does == "trains":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a step that has begun is trained to its end
    meet(Path(os.environ[RENDEZVOUS].removeprefix("file://")).parent, rank, int(os.environ["WORLD_SIZE"]))
    match does:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "memory":
            report.report(memory=told["recipe"]["training"]["max_tokens_per_micro_batch"] // 2)
            return EXIT_RANK_LOST
        case "starved":
            report.report(died="ran out of memory: no room for a checkpoint")
            return EXIT_RANK_LOST
        case "failed":
            report.report(failed="OSError: the disk is full")
            return 1
        case "collects":
            signal.signal(signal.SIGTERM, lambda *_: leave_with_all(run))
            (run / "collecting").touch()
            time.sleep(600)
        case "killed while it collects":
            while not (run / "collecting").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        case "waits":
            time.sleep(600)
        case "lost":
            time.sleep(0.3)
            report.report(lost="Connection closed by peer")
            return EXIT_RANK_LOST
        case "trains":
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": lived + 1}) + "\n")
            time.sleep(0.3)
            return EXIT_RANK_LOST
        case int(status):
            time.sleep(0.3)
            return status
    return 0


def leave_with_all(run: Path) -> None:
    """Act as rank 0: its collected samples are on disk before it detects the loss of other ranks."""
    (run / "collected").touch()
    sys.exit(EXIT_RANK_LOST)


def meet(place: Path, rank: str, world: int) -> None:
    """Wait for all ranks of this life."""
    (place / f"here-{rank}").touch()
    while len(list(place.glob("here-*"))) < world:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
