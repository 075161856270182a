"""Rules for frameworks' settings: the check, its messages, and the tables on the pages."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from scripts.settings_tables import PAGES, page_with_table

from april.integrations.rules.catalogue import FRAMEWORKS
from april.integrations.rules.rule import Rule, Verdict, broken, check, ignored, only, supported, table
from april.integrations.settings import at


def test_an_unsupported_setting_is_refused_with_a_remedy() -> None:
    config = SimpleNamespace(train=SimpleNamespace(overlap=True))
    rules = [only("train.absent", None, "leave it out"), only("train.overlap", False, "set it to false")]
    with pytest.raises(ValueError, match=r"^--train.overlap True: set it to false$"):
        check(rules, lambda name, default: at(config, name, default), "--{} {}")
    config.train.overlap = False
    check(rules, lambda name, default: at(config, name, default))


def test_an_ignored_setting_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rules = [ignored("limit", 8, "april has its own"), supported("size", "number of groups")]
    check(rules, {"limit": 8}.get)
    assert not caplog.records
    check(rules, {"limit": 9}.get, "--{} {}")
    assert [(r.levelno, r.message) for r in caplog.records] == [
        (logging.WARNING, "--limit 9 is ignored: april has its own")
    ]


def test_the_table_has_all_rules_with_the_users_spelling() -> None:
    rules = [
        supported("size", "number of groups"),
        only("overlap", False, "set it to false"),
        ignored("limit", None, "april has its own"),
    ]
    assert table(rules, "--{}").splitlines()[2:] == [
        "| `--size` | all | – | number of groups |",
        "| `--overlap` | `false` | refused | set it to false |",
        "| `--limit` | unset | ignored, with a warning | april has its own |",
    ]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_page_has_the_table_that_the_rules_make(framework: str) -> None:
    assert (PAGES / f"{framework}.md").read_text() == page_with_table(framework), "python scripts/settings_tables.py"


RULES = [(framework, rule) for framework, found in FRAMEWORKS.items() for rule in found.rules]


@pytest.mark.parametrize(("framework", "rule"), RULES, ids=[f"{name}-{rule.setting}" for name, rule in RULES])
def test_a_rule_has_a_reason_and_no_break_in_its_message(framework: str, rule: Rule) -> None:
    """Tables have a line for each rule, and messages have one line."""
    assert rule.reason
    assert rule.supported
    assert not set("\n|") & set(rule.setting + rule.supported + rule.reason)
    assert (rule.verdict is None) <= (rule.holds is None), "a setting without a check supports all values"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_settings_are_listed_once(framework: str) -> None:
    names = [rule.setting for rule in FRAMEWORKS[framework].rules]
    assert sorted(set(names)) == sorted(names)


def test_areals_single_controller_starts_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = FRAMEWORKS["areal"].rules
    for mode, count in (("0", 0), ("1", 1), ("true", 1)):
        monkeypatch.setenv("AREAL_SPMD_MODE", mode)
        for backend in ("fsdp:d2", "fsdp:t2d4", "megatron:(attn:d4p2|ffn:d8)", "fsdp:d12"):
            assert len(list(broken(rules, {"actor.backend": backend}.get))) == count, (mode, backend)
        for backend in ("fsdp:d1", "fsdp:t2", "megatron:(attn:d1p2|ffn:d1e8)"):
            assert not list(broken(rules, {"actor.backend": backend}.get)), (mode, backend)


BROKEN: dict[str, dict[str, Any]] = {
    "verl": {
        "algorithm.adv_estimator": "remax",
        "actor_rollout_ref.rollout.disaggregation.enabled": True,
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "my.Manager",
        "trainer.v1.sampler.custom_sampler.name": "MySampler",
        "trainer.v1.april.parameter_sync_step": 2,
        "trainer.v1.sampler.max_off_policy_threshold": 4,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    },
    "slime": {
        "rollout-top-p": 0.9,
        "mask-offpolicy-in-partial-rollout": True,
        "use-rollout-routing-replay": True,
        "multimodal-keys": {"image": "image", "video": "video"},
        "buffer-filter-path": "my.filter",
        "sglang-server-concurrency": 64,
        "use-distributed-post": True,
    },
    "openrlhf": {
        "train.async_queue_size": 4,
        "data.max_images_per_prompt": 1,
        "rollout.vllm_generate_batch_size": 8,
        "rollout.max_new_tokens": 64,
        "algo.advantage.is_correction_level": "off",
    },
    "skyrl": {
        "trainer.fully_async.simulate_training": True,
        "trainer.fully_async.sample_full_batch": True,
        "generator.vision_language_generator": True,
        "generator.chat_template.name_or_path": "qwen3",
        "generator.sampling_params.additional_kwargs": {"bad_words": ["x"]},
        "generator.inference_engine.backend": "sglang",
        "generator.inference_engine.enable_pd": True,
        "generator.inference_engine.enable_return_sample_support_set": True,
        "generator.inference_engine.engine_init_kwargs.logprobs_mode": "raw_logprobs",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": None,
    },
    "areal": {
        "rollout._version": "v2",
        "rollout.return_routed_experts": True,
        "gconfig.min_new_tokens": 1,
        "gconfig.frequency_penalty": 0.5,
        "gconfig.ignore_eos": True,
        "gconfig.use_beam_search": True,
        "actor.backend": "fsdp:d2t2",
        "actor.scheduling_strategy.type": "colocation",
        "rollout.scheduling_strategy.type": "colocation",
        "actor.recompute_logprob": True,
    },
}
"""A value that each rule does not support."""

GIVEN: dict[str, dict[str, Any]] = {
    "slime": {"custom-generate-function-path": "my.generate"},
    "openrlhf": {"data.max_len": 64},
    "skyrl": {
        "generator.sampling_params.temperature": 0.7,
        "generator.inference_engine.engine_init_kwargs.logprobs_mode": "processed_logprobs",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
    },
    "areal": {
        "rollout.backend": "vllm:d1",
        "actor.use_decoupled_loss": False,
        "actor.backend": "fsdp:d1t2",
        "actor.scheduling_strategy.target": "rollout",
        "rollout.scheduling_strategy.target": "actor",
    },
}
"""Supported settings beside which those values are given."""


@pytest.mark.parametrize("framework", BROKEN)
def test_a_rule_is_broken_by_its_own_setting_alone(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    checked = FRAMEWORKS[framework].rules
    assert [rule.setting for rule in checked if rule.holds] == [
        rule.setting for rule in checked if rule.setting in BROKEN[framework]
    ]
    usual = GIVEN.get(framework, {})
    assert not list(broken(checked, usual.get)), "these are supported"
    for setting, value in BROKEN[framework].items():
        given = {**usual, setting: value}
        assert [(rule.setting, found) for rule, found in broken(checked, given.get)] == [(setting, value)]
        rule = next(rule for rule in checked if rule.setting == setting)
        if rule.verdict is Verdict.REFUSED:
            with pytest.raises(ValueError, match=rf"^{setting} = .*: .+"):
                check(checked, given.get)
