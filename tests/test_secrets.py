"""Secrets are referred to by name, and are in nothing that is written."""

from __future__ import annotations

import pytest

from april.secrets import redact, redacted, references, resolved, secrets, without_secrets


def test_a_nested_reference_is_replaced_by_its_variable() -> None:
    address = "http://${HOST}/?key=${MY_KEY}"
    settings = {"url": address, "headers": [{"x": "Bearer ${MY_KEY}"}], "text": "$${HOST}", "n": 3}
    assert resolved(settings, {"HOST": "h", "MY_KEY": "k"}) == {
        "url": "http://h/?key=k",
        "headers": [{"x": "Bearer k"}],
        "text": "${HOST}",
        "n": 3,
    }
    assert list(references(settings)) == ["HOST", "MY_KEY", "MY_KEY"]
    with pytest.raises(KeyError, match="MY_KEY"):
        resolved(settings, {"HOST": "h"})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"api_key": "sk-1"}, {"api_key": "***"}),
        ({"headers": {"Authorization": "Bearer sk-1"}}, {"headers": {"Authorization": "***"}}),
        ({"tokens": ["a", "b"]}, {"tokens": ["***", "***"]}),
        ({"api_key": "${MY_KEY}"}, {"api_key": "${MY_KEY}"}),
        ({"url": "https://h/v1?a=1&api_key=sk-1#x"}, {"url": "https://h/v1?a=1&api_key=***#x"}),
        ({"url": "https://h/v1?api_key=${MY_KEY}"}, {"url": "https://h/v1?api_key=${MY_KEY}"}),
        ({"url": "redis://me:hunter2@h"}, {"url": "redis://***@h"}),
        ({"max_tokens": 5, "author": "me", "tokenizer": "t", "keyword": "w"}, None),
    ],
)
def test_settings_are_written_without_secrets(given: dict[str, object], kept: dict[str, object] | None) -> None:
    assert redacted(given) == (given if kept is None else kept)
    assert redacted(redacted(given)) == redacted(given)


def test_text_is_written_without_the_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", 'sk-"1234567')
    monkeypatch.setenv("SHORT_KEY", "abc")
    assert redact('401 for key sk-"1234567, abc') == "401 for key ***, abc"
    assert redact(r'{"error": "sk-\"1234567"}') == '{"error": "***"}'


def test_a_clean_environment_has_only_the_kept_secrets() -> None:
    environment = {"PATH": "/bin", "WANDB_API_KEY": "k", "HF_TOKEN": "t", "PROXY": "http://me:pw@h", "AUTHOR": "me"}
    assert secrets(environment) == ["WANDB_API_KEY", "HF_TOKEN", "PROXY"]
    assert without_secrets(environment, ["HF_TOKEN"]) == {"PATH": "/bin", "HF_TOKEN": "t", "AUTHOR": "me"}
