"""What the adapter relies on in vLLM, as tables of ``dflash_plugins.hooks``."""

from __future__ import annotations

from dflash_plugins.hooks import Hook, Use

_QWEN3_DFLASH = "vllm.model_executor.models.qwen3_dflash"

# Cheap modules only: all of them are imported by vLLM before plugins load, or import nothing but torch.
AT_REGISTRATION = (
    Hook("vllm.platforms", "current_platform.is_cpu", Use.CALLED, "to leave every other platform as it is"),
    Hook("vllm.model_executor.models.registry", "ModelRegistry.models", Use.REPLACED, "to put back what was there"),
    Hook(
        "vllm.model_executor.models.registry",
        "ModelRegistry.register_model",
        Use.CALLED,
        "to serve the drafter's architecture with our subclass",
        parameters=("model_arch", "model_cls"),
    ),
    Hook(
        "vllm.config",
        "VllmConfig._get_v1_model_runner_unsupported_features",
        Use.REPLACED,
        "to let DFlash 2 pass where our proposer drafts it",
        parameters=("self",),
        reads=("_is_dflash_candidate_draft",),
    ),
    Hook(
        "vllm.config",
        "VllmConfig.enable_trace_function_call_for_thread",
        Use.REPLACED,
        "to be called by every worker with its config before it imports its runner",
        parameters=("self",),
    ),
    Hook("vllm.config", "VllmConfig.use_v2_model_runner", Use.READ, "to know which runner will draft"),
)

# Checked only where it is imported already: a process that builds workers has done so, others need not pay for it.
WORKER_BASE = Hook(
    "vllm.v1.worker.worker_base",
    "WorkerBase.__init__",
    Use.REPLACED,
    "to be called with its config by every worker in a process of its own, before it builds its runner",
    parameters=("self", "vllm_config"),
)

EXPAND_KERNEL = Hook(
    "vllm.utils.cpu_triton_utils",
    "_expand_kernel_impl",
    Use.REPLACED,
    "to write the sampling parameters of the verify rows where the engine reads them",
    parameters=("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
)

EXPAND_KERNEL_TAKEN = Hook(
    "vllm.platforms.cpu",
    "CpuPlatform.register_triton_kernel_overrides",
    Use.READ,
    "to be sure that the engine takes the function by this name after plugins have loaded",
    reads=("_expand_kernel_impl",),
)

REJECTION_KERNEL = Hook(
    "vllm.utils.cpu_triton_utils",
    "_rejection_random_sample_kernel_impl",
    Use.REPLACED,
    "to reject what only fills a step up",
    parameters=(
        "output_token_ids",
        "cu_num_draft_tokens",
        "draft_token_ids",
        "draft_probs",
        "target_probs",
        "bonus_token_ids",
        "recovered_token_ids",
        "uniform_probs",
    ),
)

REJECTION_KERNEL_TAKEN = Hook(
    "vllm.platforms.cpu",
    "CpuPlatform.register_triton_kernel_overrides",
    Use.READ,
    "to be sure that the engine takes the function by this name after plugins have loaded",
    reads=("_rejection_random_sample_kernel_impl",),
)

_PROPOSER = "vllm.v1.spec_decode.dflash"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
_SPECULATOR = f"{_SPECULATORS}.dflash.speculator"

# Checked in a worker whose V1 runner is to draft DFlash 2 or D-Loop, before its runner is built.
AT_RUNNER_V1 = (
    Hook(_RUNNER_V1, "DFlashProposer", Use.REPLACED, "to draft by the core's passes"),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner.__init__",
        Use.READ,
        "to be sure that the runner takes the proposer by this name",
        reads=("DFlashProposer",),
    ),
    Hook(
        _PROPOSER,
        "DFlashProposer.__init__",
        Use.OVERRIDDEN,
        "to remember the configured K",
        parameters=("self", "vllm_config", "device", "runner"),
    ),
    Hook(
        _PROPOSER,
        "DFlashProposer.propose",
        Use.OVERRIDDEN,
        "to draft all K masks and cut afterwards",
        parameters=("self", "num_speculative_tokens"),
        reads=(
            "build_per_group_and_layer_attn_metadata",
            "_determine_batch_execution_and_padding",
            "build_model_inputs_first_pass",
            "_sample_draft_tokens",
            "_last_draft_probs",
            "parallel_drafting",
        ),
    ),
    Hook(
        _PROPOSER,
        "DFlashProposer.build_per_group_and_layer_attn_metadata",
        Use.OVERRIDDEN,
        "to keep the metadata for another pass",
        parameters=("self", "cad", "draft_index"),
    ),
    Hook(_PROPOSER, "DFlashProposer.build_model_inputs_first_pass", Use.OVERRIDDEN, "to keep the model's inputs"),
    Hook(
        _PROPOSER, "DFlashProposer._determine_batch_execution_and_padding", Use.OVERRIDDEN, "to keep the batch's size"
    ),
    Hook(
        _PROPOSER,
        "DFlashProposer._sample_draft_tokens",
        Use.OVERRIDDEN,
        "to choose tokens by the core",
        parameters=("self", "hidden_states", "sampling_metadata"),
    ),
    Hook(_PROPOSER, "DFlashProposer._get_slot_mapping", Use.CALLED, "to rewrite the block's rows at the same slots"),
    Hook("vllm.v1.sample.sampler", "_SAMPLING_EPS", Use.READ, "to call the same requests greedy as the engine"),
)


# Checked in a worker whose V2 runner is to draft D-Loop, before its runner is built.
AT_RUNNER_V2 = (
    Hook(
        _SPECULATORS,
        "init_speculator",
        Use.REPLACED,
        "to build our speculator",
        parameters=("vllm_config", "device"),
    ),
    Hook(_RUNNER_V2, "init_speculator", Use.REPLACED, "as the runner took it by name"),
    Hook(
        _SPECULATOR,
        "DFlashSpeculator._generate_draft",
        Use.OVERRIDDEN,
        "to run further passes inside what a CUDA graph captures whole",
        parameters=(
            "self",
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
        reads=(
            "_run_model",
            "sample_indices",
            "sample_pos",
            "sample_idx_mapping",
            "sample_col",
            "num_speculative_steps",
            "draft_tokens",
            "draft_logits",
            "temperature",
            "seeds",
        ),
    ),
    Hook(
        _SPECULATOR,
        "DFlashSpeculator._run_model",
        Use.CALLED,
        "to run a pass over the ids in the input buffer",
        reads=("input_buffers",),
    ),
    Hook(
        f"{_SPECULATORS}.speculator",
        "DraftModelSpeculator._maybe_predict_acceptance",
        Use.CALLED,
        "to feed the engine's estimate of acceptance",
    ),
    Hook(
        f"{_SPECULATORS}.dflash2.speculator",
        "CandidateSampler._cache_draft_logits",
        Use.CALLED,
        "to keep the realised rows of a walk where the engine keeps its own",
        parameters=("self", "candidate_ids", "num_sample", "idx_mapping", "draft_logits"),
        reads=("scores", "cached_candidate_ids"),
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        Use.CALLED,
        "to draw with the engine's own noise",
        parameters=("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature"),
        reads=("is_drafting", "logits_cache", "logits_cache_col", "use_fp64"),
    ),
)

# The arguments of the V2 runner's ``prepare_dflash_inputs``, which it is given by position.
DRAFTER_ARGUMENTS = (
    "input_buffers", "query_slot_mapping", "context_positions", "context_slot_mapping", "sample_indices", "sample_pos",
    "sample_idx_mapping", "temperature", "seeds", "input_batch", "num_sampled", "num_rejected", "last_sampled",
    "next_prefill_tokens", "input_temperature", "input_seeds", "block_table", "block_size", "cp_rank", "cp_size",
    "cp_interleave", "parallel_drafting_token_id", "num_query_per_req", "num_speculative_steps", "max_num_reqs",
    "max_num_tokens", "max_model_len",
)  # fmt: skip

# Checked in a worker whose V1 runner is to be audited, before its runner is built.
AT_AUDIT_V1 = (
    Hook(
        _RUNNER_V1,
        "GPUModelRunner._update_states",
        Use.REPLACED,
        "to see which requests come, come back, sit out or go",
        parameters=("self", "scheduler_output"),
        reads=("finished_req_ids", "scheduled_new_reqs", "scheduled_cached_reqs", "resumed_req_ids", "all_token_ids"),
    ),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner._prepare_inputs",
        Use.REPLACED,
        "to see the rows of the target forward",
        parameters=("self", "scheduler_output", "num_scheduled_tokens"),
        reads=("positions", "discard_request_mask", "_calc_spec_decode_metadata", "_prepare_input_ids"),
    ),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner._prepare_input_ids",
        Use.READ,
        "to be sure where the ids of these rows are put",
        reads=("input_ids", "_draft_token_ids"),
    ),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner._sample",
        Use.REPLACED,
        "to see what is emitted, and the target's logits on their way there",
        reads=("sampler", "rejection_sampler"),
    ),
    Hook(
        _RUNNER_V1,
        "GPUModelRunner.sample_tokens",
        Use.REPLACED,
        "to compare when a step is over, and to see the drafts that the runner keeps",
        reads=("_sample", "_draft_token_ids"),
    ),
    Hook(
        "vllm.v1.sample.sampler",
        "Sampler.sample",
        Use.REPLACED,
        "to see the target's logits of rows without a proposal, processors applied",
        parameters=("self", "logits", "sampling_metadata"),
        reads=("greedy_sample",),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "rejection_sample",
        Use.REPLACED,
        "to see the target's logits of rows with a proposal, and q",
        parameters=(
            "draft_token_ids",
            "num_draft_tokens",
            "max_spec_len",
            "cu_num_draft_tokens",
            "draft_probs",
            "target_logits",
        ),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        Use.READ,
        "to be sure that it takes that function by this name",
        reads=("rejection_sample", "apply_logits_processors"),
    ),
    Hook(
        _PROPOSER,
        "DFlashProposer.set_inputs_first_pass",
        Use.REPLACED,
        "to see the drafter's context and block",
        parameters=(
            "self",
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
        reads=("_context_positions_buffer", "_context_slot_mapping_buffer", "positions", "input_ids", "block_size"),
    ),
)


# Checked in a worker whose V2 runner is to be audited, before its runner is built.
AT_AUDIT_V2 = (
    Hook(
        _RUNNER_V2,
        "GPUModelRunner.execute_model",
        Use.REPLACED,
        "to see which requests come, come back, sit out or go",
        parameters=("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
        reads=("add_requests", "update_requests", "prepare_inputs"),
    ),
    Hook(
        _RUNNER_V2,
        "GPUModelRunner.add_requests",
        Use.READ,
        "to be sure that a preempted request comes back as a new one with all its tokens",
        reads=("scheduled_new_reqs", "prefill_token_ids", "num_computed_tokens"),
    ),
    Hook(
        _RUNNER_V2,
        "GPUModelRunner.prepare_inputs",
        Use.REPLACED,
        "to see the rows of the target forward",
        reads=("InputBatch", "num_draft_tokens_per_req", "query_start_loc_np", "combine_sampled_and_draft_tokens"),
    ),
    Hook(
        _RUNNER_V2,
        "GPUModelRunner.sample",
        Use.REPLACED,
        "to see what is emitted, and the target's logits on their way there",
        reads=("sampler", "rejection_sampler", "num_sampled", "num_rejected"),
    ),
    Hook(
        _RUNNER_V2,
        "GPUModelRunner.sample_tokens",
        Use.REPLACED,
        "to compare when a step is over, and to see the drafts that the runner keeps",
        reads=("sample", "speculator", "propose", "req_states", "draft_tokens"),
    ),
    Hook(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.sample",
        Use.REPLACED,
        "to see the target's logits of a step without proposals, processed",
        reads=("apply_sampling_params", "_sample_random"),
    ),
    Hook(
        f"{_SPECULATORS}.rejection_sampler",
        "rejection_sample",
        Use.REPLACED,
        "to see the target's logits of a step with proposals, the proposals, and what q is made of",
        parameters=(
            "target_logits",
            "draft_logits",
            "draft_sampled",
            "cu_num_logits",
            "pos",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "temperature",
        ),
    ),
    Hook(
        f"{_SPECULATORS}.rejection_sampler",
        "RejectionSampler._verify",
        Use.READ,
        "to be sure that it takes that function by this name, after the sampling rules",
        reads=("apply_sampling_params", "rejection_sample"),
    ),
    Hook(
        _SPECULATOR,
        "prepare_dflash_inputs",
        Use.REPLACED,
        "to see the drafter's context and block",
        parameters=DRAFTER_ARGUMENTS,
    ),
    Hook(
        _SPECULATOR,
        "DFlashSpeculator.propose",
        Use.READ,
        "to be sure that it takes that function by this name",
        reads=("prepare_dflash_inputs", "num_query_per_req", "max_model_len"),
    ),
)

# Checked when the drafter's class is imported, in the process that builds the drafter.
AT_LOADING = (
    Hook(_QWEN3_DFLASH, "DFlashQwen3ForCausalLM.model_cls", Use.OVERRIDDEN, "to build our inner model"),
    Hook(
        _QWEN3_DFLASH,
        "DFlashQwen3ForCausalLM.__init__",
        Use.OVERRIDDEN,
        "to read the drafter's config before weights load",
        parameters=("self", "vllm_config", "prefix"),
        reads=("draft_model_config", "model_cls", "logits_processor"),
    ),
    Hook(
        _QWEN3_DFLASH,
        "DFlashQwen3ForCausalLM.load_weights",
        Use.OVERRIDDEN,
        "to account for every tensor",
        parameters=("self", "weights"),
    ),
    Hook(
        _QWEN3_DFLASH,
        "DFlashQwen3ForCausalLM.compute_logits",
        Use.READ,
        "to scale and cap draft logits before they are mapped to the target's vocabulary",
        reads=("logits_processor", "lm_head"),
    ),
    Hook(
        _QWEN3_DFLASH,
        "DFlashQwen3Model._normalize_context_k",
        Use.OVERRIDDEN,
        "to norm the context keys of each layer with that layer's weight",
        parameters=("self", "all_k"),
        reads=("_k_norm_weights", "_rms_norm_eps"),
    ),
    Hook(
        _QWEN3_DFLASH,
        "DFlashQwen3Model.embed_input_ids",
        Use.OVERRIDDEN,
        "to apply input_embedding_scale",
        parameters=("self", "input_ids"),
    ),
    Hook(
        "vllm._custom_ops",
        "rms_norm",
        Use.CALLED,
        "to norm one layer",
        parameters=("out", "input", "weight", "epsilon"),
    ),
    Hook("vllm.distributed", "get_tensor_model_parallel_rank", Use.CALLED, "to log on one rank only"),
)
