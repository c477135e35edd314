"""Reward functions, and import paths that lead somewhere or say why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards import Completion, Score, contains_answer, copy_shaped, exact_match, last_number, load_reward
from asyncrl.schema import Reward


def completion(response: str, *, answer: str = "3141", finished: bool = True) -> Completion:
    return Completion(prompt=f"c{answer}>", response=response, token_ids=(), finished=finished, answer=answer)


@pytest.mark.parametrize(
    ("response", "finished", "reward", "correct"),
    [
        ("3141", True, 1.0, True),
        ("3141", False, 0.5 * 4 / 5, False),  # did not stop: the end position is wrong
        ("3142", True, 0.5 * 4 / 5, False),
        ("314", True, 0.5 * 3 / 5, False),  # stopped a position too early
        ("31415", True, 0.5 * 4 / 6, False),
        ("31415", False, 0.5 * 4 / 5, False),
        ("", True, 0.0, False),
        ("", False, 0.0, False),
        ("1413", True, 0.5 * 1 / 5, False),
        ("<pad>", False, 0.0, False),
    ],
)
def test_copy_shaped_pays_positions_and_the_end(response: str, finished: bool, reward: float, correct: bool) -> None:
    assert copy_shaped(completion(response, finished=finished)) == Score(reward=pytest.approx(reward), correct=correct)


@given(st.text("0123456789", max_size=8), st.text("0123456789", min_size=1, max_size=8), st.booleans())
def test_copy_shaped_is_1_only_for_the_answer_and_never_pays_for_going_on(
    response: str, answer: str, finished: bool
) -> None:
    score = copy_shaped(completion(response, answer=answer, finished=finished))
    assert 0 <= score.reward <= 1
    assert score.correct == (finished and response == answer) == (score.reward == 1)
    if response == answer:
        assert copy_shaped(completion(f"{response}0", answer=answer, finished=False)).reward < 1
        assert copy_shaped(completion(response, answer=answer)).reward == 1


@pytest.mark.parametrize(
    ("response", "finished", "correct"),
    [("3141", True, True), (" 3141\n", True, True), ("3141", False, False), ("31411", True, False), ("", True, False)],
)
def test_exact_match(response: str, finished: bool, correct: bool) -> None:
    assert exact_match(completion(response, finished=finished)) == Score(reward=float(correct), correct=correct)


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("it is 12.", "12", True),
        ("it is 312", "12", False),
        ("a+b", "a+b", True),
        ("Paris, of course", "Paris", True),
        ("Parisian", "Paris", False),
        ("", "12", False),
    ],
)
def test_contains_answer_as_a_word(response: str, answer: str, correct: bool) -> None:
    assert contains_answer(completion(response, answer=answer)) == Score(reward=float(correct), correct=correct)


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        ("5 and 7 make 12", "12", True),
        ("it makes 1,234.0 in all", "1234", True),
        ("12, not 13", "12", False),
        ("-3", "-3", True),
        ("3", "-3", False),
        ("none", "3", False),
    ],
)
def test_last_number(response: str, answer: str, correct: bool) -> None:
    assert last_number(completion(response, answer=answer)) == Score(reward=float(correct), correct=correct)


def test_weight_scales_the_reward_and_not_the_judgement() -> None:
    reward = load_reward(Reward(function="asyncrl.rewards:exact_match", weight=0.25))
    assert reward(completion("3141")) == Score(reward=0.25, correct=True)
    assert load_reward(Reward(function="asyncrl.rewards:exact_match")) is exact_match


def test_a_function_in_a_file_with_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(completion, *, per=1.0):\n    return len(completion.response) / per\n")
    reward = load_reward(Reward(function=f"{file}:length", args={"per": 2}, weight=3.0))
    assert reward(completion("abcd")) == 6.0


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    results = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        file = tmp_path / str(number) / "same.py"
        file.write_text(f"def value(completion):\n    return {number}\n")
        results.append(load_reward(Reward(function=f"{file}:value"))(completion("")))

    assert results == [1, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("asyncrl.rewards:exact_mach", "asyncrl.rewards has no exact_mach; did you mean asyncrl.rewards:exact_match?"),
        ("asyncrl.rewards:qqq", "asyncrl.rewards has no qqq"),
        ("no_such_module:f", "no module no_such_module; a file is written path/to/no_such_module.py:f"),
        ("asyncrl.nothing:f", "no module asyncrl.nothing; a file is written path/to/nothing.py:f"),
        ("math:pi", "pi is a float, not a function"),
        ("asyncrl.rewards", 'must be "module:function" or "path/to/file.py:function"'),
        ("rewards:a b", 'must be "module:function" or "path/to/file.py:function"'),
        ("nowhere/file.py:f", f"no file {Path.cwd()}/nowhere/file.py"),
    ],
)
def test_an_import_path_that_leads_nowhere_says_where_it_ends(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^reward\.function = ") as caught:
        load_reward(Reward(function=function))

    assert str(caught.value) == f'reward.function = "{function}": {message}'


def test_arguments_that_do_not_fit_are_told_with_those_that_do(tmp_path: Path) -> None:
    file = tmp_path / "args.py"
    file.write_text(
        "def f(completion, *, scale=1, shift=0):\n    return 0\n\ndef g(completion, needed):\n    return 0\n"
    )
    with pytest.raises(ValueError, match=r"got an unexpected keyword argument 'scal'; it takes: scale, shift$"):
        load_reward(Reward(function=f"{file}:f", args={"scal": 2}))

    with pytest.raises(ValueError, match=r"missing a required argument: 'needed'; it takes: needed$"):
        load_reward(Reward(function=f"{file}:g"))


def test_a_module_that_raises_or_lacks_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no data')\n")
    (tmp_path / "needy_reward.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"importing it raised RuntimeError: no data") as caught:
        load_reward(Reward(function="broken_reward:f"))

    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"needy_reward needs package_that_is_not_there, which is not installed"):
        load_reward(Reward(function="needy_reward:f"))

    with pytest.raises(ValueError, match=r"running it raised RuntimeError: no data"):
        load_reward(Reward(function=f"{tmp_path}/broken_reward.py:f"))
