"""Tiny random causal LMs of many families, by transformers' own configuration classes."""

import torch

from tests import models

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen2.5", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "cohere",
    "glm4", "mixtral", "starcoder2",
]  # fmt: skip
VOCABULARY = 96
MORE = {
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "qwen2.5": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "use_sliding_window": False,
    },
}


def tiny(
    family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0, **more
):
    """Two layers, four heads of size 8, weights of unequal sizes."""
    settings = {
        "head_dim": 8,
        "tie_word_embeddings": tied,
        "attn_implementation": "eager",
        **MORE.get(family, {}),
    }
    if "moe" in family or family == "mixtral":
        settings |= {
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        }
    # Qwen2.5 is Qwen2's code
    model = models.tiny(
        "qwen2" if family == "qwen2.5" else family, seed=seed, **{**settings, **more}
    )
    # norm weights of exactly 1 (or 0) would hide a wrong form
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
            elif p.dim() == 2:
                p.mul_(4)
    return model.to(dtype)


def batch(rows: int = 2, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Rows(torch.utils.data.Dataset):
    """The rows of a batch, one by one, as a Trainer takes them."""

    def __init__(self, count: int = 16, length: int = 12) -> None:
        self.rows = batch(count, length)

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {name: column[i] for name, column in self.rows.items()}
