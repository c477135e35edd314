"""Reward functions: how one response is judged. Named in a recipe by import path, `reward.function`.

A reward function takes a `Completion` (and the recipe's `reward.args`) and returns a `Score`, or a plain number where
there is no notion of a right answer. It is pure and quick: it runs in the driver, once for every sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from asyncrl.imports import load_callable
from asyncrl.schema import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a reward function sees of one sample.

    Attributes:
        prompt: the text that the model read.
        response: the text that it wrote, without the end token; other special tokens are spelled out.
        token_ids: the response, end token included.
        finished: whether the model ended the response itself; False if it was cut at `generator.max_new_tokens`.
        answer: the data's answer.

    Example: Completion(prompt="c3141>", response="3141", token_ids=(7, 5, 8, 5, 2), finished=True, answer="3141").
    """

    prompt: str
    response: str
    token_ids: tuple[int, ...]
    finished: bool
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A judgement.

    Attributes:
        reward: what is optimized; finite.
        correct: whether the answer is right, for accuracy; None where that has no meaning.
    """

    reward: float
    correct: bool | None = None


RewardFunction = Callable[[Completion], Score | float]


def load_reward(section: Reward) -> RewardFunction:
    """Return the recipe's reward function with its arguments and weight applied.

    Raises:
        UserError: the import path leads nowhere or the arguments do not fit; see `imports.load_callable`.
    """
    args, weight = dict(section.args or {}), section.weight
    function = load_callable(section.function, args, key="reward.function")
    if not args and weight == 1.0:
        return function

    def weighted(completion: Completion) -> Score | float:
        score = function(completion, **args)
        return replace(score, reward=score.reward * weight) if isinstance(score, Score) else score * weight

    return weighted


def exact_match(completion: Completion) -> Score:
    """1 if the response is the answer (surrounding blanks aside) and was ended by the model, else 0."""
    correct = completion.finished and completion.response.strip() == completion.answer.strip()
    return Score(reward=float(correct), correct=correct)


def copy_shaped(completion: Completion) -> Score:
    """Half for the share of positions that are right, half for all of them.

    The end token counts as a position: without it a model that copies well is paid for going on, and never learns to
    stop. The longer of response and answer is the denominator.

    Example: answer "3141", response "3142" that ended: positions 3 1 4 and the end of 5 are right, 0.5 * 4/5 = 0.4.
    """
    written = [*completion.response, *([None] if completion.finished else [])]
    wanted = [*completion.answer, None]
    num_right = sum(a == b for a, b in zip(written, wanted, strict=False))
    correct = written == wanted
    return Score(reward=0.5 * num_right / max(len(written), len(wanted)) + 0.5 * correct, correct=correct)


def contains_answer(completion: Completion) -> Score:
    """1 if the answer occurs in the response as a word of its own ("12" is not in "312"), else 0."""
    pattern = rf"(?<!\w){re.escape(completion.answer.strip())}(?!\w)"
    correct = re.search(pattern, completion.response) is not None
    return Score(reward=float(correct), correct=correct)


def last_number(completion: Completion) -> Score:
    """1 if the last number of the response equals the answer as a number ("1,234.0" equals "1234"), else 0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion.response)
    correct = bool(numbers) and _as_number(numbers[-1]) == _as_number(completion.answer)
    return Score(reward=float(correct), correct=correct)


def _as_number(text: str) -> float:
    """Return a number written with or without thousands' commas."""
    return float(text.strip().replace(",", ""))
