"""Against TRL's own trainers: real ones, on a tiny model, whose forward pass is replaced by given log-probabilities."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from april.algorithms import losses
from april.algorithms.advantages import dr_grpo, grpo, rloo
from april.algorithms.corrections import correct
from april.algorithms.logprobs import logprobs_from_logits, token_logprobs
from april.algorithms.losses import aggregate

trl = pytest.importorskip("trl")

BUDGET = 6
REWARDS = [0.1, 0.1, 0.1, 0.1, 1.0, 0.0, 0.3, 0.25]


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """A random Qwen3 of a few thousand parameters and a tokenizer of thirty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(28))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )


def trainer(kind: str, tiny: tuple[Any, Any], folder: Path, **options: Any) -> Any:
    from datasets import Dataset

    model, tokenizer = tiny
    config = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[kind](
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=BUDGET,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **options,
    )
    return {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[kind](
        model=model,
        reward_funcs=lambda completions, **_: REWARDS,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3"]}),
        processing_class=tokenizer,
    )


def batch(seed: int = 0, spread: float = 0.4) -> dict[str, Tensor]:
    """Eight responses: one empty, one of a single token, the others of any length."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, 1, 6, 3, 5, 2, 6, 4])
    logp = -3 * torch.rand(8, BUDGET, generator=g) - 0.01
    return {
        "logp": logp,
        "prox": logp + spread * torch.randn(8, BUDGET, generator=g),
        "behaviour": logp + spread * torch.randn(8, BUDGET, generator=g),
        "ref": logp + spread * torch.randn(8, BUDGET, generator=g),
        "mask": torch.arange(BUDGET) < lengths[:, None],
        "advantages": torch.randn(8, generator=g),
    }


def theirs(trainer: Any, b: dict[str, Tensor], **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's loss of the batch, and its gradient with respect to the log-probabilities."""
    live = b["logp"].clone().requires_grad_()
    trainer.current_gradient_accumulation_steps = 1
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (live, torch.zeros_like(live), None)
    ids = torch.zeros(8, BUDGET, dtype=torch.long)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": b["mask"].int(),
            "advantages": b["advantages"],
            "num_items_in_batch": b["mask"].sum(),
            **inputs,
        },
    )
    return loss.detach(), torch.autograd.grad(loss, live)[0]


def check(mine: Tensor, live: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    assert wanted[1].abs().sum() > 0
    torch.testing.assert_close(mine.detach(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(mine, live)[0], wanted[1], atol=1e-5, rtol=1e-5)


CASES = {
    "grpo": ({"loss_type": "grpo"}, losses.ppo_clip, {}, "sequence-mean", None),
    "dual clip": ({"loss_type": "grpo", "delta": 1.3}, losses.ppo_clip, {"dual_clip": 1.3}, "sequence-mean", None),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        losses.ppo_clip,
        {"eps_low": 0.2, "eps_high": 0.28},
        "token-mean",
        None,
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, losses.ppo_clip, {}, "constant", 8 * BUDGET),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        losses.gspo,
        {"eps_low": 0.03, "eps_high": 0.04},
        "sequence-mean",
        None,
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        losses.cispo,
        {"eps_high": 0.3},
        "token-mean",
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_trls(name: str, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    options, loss, bounds, mode, denominator = CASES[name]
    b = batch()
    live = b["logp"].clone().requires_grad_()
    mine = aggregate(loss(live, b["prox"], b["advantages"], b["mask"], **bounds).loss, b["mask"], mode, denominator)
    check(mine, live, theirs(trainer("grpo", tiny, tmp_path, **options), b, old_per_token_logps=b["prox"]))


def test_kl_is_trls(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    b = batch(1)
    live = b["logp"].clone().requires_grad_()
    policy = losses.ppo_clip(live, b["prox"], b["advantages"], b["mask"]).loss
    mine = aggregate(policy + 0.04 * losses.kl(live, b["ref"], b["mask"], "k3"), b["mask"], "sequence-mean")
    his = trainer("grpo", tiny, tmp_path, loss_type="grpo", use_bias_correction_kl=False)
    his.beta = 0.04  # set afterwards: the constructor would load a reference model, whose part is given here
    check(mine, live, theirs(his, b, old_per_token_logps=b["prox"], ref_per_token_logps=b["ref"]))


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence"])
def test_corrections_enter_the_loss_as_in_trl(kind: str, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    b = batch(2, spread=1.0)
    live = b["logp"].clone().requires_grad_()
    c = correct(kind, live, b["prox"], b["behaviour"], b["mask"])  # type: ignore[arg-type]
    loss = losses.ppo_clip(live, c.old_logprobs, b["advantages"], c.mask).loss * c.weights
    mine = aggregate(loss, b["mask"], "sequence-mean")
    his = trainer("grpo", tiny, tmp_path, loss_type="grpo")
    his.use_vllm = his.vllm_importance_sampling_correction = True
    log_w = (b["prox"] - b["behaviour"]) * b["mask"]
    w = (log_w.sum(-1, keepdim=True) if kind == "sequence" else log_w).exp()
    w = torch.where((w < 0.5) | (w > 5.0), 0.0, w) if kind == "icepop" else w.clamp(max=2.0)
    check(mine, live, theirs(his, b, old_per_token_logps=b["prox"], importance_sampling_ratio=w))


ADVANTAGES = {
    "grpo": ("grpo", {}, partial(grpo, eps=1e-4)),
    "dr_grpo": ("grpo", {"scale_rewards": "none"}, dr_grpo),
    "rloo": ("rloo", {}, rloo),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_trls(name: str, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    kind, options, estimator = ADVANTAGES[name]
    his = trainer(kind, tiny, tmp_path, beta=0.0, **options)
    got = his._generate_and_score_completions([{"prompt": p} for p in ["w1 w2"] * 4 + ["w3"] * 4])["advantages"]
    mine = estimator(torch.tensor(REWARDS).view(2, 4))
    # TRL leaves rounding errors on groups of equal rewards, which GRPO's eps makes larger; ours are exact zeros.
    torch.testing.assert_close(mine.flatten(), got, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(mine[1], got[4:], atol=1e-5, rtol=1e-5)


def test_rloo_on_policy_has_trls_gradient(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    """TRL's ratio is the response's, ours a token's; where both are 1 the gradient is REINFORCE's."""
    b, inf = batch(3), float("inf")
    live = b["logp"].clone().requires_grad_()
    loss = losses.ppo_clip(live, b["logp"], b["advantages"], b["mask"], eps_low=inf, eps_high=inf).loss
    (mine,) = torch.autograd.grad(aggregate(loss, b["mask"], "constant", 8), live)
    _, wanted = theirs(trainer("rloo", tiny, tmp_path, beta=0.0), b, old_logps=(b["logp"] * b["mask"]).sum(1))
    torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


def test_log_probabilities_and_entropies_are_trls(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = tiny
    temperature = 0.7
    his = trainer("grpo", tiny, tmp_path, temperature=temperature)
    ids = torch.randint(2, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted_logp, wanted_entropy, *_ = his._get_per_token_logps_and_entropies(
        his.model, ids, torch.ones_like(ids), BUDGET, compute_entropy=True
    )
    wanted_gradient = torch.autograd.grad(wanted_logp.sum(), model.lm_head.weight)[0]
    hidden = model.model(input_ids=ids).last_hidden_state[:, -BUDGET - 1 : -1].flatten(0, 1)
    targets = ids[:, -BUDGET:].flatten()
    weight = model.lm_head.weight
    for logp, entropy in (
        token_logprobs(hidden, weight, targets, temperature, chunk_size=5),
        logprobs_from_logits(hidden @ weight.T, targets, temperature),
    ):
        torch.testing.assert_close(logp, wanted_logp.flatten(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy, wanted_entropy.flatten(), atol=1e-5, rtol=1e-5)
        gradient = torch.autograd.grad(logp.sum(), weight, retain_graph=True)[0]
        torch.testing.assert_close(gradient, wanted_gradient, atol=1e-5, rtol=1e-5)
