"""LoRA training in bf16 works, but `generate()` in a callback runs outside autocast and fails. The model is tiny; nothing is downloaded."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def build():
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, bos_token_id=1, eos_token_id=2)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():  # as prepare_model_for_kbit_training does
        if "norm" in name:
            parameter.data = parameter.data.float()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def run():
    ids = torch.arange(3, 11)
    batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}

    class Sample(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **more):
            model.generate(**batch, max_new_tokens=3, do_sample=False)

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, bf16=True, use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)
        Trainer(build(), args, train_dataset=[{"input_ids": ids, "labels": ids}] * 4, callbacks=[Sample()]).train()


if __name__ == "__main__":
    run()
