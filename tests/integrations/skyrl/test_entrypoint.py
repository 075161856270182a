"""Three of SkyRL's example scripts through its own entry point, with a tiny model, for three steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="SkyRL is not installed here: scripts/setup_skyrl.sh")
sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))

from skyrl.train.entrypoints import main_base

import april.integrations.skyrl.trainer as plug_in
from april.integrations.skyrl.checkpoint import STATE
from tests.integrations.model_server import VLLMServer
from tests.integrations.restart import own_ray
from tests.integrations.skyrl.scripts import SCRIPTS
from tests.integrations.skyrl.trainer import BATCH, prepare, run_with_stand_ins, words_of

APRIL = (
    "trainer.override_entrypoint=april.integrations.skyrl",
    "april.over_sampling_batch_size=7",
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
)
"""Lines that april's page asks for."""
TINY = {
    "gsm8k/run_gsm8k.sh": {},
    "turn_level_rewards/run_gsm8k_multi_turn.sh": {
        "generator.max_turns": 3,
        "generator.max_input_length": 400,
        "trainer.ckpt_interval": 1,
    },
    "fully_async/fully_async_run_gsm8k.sh": {
        "trainer.fully_async.max_staleness_steps": 2,
        "trainer.fully_async.num_parallel_generation_workers": 7,
    },
}
"""Settings that these scripts need beside the sizes of a tiny model."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(Path(__file__).parent / "stand_ins"):
        yield


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_train_three_steps(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    prepare(tmp_path)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}?"}],
            "env_class": "gsm8k_multi_turn" if "multi_turn" in script else "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(n)},
            "extra_info": {},
        }
        for n in range(16)
    ]
    for name in ("prompts", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server = VLLMServer(tmp_path / "model", context_length=480)
    tiny = {
        "environment.env_class": rows[0]["env_class"],
        "generator.n_samples_per_prompt": 5,
        "generator.sampling_params.max_generate_length": 10,
        "trainer.max_training_steps": 3,
        **TINY[script],
    }
    arguments = [*SCRIPTS[script].split(), *APRIL, *words_of(tmp_path, [server.url], **tiny)]
    monkeypatch.setattr(sys, "argv", ["main_base", *arguments])
    # Ray runs already, and its task begins with the stand-ins.
    monkeypatch.setattr(plug_in, "initialize_ray", lambda cfg: None)
    monkeypatch.setattr(plug_in, "run", run_with_stand_ins)
    try:
        main_base.main()
    finally:
        server.close()
    assert not server.broken
    saved = json.loads((tmp_path / "checkpoints" / "global_step_3" / STATE).read_text())
    state, buffer = saved["scheduler"]["state"], saved["scheduler"]["state"]["buffer"]
    assert state["trainer_version"] == 3
    assert buffer["groups"], "no group is in flight"
    assert buffer["admitted"] - len(buffer["groups"]) == 3 * BATCH
    assert len(list((tmp_path / "weights").iterdir())) == 4, "the first weights, and one update for each step"
