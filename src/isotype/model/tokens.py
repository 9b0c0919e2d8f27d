"""Sets the end, start and padding tokens in a model's configuration, and adds the new tokens of
`model.add_tokens`.

A base with new embedding rows is saved once in the run folder, as an ordinary model. When the base
is loaded later, it has the rows on which the adapter was trained. It is loaded by the check at the
end of a run, by `chat`, by `merge` and by PEFT. All weights of the embedding and the head are
trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> None:
    """Adds special tokens to the tokenizer, in the order of `tokens`. Raises UsageError for a token
    that is already in the vocabulary, is empty, or has white space around it.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    for i, token in enumerate(tokens):
        if not token.strip() or token != token.strip():
            raise UsageError(
                f"model.add_tokens[{i}]: {token!r} begins or ends with white space, or is empty"
            )
        if token in vocabulary or token in tokens[:i]:
            raise UsageError(
                f"model.add_tokens[{i}]: {token!r} is in the vocabulary already", fix="leave it out"
            )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True
    )


def trained_token_ids(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    """Returns the sorted ids of `adapter.train_tokens`. Raises UsageError for a token that the
    vocabulary does not have.
    """
    vocabulary = tokenizer.get_vocab()
    for i, token in enumerate(tokens):
        if token not in vocabulary:
            raise UsageError(
                f"adapter.train_tokens[{i}]: {token!r} is no token of the vocabulary",
                fix="model.add_tokens adds one",
            )
    return sorted({vocabulary[token] for token in tokens})


def align_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the model's configurations the end, start and padding token of the tokenizer, as
    transformers' Trainer does.

    Some settings give the tokenizer a different end token, for example the value `chatml` of
    `data.chat_template`. If the saved model kept its old end token, its `generate` would not stop.
    Other end tokens of the model are kept.
    """
    generation = getattr(model, "generation_config", None)
    for config, allows_list in ((model.config.get_text_config(), False), (generation, True)):
        for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
            token = getattr(tokenizer, role)
            current = getattr(config, role, None)
            if config is None or token is None:
                continue
            other_ids = [
                n
                for n in (current if isinstance(current, list) else [current])
                if n not in (None, token)
            ]
            keeps_other_ids = (
                role == "eos_token_id" and other_ids and (allows_list or isinstance(current, list))
            )
            if keeps_other_ids:
                token = [token, *other_ids]
            setattr(config, role, token)


def grown_config(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Enlarges the configuration's vocabulary so that it holds all tokens of the tokenizer."""
    text: Any = config.get_text_config()
    text.vocab_size = max(text.vocab_size, len(tokenizer))
    return config


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UsageError if the tokenizer has more tokens than the model has embeddings."""
    embedding: Any = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {rows}: they do not"
            " belong together",
            code="PF008",
            fix=(
                "take the model's own tokenizer, or call model.resize_token_embeddings and save the"
                " model first"
            ),
        )


@torch.no_grad()
def grow_embeddings(model: Any, tokenizer: PreTrainedTokenizerBase, added: int) -> None:
    """Initialises the embedding rows and head rows of the last `added` tokens with the mean of the
    rows before them, computed in fp32. Enlarges the embedding and the head if needed.
    """
    first_new_id = len(tokenizer) - added
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for layer in {
        id(module): module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    }.values():
        for values in (layer.weight, getattr(layer, "bias", None)):
            if values is not None:
                values[first_new_id : len(tokenizer)] = (
                    values[:first_new_id].float().mean(0).to(values.dtype)
                )


def token_modules(model: Any) -> tuple[list[str], bool]:
    """Returns the name of the embedding, and also the name of the head if the head has separate
    weights. The second result is True if the head shares the embedding's weights.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    modules = [embedding] if tied or head is None else [embedding, head]
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    return [names[id(module)] for module in modules], tied
