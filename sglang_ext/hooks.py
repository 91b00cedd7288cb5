"""What the adapter relies on in SGLang, as tables of ``dflash_plugins.hooks``."""

from __future__ import annotations

from dflash_plugins.hooks import Hook, Use

_ARGUMENTS = "sglang.srt.arg_groups.speculative_hook"
_WORKER = "sglang.srt.speculative.dflash_worker_v2"
_MODEL = "sglang.srt.models.dflash"

HANDLE_ARGUMENTS = f"{_ARGUMENTS}._handle_dflash"
CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"

# Modules that SGLang imports when it reads its arguments, before or soon after plugins load.
AT_REGISTRATION = (
    Hook(
        _ARGUMENTS,
        "_handle_dflash",
        Use.REPLACED,
        "to refuse a pair before anything loads, and to let CPUs pass",
        parameters=("server_args",),
        reads=("current_platform", "resolving_view", "speculative_draft_model_path", "speculative_num_draft_tokens"),
    ),
    Hook(
        "sglang.srt.speculative.spec_info",
        "SpeculativeAlgorithm.create_worker",
        Use.REPLACED,
        "to let our worker draft where a run asks for it",
        parameters=("self", "server_args"),
        reads=("is_dflash", "DFlashWorkerV2"),
    ),
)

# Checked in the scheduler's process of a run that is to draft with our worker, before the drafter is built.
AT_WORKER = (
    Hook("sglang.srt.models.registry", "ModelRegistry.models", Use.REPLACED, "to build our drafter"),
    Hook(
        "sglang.srt.models.registry",
        "_ModelRegistry.resolve_model_cls",
        Use.READ,
        "to be sure that architectures are looked up there",
        reads=("models",),
    ),
    Hook(
        "sglang.srt.managers.scheduler",
        "validate_dflash_request",
        Use.REPLACED,
        "to refuse a request with a rule that verification would not follow",
        parameters=("req", "enable_overlap"),
    ),
    Hook(
        _WORKER,
        "DFlashWorkerV2.__init__",
        Use.OVERRIDDEN,
        "to hand the target's embedding and head to the drafter",
        parameters=("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        reads=("draft_model_runner", "draft_model", "selector", "_noise_embed_scale", "_selector_sampling_enabled"),
    ),
    Hook(
        _WORKER,
        "DFlashWorkerV2.forward_batch_generation",
        Use.OVERRIDDEN,
        "to run a round",
        parameters=("self", "batch"),
        reads=(
            "_propose_selector_block",
            "_accept_block",
            "_selector_sample",
            "draft_model_runner",
            "forward",
            "_noise_embed_scale",
            "_full_embed_gpu",
            "draft_tokens",
            "commit_lens",
            "target_worker",
            "forward_batch",
            "next_token_ids",
            "reqs",
        ),
    ),
    Hook(
        _WORKER,
        "DFlashWorkerV2._propose_selector_block",
        Use.OVERRIDDEN,
        "to draft by the core's passes",
        parameters=("self", "draft_logits_output", "bs", "lm_head", "anchor_token_ids", "sampling_info"),
    ),
    Hook(
        _WORKER,
        "DFlashWorkerV2._accept_block",
        Use.OVERRIDDEN,
        "to verify sampled requests by the core",
        parameters=("self", "candidates", "next_token_logits", "sampling_info", "draft_input", "prefix_lens", "bs"),
    ),
    Hook(_WORKER, "DFlashWorkerV2._maybe_build_draft_sampler", Use.OVERRIDDEN, "to choose tokens after a pass"),
    Hook(
        _WORKER,
        "DFlashWorkerV2._validate_phase1_sampling_support",
        Use.OVERRIDDEN,
        "to warn of a greedy fallback only where there is one",
    ),
    Hook(
        "sglang.srt.sampling.sampling_batch_info",
        "SamplingBatchInfo._apply_pre_grammar_logits_transforms",
        Use.READ,
        "to be sure that what we count for a request that was put back is applied to its first token",
        reads=("acc_additive_penalties", "acc_scaling_penalties", "penalizer_orchestrator"),
    ),
    Hook(
        _WORKER,
        "_commit_accept",
        Use.CALLED,
        "to lay out what is committed",
        parameters=("candidates", "accept_len", "bonus_tokens"),
    ),
    Hook(
        _MODEL,
        "DFlashDraftModel.load_weights",
        Use.OVERRIDDEN,
        "to account for every tensor",
        parameters=("self", "weights"),
    ),
    Hook(_MODEL, "CandidateSelector", Use.CALLED, "to hold the selector's tables"),
)

# Checked as well where the platform is a CPU.
ON_CPU = (
    Hook(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._extend_forward_kwargs",
        Use.REPLACED,
        "to keep the dtype of the block's embeddings",
        parameters=("self", "forward_batch"),
        reads=("input_embeds", "bfloat16"),
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend",
        "TorchNativeAttnBackend.forward_extend",
        Use.OVERRIDDEN,
        "to attend from a block",
        parameters=("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        reads=("set_kv_buffer", "req_to_token"),
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry",
        "register_attention_backend",
        Use.CALLED,
        "to put our attention in the place of torch_native",
        parameters=("name",),
    ),
    Hook(
        "sglang.srt.server_args",
        "add_draft_attention_backend_choices",
        Use.CALLED,
        "to let a drafter use torch_native",
    ),
    Hook(
        _MODEL,
        "DFlashAttention.forward",
        Use.READ,
        "to be sure that its Triton kernel can be switched off",
        reads=("use_table_qk_norm_rope",),
    ),
)

# Checked as well where the run is to be audited.
AT_AUDIT = (
    Hook(
        _WORKER,
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        Use.OVERRIDDEN,
        "to see which rows become context, and where",
        parameters=("self", "target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens"),
    ),
    Hook(
        _WORKER,
        "DFlashWorkerV2.forward_batch_generation",
        Use.READ,
        "to be sure what a round is made of",
        reads=("prefix_lens", "extend_lens", "is_extend_in_batch", "use_compact_draft_cache"),
    ),
)
