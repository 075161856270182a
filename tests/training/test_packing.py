"""Packed sequences against padded ones, over real architectures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from april.algorithms.batch import Batch
from april.algorithms.logprobs import logprobs_from_logits
from april.training.forward import PolicyModel, check_head
from april.training.learner_settings import LearnerSettings
from april.training.local import LocalLearner
from april.training.packing import PADDING_SHARE, Packing, attends_packed, can_pack, packed_attention
from tests import tiny
from tests.engines import architectures
from tests.training.steps import recipe, rollout


def ragged(lengths: tuple[int, ...], vocabulary: int) -> Batch:
    torch.manual_seed(len(lengths))
    ids = torch.randint(0, vocabulary, (len(lengths), lengths[0]))
    trained = torch.arange(2, lengths[0] + 1) <= torch.tensor(lengths)[:, None]
    trained[:, :2] = False  # the prompt
    zeros = torch.zeros(trained.shape)
    return Batch(ids, lengths, trained, zeros, zeros.long())


@pytest.mark.parametrize("architecture", architectures.SUPPORTED)
def test_packed_and_padded_agree(architecture: str) -> None:
    """Values and gradients, with windows shorter than the sequences and softcaps where the architecture has them."""
    model = architectures.model(architecture)
    architectures.sharpen(model, 0.2)
    check_head(model)
    assert can_pack(model)
    batch = ragged((31, 30, 29, 17, 17, 5, 3, 1), architectures.VOCABULARY)
    results = []
    for packed in (False, True):
        model.zero_grad()
        if packed:
            with packed_attention(model):
                logp, entropy = PolicyModel(model, 0.7)(batch)
        else:
            logp, entropy = PolicyModel(model, 0.7)(batch)
        (logp.sum() + entropy.square().sum()).div(100).backward()
        results.append((logp.detach(), entropy.detach(), [p.grad.clone() for p in model.parameters()]))
    (logp, entropy, gradients), (packed_logp, packed_entropy, packed_gradients) = results
    torch.testing.assert_close(packed_logp, logp, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_entropy, entropy, atol=1e-5, rtol=1e-5)
    for a, b in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("gemma2", {"final_logit_softcapping": 0.5}),
        ("granite", {"logits_scaling": 0.2}),
        ("cohere", {"logit_scale": 5.0}),
    ],
)
@torch.no_grad()
def test_logit_transformations_of_architectures_are_applied(architecture: str, setting: dict[str, float]) -> None:
    model = architectures.model(architecture, **setting)
    architectures.sharpen(model, 0.2)
    batch = ragged((12, 12), architectures.VOCABULARY)
    logits = model(input_ids=batch.input_ids).logits[:, :-1]
    found, wanted = PolicyModel(model, 0.7)(batch), logprobs_from_logits(logits, batch.input_ids[:, 1:], 0.7)
    for mine, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[batch.mask], own[batch.mask], atol=1e-5, rtol=1e-5)
    plain = logprobs_from_logits(logits, batch.input_ids[:, 1:])[0]
    assert (found[0] - plain)[batch.mask].abs().max() > 0.1


@torch.no_grad()
def test_scores_of_attention_are_capped_packed_too() -> None:
    results = []
    for cap in (0.3, None):
        model = architectures.model("gemma2", attn_logit_softcapping=cap, query_pre_attn_scalar=8)
        architectures.sharpen(model, 0.5)
        batch = ragged((31, 17, 5), architectures.VOCABULARY)
        padded, _ = PolicyModel(model)(batch)
        with packed_attention(model):
            packed, _ = PolicyModel(model)(batch)
        torch.testing.assert_close(packed, padded, atol=1e-4, rtol=1e-4)
        results.append(packed)
    assert (results[0] - results[1]).abs().max() > 0.1, "the cap matters here"


def test_positions_restart_in_each_sequence() -> None:
    """Rotary attention does not notice; learned positions do."""
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=101, **shape)).eval()
    assert can_pack(model)
    batch = ragged((31, 30, 17, 5), 101)
    with torch.no_grad(), packed_attention(model):
        packed, _ = PolicyModel(model)(batch)
    with torch.no_grad():
        padded, _ = PolicyModel(model)(batch)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_the_heads_bias_counts() -> None:
    model = tiny.model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(101, generator=torch.Generator().manual_seed(0)))
    check_head(model)


def test_logits_of_an_unknown_kind_are_refused() -> None:
    class Doubled(transformers.Qwen3ForCausalLM):
        def forward(self, *args, **settings):  # type: ignore[no-untyped-def]
            output = super().forward(*args, **settings)
            output.logits = 2 * output.logits
            return output

    with pytest.raises(ValueError, match="Doubled: its logits are not its head's output"):
        check_head(Doubled(tiny.model().config))


def test_weights_that_are_not_finite_are_named_as_such() -> None:
    model = tiny.model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="its logits are not finite"):
        check_head(model)


def test_sequences_are_independent() -> None:
    model = tiny.model()
    batch = ragged((20, 20, 12, 7), 101)
    with torch.no_grad(), packed_attention(model):
        before, _ = PolicyModel(model)(batch)
        batch.input_ids[1] = (batch.input_ids[1] + 1) % 101
        after, _ = PolicyModel(model)(batch)
    changed = (before != after).any(-1)
    assert changed.tolist() == [False, True, False, False]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_runs_partition_the_tokens_and_pad_little(lengths: list[int]) -> None:
    packing = Packing(lengths, torch.device("cpu"))
    runs = packing.runs
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == sum(lengths)
    assert sum(run.sequences for run in runs) == len(lengths)
    for run in runs:
        whole = run.sequences * run.longest
        assert whole - (run.stop - run.start) <= whole // PADDING_SHARE


def test_the_model_is_restored() -> None:
    model = tiny.model()
    before = model.config._attn_implementation
    with packed_attention(model):
        assert attends_packed(model)
    assert model.config._attn_implementation == before
    assert model(input_ids=torch.arange(5)[None], attention_mask=torch.ones(1, 5)).logits.isfinite().all()


def test_a_model_that_cannot_be_packed_is_padded() -> None:
    """A recurrent layer would carry its state from one sequence into the next."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=101, hidden_size=16, num_hidden_layers=1, state_size=4, intermediate_size=32, pad_token_id=0
    )
    model = transformers.MambaForCausalLM(config)
    assert not can_pack(model)
    learner = LocalLearner(model, LearnerSettings.of(recipe()))
    assert learner.train(rollout(1), 1)["grad_norm"] > 0


def test_packing_changes_no_update() -> None:
    updates = []
    for packs in (True, False):
        learner = LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(recipe(algorithm="ppo", kl_coef=0.1)))
        assert learner.packs
        learner.packs = packs
        updates.append(learner.train(rollout(1), 1))
    assert updates[0] == pytest.approx(updates[1], abs=1e-5)


def test_gradient_checkpointing_recomputes_packed() -> None:
    updates = []
    for checkpointing in (True, False):
        chosen = recipe()
        chosen.training = dataclasses.replace(chosen.training, gradient_checkpointing=checkpointing)
        updates.append(LocalLearner(tiny.model(sharpness=1.0), LearnerSettings.of(chosen)).train(rollout(1), 1))
    assert updates[0] == pytest.approx(updates[1], abs=1e-6)
