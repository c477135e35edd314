"""Tokenizers: the character tokenizer that the project ships, and the quick way to use any in the driver.

The driver encodes and decodes with the `tokenizers` library alone: importing transformers brings torch and seconds of
start-up. Only a chat template, and a tokenizer class that does more than its tokenizer.json says, need transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from asyncrl.schema import CHAR_VOCAB_SIZE
from asyncrl.user_error import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*=>,() abcdefghijklmnopqrstuvwxyz:?\n.!'\"_#;|/<[]"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Every file that a fast tokenizer may consist of; only the first is always there."""

_PLAIN_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer: 64 tokens, ids 0 to 3 pad, bos, eos, unk, then one for each character.

    It puts `<bos>` before a text. Its files are committed in `asyncrl/char_tokenizer/`, so that writing a fresh model
    needs no transformers; a test holds them to this function.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    assert len(vocabulary) == CHAR_VOCAB_SIZE
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def char_tokenizer_folder() -> Path:
    """Return the folder with the character tokenizer's files."""
    return Path(__file__).parent / "char_tokenizer"


def write_char_tokenizer(folder: Path) -> None:
    """Write the files of `build_char_tokenizer`, readable by transformers 4 and 5 alike.

    `write_char_tokenizer(char_tokenizer_folder())` renews the committed ones.
    """
    build_char_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 5 writes a name that 4 does not know
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class TextTokenizer:
    """Text to token ids and back, in batches.

    Args:
        folder: a Hugging Face folder with a fast tokenizer (tokenizer.json).

    Raises:
        UserError: the folder has no tokenizer.json, or an unreadable one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._backend = _load_backend(folder)
        self._chat: Any = None

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def unknown_id(self) -> int | None:
        """What stands for characters that the vocabulary lacks; None if there are none such."""
        token = getattr(self._backend.model, "unk_token", None)
        return self._backend.token_to_id(token) if token is not None else None

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """Return the ids of each text.

        Args:
            texts: plain prompts, or the output of `render_chat`.
            add_special_tokens: put the tokenizer's `<bos>` or the like around; False for rendered chats, which have it.
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]

    def decode_batch(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each response, special tokens spelled out: a reward must not overlook a stray one."""
        return list(self._backend.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=False))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat up to where the model shall answer, with all special tokens.

        Raises:
            UserError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)

        from jinja2 import TemplateError

        if self._chat.chat_template is None:
            raise UserError(f"the tokenizer in {self._folder} has no chat template: give prompts as text")

        try:
            rendered = self._chat.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UserError(f"the chat template refuses the messages: {error}") from None

        return str(rendered)


def _load_backend(folder: Path) -> Tokenizer:
    """Return the Rust tokenizer. A class of its own may change it, so transformers loads those."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder} has no tokenizer.json: only fast tokenizers are supported")

    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    if config.get("tokenizer_class") in _PLAIN_CLASSES:
        try:
            backend = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
            raise UserError(f"{file}: {error}") from None
    else:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())

    backend.no_padding()
    backend.no_truncation()
    return backend
