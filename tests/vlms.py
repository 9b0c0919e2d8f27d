"""Tiny random vision-language models of every family that a page of the docs lists, with a
tokenizer that has their image tokens.
"""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch

PICTURE, PATCH = 56, 14  # 4 x 4 patches, which become 2 x 2 tokens where a family merges them
TOKENS = (
    "<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<IMG_CONTEXT>", "<img>", "</img>", "<fake_token_around_image>", "<global-img>", "<|image|>",
    "<end_of_utterance>", "<|begin|>", *(f"<row_{i}_col_{j}>" for i in (1, 2, 3) for j in (1, 2, 3)),
)  # fmt: skip
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
_EYE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": PATCH,
}
_QWEN_EYE: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "patch_size": PATCH,
}  # fmt: skip
_GRID = {"mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, **_GRID}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_IDEFICS = {
    "text": {"model_type": "llama"},
    "eye": {**_EYE, "image_size": PICTURE},
    "tokens": {"image_token_id": "<image>"},
    "scale_factor": 2,
}

# text, eye: of the two configurations; tokens: key -> the token whose id it is; all else lies in
# the outer configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text": {"sliding_window": 64, "query_pre_attn_scalar": 8}, "eye": {**_EYE, "image_size": PICTURE}, "mm_tokens_per_image": 4,
        "tokens": {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    },
    "qwen2_5_vl": {
        "text": {"rope_scaling": {"type": "mrope", **_GRID}},
        "eye": {**_QWEN_EYE, "fullatt_block_indexes": [1], "window_size": 112}, "tokens": _QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text": {"rope_scaling": _INTERLEAVED},
        "eye": {**_QWEN_EYE, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, "tokens": _QWEN_TOKENS,
    },
    "qwen3_5": {
        "text": {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rope_scaling": {"partial_rotary_factor": 1.0, **_INTERLEAVED},
        },
        "eye": {**_QWEN_EYE, "num_position_embeddings": 64}, "tokens": _QWEN_TOKENS,
    },
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
    "llava": {
        "text": {"model_type": "llama"}, "eye": {**_EYE, "model_type": "clip_vision_model", "image_size": PICTURE, "projection_dim": 24},
        "tokens": {"image_token_index": "<image>"}, "image_seq_length": 16,
    },
    "internvl": {
        "text": {"model_type": "qwen2"}, "eye": {**_EYE, "image_size": [PICTURE] * 2, "patch_size": [PATCH] * 2},
        "tokens": {"image_token_id": "<IMG_CONTEXT>"}, "image_seq_length": 4, "downsample_ratio": 0.5,
    },
    "mllama": {
        "text": {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}},
        "eye": {
            **_EYE, "num_global_layers": 1, "attention_heads": 4, "image_size": PICTURE, "intermediate_layers_indices": [0],
            "vision_output_dim": 48, "max_num_tiles": 4,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "tokens": {"image_token_index": "<|image|>"},
    },
}  # fmt: skip
# begin at zero in Gemma 3 and Llama 3.2 Vision: no loss would depend on a picture
SHUT = ("mm_input_projection_weight", "cross_attn_attn_gate", "cross_attn_mlp_gate")


@cache
def _tokenizer() -> Any:
    from tests.api import train_tokenizer

    words = [
        f"what colour is the {shape}? it is {colour}."
        for shape in ("square", "disc")
        for colour in ("red", "green", "blue")
    ]
    made = train_tokenizer(words * 2, vocabulary=300)
    made.add_special_tokens({"bos_token": "<|begin|>"})
    made.add_special_tokens(
        {"additional_special_tokens": list(TOKENS)}, replace_extra_special_tokens=False
    )
    return made


def tokenizer() -> Any:
    """With ChatML's template, and the image tokens of every family."""
    return copy.deepcopy(_tokenizer())


def tiny_vlm(family: str, *, seed: int = 0, **text: Any) -> Any:
    """A random model of `family`, in fp32, as the class that the family is released as.

    text  changes of the text's configuration
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokens, made = _tokenizer(), dict(FAMILIES[family])
    ids = {key: tokens.convert_tokens_to_ids(token) for key, token in made.pop("tokens").items()}
    special = {
        "pad_token_id": tokens.pad_token_id,
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
    }
    size = {"vocab_size": len(tokens)}
    config = AutoConfig.for_model(
        family,
        text_config={**_TEXT, **size, **special, **made.pop("text"), **text},
        vision_config=made.pop("eye"),
        **ids,
        **made,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(SHUT):
                torch.nn.init.normal_(parameter, std=0.3)
    return model


# what a chat template writes: parts in their order, a picture as `{mark}`
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = {
    "processor_class": "Qwen2_5_VLProcessor", "mark": "<|vision_start|><|image_pad|><|vision_end|>",
    "images": {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9}},
}  # fmt: skip
_IDEFICS3 = {
    "processor_class": "Idefics3Processor", "mark": "<image>", "processor": {"image_seq_len": 4},
    "names": {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>", "global_image_token": "<global-img>"},
    "images": {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "processor_class": "Gemma3Processor", "mark": "<start_of_image>", "processor": {"image_seq_length": 4},
        "names": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "images": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": PICTURE, "width": PICTURE}},
    },
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": {**_QWEN, "processor_class": "Qwen3VLProcessor"},
    "qwen3_5": {**_QWEN, "processor_class": "Qwen3VLProcessor"},
    "smolvlm": _IDEFICS3,
    "idefics3": _IDEFICS3,
    "llava": {
        "processor_class": "LlavaProcessor", "mark": "<image>",
        "processor": {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "images": {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": PICTURE},
            "crop_size": {"height": PICTURE, "width": PICTURE},
        },
    },
    "internvl": {
        "processor_class": "InternVLProcessor", "mark": "<IMG_CONTEXT>", "processor": {"image_seq_length": 4},
        "names": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                  "video_token": "<|video_pad|>"},
        "images": {
            "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": PICTURE, "width": PICTURE}, "crop_to_patches": False,
        },
    },
    "mllama": {
        "processor_class": "MllamaProcessor", "mark": "<|image|>",
        "images": {"image_processor_type": "MllamaImageProcessor", "size": {"height": PICTURE, "width": PICTURE}, "max_image_tiles": 4},
    },
}  # fmt: skip


def saved_with_processor(family: str, folder: Path, *, seed: int = 0, **text: Any) -> Path:
    """The same with the files of a processor, written by hand as repositories have them: processors
    of some families need torchvision.
    """
    import json

    made = PROCESSORS[family]
    tiny_vlm(family, seed=seed, **text).save_pretrained(folder)
    tokens = tokenizer()
    # Llama 3.2's processor adds a beginning where a text has none
    tokens.chat_template = ("{{ bos_token }}" if family == "mllama" else "") + _CHAT.replace(
        "MARK", made["mark"]
    )
    tokens.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["extra_special_tokens"] = {**made.get("names", {})} or config.get(
        "extra_special_tokens", {}
    )
    file.write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**made["images"], "processor_class": made["processor_class"]})
    )
    (folder / "processor_config.json").write_text(
        json.dumps({**made.get("processor", {}), "processor_class": made["processor_class"]})
    )
    return folder
