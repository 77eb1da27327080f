"""Keys of DeepSpeed's training config that no model of ours holds: those of 0.19, and older ones.

Three lists: refused (would change results or memory), hints (change nothing here), renamed (old spellings).
"""

from __future__ import annotations

from typing import Any

from lamina.engine.config.key import Key, Status

_MIXED = 'bf16 {"enabled": true} or fp16 {"enabled": true}'
_NOT_TRAINING = "is for inference: pass it to init_inference()"


def _refused(path: str, reason: str, instead: str, *neutral: Any, block: bool = False) -> Key:
    return Key(path=path, status=Status.REFUSED, reason=reason, instead=instead, neutral=neutral, is_block=block)


def _refused_block(path: str, reason: str, instead: str) -> Key:
    return _refused(path, reason, instead, block=True)


def _hint(path: str, reason: str, *types: type) -> Key:
    return Key(path=path, status=Status.HINT, reason=reason, types=types)


def _hint_block(path: str, reason: str, **keys: type | tuple[type, ...]) -> list[Key]:
    rows = [Key(path=path, status=Status.HINT, reason=reason, is_block=True)]
    for key, types in keys.items():
        rows.append(_hint(f"{path}.{key}", reason, *(types if isinstance(types, tuple) else (types,))))
    return rows


_DELETE = "nothing (delete the key)"
_NULL = type(None)

REFUSED: tuple[Key, ...] = (
    _refused_block("amp", "Apex mixed precision changes the numbers", _MIXED),
    _refused_block("torch_autocast", "autocast chooses number formats per operation", _MIXED),
    _refused("sparse_gradients", "sparse reduction of embedding gradients is not offered", "false", False),
    _refused("gradient_predivide_factor", "dividing before the reduction changes rounding", "1.0", 1.0),
    _refused("gradient_allreduce_op", "gradients are the mean over ranks", '"mean"', "mean"),
    _refused(
        "fp32_allreduce",
        "gradients are reduced in the format in which they are computed",
        "false",
        False,
    ),
    _refused("disable_allgather", "parameters must be gathered", "false", False),
    _refused(
        "managed_gradient_accumulation",
        "the engine counts micro-batches itself",
        "true, and engine.no_sync() or a boundary set by the caller where it differs",
        True,
    ),
    _refused_block("elasticity", "the batch size would change with the number of ranks", "the three batch keys"),
    _refused_block("autotuning", "it starts other jobs", _DELETE + "; `lamina plan` sizes a job"),
    _refused_block("nebula", "checkpoints would go to a service", "engine.save_checkpoint(), which does not stall"),
    _refused_block("datastates_ckpt", "another checkpoint engine", "engine.save_checkpoint(), which does not stall"),
    _refused_block("compression_training", "the model would be trained quantized or pruned", _DELETE),
    _refused_block("quantize_training", "the model would be trained quantized", _DELETE),
    _refused_block("weight_quantization", "the model would be quantized", _DELETE),
    _refused_block("eigenvalue", "belongs to quantized training", _DELETE),
    _refused("graph_harvesting", "training is not captured in CUDA graphs", "false", False),
    _refused_block("sparse_attention", "attention belongs to the model", "it in the model"),
    _refused_block("progressive_layer_drop", "layers would be skipped at random", "it in the model"),
    _refused_block("curriculum_learning", "the data would be cut by difficulty", "it in the dataset"),
    _refused_block("data_efficiency", "the data would be sampled or routed otherwise", "it in the dataset"),
    _refused_block("hybrid_engine", _NOT_TRAINING, _DELETE),
    _refused_block("tensor_parallel", "the layers would be split over ranks", "the mesh argument of initialize()"),
    _refused_block("expert_parallel", "experts would be spread over ranks", _DELETE),
    _refused_block("pipeline", "stages are made from the model", "PipelineStage in the script"),
    _refused("sequence_parallel_size", "sequences would be split over ranks", "1", 1),
    _refused("seq_parallel_communication_data_type", "there is no sequence parallelism", _DELETE, None),
    _refused("use_data_before_expert_parallelism", "there is no expert parallelism", "false", False),
    _refused("data_types.param_dtype", "the format of parameters follows bf16 and fp16", _MIXED, None),
    _refused(
        "data_types.buffer_dtype", "persistent buffers follow the compute format, others keep theirs", "null", None
    ),
    _refused(
        "data_types.keep_in_fp32_modules",
        "all parameters share one compute format",
        '"auto" or []',
        None,
        "auto",
        [],
    ),
    _refused("bf16.bf16_master_weights_and_grads", "masters are exact fp32", "false", False),
    _refused("bf16.bf16_optimizer_states", "moments are fp32", "false", False),
    _refused("fp16.fp16_master_weights_and_grads", "masters are fp32", "false", False),
    _refused(
        "optimizer.params.max_grad_norm",
        "clipping is not the optimizer's",
        '"gradient_clipping": 1.0',
        0,
        None,
    ),
    _refused("optimizer.params.amsgrad", "the third moment is not kept", "false", False),
    _refused("optimizer.params.fp32_optimizer_states", "moments are fp32", "true", True),
    _refused("optimizer.params.fuse_param_groups", "param groups keep their own rates", "false", False),
    _refused("zero_optimization.load_from_fp32_weights", "masters are what training continues from", "true", True),
    _refused("zero_optimization.compute_grad_norm", "the norm is always computed", "true", True),
    _refused("zero_optimization.zero_hpz_partition_size", "a second copy per host would take memory", "1", 1),
    _refused("zero_optimization.zero_quantized_weights", "gathered parameters would be rounded", "false", False),
    _refused(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "frozen parameters would be rounded",
        "false",
        False,
    ),
    _refused("zero_optimization.zero_quantized_gradients", "gradients would be rounded", "false", False),
    _refused("zero_optimization.mics_shard_size", "shards would be replicated", "-1", -1, 0),
    _refused("zero_optimization.mics_hierarchical_params_gather", "there are no replicated shards", "false", False),
    _refused("zero_optimization.zeropp_loco_param", "gradients would be rounded", "null", None),
    _refused_block("zero_optimization.zenflow", "updates would be late", '"tiers": {"overlap_update": true}'),
    _refused("zero_optimization.save_muon_momentum_buffer_in_memory", "there is no Muon", "false", False),
    _refused("zero_optimization.cpu_offload", "was replaced", '"offload_optimizer": {"device": "cpu"}', False),
    _refused("zero_optimization.cpu_offload_params", "was replaced", '"offload_param": {"device": "cpu"}', False),
    _refused("zero_optimization.cpu_offload_param", "was replaced", '"offload_param": {"device": "cpu"}', False),
    _refused(
        "zero_optimization.cpu_offload_use_pin_memory",
        "was replaced",
        '"offload_optimizer": {"pin_memory": true}',
        False,
    ),
    _refused("zero_optimization.offload_optimizer.super_offload", "updates would be rolled back", "false", False),
    _refused("compile.deepcompile", "the graph would be rewritten", "torch.compile() in the script", False),
    _refused("checkpoint.load_universal", "any checkpoint loads at any world size", "false", False),
    _refused("checkpoint.use_node_local_storage", "a checkpoint is one folder that all ranks see", "false", False),
)

_PROFILER = "is not run; engine.metrics() has the figures of each step"
_COMMS = "is not run; engine.metrics() has the communication share"
_COMPILE = "is ignored: call torch.compile() in the script"
_WRITER = "figures are not sent there; engine.metrics() and tensorboard or csv_monitor have them"
_CHECKPOINT = "checkpoints are written in lamina's own way"

HINTS: tuple[Key, ...] = (
    _hint("$schema", "is for editors", str),
    _hint("disable_python_gc", "Python's garbage collector is left as it is", bool),
    _hint(
        "zero_force_ds_cpu_optimizer",
        "offloaded Adam always runs on the CPU kernels; other optimizers are torch's",
        bool,
    ),
    _hint("vocabulary_size", "only ever used to warn about alignment", int, _NULL),
    _hint("log_level", "logging is set in the script", str, _NULL),
    _hint("optimizer.legacy_fusion", "the update is always fused", bool),
    _hint("prescale_gradients", "the mean over ranks is taken in the reduction", bool),
    _hint("zero_optimization.elastic_checkpoint", "every checkpoint loads at any world size", bool),
    _hint("zero_optimization.legacy_stage1", "there is one implementation of stage 1", bool),
    _hint("zero_optimization.allgather_partitions", "parameters are always gathered by all-gather", bool),
    _hint("zero_optimization.use_multi_rank_bucket_allreduce", "gradients are always reduce-scattered", bool),
    _hint("zero_optimization.parameter_alignment", "shards are always aligned", bool),
    _hint("zero_optimization.stage3_module_granularity_threshold", "groups are found from the model", int),
    _hint(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "parameters are always gathered by all-gather",
        bool,
    ),
    _hint("zero_optimization.stage3_allgather_sequential", "groups are gathered in order", bool),
    _hint("zero_optimization.memory_efficient_linear", "linear layers are torch's", bool),
    _hint("zero_optimization.pipeline_loading_checkpoint", "loading is always streamed", bool),
    _hint("zero_optimization.override_module_apply", "Module.apply is left as it is", bool),
    _hint("zero_optimization.log_trace_cache_warnings", "engine.plan tells what was traced", bool),
    _hint("zero_optimization.enable_sanity_checks", "checks are always on", bool),
    _hint("zero_optimization.sub_group_prefetch", "sub-groups are always read ahead", bool),
    *_hint_block(
        "flops_profiler",
        _PROFILER,
        enabled=bool,
        recompute_fwd_factor=(int, float),
        profile_step=int,
        module_depth=int,
        top_modules=int,
        detailed=bool,
        output_file=(str, _NULL),
    ),
    *_hint_block("comms_logger", _COMMS, enabled=bool, verbose=bool, prof_all=bool, debug=bool, prof_ops=list),
    *_hint_block(
        "wandb",
        _WRITER,
        enabled=bool,
        group=(str, _NULL),
        team=(str, _NULL),
        project=(str, _NULL),
        host=(str, _NULL),
    ),
    *_hint_block(
        "comet",
        _WRITER,
        enabled=bool,
        samples_log_interval=int,
        project=(str, _NULL),
        workspace=(str, _NULL),
        api_key=(str, _NULL),
        experiment_name=(str, _NULL),
        experiment_key=(str, _NULL),
        online=(bool, _NULL),
        mode=(str, _NULL),
    ),
    *_hint_block(
        "compile",
        _COMPILE,
        enabled=bool,
        backend=str,
        kwargs=dict,
        schedule=(list, _NULL),
        autoep_non_moe=bool,
        free_activation=bool,
        free_activation_threshold=int,
        offload_activation=bool,
        offload_activation_pin_memory=bool,
        offload_opt_states=bool,
        double_buffer=bool,
        symmetric_memory=bool,
        debug_log=bool,
        offload_parameters=bool,
        sync_before_reduce=bool,
        sync_after_reduce=bool,
        sync_before_allgather=bool,
        sync_after_allgather=bool,
        keep_int_input_tensors=bool,
        keep_all_input_tensors=bool,
        passes=(list, _NULL),
    ),
    *_hint_block(
        "checkpoint",
        _CHECKPOINT,
        tag_validation=str,
        parallel_write=dict,
        checkpoint_serialization=bool,
        writer=(dict, _NULL),
    ),
    *_hint_block("timers", "engine.metrics() times each step", throughput=dict),
)

_ZERO = "zero_optimization"
RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "bf16.check_overflow": "bf16.check_grad_overflow",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.gather_16bit_weights_on_model_save": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.prefetch_bucket_size": f"{_ZERO}.stage3_prefetch_bucket_size",
    f"{_ZERO}.param_persistence_threshold": f"{_ZERO}.stage3_param_persistence_threshold",
    f"{_ZERO}.model_persistence_threshold": f"{_ZERO}.stage3_model_persistence_threshold",
    f"{_ZERO}.max_live_parameters": f"{_ZERO}.stage3_max_live_parameters",
    f"{_ZERO}.max_reuse_distance": f"{_ZERO}.stage3_max_reuse_distance",
    f"{_ZERO}.module_granularity_threshold": f"{_ZERO}.stage3_module_granularity_threshold",
    f"{_ZERO}.use_all_reduce_for_fetch_params": f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
    f"{_ZERO}.allgather_sequential": f"{_ZERO}.stage3_allgather_sequential",
    "aio.thread_count": "aio.intra_op_parallelism",
    "aio.num_threads": "aio.intra_op_parallelism",
    "activation_checkpointing.partitioned_activations": "activation_checkpointing.partition_activations",
    "optimizer.params.adamw_mode": "optimizer.params.adam_w_mode",
}
"""Old or other spellings, each with the key that it stands for; giving both is an error."""
