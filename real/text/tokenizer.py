"""A local tokenizer: text to token ids, ids to text, chat templates. The only module here that uses transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from real.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from testbed.errors import ConfigError, ModelError, RequestError

FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "tekken.json",
)  # fmt: skip
Message = Mapping[str, Any]
END = "<|end|>"
SENTENCES = (
    "The scheduler decides which sequences run, and the block manager where their keys and values lie.",
    "A request waits, is admitted, computes its prompt, and then emits one token after the other.",
    "When the blocks run out, the sequence that came last gives way and is computed again later.",
    "What you simulate is what runs. What runs can be measured, and what is measured can be fitted.",
    "Der Speicher ist knapp, die Anfragen sind viele; größer wäre schöner, aber kleiner geht schneller.",
    "Le modèle répond, mot après mot; ça dépend de la mémoire et du débit.",
    "Быстрее, чем вчера: очередь короткая, кэш горячий.",
    "東京の朝は早い。日本語の文章も、文字の途中で切れない。",
    "مرحبا بالعالم، الكلمات تأتي واحدة تلو الأخرى.",
    "Emoji too: 🙂🚀 👩‍👩‍👧‍👦 and e\u0301 with a combining accent.",
    "def serve(inbox, scheduler): return [plan for plan in scheduler if plan.tokens > 0]",
    "0 1 2 3 4 5 6 7 8 9 10 16 32 64 128 256 512 1024 2048",
)


class Tokenizer:
    """Wraps a tokenizer of transformers (`wrap` takes one of the tokenizers library). Raises ConfigError for others."""

    def __init__(self, inner: Any) -> None:
        if not hasattr(inner, "convert_tokens_to_ids"):
            raise ConfigError(f"tokenizer is a {type(inner).__name__}; give a folder, or a tokenizer of transformers")
        self.inner = inner
        self._backend = getattr(inner, "backend_tokenizer", None)  # of the tokenizers library; None: plain Python
        self._bytes: dict[bool, dict[int, bytes]] = {True: {}, False: {}}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids. add_special_tokens: also those that the tokenizer puts around a prompt. The text of a chat
        template has them already."""
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the ids. Spaces are not cleaned up; ids that the tokenizer does not know have no text."""
        ids = list(token_ids)
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        ids = [token for token in ids if self._token(token) is not None]
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[Message], *, chat_template: str | None = None, **options: Any) -> str:
        """Returns the prompt of a conversation, with the header of the next turn. Raises RequestError if there is no
        template, or if it rejects the messages."""
        if chat_template is None and not getattr(self.inner, "chat_template", None):
            raise RequestError(
                "the tokenizer has no chat template; give plain prompts (without --chat), or LLM.chat a chat_template="
            )
        arguments = {"chat_template": chat_template, "add_generation_prompt": True, **options}
        try:
            return str(self.inner.apply_chat_template(list(messages), tokenize=False, **arguments))
        except Exception as error:  # noqa: BLE001  (a template is a program; transformers raises ValueError)
            raise RequestError(f"the chat template refuses the messages: {_first_line(error)}") from None

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for a new sequence; its concatenated pieces equal the result of `decode`."""
        if self._is_byte_level:
            return ByteDetokenizer(lambda token: self._bytes_of(token, skip_special_tokens))
        return WindowDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens),
            lambda token: self._is_silent(token, skip_special_tokens),
            self._byte_ids.__contains__,
        )

    @property
    def eos_token_id(self) -> int | None:
        token: int | None = self.inner.eos_token_id
        return token

    @property
    def num_tokens(self) -> int:
        """The number of token ids, special and added tokens included."""
        return len(self.inner)

    # --- inside ---

    @cached_property
    def _is_byte_level(self) -> bool:
        if self._backend is None:
            return False
        from tokenizers.decoders import ByteLevel

        return isinstance(self._backend.decoder, ByteLevel)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.inner.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, item in added.items() if item.special)

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        """Ids of the tokens for single bytes; empty without byte fallback."""
        vocabulary = self.inner.get_vocab()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    def _token(self, token: int) -> str | None:
        found: str | None
        if self._backend is not None:
            found = self._backend.id_to_token(token)
        else:
            found = self.inner.convert_ids_to_tokens(token) if 0 <= token < len(self.inner) else None
        return found

    def _is_silent(self, token: int, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token in self._special_ids) or self._token(token) is None

    def _bytes_of(self, token: int, skip_special_tokens: bool) -> bytes:
        """Returns the bytes that a token of a byte-level tokenizer adds to the text."""
        known = self._bytes[skip_special_tokens]
        if token not in known:
            text = "" if self._is_silent(token, skip_special_tokens) else self._token(token) or ""
            is_written_in_bytes = all(character in self._alphabet for character in text)
            known[token] = bytes(map(self._alphabet.__getitem__, text)) if is_written_in_bytes else text.encode()
        return known[token]

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """The byte for each character in which byte-level BPE writes its tokens (GPT-2, Radford et al. 2019)."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {character: byte for byte, character in bytes_to_unicode().items()}


def read_tokenizer(tokenizer: Any) -> Tokenizer:
    """Returns a Tokenizer for a folder, or for a tokenizer of transformers or of the tokenizers library. Raises
    ConfigError, ModelError."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return load_tokenizer(tokenizer)
    from tokenizers import Tokenizer as Backend

    return wrap(tokenizer) if isinstance(tokenizer, Backend) else Tokenizer(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a local folder. Raises ConfigError if there is none, ModelError if it is damaged."""
    folder = Path(path)
    if not has_tokenizer(folder):
        raise ConfigError(f"no tokenizer at {path}: expected a folder with {FILES[0]} or {FILES[1]}")
    try:
        from transformers import AutoTokenizer

        return Tokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except ImportError as error:
        raise ConfigError(
            f"the tokenizer at {path} needs the package {error.name or 'transformers'!r}: "
            "pip install '.[real]' in the repository"
        ) from None
    except Exception as error:  # noqa: BLE001  # a damaged file raises anything, a bare Exception included
        if str(error) == _fault_of_config(folder):  # transformers reads it too, to find the tokenizer's class
            said = " ".join(str(error).split())
            raise ModelError(f"{folder / 'config.json'} is refused by transformers: {said}") from None
        raise ModelError(f"the tokenizer at {path} cannot be read: {_first_line(error)}") from None


def _fault_of_config(folder: Path) -> str | None:
    """Returns what transformers says against the folder's config.json; None if nothing."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # noqa: BLE001  # a damaged config.json raises anything, too
        return str(error)
    return None


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return any((Path(path) / name).is_file() for name in FILES)


def wrap(backend: Any, **special_tokens: str) -> Tokenizer:
    """Wraps a tokenizer of the tokenizers library. special_tokens: names of its special tokens, such as eos_token=…"""
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    return Tokenizer(make(tokenizer_object=backend, **special_tokens))


def train_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Trains a byte-level BPE tokenizer on a few sentences, for models with random weights and for tests.

    It has at most `vocab_size` tokens, of which the end token is the first. The 256 bytes and the end token are the
    minimum.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return wrap(backend, eos_token=END)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
