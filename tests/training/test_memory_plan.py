"""The memory of a run matches its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from april.algorithms.batch import Batch
from april.commands.main import run as april
from april.config.error import ConfigError
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.memory_plan import plan_memory
from tests import tiny
from tests.mixtures import mixture
from tests.training.saved_bytes import saved_bytes
from tests.training.steps import recipe, rollout


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ppo", "kl_coef": 0.1}])
def test_parameters_and_optimizer_are_counted_to_the_byte(settings: dict[str, object], tmp_path: Path) -> None:
    chosen = recipe(**settings)
    chosen.model.path = str(tiny.save(tmp_path / "policy", sharpness=1.0))
    plan = plan_memory(chosen).rank
    learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen))
    learner.release_gradients = lambda: None  # type: ignore[method-assign]
    learner.train(rollout(1), 1)
    models = [learner.model, learner.reference and learner.reference.model, learner.critic]
    head = 4 * 33 if learner.critic else 0  # the critic has a head of one output in the place of the policy's
    parameters = [p for model in models if model is not None for p in model.parameters()]
    assert plan["parameters"] == sum(p.nbytes for p in parameters) - head
    assert plan["gradients"] == sum(p.grad.nbytes for p in parameters if p.grad is not None) - head
    moments = [t for name, t in learner.state().items() if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert plan["optimizer"] == sum(t.nbytes for t in moments) - 2 * head


def test_planned_activations_match_a_real_forward_pass(tmp_path: Path) -> None:
    chosen = recipe()
    chosen.model.path = str(tiny.save(tmp_path / "policy", sharpness=1.0, num_hidden_layers=4))
    step = rollout(1)
    batch = Batch.of([sample for group in step.groups for sample in group.samples], step.version)
    tokens = sum(batch.lengths)
    chosen.training.max_tokens_per_micro_batch = tokens
    chosen.rollout.max_response_length = tokens
    learner = LocalLearner(tiny.model(sharpness=1.0, num_hidden_layers=4), LearnerSettings.of(chosen))
    held = saved_bytes(learner, batch)
    kept = plan_memory(chosen).rank["activations"]
    assert 0.75 < held / kept < 1.35
    chosen.training.gradient_checkpointing = True
    assert plan_memory(chosen).rank["activations"] < kept / 2


def test_ranks_share_the_state_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = recipe()
    chosen.model.path = str(tiny.save(tmp_path / "policy", sharpness=1.0))
    whole = plan_memory(chosen).rank
    chosen.trainer.processes = 8
    eighth = plan_memory(chosen).rank
    for part in ("parameters", "gradients", "optimizer"):
        assert whole[part] / 8 <= eighth[part] < whole[part] / 6
    capsys.readouterr()
    assert april(["memory", "--model.path", chosen.model.path, "--processes", "8"]) == 0
    assert "each rank" in capsys.readouterr().out


def test_adapters_of_a_target_are_counted_by_its_last_name_and_by_a_dotted_one(tmp_path: Path) -> None:
    counted = []
    for targets in (("q_proj",), ("self_attn.q_proj",), ("q_proj", "v_proj")):
        chosen = recipe()
        chosen.model.path = str(tiny.save(tmp_path / "policy"))
        chosen.lora.rank, chosen.lora.target_modules = 4, targets
        counted.append(plan_memory(chosen).rank["optimizer"])
    assert counted[0] == counted[1] > 0
    assert counted[2] > counted[0]


def test_routes_are_counted_by_the_shape_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = recipe()
    mixture("Glm4Moe").save_pretrained(tmp_path / "policy")
    chosen.model.path = str(tmp_path / "policy")
    assert plan_memory(chosen).routes == {}
    chosen.training.router_replay = "recorded"
    length, samples = chosen.rollout.max_response_length, chosen.rollout.rollout_batch_size
    step = 2 * 2 * length * samples * chosen.rollout.n_samples_per_prompt
    routes = plan_memory(chosen).routes
    assert (routes["a step's batch"], routes["journal, a step"]) == (step, step)
    assert routes["groups in flight"] == step * (chosen.rollout.max_staleness + 1)
    chosen.rollout.over_sampling_batch_size = 3 * samples
    assert plan_memory(chosen).routes["groups in flight"] == 3 * step
    assert april(["memory", "--model.path", chosen.model.path, "--router-replay", "latest"]) == 0
    assert "routes, in the first rank's main memory" in capsys.readouterr().out
    chosen.model.path = str(tiny.save(tmp_path / "dense", sharpness=1.0))
    with pytest.raises(ConfigError, match=r'training\.router_replay = "recorded": Qwen3ForCausalLM has no routers'):
        plan_memory(chosen)
