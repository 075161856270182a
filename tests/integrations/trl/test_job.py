"""TRL's trainer in two real processes, as `accelerate launch` starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from april.integrations.trl.checkpoint import STATE
from tests.integrations.trl.job import record, trainer
from tests.integrations.trl.launch import launch
from tests.limits import HANG


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """Four steps in two processes, an evaluation, and the last two steps again from the checkpoint between them; then
    some more, in which process 1 dies."""
    folder = tmp_path_factory.mktemp("job")
    done = launch("--multi_gpu", "job", str(folder))  # with `--cpu` accelerate starts only one process
    seen = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in seen), done.stderr[-3000:]
    assert done.returncode != 0
    return folder, [json.loads(path.read_text()) for path in seen], done.stderr


def batches(ranks: list[dict[str, Any]], part: str = "straight") -> list[list[dict[str, Any]]]:
    """The rows of each generation batch, starting with the rows of process 0."""
    return [[*first, *second] for first, second in zip(*(rank[part]["batches"] for rank in ranks), strict=True)]


def test_groups_stay_whole_across_processes(job: Any) -> None:
    for batch in batches(job[1]):
        groups = [(group, list(members)) for group, members in groupby(batch, key=lambda row: row["group"])]
        assert [len(members) for _, members in groups] == [4, 4, 4]
        assert len({group for group, _ in groups}) == 3
        for _, members in groups:
            assert len({row["answer"] for row in members}) == 1
            assert sum(row["advantage"] for row in members) == pytest.approx(0, abs=1e-4)
    trained = [row["group"] for batch in batches(job[1]) for row in batch]
    assert len(set(trained)) == 12, "no group is trained on twice, in whichever process"


def test_each_process_scores_and_trains_on_its_own_rows(job: Any) -> None:
    for rank in job[1]:
        rows = [row for batch in rank["straight"]["batches"] for row in batch]
        assert rank["straight"]["seen"] == [[f"{row['answer']}?", row["answer"]] for row in rows]
        assert all(row["mask"] == len(row["tokens"]) == len(row["versions"]) for row in rows)
    first, second = (rank["straight"]["policy"] for rank in job[1])
    assert first == second


def test_unfinished_samples_are_carried_over_and_logged_once(job: Any) -> None:
    leader, follower = ([entry for entry in rank["straight"]["logs"] if "loss" in entry] for rank in job[1])
    assert [entry["april/policy_version"] for entry in leader] == [0, 1, 2, 3]
    assert any(entry["april/samples_resumed"] > 0 for entry in leader)
    for version, (batch, entry) in enumerate(zip(batches(job[1]), leader, strict=True)):
        begun = [min(v for row in batch if row["group"] == group for v in row["versions"]) for group in trained(batch)]
        assert entry["april/staleness_max"] == version - min(begun) <= 5
        assert entry["april/step_consumed_tokens"] == sum(len(row["tokens"]) for row in batch)
    assert any(len(set(row["versions"])) > 1 for batch in batches(job[1]) for row in batch)
    assert not [name for entry in follower for name in entry if name.startswith("april/")]


def trained(batch: list[dict[str, Any]]) -> set[int]:
    return {row["group"] for row in batch}


def test_both_engines_generate(job: Any) -> None:
    """Eight slots each: sixteen samples decode at once only if both processes' engines do."""
    logged = [entry for entry in job[1][0]["straight"]["logs"] if "loss" in entry]
    assert all(entry["april/engine_occupancy"] > 0.5 for entry in logged)


def test_the_same_number_of_processes_resumes_bit_for_bit(job: Any) -> None:
    for rank in job[1]:
        assert rank["resumed"]["policy"] == rank["straight"]["policy"]
        assert rank["resumed"]["batches"] == rank["straight"]["batches"][2:]
    straight, resumed = (
        [[entry["loss"], entry["reward"], entry["grad_norm"]] for entry in job[1][0][part]["logs"] if "loss" in entry]
        for part in ("straight", "resumed")
    )
    assert resumed == straight


def test_one_process_resumes_without_losing_a_token(job: Any, tmp_path: Path) -> None:
    checkpoint = job[0] / "checkpoint-2"
    saved = json.loads((checkpoint / STATE).read_text())["scheduler"]["state"]["buffer"]["groups"]
    tokens = {
        (group["id"], sample["index"]): [token for _, ids, _ in sample["segments"] for token in ids]
        for group in saved
        for sample in group["samples"]
    }
    assert sum(map(len, tokens.values())) > 0
    alone = trainer(tmp_path, processes=1, max_steps=4)
    alone.train(resume_from_checkpoint=str(checkpoint))
    alone.close()
    seen = {(s.group_id, s.index): s.response_ids for batch, _ in alone.batches for g in batch for s in g.samples}
    assert {group["id"] for group in saved} <= {group for group, _ in seen}
    for name, begun in tokens.items():
        assert seen[name][: len(begun)] == begun
    assert len(record(alone)["batches"]) == 2


def test_evaluation_uses_exactly_the_requested_rows(job: Any) -> None:
    asked = sorted(seen for rank in job[1] for seen in rank["evaluated"])
    assert asked == [[f"{n}?", n] for n in range(100, 104) for _ in range(4)]


def test_a_dead_process_ends_the_job_with_one_line_that_names_the_command_to_resume(job: Any) -> None:
    """The launcher prints its own messages; april prints only this line, and no traceback of an abandoned process."""
    [said] = [line for line in job[2].splitlines() if line.startswith("april: ")]
    seen, _, remedy = said.partition("ended")
    assert seen in (
        "april: a process of this job has ",
        "april: this process was told to end (SIGTERM), as when another one of the job has ",
    )
    assert remedy.endswith(
        f': start the job again with trainer.train(resume_from_checkpoint="{job[0] / "checkpoint-4"}")'
    )
    assert "april/integrations" not in job[2]


def test_a_process_ended_by_the_launcher_prints_the_same_line() -> None:
    """The launcher may see that process 1 has died, and end process 0, before process 0 sees it. It waits in C++."""
    program = """
import os, signal, threading
import torch.distributed as dist
from april.integrations.peer_loss import peer_loss_reported
from april.integrations.trainer_ranks import TrainerRanks

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
job = TrainerRanks()
job.size = 2
with peer_loss_reported(job, lambda what: f"{what}: start again"):
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    store.wait(["what never comes"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "this process was told to end (SIGTERM), as when another one of the job has ended: start again"
    )
