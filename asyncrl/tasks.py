"""Procedural prompt sources: functions from a seed to a question, named by import path in `data.train.task`.

Your own is a function `task(seed: int, **args) -> Question` (or a plain `(prompt, answer)`). It must be pure: the same
seed gives the same question, in every process. Which questions are held out for evaluation is not its business:
`asyncrl.data` decides that by a hash of the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.tokenizer import Message


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its answer.

    Attributes:
        prompt: text, or chat messages that go through the tokenizer's chat template.
        answer: what the reward function compares with.
    """

    prompt: str | Sequence[Message]
    answer: str


def copy(seed: int, *, length: int = 4, alphabet: str = "0123456789") -> Question:
    """Write these characters again.

    Example: `Question("c3141>", "3141")`.
    """
    text = _characters(seed, length, alphabet)
    return Question(f"c{text}>", text)


def sort(seed: int, *, length: int = 6, alphabet: str = "0123456789") -> Question:
    """Write these characters in the order of the alphabet.

    Example: `Question("s314159>", "113459")`.
    """
    text = _characters(seed, length, alphabet)
    return Question(f"s{text}>", "".join(sorted(text, key=alphabet.index)))


def _characters(seed: int, length: int, alphabet: str) -> str:
    if length < 1 or not alphabet:
        raise ValueError(f"length must be >= 1 and alphabet not empty, got {length} and {alphabet!r}")

    return "".join(random.Random(seed).choices(alphabet, k=length))
