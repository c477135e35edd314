"""A reward function of your own. Use it from the command line, with no change to any recipe:

    python -m asyncrl.train --config configs/grpo_copy.yaml reward.function=examples/my_reward.py:vowels \\
        reward.args.wanted=3 trainer.num_steps=50

It teaches the model to write exactly three vowels.
"""

from __future__ import annotations

from asyncrl.rewards import Completion, Score


def vowels(completion: Completion, *, wanted: int = 3) -> Score:
    """1 minus a quarter for each vowel too many or too few; right if there are exactly `wanted`.

    Example: "a7eo" has 3 vowels: with wanted=3 the reward is 1.0.
    """
    num_vowels = sum(character in "aeiou" for character in completion.response)
    return Score(reward=max(0.0, 1.0 - abs(num_vowels - wanted) / 4), correct=num_vowels == wanted)
