"""Inner parts of Isotype that tests reach for, in one place: where a module moves or a name changes,
this file changes and no test. Each is imported when it is first asked for.

    from tests.api import read_text
"""

from importlib import import_module
from typing import Any

# module -> its names; `name=attribute` where two modules have one name, `name=` for the module itself
INNER = {
    "isotype.cli.merge": "export",
    "isotype.cli.report": "_describe_run",
    "isotype.config.compare": "ALLOWED_CHANGES PATH_KEYS compare",
    "isotype.config.keys": "KEY_ALIASES key_schemas",
    "isotype.config.kind": "DIFFUSION kind_LANGUAGE=LANGUAGE is_key_of_kind detect_run_kind refuse_inapplicable_keys",
    "isotype.config.write": "init_yaml reference_markdown resolved_yaml",
    "isotype.config.yaml_text": "read_value write_value",
    "isotype.data.bad_rows": "RowError",
    "isotype.data.cache": "read_entry",
    "isotype.data.encode": "Encoder Tally",
    "isotype.data.facts": "source_lines",
    "isotype.data.formats": "Example check_example detect_format ignored_keys",
    "isotype.data.pictures": "register_phone_formats",
    "isotype.data.progress": "progress=",
    "isotype.data.prompts": "user_prompts",
    "isotype.data.read": "Record",
    "isotype.data.records": "records= read_csv read_json read_parquet",
    "isotype.data.render": "data_render=",
    "isotype.data.row_keys": "CONVERSATION_KEYS",
    "isotype.data.sources": "Source open_source save_rows",
    "isotype.data.stdlib": "stdlib= stdlib_pairs",
    "isotype.data.tokens": "TokenRows TokenWriter join_rows pack_best_fit pack_rows",
    "isotype.distributed.agree": (
        "agree= MODEL_SETTINGS configuration_lines fingerprint_of_weights refuse_differences "
        "refuse_folder_of_another_machine versions"
    ),
    "isotype.distributed.bounded_store": "BoundedStore StoreTimeoutError",
    "isotype.distributed.launch": "SHUTDOWN_SECONDS",
    "isotype.distributed.rank": "Batching Rank find_rank",
    "isotype.distributed.shard": "refuse_two_dtypes refuse_weights_of_another_unit",
    "isotype.distributed.heartbeat": "ENDED_KEY Heartbeat find_lost_processes read_lost_message",
    "isotype.doctor.check": "check_check=check",
    "isotype.doctor.check.rules": "rules_RULES=RULES",
    "isotype.doctor.check.rules.base": "load_sheet",
    "isotype.doctor.check.tools": "TOOL_KEYS",
    "isotype.doctor.examination": "examine_path",
    "isotype.doctor.explain.explainer": (
        "explainer_FAMILIES=FAMILIES diagnose_error load_families load_shared_causes"
    ),
    "isotype.doctor.explain.log": "Frame read_incidents",
    "isotype.doctor.explain.page": "codes",
    "isotype.doctor.explain.recognition": "MESSAGE_EXAMPLES MESSAGE_TEMPLATES OPERATORS recognise_error",
    "isotype.doctor.explain.situation": "RecognisedError read_situation",
    "isotype.doctor.kernels": "kernels_check=check",
    "isotype.doctor.kernels.calls": "check_wrapper",
    "isotype.doctor.kernels.largest": "check_largest",
    "isotype.doctor.kernels.offsets": "choose_programs",
    "isotype.doctor.kernels.compile_inputs": "signature=",
    "isotype.doctor.kernels.target": "check_target",
    "isotype.doctor.kernels.ttir": "parse_module",
    "isotype.doctor.run.compiled": "run_compiled=",
    "isotype.doctor.run.dtype_settings": "find_dtype_setting",
    "isotype.doctor.run.frames": "collect_frames",
    "isotype.doctor.run.evidence": "run_evidence= collect_evidence",
    "isotype.doctor.run.hook": "run_hook=",
    "isotype.doctor.run.model_casts": "find_recorded_default_dtype_setter find_unrestored_calls",
    "isotype.doctor.run.not_finite.recorder": "NotFiniteError Recorder",
    "isotype.doctor.run.program": "explain_error report_end report_failure",
    "isotype.doctor.run.recorded_origins": "find_recorded_origin",
    "isotype.doctor.run.rules": "decide_cause",
    "isotype.doctor.run.first_steps": "FIRST_STEPS FirstStepsRecord",
    "isotype.doctor.run.weight_record": "RECORD",
    "isotype.doctor.run.running_code": "remove_record_frames",
    "isotype.doctor.run.recorded_calls": "find_recorded_producer",
    "isotype.doctor.trace": "trace",
    "isotype.doctor.trace.origin": "Origin",
    "isotype.entry.presets": "presets=",
    "isotype.entry.train": "train= refuse_incomplete start",
    "isotype.environment.hub": "hub=",
    "isotype.environment.hub_kernels": "disable_hub_kernels",
    "isotype.environment.memory_limits": "memory_limits=",
    "isotype.environment.install": "install=",
    "isotype.environment.planned_device": "plan_device planned_autocast",
    "isotype.environment.private_folder": (
        "NotPrivateError check_private_folder make_private_folder open_private_folder read_private_file temporary_folder"
    ),
    "isotype.environment.versions": "find_faults",
    "isotype.inference.adapter_file": "export_vllm read_pairs",
    "isotype.inference.diffusion": "draw_pictures evaluate_pictures export_comfyui merge_denoiser",
    "isotype.inference.export": "export_language",
    "isotype.inference.gguf_file": (
        "gguf_file_FAMILIES=FAMILIES export_adapter export_model header_keys tokenizer_keys"
    ),
    "isotype.inference.loaded": "load_run",
    "isotype.inference.ollama": "find_turns",
    "isotype.inference.served.compare": "compare_server",
    "isotype.inference.served.compute": "_build_prompt compute_expectations",
    "isotype.inference.served.connect": "connect",
    "isotype.inference.served.expectation": "Expectations ExpectedAnswer ScoredRow SingleToken",
    "isotype.inference.served.http": "Connection parse_address",
    "isotype.inference.served.server": "Answer Prompt Remedies ServerFacts",
    "isotype.inference.inspection.checkpoint": "StoredTensor open_checkpoint",
    "isotype.inference.inspection.dense": "open_two",
    "isotype.inference.inspection.values": "measured_values=",
    "isotype.inference.verify.gguf_model": "_file_type read_tensor_values verify_gguf_model=",
    "isotype.inference.verify.measure": "load_evaluation",
    "isotype.inference.verify.reference": "ReferenceModel _find_units _score_tokens verify_reference=",
    "isotype.inference.verify.result": "Verification kept_share",
    "isotype.inference.run_weights": "RunWeights",
    "isotype.inference.verify.settings": "_changed_settings",
    "isotype.inference.verify.tensors": "verify_tensors=",
    "isotype.inference.verify.written_model": "WrittenModel WrittenTensor",
    "isotype.inference.push": "inference_push= check_push push_push=push",
    "isotype.integrations.claims": "TESTED_VERSIONS",
    "isotype.integrations.monitor": "read_reduce_dtypes",
    "isotype.integrations.recorder": "StepRecorder",
    "isotype.integrations.weights": "RoundingLoss",
    "isotype.lora.attach": (
        "SHARED_OUTPUT=_SHARED_OUTPUT lora_layers read_projection serve_layer served_weight"
        " set_serving"
    ),
    "isotype.lora.group": "lora_group",
    "isotype.lora.kernel_cases": "LORA_CASES=CASES",
    "isotype.lora.linear": (
        "LORA_LINEAR Projection lora_linear lora_linear_reference resolve_dtypes"
    ),
    "isotype.lora.mlp": "lora_mlp",
    "isotype.lora.products": (
        "LORA_KERNELS=KERNELS add_product_ can_run_few_rows few_rows_product"
        " keep_cast_adapters kernels_unavailable_reason product_fp32 scaled_product"
    ),
    "isotype.lora.served": "served_merged_weight=merged_weight",
    "isotype.lora.quantised": "PackedLinear dequantise_weight forward_4bit packed_product",
    "isotype.model.adapter_settings": "check_patterns",
    "isotype.model.architecture": "attention_setting describe_attention",
    "isotype.model.export": "trained_tensors",
    "isotype.model.gguf": "read_architecture restore_rows",
    "isotype.model.gguf_header": "TensorEntry read_header",
    "isotype.model.pre_tokenizers": "SPLITTINGS _WORD_PATTERN=_WORDS build_pre_tokenizer",
    "isotype.model.processor": "build_picture_reader",
    "isotype.model.served": "GGUF_FAMILIES",
    "isotype.model.targets": "refuse_unknown_parameters target_notes",
    "isotype.model.tokens": "add_tokens",
    "isotype.model.value_ranges": "check_model_config",
    "isotype.observe.continuity": "Continuity",
    "isotype.observe.origin": "is_library_file",
    "isotype.observe.observer": "ModelChanges is_observed",
    "isotype.ops.adamw": "AdamwHyperparameters adamw_ adamw_reference_ stochastic_round_",
    "isotype.ops.adamw.noise": "draw_noise_bits",
    "isotype.ops.adamw.op": "adamw_module=",
    "isotype.ops.adamw.triton": "adamw_triton=",
    "isotype.ops.attention": "Documents attention_attention=attention attention_reference",
    "isotype.ops.attention.gpu": "gpu=",
    "isotype.ops.backend": "backend=",
    "isotype.ops.builds": "builds=",
    "isotype.ops.contract": "OpContract",
    "isotype.ops.cpp": "cpp= _kernels cpu_compiler",
    "isotype.ops.cross_entropy.op": "CROSS_ENTROPY cross_entropy_reference",
    "isotype.ops.cross_entropy.rule": "rule= LossRule",
    "isotype.ops.experts": "ops_experts_Adapter=Adapter Clamped ops_experts_experts=experts",
    "isotype.ops.experts.groups": "groups=",
    "isotype.ops.experts.op": (
        "ops_experts_op_Adapter=Adapter EXPERTS ops_experts_op_experts=experts experts_reference"
    ),
    "isotype.ops.gated": "gated_gradients gated_product",
    "isotype.ops.gated.op": (
        "gated_op= GELU GELU_MUL SILU_MUL gelu_mul_reference gelu_reference silu_mul_reference"
    ),
    "isotype.ops.kernel_cases": "OP_CASES=CASES",
    "isotype.ops.kernel_folder": "kernel_folder=",
    "isotype.ops.linear_cross_entropy.chunked": "chunked=",
    "isotype.ops.linear_cross_entropy.op": (
        "linear_cross_entropy_op= LINEAR_CROSS_ENTROPY linear_cross_entropy_reference"
    ),
    "isotype.ops.linear_divergence.op": (
        "LINEAR_DIVERGENCE divergence_and_entropy linear_divergence_reference"
    ),
    "isotype.ops.modulation.op": (
        "GATED_RESIDUAL MODULATED_LAYER_NORM gated_residual_reference "
        "modulated_layer_norm_reference"
    ),
    "isotype.ops.packed": "PackedState StackState pack_along_rows pack_weight dequantise_packed dequantise_4bit",
    "isotype.ops.packed.formats": "KINDS Layout",
    "isotype.ops.packed.ggml": "BLOCKS decode_blocks find_non_finite",
    "isotype.ops.packed.quantise": "pack_blocks pack_compressed",
    "isotype.ops.packed.recognise": (
        "TensorHeader SERVING_TENSORS TORCHAO_NAMES build_state recognise_layout"
    ),
    "isotype.ops.packed.state": "state=",
    "isotype.ops.packed.triton": "packed_triton=",
    "isotype.ops.rms_norm.op": "rms_norm_op= ADD_RMS_NORM RMS_NORM rms_norm_reference",
    "isotype.ops.rms_norm.triton": "rms_norm_triton=",
    "isotype.ops.rope.op": "rope_op= ROPE rope_reference",
    "isotype.ops.token_log_probs": "LINEAR_LOG_PROBS OUTPUTS linear_log_probs_reference",
    "isotype.ops.widened_calls": "WidenedCalls widened_scratch_estimators=scratch_estimators",
    "isotype.ops.widened_products": "widened_products=",
    "isotype.ops.trust": "trust=",
    "isotype.optimize.attention": (
        "optimize_attention= DocumentMask MIN_QUERIES padding_mask_reason"
    ),
    "isotype.optimize.deferred": "DeferredLogits defer",
    "isotype.optimize.denoiser": "denoiser=",
    "isotype.optimize.forwards": "forwards=",
    "isotype.optimize.gated": "gated=",
    "isotype.optimize.generation": "use_fast_linears",
    "isotype.optimize.head": "head= BYPASSED_NOTE Targets compute_loss takes_targets",
    "isotype.optimize.instances": "module_kind",
    "isotype.optimize.joint_attention": "joint_attention=",
    "isotype.optimize.layers": "layers=",
    "isotype.optimize.fp32_layers": "find_layers find_overflowing_layers use_fp32_layers",
    "isotype.optimize.place": "note_wrong_kernels",
    "isotype.optimize.widened": "place_widened",
    "isotype.optimize.trl_head": "find_fused_head",
    "isotype.pages.finding_sheet": "load_finding_formatter",
    "isotype.pages.sheets": "SheetError",
    "isotype.precision.advice": "apply_change keep_working_fixes",
    "isotype.precision.contradictions": "contradictions_RULES=RULES load_rules page",
    "isotype.precision.packing": "UnreadPacking read_packing",
    "isotype.precision.parts": "parts_Part=Part local_part",
    "isotype.precision.quantised_base": (
        "Quantisation check_base detect_quantisation quantisation_from_config unquantised_share"
    ),
    "isotype.precision.resolution": "resolution= OVERFLOWS_IN_FP16",
    "isotype.precision.vision": "vision_LANGUAGE=LANGUAGE vision_parts",
    "isotype.quickstart.pictures": (
        "COLOURS SHAPES SIDE classify_picture draw draw_at_random write_pictures"
    ),
    "isotype.quickstart.stages": "stages= Stage StopAtDeadline",
    "isotype.quickstart.text": "STAGES quickstart_text= small_config train_tokenizer",
    "isotype.proof.adapters": "check_bf16_base",
    "isotype.proof.card": "describe_card",
    "isotype.proof.kernels": "check_ops",
    "isotype.proof.learning": "check_resume",
    "isotype.proof.parts": "PARTS Part Scale",
    "isotype.proof.runner": "proof_runner= run_proof",
    "isotype.proof.summary": "Proof card_line markdown_table part_line",
    "isotype.report.live": "live= WatchServer wait_for_run",
    "isotype.report.page": "_picture_facts page_render=render verdict",
    "isotype.report.plots": "describe_losses loss_plot plots",
    "isotype.report.record": "MAX_SAMPLES read_picture read_run parse_settings",
    "isotype.runs.checkpoint.atomic_folder": (
        "atomic_folder= SEAL find_damage replace_sealed_file seal write_file write_folder write_text"
    ),
    "isotype.runs.folder": "locate_base",
    "isotype.runs.value_limits": "parse_json",
    "isotype.runs.mapped_files": "mapped_paths release_mapped_pages",
    "isotype.runs.metrics": "runs_metrics= LAST_ROWS Metrics read_last_rows read_thinned_rows",
    "isotype.tasks.diffusion.batches": "Batch PictureStream Row row_generator",
    "isotype.tasks.diffusion.denoiser": (
        "build_denoiser keep_time_exact load_for_samples load_frozen_denoiser time_embeddings"
    ),
    "isotype.tasks.diffusion.families.flow": "Lumina2",
    "isotype.tasks.diffusion.families.ideogram4": "Ideogram4",
    "isotype.tasks.diffusion.clip_proposal": "clip_proposal=",
    "isotype.tasks.diffusion.picture_proposal": "propose_picture_settings",
    "isotype.tasks.diffusion.families.noise": "size_conditioning",
    "isotype.tasks.diffusion.lora_file": "read_lora_file",
    "isotype.tasks.diffusion.picture_files": "FileContent Picture",
    "isotype.tasks.diffusion.pictures": "apply_caption_settings collect_pictures",
    "isotype.tasks.diffusion.pipeline": "pipeline= PipelineFolder",
    "isotype.tasks.diffusion.picture_sizes": "Size Window bucket_sizes",
    "isotype.tasks.diffusion.pixels": (
        "BadPicture displayed_size encode_png read_mask_pixels read_pixels"
    ),
    "isotype.tasks.diffusion.result": (
        "add_metadata comfyui_name tasks_diffusion_result_load_result=load_result save_lora"
        " write_comfyui"
    ),
    "isotype.tasks.diffusion.single_file": "widest_dtype",
    "isotype.tasks.diffusion.video_files": "TimedFrame video_files=",
    "isotype.tasks.language.checks": (
        "checks_CHECKS=CHECKS check_prompt_labels check_chat_template check_packing "
        "check_positions check_learnt_tokens check_end_token check_new_tokens"
    ),
    "isotype.tasks.language.distil": "Distil",
    "isotype.tasks.language.sample": "batch_prompts can_skip_padding generate_samples=sample",
    "isotype.tasks.language.preference": "PairLogProbs Preference answer_log_probs pair_losses",
    "isotype.tasks.language.result": "evaluate tasks_language_result_load_result=load_result",
    "isotype.testing.amp.numerics": "numerics=",
    "isotype.testing.amp.check": "load_target",
    "isotype.testing.gate": "load_gate_target run_gate",
    "isotype.training.base": "fingerprint_of_base setting_lines",
    "isotype.training.callbacks": "Callback Moment",
    "isotype.training.console": "Interrupt RunConsole fit_progress format_progress quiet_libraries wrap_header",
    "isotype.training.device_setup": "device_setup= check_run prepare_data",
    "isotype.training.finish": "finish=",
    "isotype.training.loop": "loop= Loop",
    "isotype.training.memory.blocks": (
        "Block check_offload get_frozen_blocks offload_blocks plan_offload"
        " refuse_without_host_memory"
    ),
    "isotype.training.memory.device": (
        "PLAN_TOLERANCE choose_checkpointing_by_plan overhead_memory return_freed_blocks"
    ),
    "isotype.training.memory.meta_results": "MetaResults ReuseMetaResults",
    "isotype.training.memory.offload": "CALLS_ON_DEVICE HostMemory",
    "isotype.training.memory.checkpointed_call": "call_and_recompute run_again_in_backward",
    "isotype.training.parallel": "REPLICATE SHARD choose_by_plan configured_parallel",
    "isotype.training.plan": "plan= plan_run",
    "isotype.training.preflight.check": "check_CHECKS=CHECKS Outcome PHASES preflight read_skipped",
    "isotype.training.preflight.codes": "CODES parse_skips",
    "isotype.training.preflight.rehearsal": (
        "rehearsal= rehearse_evaluation rehearse_samples rehearse_step"
    ),
    "isotype.training.preflight.static": (
        "static= check_disk check_memory check_update_sizes checkpoint_bytes result_bytes"
    ),
    "isotype.training.run_state": "RunState",
    "isotype.training.duration": "duration=",
    "isotype.training.header": "describe_time=_describe_time",
    "isotype.training.schedule": (
        "EVALUATED_SHARE MIN_EVALUATED_ROWS MIN_EVALUATIONS RunSchedule learning_rate"
    ),
    "isotype.training.setting_names": "RUN_FILE_NAMES",
    "isotype.training.setup": "setup= Trial PreflightSubject prepare",
    "isotype.training.step": "Stepper assemble_stepper gradient_norm peak_memory",
    "isotype.translate.source": "read_source",
    "isotype.translate.transforms": "transforms= ConfigDraft SourceKey TEMPLATES",
    "isotype.translate.translation": "TOOLS",
}
SOURCES = {
    entry.partition("=")[0]: (module, entry.partition("=")[2] if "=" in entry else entry)
    for module, entries in INNER.items()
    for entry in entries.split()
}


def __getattr__(name: str) -> Any:
    if name not in SOURCES:
        raise AttributeError(f"tests.api has no {name}: add it to INNER")
    module, attribute = SOURCES[name]
    value = import_module(module)
    if attribute:
        value = getattr(value, attribute)
    return value
