"""Tokenizers of every kind of decoder, trained on a few sentences."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from real.text.tokenizer import SENTENCES, Tokenizer, train_tokenizer, wrap


@cache
def byte_level() -> Tokenizer:
    """As Qwen's, Llama 3's, OPT's; with added tokens, special and not, of characters that stand for bytes too."""
    tokenizer = train_tokenizer(420)
    backend = tokenizer.inner.backend_tokenizer
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("né日🙂", normalized=False)])
    backend.add_special_tokens([AddedToken("<|sèp|>", special=True)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with ▁, unknown characters are bytes, one leading space is stripped."""
    characters = sorted({character for text in SENTENCES[:6] for character in text if character.isascii()})
    words = ["▁" + word for text in SENTENCES[:4] for word in text.split()]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, *words]
    vocabulary = {name: index for index, name in enumerate(dict.fromkeys(names))}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace() -> Tokenizer:
    """As T5's and Gemma's cousins: a Unigram model whose decoder turns ▁ into spaces."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return wrap(backend, eos_token="</s>", unk_token="<unk>")


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
