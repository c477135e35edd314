"""Prompts, in an order that depends on the seed and the place in the run only, and a held-out set apart from them.

`take` is a pure function of the index, so one cursor resumes a run. Evaluation prompts never occur in training: for a
task a hash of the prompt's content says which of the two it belongs to, for files an overlap is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.data_files import DataError, check_prompt, read_rows
from asyncrl.imports import load_callable
from asyncrl.schema import Data, Source
from asyncrl.tasks import Question
from asyncrl.tokenizer import Message, TextTokenizer
from asyncrl.types import Prompt
from asyncrl.user_error import UserError, raised_where
from engine.seeds import Purpose, derive_seed

HELD_OUT_SHARE = 10
"""One of this many questions of a task, by hash of the content, is never trained on."""

_MAX_DRAWS = 1000  # for one prompt; a task whose questions nearly all belong to the other side has too few
_EVALUATION_SEED = 0  # the held-out set is the same for every seed of the run, so that runs can be compared

RawPrompt = str | tuple[Message, ...]


class PromptSource(Protocol):
    """Training prompts, addressed by their place in the run."""

    def take(self, first_index: int, count: int) -> tuple[Prompt, ...]:
        """Return prompts first_index, ..., first_index + count - 1; the same for the same arguments, always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSets:
    """Both sides of the data.

    Attributes:
        train: endless, by index.
        eval: held-out prompts, unique, index counted from 0.
    """

    train: PromptSource
    eval: tuple[Prompt, ...]


def open_prompts(
    data: Data, *, seed: int, num_eval_prompts: int, tokenizer: TextTokenizer, max_prompt_tokens: int
) -> PromptSets:
    """Open what a recipe names, checked as far as it can be before the first step.

    Args:
        data: the recipe's section.
        seed: the run's seed: order of a file, questions of a task.
        num_eval_prompts: held-out prompts to make; 0 if the run does not evaluate. Training's prompts do not depend
            on it.
        tokenizer: the model's.
        max_prompt_tokens: longest prompt that leaves room for a response (`recipe.max_prompt_tokens`).

    Raises:
        DataError: a broken row by file and line, a prompt that is too long or that the tokenizer cannot spell, too few
            held-out prompts, a prompt that occurs on both sides.
        UserError: a task that cannot be imported, or arguments that it does not take.
    """
    reader = _Reader(tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)
    held_out_file = data.eval.path if data.eval is not None else None
    held_out = _file_rows(Path(held_out_file), reader) if held_out_file is not None else ()
    if data.train.path is not None:
        train: PromptSource = FilePrompts(rows=_file_rows(Path(data.train.path), reader), seed=seed)
    else:
        task = _open_task(data.train, "data.train")
        train = TaskPrompts(task=task, seed=seed, reader=reader, excluded=frozenset(row.content for row in held_out))
        train.take(0, 1)  # a task that cannot run says so now

    if num_eval_prompts == 0:
        evaluation: tuple[_Row, ...] = ()
    elif held_out_file is not None:
        evaluation = _first_rows(held_out, num_eval_prompts, held_out_file)
    else:
        source, key = (data.train, "data.train") if data.eval is None else (data.eval, "data.eval")
        evaluation = _held_out_rows(_open_task(source, key), num_eval_prompts, reader)

    if isinstance(train, FilePrompts):
        _check_disjoint(train.rows, held_out if held_out_file is not None else evaluation)

    return PromptSets(train=train, eval=tuple(row.as_prompt(index) for index, row in enumerate(evaluation)))


def is_held_out(prompt: RawPrompt) -> bool:
    """Return whether a task's prompt belongs to evaluation. Depends on the content only, not on any seed."""
    digest = hashlib.blake2b(_content(prompt).encode(), digest_size=8, person=b"asyncrl-held-out").digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One tokenized question; `place` says where it is from, `content` is what makes it the same as another."""

    place: str
    uid: str
    content: str
    text: str
    token_ids: tuple[int, ...]
    answer: str

    def as_prompt(self, index: int) -> Prompt:
        return Prompt(uid=self.uid, index=index, text=self.text, token_ids=self.token_ids, answer=self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A question before it is tokenized."""

    place: str
    uid: str
    prompt: RawPrompt
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Turns drafts into rows: chat template, tokenizer, and the checks that need token ids."""

    tokenizer: TextTokenizer
    max_prompt_tokens: int

    def read(self, drafts: Sequence[_Draft]) -> tuple[_Row, ...]:
        chats = [not isinstance(draft.prompt, str) for draft in drafts]
        texts = [self._render(draft) for draft in drafts]
        token_ids: list[tuple[int, ...]] = [()] * len(drafts)
        for is_chat in (False, True):
            places = [place for place, chat in enumerate(chats) if chat == is_chat]
            chosen = [texts[place] for place in places]
            encoded = self.tokenizer.encode_batch(chosen, add_special_tokens=not is_chat)
            for place, ids in zip(places, encoded, strict=True):
                token_ids[place] = ids

        return tuple(self._check(*question) for question in zip(drafts, texts, token_ids, strict=True))

    def _render(self, draft: _Draft) -> str:
        if isinstance(draft.prompt, str):
            return draft.prompt

        try:
            return self.tokenizer.render_chat(draft.prompt)
        except UserError as error:
            raise DataError(f"{draft.place}: {str(error).splitlines()[0]}") from None

    def _check(self, draft: _Draft, text: str, token_ids: tuple[int, ...]) -> _Row:
        if not token_ids:
            raise DataError(f"{draft.place}: prompt has no tokens")

        if len(token_ids) > self.max_prompt_tokens:
            raise DataError(
                f"{draft.place}: prompt has {len(token_ids)} tokens, but generator.max_model_len - "
                f"generator.max_new_tokens leaves room for {self.max_prompt_tokens}"
            )

        if self.tokenizer.unknown_id in token_ids:
            raise DataError(f"{draft.place}: prompt has characters that the tokenizer does not know: {text[:60]!r}")

        content = _content(draft.prompt)
        return _Row(
            place=draft.place, uid=draft.uid, content=content, text=text, token_ids=token_ids, answer=draft.answer
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrompts:
    """Rows of a file, shuffled anew in every epoch.

    Example: with 100 rows, prompt 250 is place 50 of epoch 2's order.
    """

    rows: tuple[_Row, ...]
    seed: int

    def take(self, first_index: int, count: int) -> tuple[Prompt, ...]:
        """See `PromptSource`."""
        prompts = []
        for index in _indices(first_index, count):
            epoch, place = divmod(index, len(self.rows))
            row = self.rows[_epoch_order(self.seed, epoch, len(self.rows))[place]]
            prompts.append(row.as_prompt(index))

        return tuple(prompts)


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Return a permutation of the rows."""
    order = np.random.Generator(np.random.PCG64(derive_seed(seed, Purpose.DATA_ORDER, epoch))).permutation(num_rows)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A procedural source, ready to be asked."""

    path: str
    function: Callable[..., Any]
    args: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.rpartition(":")[2]

    def draw(self, seed: int, uid: str) -> _Draft:
        """Ask one question."""
        place = f"{self.path}, seed {seed}"
        try:
            question = self.function(seed, **self.args)
        except Exception as error:
            raise DataError(f"{place}: {raised_where(error)}") from error

        if isinstance(question, tuple) and len(question) == 2:
            question = Question(*question)

        if not isinstance(question, Question) or not isinstance(question.answer, str):
            raise DataError(
                f"{place}: must return a Question or (prompt, answer), the answer as text, not {question!r}"
            )

        return _Draft(place=place, uid=uid, prompt=check_prompt(place, question.prompt), answer=question.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrompts:
    """Questions of a task that are not held out, endless; `excluded` are contents of a held-out file."""

    task: _Task
    seed: int
    reader: _Reader
    excluded: frozenset[str] = frozenset()

    def take(self, first_index: int, count: int) -> tuple[Prompt, ...]:
        """See `PromptSource`."""
        indices = _indices(first_index, count)
        rows = self.reader.read([self._draw(index) for index in indices])
        return tuple(row.as_prompt(index) for row, index in zip(rows, indices, strict=True))

    def _draw(self, index: int) -> _Draft:
        for draw in range(_MAX_DRAWS):
            seed = derive_seed(self.seed, Purpose.DATA_ORDER, index, draw)
            draft = self.task.draw(seed, f"{self.task.name}-{index:06d}")
            if not is_held_out(draft.prompt) and _content(draft.prompt) not in self.excluded:
                return draft

        raise DataError(f"{self.task.path}: {_MAX_DRAWS} questions drawn, all of them held out: it has too few")


def _open_task(source: Source, key: str) -> _Task:
    assert source.task is not None
    args = source.args or {}
    function = load_callable(source.task, args, key=f"{key}.task")
    return _Task(path=source.task, function=function, args=dict(args))


def _held_out_rows(task: _Task, count: int, reader: _Reader) -> tuple[_Row, ...]:
    """Return `count` different held-out questions of a task."""
    drafts: dict[str, _Draft] = {}
    for draw in range(count * HELD_OUT_SHARE * 20):
        seed = derive_seed(_EVALUATION_SEED, Purpose.EVALUATION, "questions", draw)
        draft = task.draw(seed, f"{task.name}-eval-{len(drafts):06d}")
        if is_held_out(draft.prompt):
            drafts.setdefault(_content(draft.prompt), draft)

        if len(drafts) == count:
            return reader.read(list(drafts.values()))

    raise DataError(f"{task.path}: only {len(drafts)} different held-out questions; eval.num_prompts asks for {count}")


def _file_rows(path: Path, reader: _Reader) -> tuple[_Row, ...]:
    return reader.read(
        [_Draft(place=row.place, uid=row.uid, prompt=row.prompt, answer=row.answer) for row in read_rows(path)]
    )


def _first_rows(rows: tuple[_Row, ...], count: int, path: str) -> tuple[_Row, ...]:
    """Return the first rows of a held-out file, all different."""
    if len(rows) < count:
        raise DataError(f"{path}: {len(rows)} rows, eval.num_prompts = {count}; eval.num_prompts={len(rows)} takes all")

    places: dict[str, str] = {}
    for row in rows[:count]:
        if row.content in places:
            raise DataError(f"{row.place}: the same prompt as {places[row.content]}; evaluation prompts must differ")

        places[row.content] = row.place

    return rows[:count]


def _check_disjoint(train: tuple[_Row, ...], held_out: tuple[_Row, ...]) -> None:
    places = {row.content: row.place for row in held_out}
    for row in train:
        if row.content in places:
            raise DataError(f"{row.place}: this prompt is held out for evaluation, {places[row.content]}; drop one")


def _indices(first_index: int, count: int) -> range:
    assert first_index >= 0, first_index
    assert count >= 0, count
    return range(first_index, first_index + count)


def _content(prompt: RawPrompt) -> str:
    """Return what makes two prompts the same."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
