"""The character tokenizer is a real one, and the driver's quick way agrees with transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.schema import CHAR_VOCAB_SIZE
from asyncrl.tokenizer import (
    BOS_ID,
    CHARACTERS,
    EOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    UNK_ID,
    TextTokenizer,
    char_tokenizer_folder,
    write_char_tokenizer,
)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(char_tokenizer_folder())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def quick() -> TextTokenizer:
    return TextTokenizer(char_tokenizer_folder())


def test_committed_files_are_what_the_builder_writes(tmp_path: Path) -> None:
    write_char_tokenizer(tmp_path)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_text() for file in char_tokenizer_folder().iterdir()}


def test_auto_tokenizer_reads_it_back(reference: PreTrainedTokenizerFast) -> None:
    assert len(reference) == CHAR_VOCAB_SIZE == 64
    assert (reference.pad_token_id, reference.bos_token_id) == (PAD_ID, BOS_ID)
    assert (reference.eos_token_id, reference.unk_token_id) == (EOS_ID, UNK_ID)
    ids = reference("c3141>")["input_ids"]
    assert ids[0] == BOS_ID
    assert reference.decode(ids, skip_special_tokens=True) == "c3141>"
    assert reference.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "<bos>1+1="


def test_every_id_is_one_token_of_its_own(quick: TextTokenizer) -> None:
    assert quick.vocab_size == CHAR_VOCAB_SIZE
    texts = quick.decode_batch([[index] for index in range(CHAR_VOCAB_SIZE)])
    assert texts == [*SPECIAL_TOKENS, *CHARACTERS]


@given(st.lists(st.text(CHARACTERS, max_size=30), max_size=5))
def test_the_quick_way_agrees_with_transformers_and_comes_back(texts: list[str]) -> None:
    quick = TextTokenizer(char_tokenizer_folder())
    reference = AutoTokenizer.from_pretrained(char_tokenizer_folder())
    for add in (True, False):
        encoded = quick.encode_batch(texts, add_special_tokens=add)
        assert encoded == [tuple(reference(text, add_special_tokens=add)["input_ids"]) for text in texts]

    assert quick.decode_batch(quick.encode_batch(texts, add_special_tokens=False)) == texts


def test_special_tokens_in_a_response_stay_visible(quick: TextTokenizer) -> None:
    """A reward must not take `31<pad>41` for `3141`."""
    ids = quick.encode_batch(["31", "41"], add_special_tokens=False)
    assert quick.decode_batch([[*ids[0], PAD_ID, *ids[1]]]) == ["31<pad>41"]


def test_unknown_characters_are_known_as_such(quick: TextTokenizer) -> None:
    assert quick.unknown_id == UNK_ID
    assert quick.encode_batch(["aÄb"]) == [(BOS_ID, *quick.encode_batch(["a"])[0][1:], UNK_ID, 24)]


def test_chat_goes_through_the_template(quick: TextTokenizer) -> None:
    text = quick.render_chat([{"role": "user", "content": "1+1="}])
    assert text == "<bos>1+1="
    assert quick.encode_batch([text], add_special_tokens=False) == quick.encode_batch(["1+1="])


def test_a_tokenizer_without_a_template_is_told(tmp_path: Path) -> None:
    for file in char_tokenizer_folder().iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_text(file.read_text())

    with pytest.raises(ValueError, match="chat template"):
        TextTokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}])


def test_a_template_that_refuses_is_told(tmp_path: Path) -> None:
    for file in char_tokenizer_folder().iterdir():
        (tmp_path / file.name).write_text(file.read_text())

    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"^the chat template refuses the messages: roles must alternate$"):
        TextTokenizer(tmp_path).render_chat([{"role": "user", "content": "a"}])


def test_a_class_of_its_own_is_loaded_by_transformers(tmp_path: Path, quick: TextTokenizer) -> None:
    """Only the plain classes say in their name that tokenizer.json is all there is."""
    for file in char_tokenizer_folder().iterdir():
        (tmp_path / file.name).write_text(file.read_text())

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextTokenizer(tmp_path).encode_batch(["c3141>"]) == quick.encode_batch(["c3141>"])


def test_a_folder_without_or_with_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: only fast tokenizers are supported$"):
        TextTokenizer(tmp_path)

    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        TextTokenizer(tmp_path)


def test_the_driver_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from asyncrl.tokenizer import *; "
        "TextTokenizer(char_tokenizer_folder()).encode_batch(['c3141>']); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
