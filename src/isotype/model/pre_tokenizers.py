"""Defines the rules by which llama.cpp splits text before it merges pairs of bytes. A GGUF file
names its rule in `tokenizer.ggml.pre`.

For each name llama.cpp applies regular expressions one after another; each expression splits the
pieces that the earlier expressions produced. When Isotype reads a file, it builds the same
splitting steps with the package `tokenizers`. When it writes a file, it compares each rule with the
tokenizer on sample texts, and writes the name of the rule that splits them in the same way.

The rules were compared with llama.cpp (its build in `@fugood/node-llama-linux-x64` 1.7.15) on
53,224 texts of one to seven pieces. For every rule whose name Isotype writes, both programs split
the texts in the same way, with two exceptions:

* An apostrophe before U+017F (a long s), because `(?i:'s)` matches this letter as an s.
* The rule `tekken`, because llama.cpp treats letters beyond ASCII as both upper case and lower case.

Isotype does not write three kinds of names, because the two programs split some texts differently
by these rules:

* `gpt-4o` and similar names, for letters beyond ASCII and for combining marks;
* `deepseek-coder`, for white space beyond ASCII;
* `deepseek-v3`, for `~` after a space.

Source  src/llama-vocab.cpp of llama.cpp: the names and the regular expressions
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers


@dataclass(frozen=True)
class SplitRule:
    """Describes one of llama.cpp's rules for splitting text.

    names           its names in llama.cpp; the first of them is written to files
    patterns        regular expressions, applied one after another
    ignores_merges  whether a piece that is a token is not split by merges
    may_write_name  whether Isotype writes the name into a file; False if llama.cpp splits differently
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignores_merges: bool = False
    may_write_name: bool = True


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|"
    r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

SPLITTINGS = (
    SplitRule(
        ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "phi-2", "gigachat",
         "a.x-4.0", "mellum", "modern-bert", "exaone4"),
        (_GPT2,),
    ),
    SplitRule(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
         "jina-v5-nano"),
        (_WORDS % "{1,3}",),
        ignores_merges=True,
    ),
    SplitRule(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_WORDS % "{1,3}",)),
    SplitRule(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "kormo", "megrez", "f2llmv2",
         "grok-2", "solar-open", "bailingmoe", "bailingmoe2", "llada-moe"),
        (_WORDS % "",),
    ),
    SplitRule(("qwen35",), (_WORDS_WITH_MARKS,)),
    SplitRule(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (_DIGIT, _GPT2),
    ),
    SplitRule(("tekken",), (_CASES % ("", "", ""),), ignores_merges=True),
    SplitRule(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    SplitRule(("viking",), (_BLOOM, _DIGIT)),
    SplitRule(("seed-coder",), (_SEED,)),
    SplitRule(("exaone-moe",), (_EXAONE,)),
    SplitRule(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
        (_CASES % (_CONTRACTION, _CONTRACTION, "{1,3}"),),
        may_write_name=False,
    ),
    SplitRule(("deepseek-coder",), _DEEPSEEK_CODER, may_write_name=False),
    SplitRule(("deepseek-v3",), _DEEPSEEK_V3, may_write_name=False),
)  # fmt: skip
_BY_NAME = {name: splitting for splitting in SPLITTINGS for name in splitting.names}

# one character of each class that the patterns distinguish
_CHARACTERS = "asLßÖǅʰ我ツ한क7½٣ \t\n\r\u00a0'./$_<…。😀~`\u0301"
_PHRASES = (
    "I'll say: they've  3 or 12345 apples,\n\nand 'TIS \u00bd done! ",
    "x86_64 = a_b->c[10] / 3.14e-10; // TODO\r\n\t\tif (y) {",
    "ÄpfelÖl, iPhoneX, ΟΔΟΣ, Привет, naïve; 我想在apple工作1314151天~",
    "हिन्दी ภาษาไทย العربية ١٢٣ 日本語テスト。한국어 😀👩\u200d💻",
    "   four\n    spaces \n \n\n ...!?  `code` <|x|> $5 (bloom) |a|b",
)


def find_splitting(name: str | None) -> SplitRule | None:
    return _BY_NAME.get(name or "")


def build_pre_tokenizer(splitting: SplitRule) -> Any:
    """Builds a pre-tokenizer that splits by this rule and writes bytes as characters."""
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in splitting.patterns]
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, bytes_step])


def match_splitting(tokenizer: Tokenizer) -> SplitRule | None:
    """Returns the rule with which llama.cpp gives the same tokens as `tokenizer`, or None if there
    is no such rule.
    """
    if tokenizer.pre_tokenizer is None or _changes_text(tokenizer):
        return None
    has_same_merges: bool | None = None
    for splitting in SPLITTINGS:
        if not splitting.may_write_name or not _splits_alike(tokenizer.pre_tokenizer, splitting):
            continue
        if splitting.ignores_merges == tokenizer.model.ignore_merges:
            return splitting
        if has_same_merges is None:
            has_same_merges = _merges_reach_every_token(tokenizer)
        if has_same_merges:
            return splitting
    return None


@lru_cache(1)
def _texts() -> tuple[str, ...]:
    triples = ("".join(characters) for characters in product(_CHARACTERS, repeat=3))
    return (*_PHRASES, *triples)


def _splits_alike(own: Any, splitting: SplitRule) -> bool:
    built = build_pre_tokenizer(splitting)
    # the texts take half a second, and most tokenizers have exactly the patterns of the rule
    if own.__getstate__() == built.__getstate__():
        return True
    return all(_pieces(own, text) == _pieces(built, text) for text in _texts())


def _pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _changes_text(tokenizer: Tokenizer) -> bool:
    """Returns True if the normalizer changes texts that are already in Unicode's form NFC.
    llama.cpp has no normalizer for byte-pair tokenizers; Qwen's normalizer only converts to NFC.
    """
    normalizer = tokenizer.normalizer
    if normalizer is None:
        return False
    texts = (unicodedata.normalize("NFC", text) for text in _texts())
    return any(normalizer.normalize_str(text) != text for text in texts)


def _merges_reach_every_token(tokenizer: Tokenizer) -> bool:
    """Returns True if the merges build every token from its characters, so that `ignore_merges` has
    no effect.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.model.ignore_merges = False
    added = set(copy.get_added_tokens_decoder())
    return all(_is_one_token(copy.model, token) for token in _model_tokens(copy, added))


def _model_tokens(tokenizer: Tokenizer, added: set[int]) -> Iterator[str]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return (token for token, index in vocabulary.items() if index not in added)


def _is_one_token(model: Any, token: str) -> bool:
    return len(model.tokenize(token)) == 1
