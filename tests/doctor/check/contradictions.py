# ruff: noqa: E501  a table: one row, one contradiction
"""Every known contradiction that a configuration can decide, and its repair: name -> (code, files,
repaired files, device).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """note: the finding is a note by design (a choice, a recommendation); else it is a warning or
    an error.
    """

    code: str
    bad: dict[str, str]
    good: dict[str, str]
    device: str | None = None
    note: bool = False


def j(**values: Any) -> str:
    return json.dumps(values, indent=1)


def hf(**values: Any) -> dict[str, str]:
    return {
        "training_args.json": j(
            output_dir="out", per_device_train_batch_size=2, learning_rate=2e-4, **values
        )
    }


def st(**values: Any) -> dict[str, str]:
    base = {
        "model_family": "flux",
        "model_type": "lora",
        "data_backend_config": "config/multidatabackend.json",
        "learning_rate": 1e-4,
    }
    return {
        "config.json": json.dumps({f"--{k}": v for k, v in {**base, **values}.items()}, indent=1)
    }


def env(*lines: str) -> dict[str, str]:
    return {
        "config.env": "\n".join(
            [
                "export MODEL_TYPE='lora'",
                "export MODEL_FAMILY=flux",
                "export VALIDATION_PROMPT='a cat'",
                *lines,
            ]
        )
        + "\n"
    }


def y(name: str, **values: Any) -> dict[str, str]:
    return {name: "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())}


def ax(**values: Any) -> dict[str, str]:
    return y(
        "axolotl.yaml",
        base_model="NousResearch/Llama-3.2-1B",
        micro_batch_size=2,
        sequence_len=2048,
        learning_rate=2e-4,
        **values,
    )


def lf(**values: Any) -> dict[str, str]:
    base = {
        "model_name_or_path": "meta-llama/Llama-3.1-8B",
        "stage": "sft",
        "do_train": True,
        "template": "llama3",
        "learning_rate": 1e-4,
    }
    return y("train.yaml", **{**base, "finetuning_type": "lora", **values})


def ac(**values: Any) -> dict[str, str]:
    return y(
        "accelerate.yaml",
        compute_environment="LOCAL_MACHINE",
        **{"distributed_type": "MULTI_GPU", "num_processes": 2, **values},
    )


def ds(**values: Any) -> dict[str, str]:
    return {
        "ds_config.json": j(
            **{
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": 2},
                **values,
            }
        )
    }


AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
BF16_MODEL = {"model.json": j(model_name_or_path="m", dtype="bfloat16")}
LORA = {"adapter_config.json": j(peft_type="LORA", r=16, lora_alpha=32, target_modules=["q_proj"])}
CHECKPOINT = {
    "config.json": j(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        model_type="llama",
        torch_dtype="bfloat16",
    )
}


def published(sizes: dict[str, int] | None = None, **quantisation: Any) -> dict[str, str]:
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 448,
    }
    return {
        "config.json": j(
            torch_dtype="bfloat16", **llama | (sizes or {}), quantization_config=quantisation
        )
    }


BNB = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def model(**values: Any) -> dict[str, str]:
    return {"model.json": j(model_name_or_path="m", **values)}


ORPO = """import torch
from transformers import AutoModelForCausalLM
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
model = AutoModelForCausalLM.from_pretrained("a/b", dtype=torch.bfloat16)
args = ORPOConfig("out", bf16=False)
ORPOTrainer(model, args=args, train_dataset=rows, processing_class=tok).train()
"""
CASES: dict[str, Case] = {
    # SimpleTuner
    "ST001 json": Case("CF020", st(mixed_precision="bf16", optimizer="adamw_bf16", gradient_precision="fp32"), st(mixed_precision="bf16", optimizer="adamw_bf16")),
    "ST001 env": Case("CF020", env("MIXED_PRECISION=bf16", "TRAINER_EXTRA_ARGS='--gradient_precision=fp32'"), env("MIXED_PRECISION=bf16", "TRAINER_EXTRA_ARGS='--gradient_precision=unmodified'")),
    "ST001 appended": Case("CF020", env("MIXED_PRECISION=bf16", "TRAINER_EXTRA_ARGS='--foo=1'", "TRAINER_EXTRA_ARGS+=' --gradient_precision=fp32'"), env("MIXED_PRECISION=bf16", "TRAINER_EXTRA_ARGS='--foo=1'")),
    "ST001 toml": Case("CF020", {"config.toml": 'model_family = "sdxl"\nmodel_type = "lora"\nmixed_precision = "bf16"\ngradient_precision = "fp32"\n'}, {"config.toml": 'model_family = "sdxl"\nmodel_type = "lora"\nmixed_precision = "bf16"\n'}),
    "ST003": Case("CF020", st(mixed_precision="bf16", optimizer="torch-adamw", gradient_precision="fp32"), st(mixed_precision="bf16", optimizer="torch-adamw", gradient_precision="unmodified")),
    "ST004": Case("CF021", st(mixed_precision="no", optimizer="adamw_bf16"), st(mixed_precision="no", optimizer="optimi-adamw")),
    "ST004 default optimizer": Case("CF021", st(mixed_precision="no"), st(mixed_precision="bf16")),
    "ST005 no": Case("CF022", st(mixed_precision="no", base_model_precision="int8-quanto", optimizer="optimi-adamw"), st(mixed_precision="no", base_model_precision="int8-quanto", base_model_default_dtype="fp32", optimizer="optimi-adamw")),
    "ST005 fp16": Case("CF022", st(mixed_precision="fp16", base_model_precision="int8-quanto", optimizer="optimi-lion"), st(mixed_precision="bf16", base_model_precision="int8-quanto", optimizer="optimi-lion")),
    "ST006": Case("CF002", st(mixed_precision="fp16", optimizer="torch-adamw"), st(mixed_precision="bf16", optimizer="torch-adamw")),
    "ST007": Case("CF021", env("MIXED_PRECISION=fp16", "OPTIMIZER=adamw_bf16"), env("MIXED_PRECISION=bf16", "OPTIMIZER=adamw_bf16")),
    "ST008": Case("CF014", st(mixed_precision="fp32", optimizer="optimi-adamw"), st(mixed_precision="no", optimizer="optimi-adamw")),
    "ST008 case": Case("CF014", st(mixed_precision="BF16"), st(mixed_precision="bf16")),
    "ST009": Case("CF007", st(mixed_precision="fp8"), st(mixed_precision="bf16"), device="mps"),
    "ST010": Case("CF023", st(mixed_precision="fp8", base_model_precision="int8-quanto"), st(mixed_precision="fp8", base_model_precision="fp8-torchao")),
    "ST011": Case("CF021", st(mixed_precision="no", optimizer="adam_bfloat16"), st(mixed_precision="bf16", optimizer="adamw_bf16")),
    "ST015": Case("CF024", st(model_family="sdxl", mixed_precision="bf16", base_model_precision="fp8-quanto"), st(model_family="sdxl", mixed_precision="bf16", base_model_precision="fp8-torchao")),
    "ST016": Case("CF024", st(mixed_precision="bf16", base_model_precision="int8-quanto", fsdp_enable=True, fsdp_version=2), st(mixed_precision="bf16", base_model_precision="int8-torchao", fsdp_enable=True, fsdp_version=2)),
    "ST018": Case("CF025", {**st(mixed_precision="bf16"), **ac(distributed_type="DEEPSPEED", mixed_precision="bf16")}, {**st(mixed_precision="bf16"), **ac(mixed_precision="bf16")}),
    "ST019": Case("CF024", st(mixed_precision="bf16", attention_mechanism="sageattention", base_model_precision="nf4-bnb"), st(mixed_precision="bf16", attention_mechanism="diffusers", base_model_precision="nf4-bnb")),
    "ST020": Case("CF026", st(mixed_precision="bf16", vae_dtype="fp16"), st(mixed_precision="bf16", vae_dtype="bf16")),
    "ST021": Case("CF012", st(mixed_precision="bf16", use_ema=True), st(mixed_precision="bf16", use_ema=False)),
    "ST027": Case("CF027", env("PURE_BF16=true", "MIXED_PRECISION=no", "OPTIMIZER=optimi-adamw"), env("MIXED_PRECISION=no", "OPTIMIZER=optimi-adamw")),
    "ST028": Case("CF022", st(mixed_precision="no", base_model_precision="int8-quanto", base_model_default_dtype="fp32", optimizer="adamw_bf16"), st(mixed_precision="no", base_model_precision="int8-quanto", base_model_default_dtype="fp32", optimizer="optimi-adamw")),
    # transformers
    "HF001": Case("CF001", hf(fp16=True, bf16=True), hf(bf16=True)),
    "HF001 yaml": Case("CF001", y("args.yaml", output_dir="o", per_device_train_batch_size=1, fp16=True, bf16=True), y("args.yaml", output_dir="o", per_device_train_batch_size=1, fp16=True)),
    "HF001 command line": Case("CF001", {"train.sh": "torchrun --nproc_per_node 2 \\\n  train.py --output_dir o --fp16 True \\\n  --bf16 True\n"}, {"train.sh": "torchrun train.py --output_dir o --bf16 True\n"}),
    "HF001 python": Case("CF001", {"train.py": "from transformers import TrainingArguments\nargs = TrainingArguments('o', fp16=True,\n  bf16=True)\n"}, {"train.py": "from transformers import TrainingArguments\nargs = TrainingArguments('o', bf16=True)\n"}),
    "HF002": Case("CF001", hf(bf16=True, fp16_full_eval=True, bf16_full_eval=True), hf(bf16=True)),
    "HF003": Case("CF007", hf(bf16=True), hf(fp16=True), device="t4"),
    "HF003 v100": Case("CF007", hf(bf16_full_eval=True), hf(), device="V100"),
    "HF004": Case("CF007", hf(tf32=True), hf(tf32=False), device="t4"),
    "HF005": Case("CF007", hf(fp16=True, use_cpu=True), hf(bf16=True, use_cpu=True)),
    "HF005 device": Case("CF007", {**hf(), **ac(mixed_precision="fp16")}, {**hf(bf16=True), **ac(mixed_precision="bf16")}, device="cpu"),
    "HF006 start": Case("CF011", hf(bf16=True, bf16_full_eval=True, eval_on_start=True), hf(bf16=True, bf16_full_eval=True)),
    "HF006 code": Case("CF011", {"t.py": "from transformers import TrainingArguments\na = TrainingArguments('o', bf16_full_eval=True, bf16=True)\ntrainer.evaluate()\ntrainer.train()\n"}, {"t.py": "from transformers import TrainingArguments\na = TrainingArguments('o', bf16_full_eval=True, bf16=True)\ntrainer.train()\ntrainer.evaluate()\n"}),
    "HF007": Case("CF004", {"training_args.json": j(bf16=True, learning_rate=1e-5, output_dir="o"), **BF16_MODEL}, {"training_args.json": j(bf16=True, learning_rate=1e-5, output_dir="o"), **model(dtype="float32")}),
    "HF007 checkpoint": Case("CF004", {"training_args.json": j(bf16=True, learning_rate=1e-5, output_dir="o"), **CHECKPOINT}, {"training_args.json": j(bf16=True, learning_rate=1e-5, output_dir="o"), **CHECKPOINT, **LORA}),
    "HF008": Case("CF002", {**hf(fp16=True), **model(dtype="float16")}, {**hf(fp16=True), **model(dtype="float32")}),
    "HF008 adapters": Case("CF002", {"t.json": j(output_dir="o", fp16=True, learning_rate=1e-4, dtype="float16", trainable_dtype="float16")}, {"t.json": j(output_dir="o", fp16=True, learning_rate=1e-4, dtype="float16", trainable_dtype="float32")}),
    "HF009": Case("CF009", {**hf(bf16=False, fp16=False), ".env": "ACCELERATE_MIXED_PRECISION=bf16\n"}, {**hf(bf16=True), ".env": "ACCELERATE_MIXED_PRECISION=bf16\n"}),
    "HF009 file": Case("CF009", {**hf(bf16=False), **ac(mixed_precision="fp16")}, {**hf(fp16=True), **ac(mixed_precision="fp16")}),
    "HF009 env json": Case("CF009", {**hf(bf16=False), "env.json": j(ACCELERATE_MIXED_PRECISION="bf16")}, {**hf(bf16=True), "env.json": j(ACCELERATE_MIXED_PRECISION="bf16")}),
    "HF010": Case("CF009", {**hf(bf16=True), **ac(mixed_precision="fp8")}, {**hf(bf16=True), **ac(mixed_precision="bf16")}),
    "HF010 launch": Case("CF009", {"run.sh": "accelerate launch --mixed_precision fp16 train.py --bf16 True --output_dir o\n"}, {"run.sh": "accelerate launch --mixed_precision bf16 train.py --bf16 True --output_dir o\n"}),
    "HF011": Case("CF040", hf(half_precision_backend="auto"), hf()),
    "HF011 no_cuda": Case("CF040", hf(no_cuda=True), hf(use_cpu=True)),
    "HF012": Case("CF013", {**hf(), **model(dtype="float32", attn_implementation="flash_attention_2")}, {**hf(bf16=True), **model(dtype="float32", attn_implementation="flash_attention_2")}),
    "HF013": Case("CF008", {**hf(bf16=True), **model(quantization_config=BNB, adapter=None)}, {**hf(bf16=True), **model(quantization_config=BNB, adapter="lora")}),
    "HF015": Case("CF041", hf(bf16=True, fsdp="full_shard", fsdp_config={"activation_checkpointing": True}, gradient_checkpointing=True), hf(bf16=True, fsdp="full_shard", fsdp_config={"activation_checkpointing": True})),
    "UN001": Case("CF003", {"t.py": "from trl import SFTConfig\nmodel = FastLanguageModel.from_pretrained('m', dtype=torch.float16)\na = SFTConfig(bf16=True)\n"}, {"t.py": "from trl import SFTConfig\nmodel = FastLanguageModel.from_pretrained('m', dtype=torch.float16)\nmodel = get_peft_model(model)\na = SFTConfig(fp16=True)\n"}),
    "fp16 flag, bf16 weights": Case("CF003", {**hf(fp16=True), **BF16_MODEL}, {**hf(bf16=True), **BF16_MODEL}),
    "TR003": Case("CF007", {"t.py": "from trl import SFTConfig\na = SFTConfig(output_dir='o')\n"}, {"t.py": "from trl import SFTConfig\na = SFTConfig(output_dir='o', fp16=True)\n"}, device="t4"),
    "BN compute": Case("CF010", {**hf(fp16=True), **model(dtype="float16", quantization_config={**BNB, "bnb_4bit_compute_dtype": "float32"})}, {**hf(fp16=True), **model(dtype="float16", quantization_config={**BNB, "bnb_4bit_compute_dtype": "float16"})}, note=True),
    "BN002": Case("CF042", {**hf(bf16=True), **model(quantization_config={"load_in_4bit": True, "load_in_8bit": True})}, {**hf(bf16=True), **model(quantization_config={"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"})}),
    "BN compute dtype unset": Case("CF010", {**hf(bf16=True), **LORA, **model(quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})}, {**hf(bf16=True), **LORA, **model(quantization_config=BNB)}, note=True),
    "BN compute dtype unset in Python": Case("CF010", {"t.py": "q = BitsAndBytesConfig(load_in_4bit=True)\na = SFTConfig(output_dir='o', bf16=True)\nLoraConfig(r=8)\n"}, {"t.py": "q = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=pick())\na = SFTConfig(output_dir='o', bf16=True)\nLoraConfig(r=8)\n"}, note=True),
    "BN one flat file": Case("CF010", y("sft.yaml", model_name_or_path="a/b", load_in_4bit=True, bnb_4bit_compute_dtype="float16", bf16=True, use_peft=True, output_dir="o"), y("sft.yaml", model_name_or_path="a/b", load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16", bf16=True, use_peft=True, output_dir="o"), note=True),
    "BN005": Case("CF044", {**hf(bf16=True), **model(quantization_config=BNB), **LORA, "config.json": j(architectures=["A"], hidden_size=8, model_type="llama", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"})}, {**hf(bf16=True), **model(quantization_config=BNB), **LORA}),
    "BN006": Case("CF043", {**hf(bf16=True), **LORA, **model(quantization_config={**BNB, "bnb_4bit_compute_dtype": "torch.bfloat16"})}, {**hf(bf16=True), **LORA, **model(quantization_config=BNB)}),
    "BN006 storage": Case("CF043", {**hf(fp16=True), **LORA, **model(quantization_config={**BNB, "bnb_4bit_compute_dtype": "half", "bnb_4bit_quant_storage": "half"})}, {**hf(fp16=True), **LORA, **model(quantization_config={**BNB, "bnb_4bit_compute_dtype": "half", "bnb_4bit_quant_storage": "float16"})}),
    "PE001": Case("CF045", {**hf(bf16=True, fsdp="full_shard", fsdp_config={"version": 1}), **BF16_MODEL, **LORA}, {**hf(bf16=True), **BF16_MODEL, **LORA}, note=True),
    "scaler with bf16 autocast": Case("CF048", {"t.py": "scaler = torch.amp.GradScaler()\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\n"}, {"t.py": "with torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\n"}),
    # other ways of writing it down
    "notebook": Case("CF001", {"t.ipynb": j(cells=[{"cell_type": "code", "source": ["%pip install x\n", "a = TrainingArguments(output_dir='o', fp16=True, bf16=True)\n"]}])}, {"t.ipynb": j(cells=[{"cell_type": "code", "source": ["%pip install x\n", "a = TrainingArguments(output_dir='o', bf16=True)\n"]}])}),
    "half() of a loaded model": Case("CF002", {"t.py": "m = AutoModelForCausalLM.from_pretrained('a/b').half()\na = TrainingArguments('o', fp16=True)\n"}, {"t.py": "m = AutoModelForCausalLM.from_pretrained('a/b').float()\na = TrainingArguments('o', fp16=True)\n"}),
    "to() of a loaded model": Case("CF003", {"t.py": "m = AutoModelForCausalLM.from_pretrained('a/b').to(torch.bfloat16)\na = TrainingArguments('o', fp16=True)\n"}, {"t.py": "m = AutoModelForCausalLM.from_pretrained('a/b').to('cuda')\na = TrainingArguments('o', fp16=True)\n"}),
    "swift": Case("CF002", {"run.sh": "swift sft --model a/b --torch_dtype float16 --fp16 true --output_dir o\n"}, {"run.sh": "swift sft --model a/b --torch_dtype float32 --fp16 true --output_dir o\n"}),
    "set later": Case("CF001", {"t.py": "a = TrainingArguments('o', bf16=True)\na.fp16 = True\n"}, {"t.py": "a = TrainingArguments('o', bf16=True)\nif old:\n    a.fp16 = True\n"}),
    "a script that ends in a backslash": Case("CF009", {"run.sh": "accelerate launch --mixed_precision fp16 t.py --bf16 --output_dir o \\"}, {"run.sh": "accelerate launch --mixed_precision bf16 t.py --bf16 --output_dir o \\"}),
    "second command of a line": Case("CF009", {"run.sh": "cd x && accelerate launch --mixed_precision fp16 t.py --bf16 --output_dir o\n"}, {"run.sh": "cd x && accelerate launch --mixed_precision bf16 t.py --bf16 --output_dir o\n"}),
    "rounded activations": Case("CF064", {**hf(bf16=True), **LORA, **published(quant_method="compressed-tensors", format="float-quantized", config_groups={"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}})}, {**hf(bf16=True), **LORA, **published(quant_method="compressed-tensors", format="dense", config_groups={"group_0": {"weights": {"num_bits": 8}, "input_activations": None}})}),
    "torchao's rounded activations": Case("CF064", {**hf(bf16=True), **LORA, **published(quant_method="torchao", quant_type={"default": {"_type": "Int8DynamicActivationInt8WeightConfig", "_data": {}, "_version": 1}})}, {**hf(bf16=True), **LORA, **published(quant_method="torchao", quant_type={"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 1}})}),
    "blocks of DeepSeek": Case("CF065", {**hf(bf16=True), **LORA, **published({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "intermediate_size": 512}, quant_method="fp8", weight_block_size=[128, 128])}, {**hf(bf16=True), **LORA, **published({"kv_lora_rank": 448, "qk_rope_head_dim": 64, "intermediate_size": 512}, quant_method="fp8", weight_block_size=[128, 128])}, "cpu"),
    "widened before training": Case("CF066", {**hf(bf16=True), **LORA, **published(quant_method="mxfp4")}, {**hf(bf16=True), **LORA, **published(quant_method="gptq", bits=4)}, note=True),
    "blocks that do not divide": Case("CF065", {**hf(bf16=True), **LORA, **published(quant_method="fp8", weight_block_size=[128, 128])}, {**hf(bf16=True), **LORA, **published(quant_method="fp8", weight_block_size=[64, 64])}, "cpu"),
    "widened for good": Case("CF066", {**hf(bf16=True), **LORA, **published(quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": {"weights": {"num_bits": 4}}})}, {**hf(bf16=True), **LORA, **published(quant_method="gptq", bits=4)}, note=True),
    "a checkpoint's compute dtype": Case("CF010", {**hf(bf16=True), **LORA, "config.json": j(architectures=["A"], hidden_size=8, model_type="llama", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"})}, {**hf(bf16=True), **LORA, "config.json": j(architectures=["A"], hidden_size=8, model_type="llama", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"})}, note=True),
    "Lightning 16-true": Case("CF017", y("c.yaml", trainer={"accelerator": "gpu", "precision": "16-true", "max_epochs": 1}), y("c.yaml", trainer={"accelerator": "gpu", "precision": "16-mixed", "max_epochs": 1})),
    # accelerate
    "AC001": Case("CF014", {"accelerate.yaml": ac()["accelerate.yaml"] + "mixed_precision: no\n"}, ac(mixed_precision="no")),
    "AC002": Case("CF014", ac(mixed_precision="fp32"), ac(mixed_precision="bf16")),
    "AC002 env": Case("CF014", {**hf(), ".env": "ACCELERATE_MIXED_PRECISION=float32\n"}, {**hf(), ".env": "ACCELERATE_MIXED_PRECISION=no\n"}),
    "AC003": Case("CF058", ac(mixed_precision="bf16", fp16=True), ac(mixed_precision="bf16")),
    "AC004": Case("CF058", ac(mixed_precision="bf16", downcast_bf16="yes"), ac(mixed_precision="bf16", downcast_bf16="no")),
    "AC006": Case("CF051", {**ac(distributed_type="DEEPSPEED", mixed_precision="bf16"), **ds(bf16={"enabled": False})}, {**ac(distributed_type="DEEPSPEED", mixed_precision="bf16"), **ds(**AUTO)}),
    "AC006 trainer": Case("CF050", {**hf(bf16=True, deepspeed="ds_config.json"), **ds(bf16={"enabled": False})}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO)}),
    "AC010": Case("CF007", ac(mixed_precision="fp8"), ac(mixed_precision="bf16"), device="a100"),
    "AC012": Case("CF007", {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO)}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO, communication_data_type="fp32")}, device="mi300x", note=True),
    # FSDP
    "FS001": Case("CF006", {**hf(), **ac(distributed_type="FSDP", mixed_precision="bf16")}, {**hf(bf16=True), **ac(distributed_type="MULTI_GPU", mixed_precision="bf16")}, note=True),
    "FS004": Case("CF015", {**hf(bf16=True, fsdp="full_shard", fsdp_config={"fsdp_version": 2}), **BF16_MODEL, "adapter_config.json": j(peft_type="LORA", r=8, lora_alpha=16, modules_to_save=["lm_head"])}, {**hf(bf16=True, fsdp="full_shard", fsdp_config={"fsdp_version": 2}), **BF16_MODEL, **LORA}),
    "FS005": Case("CF060", {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy={'param_dtype': 'bf16', 'buffer_dtype': 'bf16'})\na = Accelerator(fsdp_plugin=p)\n"}, {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy={'param_dtype': 'bf16', 'output_dtype': 'bf16'})\na = Accelerator(fsdp_plugin=p)\n"}),
    "FS005 v1": Case("CF060", {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=1, mixed_precision_policy={'output_dtype': 'bf16'})\na = Accelerator(fsdp_plugin=p)\n"}, {"t.py": "p = FullyShardedDataParallelPlugin(fsdp_version=1, mixed_precision_policy={'buffer_dtype': 'bf16'})\na = Accelerator(fsdp_plugin=p)\n"}),
    "FS007": Case("CF015", {**hf(bf16=True, fsdp="full_shard", fsdp_config={"fsdp_version": 2}), **model(dtype="bfloat16", quantization_config=BNB), **LORA}, {**hf(bf16=True, fsdp="full_shard", fsdp_config={"fsdp_version": 2}), **model(dtype="bfloat16", quantization_config={**BNB, "bnb_4bit_quant_storage": "bfloat16"}), **LORA}),
    "FSDP as a list, 8 bits": Case("CF015", y("c.yml", base_model="a/b", datasets=[{"path": "x"}], sequence_len=8, micro_batch_size=1, bf16=True, adapter="lora", load_in_8bit=True, fsdp=["full_shard", "auto_wrap"], fsdp_config={"fsdp_use_orig_params": False}), y("c.yml", base_model="a/b", datasets=[{"path": "x"}], sequence_len=8, micro_batch_size=1, bf16=True, adapter="qlora", load_in_4bit=True, fsdp=["full_shard", "auto_wrap"], fsdp_config={"fsdp_use_orig_params": False})),
    # DeepSpeed
    "DS001": Case("CF001", ds(bf16={"enabled": True}, fp16={"enabled": True}), ds(bf16={"enabled": True}, fp16={"enabled": False})),
    "DS002": Case("CF050", {**hf(bf16=False, deepspeed="ds_config.json"), **ds(bf16={"enabled": True})}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(bf16={"enabled": True})}),
    "DS002 inline": Case("CF050", {"t.py": "from transformers import TrainingArguments\nds = {'fp16': {'enabled': True}, 'zero_optimization': {'stage': 2}}\na = TrainingArguments('o', bf16=True, deepspeed={'fp16': {'enabled': True}})\n"}, {"t.py": "from transformers import TrainingArguments\na = TrainingArguments('o', bf16=True, deepspeed={'bf16': {'enabled': 'auto'}})\n"}),
    "DS003": Case("CF011", {**hf(bf16_full_eval=True, deepspeed="ds_config.json"), **ds(**AUTO)}, {**hf(bf16=True, bf16_full_eval=True, deepspeed="ds_config.json"), **ds(**AUTO)}),
    "DS004": Case("CF001", {**hf(bf16=True, fp16_full_eval=True, deepspeed="ds_config.json"), **ds(**AUTO)}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO)}),
    "DS005": Case("CF051", {**hf(bf16=True, deepspeed="ds_config.json"), **ds()}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO)}),
    "DS006": Case("CF005", {**hf(bf16=True, gradient_accumulation_steps=32, deepspeed="ds_config.json"), **ds(**AUTO)}, {**hf(bf16=True, gradient_accumulation_steps=32, deepspeed="ds_config.json"), **ds(**AUTO, data_types={"grad_accum_dtype": "fp32"})}),
    "DS007": Case("CF052", ds(zero_optimization={"stage": 0}, fp16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}), ds(zero_optimization={"stage": 1}, fp16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})),
    "DS bf16 accumulated in fp16": Case("CF052", ds(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp16"}), ds(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})),
    "DS fp16 accumulated in bf16": Case("CF052", ds(fp16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"}), ds(fp16={"enabled": True}, data_types={"grad_accum_dtype": "float32"})),
    "DS009": Case("CF053", ds(amp={"enabled": True}), ds(amp={"enabled": False})),
    "DS quantised weights": Case("CF067", ds(bf16={"enabled": True}, zero_optimization={"stage": 3, "zero_quantized_weights": True}), ds(bf16={"enabled": True}, zero_optimization={"stage": 3, "zero_quantized_weights": False})),
    "DS011": Case("CF055", ds(bf16={"enabled": True, "loss_scale_window": 1000}), ds(bf16={"enabled": True})),
    "DS012": Case("CF056", ds(bf16={"enabled": True}, communication_data_type="bfloat16"), ds(bf16={"enabled": True}, communication_data_type="bf16")),
    "DS013": Case("CF061", {"t.py": "engine = deepspeed.initialize(model=m, config='ds_config.json')\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    engine(x)\n", **ds(bf16={"enabled": True})}, {"t.py": "engine = deepspeed.initialize(model=m, config='ds_config.json')\nengine(x)\nwith torch.autocast('cuda', enabled=False):\n    pass\n", **ds(bf16={"enabled": True}, torch_autocast={"enabled": True})}),
    "DS014": Case("CF057", {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO, zero_optimization={"stage": 3}), **BF16_MODEL, **LORA}, {**hf(bf16=True, deepspeed="ds_config.json"), **ds(**AUTO), **BF16_MODEL, **LORA}),
    # axolotl
    "AX both": Case("CF001", ax(bf16=True, fp16=True, adapter="lora"), ax(bf16=True, adapter="lora")),
    "AX001": Case("CF070", ax(bf16="full", adapter="lora"), ax(bf16=True, adapter="lora")),
    "AX002": Case("CF071", ax(float16=True, adapter="lora"), ax(float16=True, bf16=False, adapter="lora"), device="a100"),
    "AX004": Case("CF071", ax(float32=True, bf16="auto", adapter="lora"), ax(bf16=False, fp16=False, adapter="lora")),
    "AX005": Case("CF004", y("a.yaml", base_model="m", micro_batch_size=1, sequence_len=8, bf16=True, learning_rate="0.00001", optimizer="adamw_torch"), y("a.yaml", base_model="m", micro_batch_size=1, sequence_len=8, bf16=True, learning_rate="0.00001", optimizer="adamw_torch", adapter="lora")),
    "AX006": Case("CF008", ax(load_in_8bit=True, bf16=True), ax(load_in_8bit=True, bf16=True, adapter="lora")),
    "AX007": Case("CF072", ax(adapter="qlora", load_in_8bit=True, bf16=True), ax(adapter="qlora", load_in_4bit=True, bf16=True)),
    "AX007 not 4bit": Case("CF072", ax(adapter="qlora", bf16=True), ax(adapter="lora", bf16=True)),
    "AX008": Case("CF073", ax(adapter="lora", load_in_8bit=True, bf16=False), ax(adapter="lora", load_in_8bit=True, bf16=True)),
    "AX009": Case("CF074", ax(adapter="lora", bf16=True, fp32_norms=True), ax(adapter="lora", bf16=True, fp32_norms=True, fsdp_version=2, fsdp_config={"reshard_after_forward": True})),
    "AX010": Case("CF075", ax(adapter="lora", bf16=True, sample_packing=True, sdp_attention=True), ax(adapter="lora", bf16=True, sample_packing=True, flash_attention=True), device="a100"),
    "AX011": Case("CF002", ax(bf16=False, fp16=True, sample_packing=True), ax(bf16=False, fp16=True, sample_packing=True, adapter="lora")),
    "AX012": Case("CF076", ax(adapter="lora", fp8=True, bf16=True), ax(adapter="lora", fp8=True, bf16=True, torch_compile=True)),
    "AX012 gather": Case("CF076", ax(adapter="lora", fp8=True, torch_compile=True, fp8_enable_fsdp_float8_all_gather=True), ax(adapter="lora", fp8=True, torch_compile=True, fp8_enable_fsdp_float8_all_gather=True, fsdp_version=2)),
    "AX015": Case("CF077", ax(rl="dpo", adapter="qlora", load_in_4bit=True, bf16=True, fsdp_version=2), ax(rl="dpo", adapter="qlora", load_in_4bit=True, bf16=True)),
    "AX016": Case("CF078", y("a.yaml", base_model="Qwen/Qwen1.5-MoE-A2.7B", micro_batch_size=1, sequence_len=8, adapter="qlora", load_in_4bit=True, bf16=True, bnb_config_kwargs={"bnb_4bit_quant_storage": "bfloat16"}), y("a.yaml", base_model="Qwen/Qwen1.5-MoE-A2.7B", micro_batch_size=1, sequence_len=8, adapter="qlora", load_in_4bit=True, bf16=True, bnb_config_kwargs={"bnb_4bit_quant_storage": "float32"})),
    # LLaMA-Factory
    "LF001": Case("CF080", lf(pure_bf16=True, finetuning_type="full", deepspeed="examples/deepspeed/ds_z3_config.json"), lf(bf16=True, finetuning_type="full", deepspeed="examples/deepspeed/ds_z3_config.json")),
    "LF002": Case("CF007", lf(pure_bf16=True, finetuning_type="full"), lf(fp16=True, finetuning_type="full"), device="t4"),
    "LF003": Case("CF081", lf(pure_bf16=True), lf(bf16=True)),
    "LF004": Case("CF001", lf(pure_bf16=True, fp16=True, finetuning_type="full"), lf(fp16=True, finetuning_type="full")),
    "LF005": Case("CF004", lf(pure_bf16=True, finetuning_type="full", learning_rate="1.0e-5"), lf(bf16=True, finetuning_type="full", learning_rate="1.0e-5")),
    "LF006": Case("CF082", {**lf(), "config.json": j(architectures=["A"], hidden_size=8, model_type="llama", torch_dtype="float32")}, {**lf(bf16=True), "config.json": j(architectures=["A"], hidden_size=8, model_type="llama", torch_dtype="float32")}),
    "LF007": Case("CF083", lf(bf16=True, quantization_bit=4), lf(bf16=True, quantization_bit=4, upcast_layernorm=True), note=True),
    "LF008": Case("CF084", lf(bf16=True, quantization_bit=8, deepspeed="ds_z3_config.json"), lf(bf16=True, quantization_bit=4, upcast_layernorm=True, deepspeed="ds_z2_config.json")),
    "LF009": Case("CF084", lf(bf16=True, quantization_bit=4, quantization_method="hqq", upcast_layernorm=True, deepspeed="ds_z3_config.json"), lf(bf16=True, quantization_bit=4, quantization_method="bnb", upcast_layernorm=True, deepspeed="ds_z3_config.json")),
    "LF010": Case("CF085", lf(bf16=True, fp8=True, quantization_bit=4), lf(bf16=True, fp8=True)),
    "LF011": Case("CF085", lf(bf16=True, fp8_enable_fsdp_float8_all_gather=True), lf(bf16=True, fp8=True, fp8_enable_fsdp_float8_all_gather=True)),
    "LF012": Case("CF008", lf(bf16=True, quantization_bit=4, finetuning_type="full"), lf(bf16=True, quantization_bit=4, upcast_layernorm=True)),
    "LF013": Case("CF015", {**lf(quantization_bit=4), **ac(distributed_type="FSDP")}, {**lf(quantization_bit=4, bf16=True), **ac(distributed_type="FSDP", mixed_precision="bf16")}),
    "LF014": Case("CF015", {**lf(upcast_layernorm=True, bf16=True), **ac(distributed_type="FSDP")}, {**lf(bf16=True), **ac(distributed_type="FSDP")}),
    # others
    "TT001": Case("CF090", y("tt.yaml", model={"_component_": "torchtune.models.llama3.llama3_8b"}, dtype="fp16"), y("tt.yaml", model={"_component_": "torchtune.models.llama3.llama3_8b"}, dtype="bf16")),
    "TT002": Case("CF007", y("tt.yaml", model={"_component_": "torchtune.models.llama3.lora_llama3_8b"}, dtype="bf16"), y("tt.yaml", model={"_component_": "torchtune.models.llama3.lora_llama3_8b"}, dtype="fp32"), device="v100"),
    "TT003": Case("CF004", y("tt.yaml", model={"_component_": "torchtune.models.llama3.llama3_8b"}, dtype="bf16", optimizer={"_component_": "torch.optim.AdamW", "lr": "2.0e-05"}), y("tt.yaml", model={"_component_": "torchtune.models.llama3.llama3_8b"}, dtype="fp32", optimizer={"_component_": "torch.optim.AdamW", "lr": "2.0e-05"})),
    "TI001": Case("CF091", {"train.toml": '[job]\ndump_folder = "o"\n[training]\nmixed_precision_param = "bfloat16"\nmixed_precision_reduce = "bfloat16"\n'}, {"train.toml": '[job]\ndump_folder = "o"\n[training]\nmixed_precision_param = "bfloat16"\nmixed_precision_reduce = "float32"\n'}),
    "LI002": Case("CF007", y("config.yaml", trainer={"accelerator": "cpu", "precision": "16-mixed"}), y("config.yaml", trainer={"accelerator": "cpu", "precision": "bf16-mixed"})),
    "LI005": Case("CF006", {"t.py": "import lightning as L\nt = L.Trainer(precision='bf16-mixed', strategy=FSDPStrategy(auto_wrap_policy=p))\n"}, {"t.py": "import lightning as L\nt = L.Trainer(precision='bf16-mixed', strategy='ddp')\n"}, note=True),
    "LI006": Case("CF093", {"t.py": "import lightning as L\nt = L.Trainer(precision='bf16-mixed', plugins=[MixedPrecision('16-mixed', 'cuda')])\n"}, {"t.py": "import lightning as L\nt = L.Trainer(precision='bf16-mixed')\n"}),
    "KO001": Case("CF094", {"run.sh": "accelerate launch sdxl_train.py --full_bf16 --mixed_precision fp16\n"}, {"run.sh": "accelerate launch --mixed_precision bf16 sdxl_train.py --full_bf16 --mixed_precision bf16\n"}),
    "KO001 toml": Case("CF094", {"k.toml": 'network_module = "networks.lora"\nfp8_base = true\nmixed_precision = "no"\n'}, {"k.toml": 'network_module = "networks.lora"\nfp8_base = true\nmixed_precision = "bf16"\n'}),
    "kohya launcher only": Case("CF009", {"run.sh": "accelerate launch --mixed_precision bf16 train_network.py --network_module networks.lora\n"}, {"run.sh": "accelerate launch --mixed_precision bf16 train_network.py --network_module networks.lora --mixed_precision bf16\n"}),
    "GE003": Case("CF005", st(mixed_precision="bf16", gradient_accumulation_steps=128), st(mixed_precision="bf16", gradient_accumulation_steps=1)),
    "prodigy": Case("CF020", {"config.json": j(optimizer="prodigy", mixed_precision="bf16", gradient_precision="fp32", model_type="lora")}, {"config.json": j(optimizer="prodigy", mixed_precision="bf16", gradient_precision="unmodified", model_type="lora")}),
    "axolotl both, few keys": Case("CF001", y("c.yml", base_model="m", bf16=True, fp16=True), y("c.yml", base_model="m", bf16="auto", fp16=None)),
    "gemma in fp16": Case("CF016", {"training_args.json": j(fp16=True, bf16=False, learning_rate=1e-5), "model.json": j(model_name_or_path="google/gemma-3-4b-it", dtype="float32")}, {"training_args.json": j(fp16=False, bf16=True, learning_rate=1e-5), "model.json": j(model_name_or_path="google/gemma-3-4b-it", dtype="float32")}),
    "t5 checkpoint in fp16": Case("CF016", {**hf(fp16=True), "config.json": j(architectures=["T5ForConditionalGeneration"], d_model=512, vocab_size=32128, model_type="t5")}, {**hf(bf16=True), "config.json": j(architectures=["T5ForConditionalGeneration"], d_model=512, vocab_size=32128, model_type="t5")}),
    "FSDP1 QLoRA storage": Case("CF015", {**hf(bf16=True, fsdp="full_shard auto_wrap"), **model(dtype="bfloat16", quantization_config=BNB, adapter="lora")}, {**hf(bf16=True, fsdp="full_shard auto_wrap"), **model(dtype="bfloat16", adapter="lora", quantization_config={**BNB, "bnb_4bit_quant_storage": "bfloat16"})}),
    "FSDP QLoRA storage by accelerate": Case("CF015", {**hf(bf16=True), **ac(distributed_type="FSDP", mixed_precision="bf16"), **model(dtype="bfloat16", quantization_config={**BNB, "bnb_4bit_quant_storage": "float32"})}, {**hf(bf16=True), **ac(distributed_type="FSDP", mixed_precision="bf16"), **model(dtype="bfloat16", quantization_config={**BNB, "bnb_4bit_quant_storage": "bfloat16"})}),
    "FSDP QLoRA storage in axolotl": Case("CF015", ax(adapter="qlora", load_in_4bit=True, bf16=True, fsdp=["full_shard"], bnb_config_kwargs={"bnb_4bit_quant_storage": "float32"}), ax(adapter="qlora", load_in_4bit=True, bf16=True, fsdp=["full_shard"], bnb_config_kwargs={"bnb_4bit_quant_storage": "bfloat16"})),
    "a start that moves the reference": Case("CF019", {"t.py": "from peft import LoraConfig\nfrom transformers import AutoModelForCausalLM\nfrom trl import DPOConfig, DPOTrainer\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\npeft = LoraConfig(r=8, init_lora_weights='pissa', task_type='CAUSAL_LM')\nargs = DPOConfig('o', bf16=True)\nDPOTrainer(model, args=args, train_dataset=rows, peft_config=peft).train()\n"}, {"t.py": "from peft import LoraConfig\nfrom transformers import AutoModelForCausalLM\nfrom trl import DPOConfig, DPOTrainer\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\npeft = LoraConfig(r=8, task_type='CAUSAL_LM')\nargs = DPOConfig('o', bf16=True)\nDPOTrainer(model, args=args, train_dataset=rows, peft_config=peft).train()\n"}),
    "log-probabilities in bf16": Case("CF030", {"t.py": ORPO}, {"t.py": ORPO.replace("bf16=False", "bf16=True")}, device="cpu"),
    "log-probabilities in bf16, use_cpu": Case("CF030", {"t.py": ORPO.replace("bf16=False", "bf16=False, use_cpu=True")}, {"t.py": ORPO.replace("bf16=False", "bf16=True, use_cpu=True")}),
    "a loop's own GradScaler": Case("CF003", {'loop.py': 'import torch\nfrom transformers import AutoModel\n\nmodel = AutoModel.from_pretrained("bert-base-uncased", dtype=torch.bfloat16).cuda()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\nscaler = torch.amp.GradScaler("cuda")\nfor batch in []:\n    with torch.autocast("cuda", dtype=torch.float16):\n        loss = model(**batch).last_hidden_state.mean()\n    scaler.scale(loss).backward()\n    scaler.step(opt)\n    scaler.update()\n'}, {'loop.py': 'import torch\nfrom transformers import AutoModel\n\nmodel = AutoModel.from_pretrained("bert-base-uncased", dtype=torch.float32).cuda()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\nscaler = torch.amp.GradScaler("cuda")\nfor batch in []:\n    with torch.autocast("cuda", dtype=torch.float16):\n        loss = model(**batch).last_hidden_state.mean()\n    scaler.scale(loss).backward()\n    scaler.step(opt)\n    scaler.update()\n'}),
    "Lightning casts no weight": Case("CF002", {'train.py': 'import lightning as L\nimport torch\nfrom transformers import AutoModelForCausalLM\n\n\nclass Lit(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n        self.model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float16)\n\n\ntrainer = L.Trainer(precision="16-mixed", devices=1, max_steps=10)\ntrainer.fit(Lit())\n'}, {'train.py': 'import lightning as L\nimport torch\nfrom transformers import AutoModelForCausalLM\n\n\nclass Lit(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n        self.model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.float32)\n\n\ntrainer = L.Trainer(precision="bf16-mixed", devices=1, max_steps=10)\ntrainer.fit(Lit())\n'}),
    "a module that DeepSpeed launches": Case("CF001", {"t.sh": "deepspeed --module llava.train.train --pretrain m --bf16 --fp16 --learning_rate 5e-6\n"}, {"t.sh": "deepspeed --module llava.train.train --pretrain m --bf16 --learning_rate 5e-6\n"}),
    "AX deepspeed": Case("CF050", {**ax(bf16=True, fp16=False, deepspeed="ds_config.json"), **ds(fp16={"enabled": True}, bf16={"enabled": False})}, {**ax(bf16=True, fp16=False, deepspeed="ds_config.json"), **ds(bf16={"enabled": True})}),
    "AX deepspeed auto": Case("CF050", {**ax(bf16="auto", deepspeed="ds_config.json"), **ds(fp16={"enabled": True})}, {**ax(bf16="auto", deepspeed="ds_config.json"), **ds(bf16={"enabled": True})}),
    "AC006 the other half": Case("CF051", {**ac(distributed_type="DEEPSPEED", mixed_precision="bf16"), **ds(bf16={"enabled": False}, fp16={"enabled": True})}, {**ac(distributed_type="DEEPSPEED", mixed_precision="bf16"), **ds(bf16={"enabled": True}, fp16={"enabled": False})}),
    "BN006 python": Case("CF043", {"q.py": "import torch\nb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype='torch.bfloat16')\n"}, {"q.py": "import torch\nb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)\n"}),
    "gemma by name alone": Case("CF016", {'training_args.json': '{"fp16": true, "bf16": false, "learning_rate": 2e-5, "per_device_train_batch_size": 1}\n', 'model.json': '{"model_name_or_path": "google/gemma-3-4b-it"}\n'}, {'training_args.json': '{"fp16": false, "bf16": true, "learning_rate": 2e-5, "per_device_train_batch_size": 1}\n', 'model.json': '{"model_name_or_path": "google/gemma-3-4b-it"}\n'}),
    "half() of a model of one's own": Case("CF002", {"t.py": "import torch\nmodel = Net().cuda().half()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\nscaler = torch.cuda.amp.GradScaler()\nwith torch.cuda.amp.autocast():\n    loss = model(x)\nscaler.scale(loss).backward()\n"}, {"t.py": "import torch\nteacher = Net().half()\nmodel = Net().cuda()\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\nscaler = torch.cuda.amp.GradScaler()\nif args.half:\n    model.half()\nmodel.half()\ntorch.save(model.state_dict(), 'm.pt')\n"}),
    "to(bfloat16) of a model of one's own": Case("CF003", {"t.py": "import torch\nmodel = Net()\nmodel.to(torch.bfloat16)\nopt = torch.optim.SGD(model.parameters(), lr=1e-2)\nscaler = torch.amp.GradScaler('cuda')\nwith torch.autocast('cuda', dtype=torch.float16):\n    loss = model(x)\n"}, {"t.py": "import torch\nmodel = Net()\nmodel.to('cuda')\nopt = torch.optim.SGD(model.parameters(), lr=1e-2)\nscaler = torch.amp.GradScaler('cuda')\nwith torch.autocast('cuda', dtype=torch.float16):\n    loss = model(x)\n"}),
    "TT001 tune run": Case("CF090", {"t.sh": "tune run --nproc_per_node 4 full_finetune_distributed --config llama3_1/8B_full dtype=fp16 optimizer.lr=2e-5\n"}, {"t.sh": "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device dtype=bf16 optimizer.lr=2e-5\n"}),
    "AX002 fp16 beside auto": Case("CF071", ax(bf16="auto", fp16=True, adapter="lora"), ax(bf16="auto", adapter="lora")),
    "BN006 a model's dtype": Case("CF043", {"t.py": "m = AutoModelForCausalLM.from_pretrained('a/b', dtype='bf16')\na = TrainingArguments('o', bf16=True, optim='adafactor')\n"}, {"t.py": "import torch\nHALF = torch.bfloat16\nm = AutoModelForCausalLM.from_pretrained('a/b', dtype=HALF)\nn = FastLanguageModel.from_pretrained('a/b', dtype='bfloat16')\na = TrainingArguments('o', bf16=True, optim='adafactor')\n"}),
}  # fmt: skip
