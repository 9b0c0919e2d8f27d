"""Every failing program is explained with its true cause, place and fix, which were written down
first; its repaired twin, to which the fix was applied, ends without an error.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version

from isotype.finding import Finding
from tests.api import (
    RECORD,
    collect_evidence,
    decide_cause,
    find_unrestored_calls,
    is_library_file,
    remove_record_frames,
    run_compiled,
)

PROGRAMS = Path(__file__).parent / "programs"


class Truth(NamedTuple):
    """code, the text of the line, words of the place, the cause and the fix.

    recorded_fix  words of the fix if all tensors were recorded; "" if it is the same
    """

    code: str
    line: str
    symbol: str | None
    cause: str
    fix: str
    recorded_fix: str = ""


TRUTH = {
    "norm_output": Truth(
        "RN001",
        "return self.proj(hidden)",
        "blocks.0.proj",
        "`self.norm(x.float())` (tests/doctor/run/programs/norm_output.py:18) returns fp32, because"
        " `block.norm.float()` (tests/doctor/run/programs/norm_output.py:39) made the weights of"
        " blocks.0.norm fp32",
        "`hidden.to(torch.bfloat16)`",
    ),
    "library_norms": Truth(
        "RN001",
        "out = model(input_ids=ids, labels=ids)",
        "model.layers.0.self_attn.q_proj",
        "because `parameter.data = parameter.data.float()`"
        " (tests/doctor/run/programs/library_norms.py:21) made the weights of"
        " model.layers.0.input_layernorm fp32",
        "leave `parameter.data = parameter.data.float()`"
        " (tests/doctor/run/programs/library_norms.py:21) out, which also casts other modules",
    ),
    "library_hook": Truth(
        "RN001",
        "out = model(ids, labels=ids)",
        "model.decoder.layers.0.self_attn_layer_norm",
        "`output.float()` in the forward hook `<lambda>` of model.decoder.embed_tokens",
        "leave `output.float()` (tests/doctor/run/programs/library_hook.py:22) out",
    ),
    "lora_adapters": Truth(
        "RN002",
        "return self.base(x) + self.lora_B(self.lora_A(x))",
        "1.lora_A",
        "1.lora_A.weight is fp32",
        'with torch.autocast("cpu", dtype=torch.bfloat16): loss = model(x).float().square().mean()',
    ),
    "fused_backward": Truth(
        "RN005",
        "inner = dy @ b",
        "backward",
        "backward runs outside autocast",
        '@torch.amp.custom_bwd(device_type="cpu")',
    ),
    "chunked_backward": Truth(
        "RN005",
        "torch.mm(states, rows.t(), out=logits)",
        "backward",
        "forward computes with `weight[start:stop].to(hidden.dtype)`"
        " (tests/doctor/run/programs/chunked_backward.py:15), and backward uses"
        " `head[start:ctx.stop]` (tests/doctor/run/programs/chunked_backward.py:25) without this cast",
        "`head[start:ctx.stop].to(states.dtype)` at"
        " tests/doctor/run/programs/chunked_backward.py:25",
    ),
    "pooled_rows": Truth(
        "RN008",
        "total.index_add_(0, groups, rows)",
        "Pool",
        "total is created in fp32 (tests/doctor/run/programs/pooled_rows.py:21)",
        "`torch.zeros(size, 4, dtype=torch.float64)` at tests/doctor/run/programs/pooled_rows.py:21,"
        " and `torch.zeros(size, dtype=torch.float64)` at"
        " tests/doctor/run/programs/pooled_rows.py:22",
    ),
    "scaler": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "all 4 parameters of the optimizer are fp16",
        "leave `.half()` (tests/doctor/run/programs/scaler.py:8) out, or cast the trained parameters",
    ),
    "scaler_adapters": Truth(
        "RN006",
        "scaler.unscale_(optimizer)",
        "<module>",
        "all 2 parameters of the optimizer are fp16",
        "for p in transformer.parameters()",
    ),
    "restored_moments": Truth(
        "RN007",
        'state["average"].lerp_(p.grad.float(), 0.1)',
        "step",
        "`optimizer.load_state_dict(saved)` (tests/doctor/run/programs/restored_moments.py:35)"
        " casts the states",
        'optimizer.state[p].update(saved["state"].get(i, dict()))',
    ),
    "optimizer_states": Truth(
        "RN007",
        "optimizer.step()",
        "<module>",
        "`model.to(torch.bfloat16)` (tests/doctor/run/programs/optimizer_states.py:14) cast the model",
        "cast the model before its first step",
    ),
    "kept_module": Truth(
        "RN002",
        "return self.gate(hidden)",
        "gate",
        "loads it in fp32, because `Gated._keep_in_fp32_modules_strict` contains 'gate'",
        'with torch.autocast("cpu", dtype=torch.bfloat16)',
    ),
    "config_field": Truth(
        "RN001",
        "model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()",
        "1",
        "its dtype is the default of `Settings(width=width)`"
        " (tests/doctor/run/programs/config_field.py:26)",
        ".to(torch.bfloat16)` at tests/doctor/run/programs/config_field.py:22",
    ),
    "residual_stream": Truth(
        "RN001",
        "x = x + self.mixer(self.first_norm(x))",
        "layer.first_norm",
        "the weights of layer.first_norm are bf16",
        "`x = x.to(torch.bfloat16)` before tests/doctor/run/programs/residual_stream.py:18",
        "`positions.to(torch.bfloat16)` at tests/doctor/run/programs/residual_stream.py:33",
    ),
    "short_ids": Truth(
        "RN015",
        "nn.Embedding(16, 8)(tokens).sum().backward()",
        "Embedding",
        "`tokens` is int16, and embedding needs indices of int64",
        "`tokens.long()` at tests/doctor/run/programs/short_ids.py:19",
        ".long()` at tests/doctor/run/programs/short_ids.py:13",
    ),
    "checked_parameter": Truth(
        "RN020",
        "assert parameter.dtype == torch.bfloat16",
        "step",
        "`parameter` is weight: `nn.Linear(4, 2)` (tests/doctor/run/programs/checked_parameter.py:21)"
        " builds it in fp32",
        "`adapter.to(torch.bfloat16)` before the optimizer is made",
    ),
    "experts": Truth(
        "RN008",
        "out.index_add_(0, rows, values)",
        "Experts",
        "autocast, which is on, computes `values` in bf16, and leaves out, from `torch.randn(4, 8)`",
        "`values.to(out.dtype)`",
    ),
    "expert_calls": Truth(
        "RN008",
        "out.index_add_(0, rows, expert(x[rows]) * weights[rows])",
        "Experts",
        "`(expert(x[rows]) * weights[rows])` is bf16",
        "`(expert(x[rows]) * weights[rows]).to(out.dtype)`",
    ),
    "callback_generate": Truth(
        "RN003",
        "return model.generate(ids)",
        "head",
        "callback_generate.py:32 opens autocast",
        'with torch.autocast("cpu", dtype=torch.bfloat16): return model.generate(ids)',
    ),
    "class_targets": Truth(
        "RN010",
        "return F.cross_entropy(logits, labels)",
        "training_loss",
        "the cast `value.to(torch.bfloat16)` (tests/doctor/run/programs/class_targets.py:20) makes"
        " `labels` bf16",
        "`labels.long()`",
    ),
    "binary_targets": Truth(
        "RN010",
        "loss = criterion(model(x).squeeze(1), labels)",
        "BCEWithLogitsLoss",
        "`labels` is int64",
        "`labels.to(torch.float32)`",
    ),
    "rotary_attention": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(q, k, v)",
        "attention",
        "`torch.arange(8) / 8` made q and k fp32 (tests/doctor/run/programs/rotary_attention.py:28),"
        " because it computes floats from int64; v is bf16: `self.qkv(x)`"
        " (tests/doctor/run/programs/rotary_attention.py:16) returns bf16, as"
        " the weights of attention.qkv are",
        "`q.to(torch.bfloat16)` and `k.to(torch.bfloat16)` at",
    ),
    "vae_latents": Truth(
        "RN001",
        "return self.conv_out(self.conv_in(latents))",
        "conv_in",
        "`torch.randn(1, 4, 4, 4)` creates a tensor in fp32",
        "`latents.to(torch.float16)`",
    ),
    "loader_float64": Truth(
        "RN001",
        "loss = nn.functional.cross_entropy(model(features), labels)",
        "0",
        "`np.full(8, index / 4)` is fp64 (tests/doctor/run/programs/loader_float64.py:16)",
        "`features.to(torch.float32)`",
    ),
    "thread": Truth(
        "RN004",
        "return model(x)",
        "1",
        "autocast is on in the thread that waits",
        "return model(x)  (tests/doctor/run/programs/thread.py:19)",
    ),
    "checkpoint": Truth(
        "RN019",
        "loss.backward()",
        "<module>",
        "`block.is_warm = True` (tests/doctor/run/programs/checkpoint.py:25) changes what Block reads",
        "after backward",
    ),
    "two_halves": Truth(
        "RN001",
        "model(pixels).float().sum().backward()",
        "0",
        "bf16",
        "`pixels.to(torch.float16)`",
    ),
    "integer_parameter": Truth(
        "RN012",
        "self.codes = nn.Parameter(codes)",
        "Int8Linear",
        "`codes` is int8",
        "`nn.Parameter(codes, requires_grad=False)`",
    ),
    "numpy_metric": Truth(
        "RN013",
        "predictions = logits.numpy().argmax(-1)",
        "accuracy",
        "`logits` is bf16",
        "numpy_metric.py:13, and `scores.cpu().float()` at",
    ),
    "numpy_adapter": Truth(
        "RN013",
        "return load_file(path)",
        "read_adapter",
        "the file holds a tensor in bf16, a dtype that NumPy does not have",
        "`{name: tensor.float().numpy() for name, tensor in safetensors.torch.load_file(path).items()}`",
    ),
    "numpy_buffer": Truth(
        "RN013",
        "rows = np.zeros((2, hidden.shape[0]), dtype=dtype)",
        "collect",
        "passes torch's bf16 to NumPy, which has no bf16",
        "np.float32 as the dtype for NumPy at tests/doctor/run/programs/numpy_buffer.py:11",
    ),
    "shared_features": Truth(
        "RN001",
        'features["scores"] = self.linear(features["pooled"])',
        "1.linear",
        "`torch.clamp(lengths.unsqueeze(1), min=1e-09)`"
        " (tests/doctor/run/programs/shared_features.py:19) returns fp32, because it computes"
        " floats from int64",
        "`features['pooled'].to(torch.bfloat16)` at",
    ),
    "returned_region": Truth(
        "RN017",
        'raise RuntimeError(f"expected scalar type {boxes.dtype} but found {scores.dtype}")',
        "suppress",
        "`factors.prod(0)` is fp32 (tests/doctor/run/programs/returned_region.py:29), because"
        " autocast (tests/doctor/run/programs/returned_region.py:",
        "`boxes.to(torch.bfloat16)` at tests/doctor/run/programs/returned_region.py:39",
    ),
    "missing_kernel": Truth(
        "RN014",
        "q, _ = torch.linalg.qr(weight)",
        "orthogonal_start",
        "implements qr on cpu for other dtypes",
        "`weight.float()`",
    ),
    "float_ids": Truth(
        "RN015",
        'model(batch["input_ids"]).float().sum().backward()',
        "0",
        "the cast `v.to(torch.bfloat16)` (tests/doctor/run/programs/float_ids.py:13) makes them",
        "`v.to(torch.bfloat16) if v.is_floating_point() else v` at",
    ),
    "integer_counts": Truth(
        "RN016",
        "counts *= 0.9",
        "<module>",
        "`counts` is int64, and the result is a float",
        "`counts = counts * 0.9` at tests/doctor/run/programs/integer_counts.py:11",
    ),
    "mask_constant": Truth(
        "RN018",
        "return scores.masked_fill(mask, constant).softmax(-1)",
        "masked_attention",
        "`scores` is fp16",
        "`scores.masked_fill(mask, torch.finfo(scores.dtype).min)` at",
    ),
    "out_buffer": Truth(
        "RN008",
        "return torch.matmul(x, self.weight, out=buffer)",
        "Project",
        "buffer is fp32",
        "`buffer.copy_(torch.matmul(x, self.weight))` at",
    ),
    "projected_gradient": Truth(
        "RN017",
        "low = torch.mm(basis, gradient)",
        "step",
        "is fp32",
        "`basis.to(torch.bfloat16)`",
    ),
    "average": Truth(
        "RN008",
        "torch._foreach_lerp_(self.shadow, weights, 0.01)",
        "update",
        "self.shadow[0] is fp32, `weights[0]` is bf16",
        "`[tensor.to(torch.float32) for tensor in weights]`",
    ),
    "hidden_state": Truth(
        "RN001",
        "return self.rnn(self.embed(ids), start)[0]",
        "rnn",
        "`torch.zeros(1, ids.shape[1], 4)` creates a tensor in fp32",
        "`start.to(torch.bfloat16)`",
    ),
    "backward_targets": Truth(
        "RN010",
        "loss.backward()",
        "<module>",
        "`ratings` is int64",
        "`ratings.to(torch.float32)`",
    ),
    "router_check": Truth(
        "RN020",
        'assert logits.dtype == torch.float32, "router logits must be float32"',
        "Router",
        "autocast, which is on, computes `self.gate(x)` in bf16",
        "`self.gate(x).to(torch.float32)`",
    ),
    "chunked_head": Truth(
        "RN008",
        "total.addmm_(left, right)",
        "backward",
        "total is fp32, `left` is bf16",
        "`left.to(total.dtype)` and `right.to(total.dtype)`",
    ),
    "timesteps": Truth(
        "RN001",
        "return self.linear(sample)",
        "embedding.linear",
        "the explicit cast `step.float()` makes it fp32",
        "`sample.to(torch.float16)`",
    ),
    "quantile": Truth(
        "RN014",
        "return x.clamp(max=torch.quantile(values.abs(), 0.99).item())",
        "clip",
        "implements quantile on cpu for other dtypes",
        "`values.abs().float()`",
    ),
    "loss_weights": Truth(
        "RN023",
        "return criterion(logits, labels)",
        "CrossEntropyLoss",
        "`torch.tensor([7.0, 2.0, 1.0], dtype=torch.float64)` is fp64",
        "`class_weights.to(torch.float32)` at tests/doctor/run/programs/loss_weights.py:18",
    ),
    "library_kernel": Truth(
        "RN014",
        "nn.init.orthogonal_(layer.weight)",
        "<module>",
        "is bf16, and PyTorch implements",
        "the frames do not show this line",
    ),
    "compiled_attention": Truth(
        "RN017",
        "return torch.matmul(probabilities, values)",
        "attend",
        "`scores.softmax(-1, dtype=torch.float32)` is fp32",
        "`probabilities.to(torch.bfloat16)`",
    ),
    "packed_weight": Truth(
        "RN012",
        "parameter.requires_grad_(True)",
        "<module>",
        "1.weight is a quantised weight (PackedWeight)",
        "set requires_grad for floating-point parameters only",
    ),
    "fourier_layer": Truth(
        "RN014",
        "spectrum = torch.fft.rfft(wide)",
        "1",
        "implements rfft on cpu for other dtypes",
        "cast back to torch.bfloat16 only after the inverse transform",
    ),
    "pre_hook": Truth(
        "RN001",
        "model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()",
        "2",
        "`value.float()` in the forward pre-hook `steady_input` of 2 (registered at"
        " tests/doctor/run/programs/pre_hook.py:16) makes it fp32",
        "leave `value.float()` (tests/doctor/run/programs/pre_hook.py:12) out",
    ),
    "batch_helper": Truth(
        "RN015",
        "hidden = self.embed(input_ids)",
        "embed",
        "`v.to(DEVICE, dtype=dtype)` (tests/doctor/run/programs/batch_helper.py:26) makes them",
        "`v.to(DEVICE, dtype=dtype) if v.is_floating_point() else v` at",
    ),
    "collator_cast": Truth(
        "RN001",
        "nn.functional.cross_entropy(model(features), labels).backward()",
        "0",
        "the explicit cast `features.to(self.dtype)` makes it fp16"
        " (tests/doctor/run/programs/collator_cast.py:16)",
        "`features.to(torch.bfloat16)` at",
    ),
    "position_table": Truth(
        "RN001",
        "return self.norm(self.dropout(x))",
        "norm",
        "the operation with `table` (tests/doctor/run/programs/position_table.py:29) promotes it to"
        " fp32, because `torch.zeros(length, width)` is fp32"
        " (tests/doctor/run/programs/position_table.py:11)",
        "`table.to(torch.bfloat16)` at tests/doctor/run/programs/position_table.py:29",
    ),
    "class_weights": Truth(
        "RN023",
        "return self.loss_function(self.head(features), labels)",
        "loss_function",
        "`torch.tensor([1.0, 2.0, 4.0])` is fp32 (tests/doctor/run/programs/class_weights.py:19)",
        "`class_weights.to(torch.bfloat16)` at tests/doctor/run/programs/class_weights.py:13",
    ),
    "master_gradients": Truth(
        "RN022",
        "master.grad = parameter.grad",
        "<module>",
        "`parameter.grad` is bf16, and a gradient must have the dtype of its parameter",
        "`master.grad = parameter.grad.to(master.dtype)`",
    ),
    "callback_cast": Truth(
        "RN007",
        "trainer.train()",
        "<module>",
        "in the callback Samples.on_step_end, registered at"
        " tests/doctor/run/programs/callback_cast.py:37",
        "leave out `model.to(torch.bfloat16)` (tests/doctor/run/programs/callback_cast.py:15)",
    ),
    "add_noise": Truth(
        "RN001",
        "model(noisy).sum().backward()",
        "Conv2d",
        "`torch.randn(latents.shape, dtype=dtype)` creates a tensor in fp32",
        "`noisy.to(torch.bfloat16)` at",
    ),
    "second_model": Truth(
        "RN001",
        "return model(noise)",
        "0",
        "`torch.randn(2, 8)` creates a tensor in fp32",
        "`noise.to(torch.bfloat16)` at",
    ),
    "projected_prefix": Truth(
        "RN001",
        "return self.language(inputs_embeds=hidden).logits",
        "language.model.layers.0.self_attn.q_proj",
        "builds the weights of projector in fp32, the default dtype",
        "`hidden.to(torch.bfloat16)` at",
        "`prefix.to(torch.bfloat16)` at tests/doctor/run/programs/projected_prefix.py:28",
    ),
    "trainer_collator": Truth(
        "RN015",
        "Trainer(model, settings, data_collator=collate, train_dataset=rows).train()",
        "model.decoder.embed_tokens",
        "the cast `tensor.to(torch.bfloat16)` (tests/doctor/run/programs/trainer_collator.py:15)",
        "`tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor` at",
    ),
    "steered_layers": Truth(
        "RN001",
        "hidden = layer(hidden)",
        "layers.1",
        "in the forward hook `add_vector` of layers.0 (registered at"
        " tests/doctor/run/programs/steered_layers.py:39)",
        "let the hook keep the dtype: cast",
    ),
    "table_attributes": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(q, k, v)",
        "Attention",
        "`self.cosine` made q and k fp32",
        "`q.to(torch.bfloat16)` and `k.to(torch.bfloat16)` at",
    ),
    "hook_fault": Truth(
        "RN017",
        "return output @ steering",
        "0",
        "is fp32",
        "`steering.to(torch.bfloat16)` at",
    ),
    "complex_rotary": Truth(
        "RN014",
        "complex_queries = torch.view_as_complex(queries.unflatten(-1, (-1, 2)))",
        "rotate",
        "is bf16, and PyTorch implements view_as_complex on cpu for other dtypes only",
        ":11, and `keys.unflatten(-1, (-1, 2)).float()` at tests/doctor/run/programs/complex_rotary.py:12",
    ),
    "polar_table": Truth(
        "RN014",
        "return torch.polar(torch.ones_like(angles), angles)",
        "rotation_table",
        "`angles` is bf16",
        "`angles = angles.float()` before",
    ),
    "attention_mask": Truth(
        "RN024",
        "return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)",
        "attend",
        "`mask` is int64",
        "`mask.bool()`",
    ),
    "quantised_head": Truth(
        "RN025",
        "logits = torch.matmul(hidden, model[1].weight.t())",
        "<module>",
        "1.weight (Codes) holds int8 codes",
        "call the layer `1` in place of matmul",
    ),
    "other_device": Truth(
        "RN026",
        "model(torch.randn(2, 4, dtype=torch.bfloat16))",
        "1",
        "other_device.py:10 opens autocast for cuda only",
        'torch.autocast("cpu", dtype=torch.bfloat16) at tests/doctor/run/programs/other_device.py:10',
    ),
    "lstm_state": Truth(
        "RN001",
        "rnn(torch.randn(3, 2, 4, dtype=torch.bfloat16), state)",
        "LSTM",
        "`torch.zeros(1, batch, 4)` creates a tensor in fp32",
        "`torch.zeros(1, batch, 4, dtype=torch.bfloat16)` at"
        " tests/doctor/run/programs/lstm_state.py:13, for each such call of the line",
    ),
    "compiled_input": Truth(
        "RN001",
        "compiled(images)",
        "1",
        "`torch.rand(2, 2, 3)` creates a tensor in fp32",
        "`images.to(torch.bfloat16)`",
    ),
    "loaded_states": Truth(
        "RN007",
        "optimizer.step()",
        "<module>",
        "`optimizer.state[parameter] = ...` (tests/doctor/run/programs/loaded_states.py:13)",
        "optimizer.load_state_dict(optimizer.state_dict()) after it",
    ),
    "assigned_checkpoint": Truth(
        "RN001",
        "model(features)",
        "Linear",
        "because `model.load_state_dict(checkpoint, assign=True)`",
        "model.float() after `model.load_state_dict(checkpoint, assign=True)`",
    ),
    "default_dtype": Truth(
        "RN019",
        "loss.backward()",
        "<module>",
        "`torch.linspace(0, 1, 4)` (tests/doctor/run/programs/default_dtype.py:12) creates a tensor"
        " in the default dtype",
        "give `torch.linspace(0, 1, 4)`",
    ),
    "integer_features": Truth(
        "RN001",
        "model(counts)",
        "0",
        "creates a tensor in int64 (tests/doctor/run/programs/integer_features.py:9); the weights of"
        " 0 are fp32, and autocast casts neither of them",
        "`counts.to(torch.float32)`",
    ),
    "reward_scores": Truth(
        "RN014",
        "return (rewards - rewards.mean()) / (rewards.std() + 1e-4)",
        "advantages",
        "`rewards` is int64",
        "`torch.tensor(lengths, dtype=torch.float32)`",
    ),
    "trainer_targets": Truth(
        "RN010",
        "Trainer(Regressor(), settings, data_collator=collate, train_dataset=rows).train()",
        "<module>",
        "`labels` is fp64",
        "`torch.tensor(scores, dtype=torch.float32)` at"
        " tests/doctor/run/programs/trainer_targets.py:27",
    ),
    "rotated_output": Truth(
        "RN017",
        'return torch.einsum("nd,de->ne", hidden, rotation)',
        "Rotation",
        "is fp32",
        "`rotation.to(torch.bfloat16)` at tests/doctor/run/programs/rotated_output.py:18",
    ),
    "unwrapped_model": Truth(
        "RN003",
        "unwrapped(torch.randn(2, 4, dtype=torch.bfloat16))",
        "1",
        "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`"
        " (tests/doctor/run/programs/unwrapped_model.py:18) removes autocast",
        "leave keep_fp32_wrapper=False out of",
    ),
    "scaled_adapters": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "`model.half()` (tests/doctor/run/programs/scaled_adapters.py:10) made them fp16",
        "leave `model.half()`",
    ),
    "checkpoint_cast": Truth(
        "RN019",
        "loss.backward()",
        "<module>",
        "`model.bfloat16()` in log_sample (tests/doctor/run/programs/checkpoint_cast.py:24) casts",
        'with torch.autocast("cpu", dtype=torch.bfloat16), or cast a copy',
    ),
    "checkpoint_table": Truth(
        "RN019",
        "checkpoint(model, x, use_reentrant=False).sum().backward()",
        "<module>",
        "`self.table = table.to(x.dtype)` (tests/doctor/run/programs/checkpoint_table.py:19)",
        "cast `table` to one dtype where Scaled reads it",
    ),
    "saved_casts": Truth(
        "RN019",
        "return torch.tanh(self.shared(x))",
        "shared",
        "forward took the bf16 copy of shared.weight from the cache of autocast"
        " (tests/doctor/run/programs/saved_casts.py:39)",
        "cache_enabled=False)` at tests/doctor/run/programs/saved_casts.py:39, which casts each",
    ),
    "lazy_buffers": Truth(
        "RN002",
        "return nn.functional.linear(wave, self.bank)",
        "filters",
        "filters.bank is fp32: `Filters(size=16)` (tests/doctor/run/programs/lazy_buffers.py:26)"
        " builds it in fp32, the default dtype",
        "`Filters(size=16).to(torch.bfloat16)` at tests/doctor/run/programs/lazy_buffers.py:26",
    ),
    "lazy_adapter": Truth(
        "RN002",
        "return hidden + self.up(self.down(hidden))",
        "adapter.down",
        "`Adapter(8)` (tests/doctor/run/programs/lazy_adapter.py:28) builds it in fp32",
        "`Adapter(8).to(torch.bfloat16)` at tests/doctor/run/programs/lazy_adapter.py:28",
    ),
    "orthogonal_weight": Truth(
        "RN014",
        "projected = self.projection(x)",
        "projection.parametrizations.weight.0",
        "the parametrization of projection.weight computes with"
        " projection.parametrizations.weight.original, which is bf16: `model.to(torch.bfloat16)`"
        " (tests/doctor/run/programs/orthogonal_weight.py:25) made it bf16",
        "keep projection in fp32 with .float(), after `model.to(torch.bfloat16)`"
        " (tests/doctor/run/programs/orthogonal_weight.py:25):"
        " `self.projection(x.float()).to(torch.bfloat16)` at"
        " tests/doctor/run/programs/orthogonal_weight.py:20, and cast its weight back",
    ),
    "tensor_dataset": Truth(
        "RN001",
        "nn.functional.cross_entropy(model(x), labels).backward()",
        "0",
        "`torch.from_numpy(features)` creates a tensor in fp64",
        "`x.to(torch.float32)`",
        "`torch.from_numpy(features).to(torch.float32)`",
    ),
    "stacked_rows": Truth(
        "RN001",
        'nn.functional.cross_entropy(model(wave), batch["label"]).backward()',
        "0",
        "`np.sin(440 * np.arange(16) / 16000)` is fp64",
        "`wave.to(torch.float32)`",
        "`torch.as_tensor(row['wave'], dtype=torch.float32)`",
    ),
    "trainer_rows": Truth(
        "RN001",
        "Trainer(PatchTSTForRegression(config), settings, train_dataset=Series()).train()",
        "model.encoder.embedder.input_embedding",
        "`torch.from_numpy(values - values.mean())` creates a tensor in fp64",
        "`torch.from_numpy(values - values.mean()).to(torch.float32)` at",
    ),
    "sampling_loop": Truth(
        "RN001",
        "noise = model(scaled)",
        "Conv2d",
        "the explicit cast `noise.float()` makes it fp32",
        "`scaled.to(torch.bfloat16)`",
        "`(0.1 * noise.float()).to(torch.bfloat16)` at",
    ),
    "checkpoint_segments": Truth(
        "RN001",
        "checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()",
        "1.0",
        "builds the weights of 0.1 in fp32, the default dtype; the weights of 1.0 are bf16",
        "else normed).to(torch.bfloat16)` at tests/doctor/run/programs/checkpoint_segments.py:17",
    ),
    "kv_cache": Truth(
        "RN008",
        "self.keys.index_copy_(0, positions, keys)",
        "cache",
        "self.keys is created in fp32",
        "`Cache(6, 8, dtype=torch.bfloat16)` at tests/doctor/run/programs/kv_cache.py:30",
    ),
    "checkpoint_context": Truth(
        "RN019",
        "loss.backward()",
        "<module>",
        "`self.dtype = previous` (tests/doctor/run/programs/checkpoint_context.py:18) changes what",
        "call backward inside the same `with precision.low():`",
    ),
    "validator_cast": Truth(
        "RN007",
        "optimizer.step()",
        "<module>",
        "`model.to(self.dtype)` (tests/doctor/run/programs/validator_cast.py:17) in __call__ cast",
        "or cast a copy: copy.deepcopy(model)",
    ),
    "computed_operand": Truth(
        "RN014",
        "spectrum = torch.fft.rfft(self.inner(x), dim=1)",
        "Mixer",
        "`self.inner(x)` is bf16, and PyTorch implements rfft on cpu",
        "computed_operand.py:21, and `self.kernel.float()` at",
    ),
    "unpacked_tables": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(q, k, x)",
        "Model",
        "`torch.from_numpy(np.cos(angles))` made q and k fp64",
        "`q.to(torch.bfloat16)` and `k.to(torch.bfloat16)` at",
    ),
    "sampler_class": Truth(
        "RN001",
        "velocity = self.model(latents)",
        "Linear",
        "`torch.linspace(1.0, 0.0, 3, dtype=torch.float32)` creates a tensor in fp32",
        "`latents.to(torch.bfloat16)`",
    ),
    "left_default": Truth(
        "RN027",
        "return self.inp(inputs)",
        "inp",
        "left_default.py:24) leaves the default dtype at bf16 after load",
        "restore it before load returns",
    ),
    "two_defaults": Truth(
        "RN001",
        "return self.embedding(encode(symbols))",
        "Linear",
        "fp32 is the default dtype, which `torch.set_default_dtype(dtype)`"
        " (tests/doctor/run/programs/two_defaults.py:10) set in the call"
        " `Calculator(torch.float32)` at tests/doctor/run/programs/two_defaults.py:30",
        "`torch.set_default_dtype(torch.float64)` before tests/doctor/run/programs/two_defaults.py:",
    ),
    "restored_average": Truth(
        "RN008",
        "average.lerp_(current[name], 0.1)",
        "update",
        "because `average.load_state_dict(saved, assign=True)`"
        " (tests/doctor/run/programs/restored_average.py:19) keeps the dtypes of the checkpoint",
        "`current[name].to(average.dtype)`",
    ),
    "evaluation": Truth(
        "RN003",
        "return self.model(x).float().mean()",
        "adapter",
        "evaluation.py:24 opens autocast",
        'with torch.autocast("cpu", dtype=torch.bfloat16): return self.model(x)',
    ),
    "imported_norm_cast": Truth(
        "RN001",
        "return x + self.proj(self.norm(x.to(self.norm.weight.dtype)))",
        "0.proj",
        "because `parameter.data = parameter.data.to(dtype)`"
        " (tests/doctor/run/model_preparation.py:9) made the weights of 0.norm fp32",
        "`self.norm(x.to(self.norm.weight.dtype)).to(torch.bfloat16)`",
    ),
    "library_attribute": Truth(
        "RN001",
        "model(noisy).sum().backward()",
        "Linear",
        "`torch.linspace(1.0, 0.1, 4)` creates a tensor in fp32"
        " (tests/doctor/run/programs/library_attribute.py:9)",
        "`noisy.to(torch.bfloat16)`",
        "`(get_sigmas(torch.tensor([0, 2])) * noise).to(torch.bfloat16)` at",
    ),
    "narrow_adapters": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "narrow_adapters.py:13) builds them in fp16, the dtype of the base",
        "`get_peft_model(base, config)` at tests/doctor/run/programs/narrow_adapters.py:13",
    ),
    "other_model_cast": Truth(
        "RN001",
        "return self.linear(hidden)",
        "linear",
        "`nn.LayerNorm(8)` (tests/doctor/run/programs/other_model_cast.py:12) builds the weights of"
        " norm in fp32",
        "`hidden.to(torch.bfloat16)`",
    ),
    "prepared_head": Truth(
        "RN002",
        "return self.score(hidden)",
        "score",
        "`prepare_model_for_kbit_training(backbone, use_gradient_checkpointing=False)`"
        " (tests/doctor/run/programs/prepared_head.py:15) made the others fp32",
        "`nn.Linear(16, 1, dtype=torch.float32)` at tests/doctor/run/programs/prepared_head.py:22",
    ),
    "half_checkpoint": Truth(
        "RN006",
        "scaler.unscale_(optimizer)",
        "<module>",
        "half_checkpoint.py:22) keeps them in fp16, the dtype of the checkpoint",
        "`AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)` at",
    ),
    "loaded_part": Truth(
        "RN001",
        "hidden = self.backbone(inputs_embeds=embeddings).last_hidden_state",
        "backbone.layers.0.self_attn.q_proj",
        "loaded_part.py:25) keeps the weights of the model in bf16, the dtype of the checkpoint",
        "`LlamaModel.from_pretrained(folder, dtype=torch.float32)` at",
    ),
    "gathered_metric": Truth(
        "RN013",
        "rewards = self.gather(rewards).cpu().numpy()",
        "log",
        "`torch.ones(3, dtype=torch.bfloat16)` (tests/doctor/run/programs/gathered_metric.py:19)"
        " creates it in bf16",
        "`self.gather(rewards).cpu().float()` at",
    ),
    "typed_activation": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "`super().__init__(channels, dtype=DTYPE)` (",
        "`super().__init__(channels, dtype=torch.float32)` at",
    ),
    "widened_blocks": Truth(
        "RN002",
        "return self.last(hidden)",
        "last",
        "`decoder.half()` (",
        "`hidden.to(torch.float16)` at",
    ),
    "returned_targets": Truth(
        "RN010",
        "(policy_loss + value_loss).backward()",
        "<module>",
        "`returns` is fp64, from `torch.from_numpy(np.cumsum(rewards))`",
        "`returns.to(torch.float32)` at tests/doctor/run/programs/returned_targets.py:23",
    ),
    "float_mask": Truth(
        "RN014",
        "allowed = mask & valid",
        "Attention",
        "PyTorch implements bitand for bool and integers only",
        "`torch.ones(valid.shape[-1], valid.shape[-1], dtype=torch.bool)` at",
    ),
    "autocast_norm": Truth(
        "RN001",
        "model(pixels)",
        "0",
        "made the weights of the model bf16, and autocast does not cast the operands of layer_norm",
        "`pixels.to(torch.bfloat16)` at tests/doctor/run/programs/autocast_norm.py:13",
    ),
    "frozen_encoder": Truth(
        "RN001",
        "latents = encoder(pixels)",
        "0",
        "the explicit cast `torch.rand(1, 3, 8, 8).to(weight_dtype)` makes it fp16",
        "`pixels.to(torch.float32)` at tests/doctor/run/programs/frozen_encoder.py:18",
    ),
    "computed_weight": Truth(
        "RN017",
        "return self.base(x) + F.linear(x, self.get_weight())",
        "Branch",
        "`self.left` is fp32 (tests/doctor/run/programs/computed_weight.py:17)",
        "`self.get_weight().to(torch.bfloat16)` at",
    ),
    "quantised_cache": Truth(
        "RN008",
        "self.keys[positions] = keys",
        "Attention",
        "the cast `x.to(self.precision)`"
        " (tests/doctor/run/programs/quantised_cache.py:16) makes `keys` fp32",
        "`Int8Linear(nn.Linear(8, 8), precision=torch.bfloat16)` at"
        " tests/doctor/run/programs/quantised_cache.py:36",
    ),
    "kept_buffer": Truth(
        "RN008",
        "torch.matmul(x, weight, out=out)",
        "Project",
        "(tests/doctor/run/programs/kept_buffer.py:15); its dtype comes from `torch.float16`"
        " (tests/doctor/run/programs/kept_buffer.py:8)",
        "torch.bfloat16 in place of `torch.float16` at tests/doctor/run/programs/kept_buffer.py:8",
    ),
    "cached_prefix": Truth(
        "RN011",
        "return self.model(ids, past_key_values=self.prefix(), use_cache=True).logits",
        "model.model.layers.0.self_attn",
        "`self.table.weight` made key and value fp32"
        " (tests/doctor/run/programs/cached_prefix.py:27), because `cache.update(",
        "`key.expand(1, -1, -1, -1).to(torch.bfloat16)` at"
        " tests/doctor/run/programs/cached_prefix.py:29 and `value.expand(1, -1, -1, -1)",
    ),
    "output_fields": Truth(
        "RN001",
        "return self.head(encoded.pooled)",
        "head",
        "the explicit cast `states.float()` makes it fp32"
        " (tests/doctor/run/programs/output_fields.py:23)",
        "`encoded.pooled.to(torch.bfloat16)` at tests/doctor/run/programs/output_fields.py:36",
    ),
    "rotary_default": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(queries, keys, values)",
        "Attention",
        "its dtype is the default of `rotate(queries, keys, table)`"
        " (tests/doctor/run/programs/rotary_default.py:22)",
        "`queries.to(torch.bfloat16)` and `keys.to(torch.bfloat16)` at",
    ),
    "dataset_targets": Truth(
        "RN010",
        "loss.backward()",
        "<module>",
        "`batch['y']` is fp64, from `torch.tensor(np.array([index / 4]))`",
        "`torch.tensor(np.array([index / 4]), dtype=torch.float32)` at"
        " tests/doctor/run/programs/dataset_targets.py:16",
        "`batch['y'].to(torch.float32)` at tests/doctor/run/programs/dataset_targets.py:23",
    ),
    "cross_attention": Truth(
        "RN001",
        "return self.cross(x, context, context)[0]",
        "cross",
        "(tests/doctor/run/programs/cross_attention.py:17); its dtype comes from `torch.float16`"
        " (tests/doctor/run/programs/cross_attention.py:10)",
        "`context.to(torch.bfloat16)` at tests/doctor/run/programs/cross_attention.py:30",
    ),
    "option_dtype": Truth(
        "RN001",
        "return model(pixels)",
        "Conv2d",
        "its dtype comes from `parser.add_argument('--dtype', default='float16')`"
        " (tests/doctor/run/programs/option_dtype.py:10)",
        "`pixels.to(torch.bfloat16)` at tests/doctor/run/programs/option_dtype.py:17",
    ),
    "autocast_off": Truth(
        "RN001",
        "return self.head(hidden)",
        "head",
        "`self.encode(x)` (tests/doctor/run/programs/autocast_off.py:18) returns bf16, because it"
        " runs under autocast (tests/doctor/run/programs/autocast_off.py:30); the weights of head"
        " are fp32, and autocast, which would cast both, is switched off at"
        " tests/doctor/run/programs/autocast_off.py:25",
        "`hidden.to(torch.float32)` at tests/doctor/run/programs/autocast_off.py:26",
    ),
    "linear_probe": Truth(
        "RN017",
        "return torch.linalg.solve(gram, features.T @ targets)",
        "fit",
        "solve needs one dtype",
        "`(features.T @ targets).to(torch.float32)` at",
    ),
    "autocast_block": Truth(
        "RN001",
        "return self.head(hidden)",
        "head",
        "`self.block(x, expert)` (tests/doctor/run/programs/autocast_block.py:36) returns bf16,"
        " because Block.forward runs under autocast (tests/doctor/run/programs/autocast_block.py:24)",
        "`hidden.to(torch.float32)` at tests/doctor/run/programs/autocast_block.py:39",
    ),
    "autocast_encoder": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(query, memory, memory)",
        "Reader",
        "because Encoder.forward runs under autocast"
        " (tests/doctor/run/programs/autocast_encoder.py:16); query is fp32: `self.query(x)`"
        " (tests/doctor/run/programs/autocast_encoder.py:31) returns fp32",
        "`memory.to(torch.float32)` at tests/doctor/run/programs/autocast_encoder.py:32",
    ),
    "written_cache": Truth(
        "RN011",
        "model(torch.arange(1)[None], past_key_values=cache, use_cache=True)",
        "model.layers.0.self_attn",
        "`layer.keys = keys` (tests/doctor/run/programs/written_cache.py:12) stores it in fp16, and"
        " fp16 with bf16 gives fp32",
        "cast to torch.bfloat16 at tests/doctor/run/programs/written_cache.py:22:"
        " `(codes * scale).to(DTYPE)`",
    ),
    "frozen_arguments": Truth(
        "RN001",
        "denoiser(",
        "time_text_embed.timestep_embedder.linear_1",
        "`torch.randn(1, 16)` creates a tensor in fp32"
        " (tests/doctor/run/programs/frozen_arguments.py:27)",
        "`pooled.to(torch.bfloat16)` and `words.to(torch.bfloat16)` at"
        " tests/doctor/run/programs/frozen_arguments.py:31",
    ),
    "prepared_output": Truth(
        "RN001",
        "return vae.decode(latents, return_dict=False)[0]",
        "post_quant_conv",
        "`model(latents)` (tests/doctor/run/programs/prepared_output.py:26) returns fp32, because"
        " `accelerator.prepare(...)` (tests/doctor/run/programs/prepared_output.py:37) makes accelerate cast",
        "`latents.to(torch.bfloat16)` at tests/doctor/run/programs/prepared_output.py:30",
    ),
    "engine_cast": Truth(
        "RN008",
        "average.data.lerp_(current.data, 0.1)",
        "update",
        "`self.module.bfloat16()` (tests/doctor/run/programs/engine_cast.py:13) made 0.weight bf16",
        "`current.data.to(average.data.dtype)`",
    ),
    "mixed_units": Truth(
        "RN028",
        'FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)',
        "FullyShardedDataParallel",
        "`nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()`"
        " (tests/doctor/run/programs/mixed_units.py:11) made base_model.model.0.base_layer.weight"
        " and 3 more fp16",
        "autocast_adapter_dtype=False)` at tests/doctor/run/programs/mixed_units.py:14",
    ),
    "uniform_check": Truth(
        "RN028",
        'raise ValueError("expected a uniform dtype of all gradients")',
        "total_norm",
        "(tests/doctor/run/programs/uniform_check.py:14) builds decay in fp32;"
        " `nn.Linear(8, 8, dtype=torch.bfloat16)`",
        "`nn.Parameter(torch.log(torch.arange(1, 9, dtype=dtype)).to(torch.bfloat16))`",
    ),
    "resumed_states": Truth(
        "RN007",
        'state["average"].lerp_(parameter.grad.float(), 0.1)',
        "step",
        "`optimizer.load_state_dict(self.states)` (tests/doctor/run/programs/resumed_states.py:30)"
        " casts the states that it loads to the dtype of their parameter, bf16",
        'optimizer.state[p].update(self.states["state"].get(i, dict()))',
    ),
    "kernel_check": Truth(
        "RN020",
        'assert x.dtype == cos.dtype == sin.dtype, f"got {x.dtype} and {cos.dtype}"',
        "Attention",
        "makes it fp32 (tests/doctor/run/programs/kernel_check.py:30); the check compares it with cos and"
        " sin in bf16; cos is bf16: ",
        ".to(torch.bfloat16)` at tests/doctor/run/programs/kernel_check.py:3",
    ),
    "new_head": Truth(
        "RN001",
        "return self.head(hidden)",
        "head",
        "`nn.Linear(4, count + 2)` (tests/doctor/run/programs/new_head.py:23) builds head.weight in"
        " fp32, the default dtype",
        "`hidden.to(torch.float32)` at tests/doctor/run/programs/new_head.py:18",
    ),
    "disabled_cast": Truth(
        "RN005",
        "return torch.mm(gradient, weight.t()), None, None",
        "backward",
        "the incoming gradient has the dtype of forward's output, the saved tensors have their stored"
        " dtypes",
        '@torch.amp.custom_fwd(device_type="cpu") on forward',
    ),
    "attention_bias": Truth(
        "RN011",
        'raise RuntimeError("invalid dtype for bias, it should be that of query")',
        "Attention",
        "`torch.zeros(keep.shape)` made bias fp32 (tests/doctor/run/programs/attention_bias.py:26);"
        " query is bf16",
        "`torch.zeros(keep.shape, dtype=torch.bfloat16)` at"
        " tests/doctor/run/programs/attention_bias.py:26",
    ),
    "dtype_table": Truth(
        "RN043",
        "return bytes([self.codes[dtype]]) + tensor.numpy().tobytes()",
        "write",
        "`self.codes` (tests/doctor/run/programs/dtype_table.py:17) has no entry for uint16, the dtype"
        " of `tensor`: `torch.tensor(read_image(seed))`",
        "`torch.tensor(read_image(seed)).to(torch.int32)` at tests/doctor/run/programs/dtype_table.py:25",
    ),
    "decorated_forward": Truth(
        "RN001",
        "return self.proj(hidden) * scale",
        "block.proj",
        "`torch.linspace(0, 1, 4)` creates a tensor in fp32"
        " (tests/doctor/run/programs/decorated_forward.py:36)",
        "`hidden.to(torch.bfloat16)`",
    ),
    "supported_check": Truth(
        "RN020",
        'raise TypeError(f"fused_attention does not support {q.dtype}")',
        "Attention",
        "the explicit cast `x.float()` makes it fp32"
        " (tests/doctor/run/programs/supported_check.py:24)",
        "`self.norm(q).to(torch.bfloat16)` at tests/doctor/run/programs/supported_check.py:41",
    ),
    "stated_check": Truth(
        "RN020",
        'raise ValueError("logits must be of type float32")',
        "mask_logits",
        "is bf16 (tests/doctor/run/programs/stated_check.py:26)",
        "`scores.to(torch.float32)` at tests/doctor/run/programs/stated_check.py:29",
    ),
    "spectrum": Truth(
        "RN014",
        "return torch.stft(signal, 16, window=window, return_complex=True).abs()",
        "Spectrum",
        "`signal` is bf16, and PyTorch implements stft on cpu for other dtypes only",
        "`signal.float()`, and `window.float()` at tests/doctor/run/programs/spectrum.py:18",
    ),
    "stored_weights": Truth(
        "RN014",
        "return x.float() * self.weight",
        "Scale",
        "`Scale().to(torch.float8_e4m3fn)` (tests/doctor/run/programs/stored_weights.py:19) made"
        " the weights fp8_e4m3",
        "`model.to(torch.bfloat16)` before tests/doctor/run/programs/stored_weights.py:25",
    ),
    "trainer_norms": Truth(
        "RN001",
        "Trainer(model, settings, train_dataset=rows).train()",
        "model.layers.0.self_attn.q_proj",
        "made the weights of model.layers.0.input_layernorm fp32",
        "or set bf16=True in TrainingArguments",
    ),
    "mel_frontend": Truth(
        "RN001",
        "encoder(features)",
        "Conv1d",
        "the explicit cast `waveform.to(torch.float32)` makes it fp32"
        " (tests/doctor/run/programs/mel_frontend.py:15)",
        "`features.to(torch.bfloat16)` at tests/doctor/run/programs/mel_frontend.py:26",
    ),
    "numpy_sigmas": Truth(
        "RN017",
        "sample(Denoiser(), torch.randn(2, 4) * sigmas[0], sigmas, lambda x: x @ factors)",
        "<lambda>",
        "in fp64; factors is fp32: `torch.rand(4, 3)`"
        " (tests/doctor/run/programs/numpy_sigmas.py:44) creates it in fp32; matmul needs",
        ".to(torch.float32)`",
    ),
    "blurred_mask": Truth(
        "RN017",
        "rows = F.conv2d(rows, kernel.view(1, 1, 1, -1))",
        "blur",
        "rows is fp16: `torch.rand(2, 8, 8).half()` (tests/doctor/run/programs/blurred_mask.py:24)",
        "`kernel = kernel.to(rows.dtype)` before tests/doctor/run/programs/blurred_mask.py:18",
    ),
    "pipeline_models": Truth(
        "RN001",
        "return self.head(self.block(self.embed(noise)))",
        "transformer.embed",
        "`Transformer().to(torch.bfloat16)` (tests/doctor/run/programs/pipeline_models.py:28) made"
        " transformer.embed.weight bf16",
        "`noise.to(torch.bfloat16)` at tests/doctor/run/programs/pipeline_models.py:21",
    ),
    "outside_adapter": Truth(
        "RN011",
        "return F.scaled_dot_product_attention(q, k, v)",
        "Attention",
        "`nn.Linear(8, 8, bias=False)` (tests/doctor/run/programs/outside_adapter.py:24) builds the"
        " weights of self.adapter.k in fp32",
        "`k.to(torch.float16)` and `v.to(torch.float16)` at",
    ),
    "kernel_dtype": Truth(
        "RN020",
        'assert left.dtype == right.dtype, f"got {left.dtype} and {right.dtype}"',
        "1",
        "the explicit cast `codes.to(torch.float16)` makes it fp16"
        " (tests/doctor/run/programs/kernel_dtype.py:15)",
        "`weight.to(torch.bfloat16)` at tests/doctor/run/programs/kernel_dtype.py:18",
    ),
    "loader_check": Truth(
        "RN017",
        'raise RuntimeError(f"{name}: mismatched dtypes or shape")',
        "load",
        "`self.weight = nn.Parameter(torch.ones(width, dtype=dtype))`"
        " (tests/doctor/run/programs/loader_check.py:15) builds 1.weight in bf16",
        "`tensor = tensor.to(torch.bfloat16)` before tests/doctor/run/programs/loader_check.py:29",
    ),
    "uncast_decoder": Truth(
        "RN001",
        "return self.up(latents)",
        "up",
        "because `Denoiser().half()` (tests/doctor/run/programs/uncast_decoder.py:39) made the"
        " weights of Denoiser fp16; `Decoder(8)` (tests/doctor/run/programs/uncast_decoder.py:40)"
        " builds the weights of Decoder in fp32, the default dtype, and no call cast them",
        "`latents.to(torch.float32)` at",
    ),
    "clamped_cells": Truth(
        "RN016",
        "return rows.clamp_(0, gain[1] - 1), columns.clamp_(0, gain[0] - 1)",
        "find_cells",
        "`rows` is int64, and `gain[1] - 1` is fp32: `torch.ones(4)`"
        " (tests/doctor/run/programs/clamped_cells.py:18) creates it in fp32",
        "`(gain[1] - 1).to(rows.dtype)` and `(gain[0] - 1).to(columns.dtype)` at"
        " tests/doctor/run/programs/clamped_cells.py:15",
    ),
    "widened_states": Truth(
        "RN008",
        'buffer.lerp_(parameter.grad, 1 - group["momentum"])',
        "step",
        "`state[key] = value.to(device=parameter.device, dtype=torch.float32)`"
        " (tests/doctor/run/programs/widened_states.py:39) makes the states that"
        " `second.load_state_dict(first.state_dict())`"
        " (tests/doctor/run/programs/widened_states.py:51) loads fp32",
        "`parameter.grad.to(buffer.dtype)` at tests/doctor/run/programs/widened_states.py:27; for"
        " states in bf16, leave the cast in",
    ),
    "list_rows": Truth(
        "RN001",
        'nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()',
        "Linear",
        "the explicit cast `torch.full((8,), index / 4).double()` makes it fp64"
        " (tests/doctor/run/programs/list_rows.py:13)",
        "`batch['features'].to(torch.float32)` at",
    ),
    "float_rows": Truth(
        "RN001",
        "nn.functional.cross_entropy(model(values[:, None]), labels).backward()",
        "Linear",
        "the data of `index / 4` (tests/doctor/run/programs/float_rows.py:8) are fp64, because a"
        " DataLoader makes fp64 tensors of Python's floats",
        "`values[:, None].float()` at",
    ),
    "formatted_rows": Truth(
        "RN001",
        'nn.functional.cross_entropy(model(x).float(), batch["label"]).backward()',
        "Linear",
        "`rows.with_format('torch')` (tests/doctor/run/programs/formatted_rows.py:11) returns fp32,"
        " because a dataset in the format torch makes fp32 tensors of all floats",
        "`x.to(torch.bfloat16)` at",
    ),
    "stored_argument": Truth(
        "RN001",
        "return model(shifted)",
        "Linear",
        "`torch.linspace(0, 1, 8)` creates a tensor in fp32"
        " (tests/doctor/run/programs/stored_argument.py:34)",
        "`shifted.to(torch.bfloat16)` at",
        "`self.table.to(torch.bfloat16)` at",
    ),
    "validation_cast": Truth(
        "RN006",
        "scaler.step(optimizer)",
        "<module>",
        "`model.half()` (tests/doctor/run/programs/validation_cast.py:13) made them fp16 after a step"
        " of the optimizer",
        "cast a copy (copy.deepcopy) in place of the trained parameters at"
        " tests/doctor/run/programs/validation_cast.py:13",
    ),
    "custom_operator": Truth(
        "RN005",
        "return (grad @ weight) * 0.5, (grad.t() @ x) * 0.5",
        "backward",
        "isotype_tests::scaled_product has no rule for autocast",
        '`torch.library.register_autocast("isotype_tests::scaled_product", "cpu", torch.bfloat16)`'
        " after the operator is defined",
    ),
    "beam_distribution": Truth(
        "RN014",
        "self.distribution = MultivariateNormal(mean, covariance_matrix=covariance)",
        "__init__",
        "`covariance` is fp16, and PyTorch implements cholesky",
        "`covariance.float()`, and `mean.float()` at tests/doctor/run/programs/beam_distribution.py:13",
    ),
    "engine_check": Truth(
        "RN020",
        'assert dtype == self.config.dtype, f"cannot load {name}"',
        "update",
        "`weight` is 1.weight: `nn.Linear(8, 2, dtype=torch.float32)`"
        " (tests/doctor/run/programs/engine_check.py:42) builds it in fp32",
        "`weight.to(torch.bfloat16)` at tests/doctor/run/programs/engine_check.py:37",
    ),
    "static_cache": Truth(
        "RN008",
        "return model(ids, past_key_values=cache)",
        "model.layers.0.self_attn",
        "autocast, which is on, computes `value_states` in fp16",
        'with torch.autocast("cpu", enabled=False): model(ids, past_key_values=cache)'
        "  (tests/doctor/run/programs/static_cache.py:24), since all weights are fp32",
    ),
    "layerwise_casting": Truth(
        "RN001",
        "return self.up(self.down(x))",
        "1.down",
        "the weights of 1.down are stored in fp8_e4m3, and `module.to(self.compute)`"
        " (tests/doctor/run/programs/layerwise_casting.py:16) makes them bf16 only while it runs",
        "`return tuple(value.to(torch.bfloat16) for value in args)` after `module.to(self.compute)`"
        " (tests/doctor/run/programs/layerwise_casting.py:16)",
    ),
    "sharded_head": Truth(
        "RN042",
        "return self.head(torch.relu(self.body(x)))",
        "head",
        "`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`"
        " (tests/doctor/run/programs/sharded_head.py:29) casts head.weight, whose parts are fp32,",
        "`fully_shard(model.get_submodule('head'), mesh=mesh,"
        " mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))` in front of"
        " `fully_shard(model, mesh=mesh, mp_policy=policy)`"
        " (tests/doctor/run/programs/sharded_head.py:30); otherwise leave `inputs[0].float()`",
    ),
    "pareto_tail": Truth(
        "RN001",
        "return -GeneralizedPareto(zero, self.scale, self.shape).log_prob(excess).mean()",
        "Tail",
        "`torch.tensor(0.0)` creates a tensor in fp32 (torch/distributions/generalized_pareto.py",
        "torch.set_default_dtype(torch.float64) at the start of the program",
    ),
    "mask_classes": Truth(
        "RN015",
        "onehot = nn.functional.one_hot(target, 3).permute(0, 3, 1, 2)",
        "OverlapLoss",
        "`target` is uint8, and one_hot needs indices of int64, or of int32 where it accepts them:"
        " `torch.from_numpy(self.masks[index])`"
        " (tests/doctor/run/programs/mask_classes.py:19)",
        "`torch.from_numpy(self.masks[index]).long()` at"
        " tests/doctor/run/programs/mask_classes.py:19",
    ),
}


def run_in_process(
    name: str, monkeypatch, *arguments: str, records_tensors: bool = False
) -> Finding | None:
    """Runs a program; returns the finding about the exception that ended it."""
    if name == "static_cache" and Version(version("transformers")) >= Version("5.24"):
        pytest.skip("since transformers 5.24 the cache takes the dtype of the values")
    path = PROGRAMS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    default_dtype = torch.get_default_dtype()
    if records_tensors:
        stance = torch.compiler.set_stance("force_eager")
        RECORD.record_tensors()
    else:
        stance = contextlib.nullcontext()
        RECORD.install()
    try:
        with stance:
            exec(code, {"__name__": "__main__"})
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next
        remove_record_frames(error)
        evidence = collect_evidence(error)
        return None if evidence is None else decide_cause(evidence)
    finally:
        RECORD.remove()
        torch.set_default_dtype(default_dtype)
    return None


@pytest.mark.parametrize("name", TRUTH)
def test_cause_place_and_fix(name, monkeypatch):
    truth = TRUTH[name]
    finding = run_in_process(name, monkeypatch)
    assert finding is not None
    assert finding.code == truth.code, finding.render()
    source = Path(finding.place.file).read_text(encoding="utf-8").splitlines()
    assert source[finding.place.line - 1].strip() == truth.line
    assert finding.place.symbol == truth.symbol
    assert truth.cause in finding.cause
    assert truth.fix in finding.fix


def test_check_that_fails_for_a_shape_is_not_explained(monkeypatch):
    assert run_in_process("loader_check", monkeypatch, "shape") is None


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        (
            "all",
            "`self.norm(q).to(torch.bfloat16)` and `k.to(torch.bfloat16)` and `v.to(torch.bfloat16)`"
            " at tests/doctor/run/programs/supported_check.py:41",
        ),
        (
            "mixed",
            "`self.norm(q).to(torch.bfloat16)` and `k.to(torch.bfloat16)` at"
            " tests/doctor/run/programs/supported_check.py:41",
        ),
    ],
)
def test_check_that_refuses_several_tensors(argument, fix, monkeypatch):
    finding = run_in_process("supported_check", monkeypatch, argument)
    assert finding.code == "RN020"
    assert fix in finding.fix


def test_field_of_a_dataclass_leads_to_its_argument(monkeypatch):
    finding = run_in_process("stored_argument", monkeypatch, "request")
    assert "`torch.full((2, 8), 0.5)` creates a tensor in fp32" in finding.cause


@pytest.mark.full
@pytest.mark.parametrize("name", TRUTH)
def test_the_record_of_tensors_keeps_code_place_and_fix(name, monkeypatch):
    truth = TRUTH[name]
    finding = run_in_process(name, monkeypatch, records_tensors=True)
    assert finding is not None
    assert finding.code == truth.code, finding.render()
    source = Path(finding.place.file).read_text(encoding="utf-8").splitlines()
    assert source[finding.place.line - 1].strip() == truth.line
    # the general fix does not advise to record what is recorded
    fix = truth.recorded_fix or truth.fix
    assert fix in finding.fix or truth.fix == "the frames do not show this line"


def test_compiled_code_of_several_processes_is_not_run_again(monkeypatch):
    monkeypatch.setattr(run_compiled, "has_other_processes", lambda: True)
    finding = run_in_process("compiled_attention", monkeypatch)
    assert finding.code == "RN021"
    assert "an operand of `return torch.matmul(probabilities, values)`" in finding.cause
    assert "cast the fp32 operand of this line to torch.bfloat16" in finding.fix


GENERATED = """
import torch

def call(first, second):
    wide = first.double()
    return (torch.mm(wide, second),)
"""


def test_dtype_of_a_cache_leads_to_the_key_from_which_it_comes(monkeypatch):
    finding = run_in_process("static_cache", monkeypatch, records_tensors=True)
    assert "self.values is fp32, because it takes the dtype of `k * cos` (" in finding.cause
    assert "computes with model.embed_tokens.weight in fp32" in finding.cause


def test_call_that_fails_only_with_the_compiler(tmp_path):
    file = tmp_path / "torchinductor_me" / "ab" / "cab.py"
    file.parent.mkdir(parents=True)
    file.write_text(GENERATED)
    module = {}
    exec(compile(GENERATED, str(file), "exec"), module)
    multiply = lambda x, weight: x @ weight  # noqa: E731
    compiled = torch.compile(multiply, backend=lambda graph, inputs: module["call"])
    with pytest.raises(RuntimeError) as failure:
        compiled(torch.ones(2, 2), torch.ones(2, 2))
    finding = decide_cause(collect_evidence(failure.value))
    assert finding.code == "RN021"
    assert finding.place.file == "tests/doctor/run/test_programs.py"
    assert "the same call without the compiler raises no error" in finding.cause
    assert 'backend="aot_eager"' in finding.fix
    assert "next" not in dict(finding.details)


def test_code_that_inductor_generated_is_not_the_users(monkeypatch):
    assert not is_library_file("/tmp/cache/ab/cabdef.py")
    assert is_library_file("/tmp/torchinductor_me/ab/cabdef.py")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor")
    assert is_library_file("/tmp/inductor/ab/cabdef.py")


def test_facts_name_the_default_dtype(monkeypatch):
    details = dict(run_in_process("left_default", monkeypatch).details)
    program = "tests/doctor/run/programs/left_default.py"
    text = f"bf16, set by `torch.set_default_dtype(self.dtype)` at {program}:24"
    assert details["default dtype"] == text


def test_facts_name_the_states_of_an_optimizer(monkeypatch):
    details = dict(run_in_process("optimizer_states", monkeypatch).details)
    assert details["exp_avg"] == "fp32[8 8]  state of weight"


def test_facts_count_the_weights_of_another_dtype(monkeypatch):
    details = dict(run_in_process("imported_norm_cast", monkeypatch).details)
    assert details["fp32 weights"] == "2 RMSNorm"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("old = get_default_dtype(); set_default_dtype(half)\n  return build()", 1),
        ("set_default_dtype(half)\n  if fast: return\n  set_default_dtype(single)", 2),
        ("set_default_dtype(half)", 0),
        ("set_default_dtype(half)\n  try: build()\n  finally: set_default_dtype(single)", 0),
        ("set_default_dtype(half)\n  yield\n  set_default_dtype(single)", 0),
    ],
)
def test_only_functions_that_mean_to_restore_the_default_dtype_count(body, count):
    function = ast.parse(f"def load():\n  {body}\n").body[0]
    assert len(find_unrestored_calls(function)) == count


def test_hook_that_was_running_is_named(monkeypatch):
    finding = run_in_process("hook_fault", monkeypatch)
    text = "hook `steer` of 0 (registered at tests/doctor/run/programs/hook_fault.py:17)"
    assert ("hook", text) in finding.details


@pytest.mark.parametrize("name", TRUTH)
def test_repaired_program_ends_without_error(name, monkeypatch):
    path = PROGRAMS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), "repaired"])
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})


def test_every_program_has_its_truth():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(TRUTH)
