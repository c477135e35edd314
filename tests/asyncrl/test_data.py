"""Prompts: pure functions of the index, held-out prompts apart, every broken line by file and number."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import PromptSets, is_held_out, open_prompts
from asyncrl.data_files import DataError
from asyncrl.schema import Data, Source
from asyncrl.tasks import Question, copy, sort
from asyncrl.tokenizer import BOS_ID, TextTokenizer, char_tokenizer_folder

TOKENIZER = TextTokenizer(char_tokenizer_folder())
COPY = Source(task="asyncrl.tasks:copy")


def open_(
    train: Source, evaluation: Source | None = None, *, seed: int = 0, num_eval: int = 0, max_prompt_tokens: int = 27
) -> PromptSets:
    return open_prompts(
        Data(train=train, eval=evaluation),
        seed=seed,
        num_eval_prompts=num_eval,
        tokenizer=TOKENIZER,
        max_prompt_tokens=max_prompt_tokens,
    )


def write_jsonl(file: Path, rows: list[Any]) -> Source:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Source(path=str(file))


def test_copy_prompt_is_as_the_model_reads_it() -> None:
    (prompt,) = open_(COPY).train.take(17, 1)
    assert (prompt.uid, prompt.index) == ("copy-000017", 17)
    assert prompt.text == f"c{prompt.answer}>"
    assert len(prompt.answer) == 4
    assert prompt.token_ids == (BOS_ID, *TOKENIZER.encode_batch([prompt.text], add_special_tokens=False)[0])


def test_tasks_are_pure_and_right() -> None:
    assert copy(3) == copy(3) != copy(4)
    for seed in range(20):
        question = sort(seed, length=6)
        assert question.answer == "".join(sorted(str(question.prompt)[1:-1]))
        assert question.prompt[0] == "s"

    assert sort(1, length=3, alphabet="ba").answer in {"bbb", "bba", "baa", "aaa"}


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(0, 2**40))
def test_take_is_a_pure_function_of_the_index(first: int, count: int, seed: int) -> None:
    """One cursor resumes a run: any cut of the same range gives the same prompts, in a new process too."""
    whole = open_(COPY, seed=seed).train.take(first, count)
    source = open_(COPY, seed=seed).train
    assert tuple(source.take(first + place, 1)[0] for place in reversed(range(count)))[::-1] == whole
    assert [prompt.index for prompt in whole] == list(range(first, first + count))


def test_seeds_give_different_questions_and_epochs_different_orders(tmp_path: Path) -> None:
    answers = [tuple(p.answer for p in open_(COPY, seed=seed).train.take(0, 8)) for seed in range(4)]
    assert len(set(answers)) == 4
    source = write_jsonl(tmp_path / "d.jsonl", [{"prompt": f"{i}", "answer": i} for i in range(30)])
    train = open_(source).train
    epochs = [[p.uid for p in train.take(epoch * 30, 30)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [p.uid for p in train.take(25, 10)] == [*epochs[0][25:], *epochs[1][:5]]
    assert [p.uid for p in open_(source, seed=1).train.take(0, 30)] != epochs[0]


def test_held_out_prompts_never_occur_in_training() -> None:
    sets = open_(COPY, num_eval=256)
    held_out = {prompt.text for prompt in sets.eval}
    assert len(held_out) == len(sets.eval) == 256
    assert all(is_held_out(text) for text in held_out)
    trained = {prompt.text for prompt in sets.train.take(0, 20_000)}
    assert len(trained) > 7_000  # most of the 9,000 that are left
    assert not any(is_held_out(text) for text in trained)


def test_held_out_set_is_the_same_for_every_seed_and_its_uids_count() -> None:
    first, second = open_(COPY, num_eval=64).eval, open_(COPY, seed=5, num_eval=64).eval
    assert first == second
    assert [prompt.uid for prompt in first] == [f"copy-eval-{index:06d}" for index in range(64)]
    assert [prompt.index for prompt in first] == list(range(64))


def test_training_is_the_same_with_evaluation_on_and_off() -> None:
    assert open_(COPY, num_eval=64).train.take(0, 100) == open_(COPY).train.take(0, 100)


def test_too_small_a_task_is_told() -> None:
    one_digit = Source(task="asyncrl.tasks:copy", args={"length": 1})
    with pytest.raises(DataError, match=r"only \d different held-out questions; eval.num_prompts asks for 64$"):
        open_(one_digit, num_eval=64)


def test_a_task_whose_questions_are_all_held_out_is_told(tmp_path: Path) -> None:
    text = next(f"q{number}" for number in range(1000) if is_held_out(f"q{number}"))
    file = tmp_path / "only.py"
    file.write_text(f"def only(seed):\n    return {text!r}, 'a'\n")
    with pytest.raises(DataError, match=r"1000 questions drawn, all of them held out"):
        open_(Source(task=f"{file}:only"))


def test_a_file_for_evaluation_is_taken_out_of_a_task(tmp_path: Path) -> None:
    asked = [prompt.text for prompt in open_(COPY).train.take(0, 50)]
    rows = [{"prompt": text, "answer": text[1:-1]} for text in dict.fromkeys(asked)]
    sets = open_(COPY, write_jsonl(tmp_path / "eval.jsonl", rows), num_eval=len(rows))
    assert not {prompt.text for prompt in sets.train.take(0, 200)} & set(asked)
    assert [prompt.text for prompt in sets.eval] == [row["prompt"] for row in rows]


def test_a_row_on_both_sides_is_refused_by_both_places(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "x"}])
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "c", "answer": "x"}, {"prompt": "b", "answer": "y"}])
    message = rf"^{tmp_path}/train.jsonl:2: this prompt is held out for evaluation, {tmp_path}/eval.jsonl:2; drop one$"
    with pytest.raises(DataError, match=message):
        open_(train, held_out, num_eval=1)

    with pytest.raises(DataError, match=message):  # whether or not it evaluates
        open_(train, held_out, num_eval=0)


def test_a_held_out_file_must_be_long_enough_and_without_repeats(tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "c", "answer": "x"}, {"prompt": "c", "answer": "y"}])
    with pytest.raises(DataError, match=r"2 rows, eval.num_prompts = 3; eval.num_prompts=2 takes all$"):
        open_(COPY, held_out, num_eval=3)

    with pytest.raises(
        DataError, match=r"eval.jsonl:2: the same prompt as .*eval.jsonl:1; evaluation prompts must dif"
    ):
        open_(COPY, held_out, num_eval=2)


def test_jsonl_rows(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "1+1=", "answer": 2, "source": "ignored"},
        {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "id": "chat"},
        {"prompt": "3*1.5=", "answer": 4.5, "id": 7},
    ]
    file = tmp_path / "sums.jsonl"
    file.write_text(f"\n{json.dumps(rows[0])}\r\n\n{json.dumps(rows[1])}\n{json.dumps(rows[2])}")
    found = {prompt.uid: prompt for prompt in open_(Source(path=str(file))).train.take(0, 3)}
    assert set(found) == {"sums-000002", "chat", "7"}
    assert [found[uid].answer for uid in ("sums-000002", "chat", "7")] == ["2", "4", "4.5"]
    assert found["chat"].text == "<bos>2+2="
    assert found["chat"].token_ids == TOKENIZER.encode_batch(["2+2="])[0]
    assert found["sums-000002"].text == "1+1="


def test_parquet_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    table = {"prompt": ["a", "b"], "answer": ["x", "y"], "id": ["first", None], "more": [1.0, 2.0]}
    parquet.write_table(pyarrow.table(table), file)
    found = {prompt.uid: prompt.answer for prompt in open_(Source(path=str(file))).train.take(0, 2)}
    assert found == {"first": "x", "rows-000002": "y"}

    parquet.write_table(pyarrow.table({"prompt": ["a", ""], "answer": ["x", "y"]}), file)
    with pytest.raises(DataError, match=r"rows.parquet: row 2: prompt is empty$"):
        open_(Source(path=str(file)))

    file.write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"rows.parquet: "):
        open_(Source(path=str(file)))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"parquet needs pyarrow: install asyncrl\[data\]$"):
        open_(Source(path=str(tmp_path / "rows.parquet")))


GOOD = '{"prompt": "a", "answer": "b"}'
BROKEN_LINES = {
    "{": "not JSON: Expecting property name enclosed in double quotes at column 2",
    '{"prompt": "a" "answer": 1}': "not JSON: Expecting ',' delimiter at column 16",
    "[1, 2]": "must be an object with prompt and answer, not a list",
    '"text"': "must be an object with prompt and answer, not text",
    '{"prompt": "a"}': "no answer; keys here: prompt",
    '{"question": "a", "answer": "b"}': "no prompt; keys here: question, answer",
    "{}": "no prompt; keys here: none",
    '{"prompt": "", "answer": "b"}': "prompt is empty",
    '{"prompt": [], "answer": "b"}': "prompt has no messages",
    '{"prompt": 3, "answer": "b"}': "prompt must be text or a list of messages, not a number",
    '{"prompt": "a", "answer": ["b"]}': "answer must be text or a number, not a list",
    '{"prompt": "a", "answer": true}': "answer must be text or a number, not true or false",
    '{"prompt": "a", "answer": null}': "no answer; keys here: prompt, answer",
    '{"prompt": "a", "answer": "b", "id": 1.5}': "id must be text or a whole number, not a number",
    '{"prompt": ["a"], "answer": "b"}': "message 1 must have exactly role and content, not text",
    '{"prompt": [{"role": "user"}], "answer": "b"}': "message 1 must have exactly role and content, not keys role",
    '{"prompt": [{"role": "user", "content": 1}], "answer": "b"}': (
        "message 1: role and content must be text, not text and a number"
    ),
    '{"prompt": "123456789012345678901234567890", "answer": "b"}': (
        "prompt has 31 tokens, but generator.max_model_len - generator.max_new_tokens leaves room for 27"
    ),
    '{"prompt": "Ä", "answer": "b"}': "prompt has characters that the tokenizer does not know: 'Ä'",
}


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f"{GOOD}\n{GOOD}\n{line}\n{GOOD}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        open_(Source(path=str(file)))

    assert str(caught.value) == f"{file}:3: {BROKEN_LINES[line]}"


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(f"{GOOD}\n".encode() + b'{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match=r"train.jsonl:2: not UTF-8 text: byte 12 of the line$"):
        open_(Source(path=str(file)))


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [
        {"prompt": "a", "answer": "b", "id": "x"},
        {"prompt": "c", "answer": "d"},
        {"prompt": "e", "answer": 1, "id": "x"},
    ]
    with pytest.raises(DataError, match=rf'^{file}:3: id "x" is taken by {file}:1$'):
        open_(write_jsonl(file, rows))


def test_an_empty_or_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train.jsonl: no rows$"):
        open_(write_jsonl(tmp_path / "train.jsonl", []))

    with pytest.raises(DataError, match=r"none.jsonl: No such file or directory$"):
        open_(Source(path=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'a'", r"mine.py:task, seed \d+: must return a Question or \(prompt, answer\), .*not 'a'$"),
        ("return 'a', 1", r"the answer as text, not Question\(prompt='a', answer=1\)$"),
        ("return '', 'b'", r"mine.py:task, seed \d+: prompt is empty$"),
        ("raise RuntimeError('no data')", r"mine.py:task, seed \d+: raised RuntimeError: no data \(.*mine.py:2\)$"),
        ("return 'a' * 40, 'b'", r"mine.py:task, seed \d+: prompt has 41 tokens, but .* leaves room for 27$"),
    ],
)
def test_a_task_that_cannot_be_used_says_so_at_once(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def task(seed):\n    {body}\n")
    with pytest.raises(DataError, match=message):
        open_(Source(task=f"{file}:task"))


def test_a_task_of_ones_own_with_chat(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from asyncrl.tasks import Question\n"
        "def add(seed, *, most=9):\n"
        "    a, b = seed % (most + 1), seed // 16 % (most + 1)\n"
        "    return Question([{'role': 'user', 'content': f'{a}+{b}='}], str(a + b))\n"
    )
    prompts = open_(Source(task=f"{file}:add", args={"most": 5})).train.take(0, 40)
    counts = Counter(prompt.text for prompt in prompts)
    assert len(counts) > 10
    for prompt in prompts:
        assert prompt.text.startswith("<bos>")
        assert eval(prompt.text[5:-1]) == int(prompt.answer)  # noqa: S307 - a sum that we wrote


def test_wrong_arguments_of_a_task_are_told() -> None:
    with pytest.raises(
        ValueError, match=r'^data.train.task = "asyncrl.tasks:copy": args .*it takes: length, alphabet$'
    ):
        open_(Source(task="asyncrl.tasks:copy", args={"lenght": 4}))

    with pytest.raises(DataError, match=r"raised ValueError: length must be >= 1"):
        open_(Source(task="asyncrl.tasks:copy", args={"length": 0}))


def test_a_question_is_a_plain_pair_too() -> None:
    assert Question("a", "b") == Question(prompt="a", answer="b")
