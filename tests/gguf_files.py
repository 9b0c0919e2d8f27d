"""GGUF files with the blocks of one kind, drawn at random: numpy's package gguf quantises only some
kinds, and decodes them all.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from tests.api import _WORD_PATTERN, BLOCKS, header_keys, tokenizer_keys
from tests.api import gguf_file_FAMILIES as FAMILIES

TEXTS = ["How much is 12 plus 7?", "It's  12,\n\n  and héllo ✓", "<|im_start|>user\nHi<|im_end|>\n"]


def splitting(pattern: str | None = None, *, size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits as Qwen 2 does; by default with ChatML."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from isotype.data.chat import NAMED_TEMPLATES

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern or _WORD_PATTERN % ""), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 8, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = NAMED_TEMPLATES["chatml"].text
    return made


def blocks(kind: str, rows: int, columns: int) -> np.ndarray:
    """uint8[rows bytes] of about the size that a trained weight has."""
    numbers, size, halves = BLOCKS[kind]
    drawn = torch.randint(0, 256, (rows * columns // numbers, size), dtype=torch.uint8)
    largest = {
        "Q8_0": 127,
        "IQ4_NL": 127,
        "Q6_K": 127 * 32,
        "Q4_K": 63 * 15,
        "Q5_K": 63 * 31,
        "Q3_K": 31 * 4,
        "Q2_K": 45,
    }.get(kind, 16)
    for at in halves:
        own = ((torch.rand(len(drawn)) + 0.5) * columns**-0.5 / largest).half()
        # the second is a minimum, of which the mean of a block becomes zero
        own = (
            own * {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
            if at != halves[0]
            else own
        )
        drawn[:, at : at + 2] = own.view(torch.uint8).view(-1, 2)
    return drawn.reshape(rows, -1).numpy()


def write(
    model,
    folder: Path,
    file: Path,
    kind: str,
    *,
    others: dict[str, str] | None = None,
    keys: dict | None = None,
) -> None:
    """A file of `model`, whose tokenizer is in `folder`, with every matrix in blocks.

    keys    in the place of the file's own; None for one that the file lacks
    others  the end of llama.cpp's name of a tensor -> its kind in the place of `kind`
    """
    import gguf

    torch.manual_seed(0)
    config = model.config
    norm_offset = FAMILIES[config.model_type].norm_offset
    architecture = getattr(gguf.MODEL_ARCH, FAMILIES[config.model_type].architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for method, value in [*header_keys(config), *tokenizer_keys(folder, config.vocab_size, "")]:
        getattr(writer, method)(value)

    def put(name: str, value: torch.Tensor, *, packed: bool) -> None:
        own = next((k for end, k in (others or {}).items() if name.endswith(end)), kind)
        if not packed:
            writer.add_tensor(name, value.float().numpy())
            return
        drawn = np.stack(
            [blocks(own, *one.shape) for one in (value if value.ndim == 3 else value[None])]
        )
        writer.add_tensor(
            name, drawn if value.ndim == 3 else drawn[0], raw_dtype=gguf.GGMLQuantizationType[own]
        )

    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("experts.gate_up_proj"):
            for part, one in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                put(f"blk.{layer}.ffn_{part}_exps.weight", one, packed=True)
        elif name.endswith("experts.down_proj"):
            put(f"blk.{layer}.ffn_down_exps.weight", value, packed=True)
        else:
            if name.endswith("norm.weight"):
                value = value + norm_offset
            put(
                names.get_name(name, try_suffixes=(".weight", ".bias")),
                value,
                packed=value.ndim > 1 and "mlp.gate.weight" not in name,
            )
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is None:
            continue
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
