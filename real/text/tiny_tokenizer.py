"""A byte-level BPE tokenizer, trained on the spot on a few sentences: for a model of random weights, and for tests."""

from __future__ import annotations

from collections.abc import Iterable

from real.text.tokenizer import Tokenizer, wrap

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


def train_tokenizer(vocab_size: int = 512, sentences: Iterable[str] = SENTENCES) -> Tokenizer:
    """At most `vocab_size` tokens (at least the 256 bytes and an end token are needed), the end token the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(sentences, trainer)
    return wrap(backend, eos_token=END)
