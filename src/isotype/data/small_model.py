"""Makes the parts of a small model: a byte-level BPE tokenizer with a ChatML template, and the configuration of a Llama for two CPU
cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import UsageError
from .chat import NAMED

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = 4096) -> Any:
    """A byte-level BPE tokenizer of `texts`, with ChatML's special tokens and template; the end of a turn is also the end of a text.

    Every digit is a token of its own, as in Llama, to save vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, TURN, END_OF_TURN]
    if vocabulary < 256 + len(special):
        raise UsageError(f"a byte-level vocabulary has at least {256 + len(special)} tokens, got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    made.chat_template = NAMED["chatml"].text
    made.add_special_tokens({"additional_special_tokens": [TURN]})
    return made


def small_config(tokenizer: Any, *, hidden: int = 256, layers: int = 4, positions: int = 512) -> Any:
    """A Llama of about 4 million parameters with the default sizes: embedding and head tied, head dimension 64."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_bias=False,
    )
