"""Every trainer that `attach` is tested with, tiny: a model of 20,000 parameters on disk, a word
tokenizer, rows of words.

`TRAINERS[name](setting)` gives a trainer that is ready for `attach` and `train()`; it has seen
nothing of Isotype.
"""

import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isotype.integrations import attach
from tests.models import quantised, tiny

WORDS = 93
STEPS = 3


@dataclass(frozen=True)
class Setting:
    """form: full, lora or qlora; stored: the checkpoint's dtype as loaded; more: arguments of the
    trainer's configuration.
    """

    folder: Path
    form: str = "lora"
    bf16: bool = False
    family: str = "qwen2"
    stored: torch.dtype = torch.float32
    checkpointing: bool = False
    rate: float = 2e-3
    more: dict[str, Any] = field(default_factory=dict)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """What TrainingArguments and TRL's configurations share."""
        return {
            "output_dir": str(self.folder / "out"), "use_cpu": True, "bf16": self.bf16, "max_steps": STEPS, "logging_steps": 1,
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": self.rate, "report_to": [],
            "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": self.checkpointing, **changes, **self.more,
        }  # fmt: skip

    def path(self) -> str:
        """The saved model, made once a folder; some trainers load their reference from it."""
        folder = self.folder / f"{self.family}-model"
        if not folder.exists():
            tiny(self.family, vocab_size=WORDS + 3).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
        return str(folder)

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(self.path(), dtype=self.stored)
        return quantised(made) if self.form == "qlora" else made

    def teacher(self) -> Any:
        return tiny(self.family, vocab_size=WORDS + 3, seed=7)

    def peft(self, task: str = "CAUSAL_LM") -> Any:
        from peft import LoraConfig

        return (
            None
            if self.form == "full"
            else LoraConfig(r=4, target_modules="all-linear", task_type=task)
        )

    def with_adapter(self) -> Any:
        """For trainers that attach none themselves."""
        from peft import get_peft_model

        model = self.model()
        torch.manual_seed(0)
        return model if self.form == "full" else get_peft_model(model, self.peft())


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        padding_side="left",
    )
    made.chat_template = "{% for m in messages %}{{ m['role'] and m['content'] }} {% endfor %}"
    return made


def words(seed: int, count: int) -> str:
    return " ".join(f"w{(seed * 7 + j * j) % WORDS}" for j in range(3, 3 + count))


def dataset(rows: int = 16, **columns: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {name: [column(i) for i in range(rows)] for name, column in columns.items()}
    )


def texts(rows: int = 16) -> Any:
    return dataset(rows, text=lambda i: words(i, 8 + i % 5))


def prompts() -> Any:
    return dataset(prompt=lambda i: words(i, 4))


def preferences() -> Any:
    return dataset(
        prompt=lambda i: words(i, 4),
        chosen=lambda i: words(i + 1, 5 + i % 3),
        rejected=lambda i: words(i + 2, 6),
    )


class Encoded(torch.utils.data.Dataset):
    """Rows as a plain Trainer takes them: padded ids, a mask, and labels with their first tokens
    masked.
    """

    def __init__(self, count: int = 16, longest: int = 14) -> None:
        self.rows = []
        for i in range(count):
            ids = tokenizer()(words(i, 8 + i % 5))["input_ids"]
            padding = longest - len(ids)
            self.rows.append(
                {
                    "input_ids": torch.tensor(ids + [0] * padding),
                    "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
                    "labels": torch.tensor([-100] * (i % 4) + ids[i % 4 :] + [-100] * padding),
                }
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.rows[i]


def diversity(completions: list[Any], **_: Any) -> list[float]:
    return [len(set(str(c).split())) / 10 for c in completions]


def plain(setting: Setting, cls: Any = None) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**setting.arguments())
    return (cls or Trainer)(
        setting.with_adapter(), arguments, train_dataset=Encoded(), eval_dataset=Encoded(6)
    )


def seq2seq(setting: Setting) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(**setting.arguments())
    return Seq2SeqTrainer(
        setting.with_adapter(), arguments, train_dataset=Encoded(), eval_dataset=Encoded(6), processing_class=tokenizer()
    )  # fmt: skip


def _trl(
    name: str,
    setting: Setting,
    config: dict[str, Any],
    *,
    where: str = "trl",
    task: str = "CAUSAL_LM",
    **trainer: Any,
) -> Any:
    module = __import__(where, fromlist=[name])
    arguments = getattr(module, f"{name}Config")(**setting.arguments(**config))
    model = trainer.pop("model", None) or setting.model()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(module, f"{name}Trainer")(
            model, args=arguments, processing_class=tokenizer(), peft_config=setting.peft(task), **trainer
        )  # fmt: skip


def _policy(name: str, setting: Setting, **config: Any) -> Any:
    short = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    return _trl(name, setting, short | config, train_dataset=prompts(), reward_funcs=diversity)


def reward(setting: Setting) -> Any:
    from transformers import AutoModelForSequenceClassification

    path = setting.path()
    # the head is in no file: both trainers of a comparison start with the same one
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32
    )
    rows = dataset(chosen=lambda i: words(i + 1, 5 + i % 3), rejected=lambda i: words(i + 2, 6))
    return _trl(
        "Reward", setting, {"max_length": 32}, task="SEQ_CLS", model=model, train_dataset=rows
    )


def labelled() -> Any:
    return dataset(
        prompt=lambda i: words(i, 4),
        completion=lambda i: words(i + 1, 5 + i % 3),
        label=lambda i: bool(i % 2),
    )


def chats() -> Any:
    return dataset(
        messages=lambda i: [
            {"role": "user", "content": words(i, 4)},
            {"role": "assistant", "content": words(i + 1, 5)},
        ]
    )


SHORT = {"max_length": 32}
TRAINERS = {
    "Trainer": plain,
    "Seq2SeqTrainer": seq2seq,
    "SFT": lambda s: _trl("SFT", s, SHORT, train_dataset=texts(), eval_dataset=texts(6)),
    "DPO": lambda s: _trl("DPO", s, SHORT, train_dataset=preferences()),
    "KTO": lambda s: _trl("KTO", s, SHORT, train_dataset=labelled()),
    "GRPO": lambda s: _policy("GRPO", s, entropy_coef=0.01),
    "RLOO": lambda s: _policy("RLOO", s),
    "Reward": reward,
    "Distillation": lambda s: _trl("Distillation", s, {"max_completion_length": 6}, train_dataset=prompts(), teacher_model=s.teacher()),
    "OnlineDPO": lambda s: _trl(
        "OnlineDPO", s, SHORT | {"max_new_tokens": 6}, where="trl.experimental.online_dpo", train_dataset=prompts(), reward_funcs=diversity
    ),
    "GKD": lambda s: _trl(
        "GKD", s, {"max_length": 32, "lmbda": 0.0, "max_new_tokens": 4}, where="trl.experimental.gkd", train_dataset=chats(),
        teacher_model=s.teacher(),
    ),
    "ORPO": lambda s: _trl("ORPO", s, SHORT, where="trl.experimental.orpo", train_dataset=preferences()),
    "CPO": lambda s: _trl("CPO", s, SHORT, where="trl.experimental.cpo", train_dataset=preferences()),
}  # fmt: skip


def attached(trainer: Any, precision: str, **more: Any) -> Any:
    """The trainer, to which Isotype is attached without a word."""
    attach(trainer, precision, quiet=True, **more)
    return trainer


def curve(trainer: Any) -> list[float]:
    """The loss and the gradient's norm of each step, from generators seeded alike."""
    torch.manual_seed(0)
    trainer.train()
    return [
        row[key]
        for row in trainer.state.log_history
        if "loss" in row
        for key in ("loss", "grad_norm")
    ]
