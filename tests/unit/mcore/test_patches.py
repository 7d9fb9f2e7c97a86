"""Tests that the symbols that `mcore/patches` replaces, clears or calls exist, with the expected signatures.

Reads the installed sources, because importing the packages would show symbols that are already replaced.
"""

import ast
import functools
import importlib.metadata
import pkgutil
import re
import sys
from pathlib import Path

import torch

from nemo_offload_rl.mcore import patches
from nemo_offload_rl.mcore.patches.cpu_device import MODULES_WITH_LITERAL_CUDA

CORE = "megatron.core"
WRITER = f"{CORE}.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
HYBRID = f"{CORE}.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
DISTRIBUTED = f"{CORE}.optimizer.distrib_optimizer:DistributedOptimizer"
DDP = f"{CORE}.distributed.distributed_data_parallel:DistributedDataParallel"
LAYER = f"{CORE}.transformer.transformer_layer:TransformerLayer"
RANDOM = f"{CORE}.tensor_parallel.random"
ROUTER = f"{CORE}.transformer.moe.router:TopKRouter"
COLUMN = f"{CORE}.tensor_parallel.layers:ColumnParallelLinear"
ROTARY = f"{CORE}.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
C10D = "torch.distributed.distributed_c10d"
MAPPING = "megatron.bridge.models.conversion.param_mapping"
OFFLOAD = f"{CORE}.pipeline_parallel.fine_grained_activation_offload"
ROPE = f"{CORE}.models.common.embeddings.rope_utils"
YARN = f"{CORE}.models.common.embeddings.yarn_rotary_pos_embedding"
UPSTREAM = [
    # activation_offload: the manager has the methods that layers call
    f"{OFFLOAD} fine_grained_offloading_group_offload(tensor, name, forced_released_tensors=None, delay_offload=False)",
    f"{OFFLOAD}:FineGrainedActivationOffloadingInterface forward_record() backward_record(tensor)",
    f"{OFFLOAD}:PipelineOffloadManager init_model_chunk_offload_handler(self, pp_rank, vp_size, vp_stage, "
    "min_offloaded_tensor_size=1024 * 1024, delta_offload_bytes_across_pp_ranks=0, "
    "activation_offload_fraction=1.0, max_inflight_offloads=None) pop_forward_chunk(self, name=None) "
    "cur_forward_chunk(self) __enter__(self) __exit__(self, *args) mark_not_offload(self, tensor) "
    "disable_offload(self) enable_offload(self) flush_delayed_groups(self) reset(self) cuda_graph_stream(self) "
    "cuda_graph_event(self)",
    f"{RANDOM}:CheckpointWithoutOutput checkpoint(self, run_function, *args)",
    # checkpoint_writer
    f"{WRITER} finish(self, metadata, results) "
    "write_preloaded_data_multithread(transform_list, use_msc, rank, write_buckets, global_results_queue) "
    "write_preloaded_data(transform_list, local_proc_idx, write_bucket, results_queue, count_queue, use_fsync, "
    "**kwargs)",
    # cpu_device
    "torch.cuda current_device() set_device(device) synchronize(device=None) current_stream(device=None) "
    "default_stream(device=None) stream(stream)",
    "torch.cuda.graphs is_current_stream_capturing()",
    "torch.cuda.memory empty_cache() reset_peak_memory_stats(device=None)",
    "torch.cuda.random get_rng_state(device='cuda') set_rng_state(new_state, device='cuda') manual_seed(seed)",
    "torch.cuda.streams:Stream wait_stream(self, stream) wait_event(self, event) record_event(self, event=None) "
    "synchronize(self)",
    "torch.cuda.streams:Event record(self, stream=None) wait(self, stream=None) query(self)",
    "torch.nn.modules.module:Module cuda(self, device=None)",
    f"{RANDOM} _get_cuda_rng_state(device='cuda', clone=False, graph_safe=False) "
    "_set_cuda_rng_state(new_state, device=-1, graph_safe=False)",
    f"{CORE}.transformer.moe.moe_utils maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False)",
    # cpu_optimizer: what it uses of megatron-core's optimizer, and how masters are reloaded
    f"{HYBRID} __init__(self, params, offload_fraction=0.5, cpu_optimizer_cls=None, gpu_optimizer_cls=None, "
    "param_update_in_fp32=False, pin_cpu_grads=True, pin_cpu_params=True, overlap_cpu_optimizer_d2h_h2d=True, "
    "**kwargs) step(self, closure=None) update_fp32_param_by_new_param(self) dummy_step(self) "
    "_sync_hdo_state_to_sub_optimizers(self)",
    f"{CORE}.optimizer get_megatron_optimizer(config, model_chunks, config_overrides=None, "
    "use_gloo_process_groups=True, pg_collection=None, dump_param_to_param_group_map=None)",
    f"{DISTRIBUTED} _get_model_param_range_map(self, param) "
    "_set_main_param_and_optimizer_states(self, model_param, tensors)",
    # gradient_nodes
    f"{DDP} _make_backward_post_hook(self, param)",
    # graph_inputs
    f"{CORE}.transformer.module:GraphableMegatronModule get_layer_static_inputs(self, seq_length, micro_batch_size)",
    f"{LAYER} _get_te_cuda_graph_replay_args(self, *args, **kwargs) _te_cuda_graph_replay(self, *args, **kwargs) "
    "_forward_mlp(self, hidden_states, inference_context=None, padding_mask=None, packed_seq_params=None)",
    # layer_input: what it replaces; and the random numbers that a recomputed layer starts with
    f"{CORE}.recompute checkpointed_forward(self, hidden_states, attention_mask, context, context_mask, "
    "rotary_pos_emb, attention_bias, packed_seq_params, use_inner_quantization_context, padding_mask=None, "
    "extract_layer_indices=None, layer_offset=0)",
    f"{RANDOM} _get_all_rng_states() _set_all_rng_states(cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker) "
    "_fork_rng()",
    # residency.streamed.init_state
    f"{DISTRIBUTED} _copy_main_params_to_model_params(self)",
    f"{CORE}.optimizer.optimizer:Float16OptimizerWithFloat16Params _copy_main_params_to_model_params(self)",
    # object_collectives: a group that is given by name
    f"{C10D} all_gather_object(object_list, obj, group=None) "
    "gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None) "
    "scatter_object_list(scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, "
    "group_src=None) broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None)",
    # output_layer, whose call runs the hooks; the weight is the layer's or the one passed to the processor
    f"{COLUMN} forward(self, input_, weight=None, runtime_gather_output=None)",
    # packed_rotary: what it replaces, with the arguments that its caller names; and what it calls
    f"{ROPE} _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, rotary_interleaved=False, "
    "mla_rotary_interleaved=False, mscale=1.0, cp_group=None, multi_latent_attention=None) "
    "_apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0, "
    "multi_latent_attention=None)",
    # process_groups
    f"{CORE}.parallel_state destroy_model_parallel()",
    f"{ROTARY} forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None)",
    f"{YARN}:YarnRotaryEmbedding forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None)",
    # rotary_frequencies
    "megatron.bridge.models.gpt_provider:GPTModelProvider provide(self, pre_process=None, post_process=None, "
    "vp_stage=None)",
    # router_losses
    f"{ROUTER} attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, "
    "reduce_group, needs_dp_avg=True, valid_token_count=None) "
    "_apply_expert_bias(self, routing_map, padding_mask=None)",
    # weight_export
    f"{MAPPING} split_qkv_weights(provider, qkv, feature_dim=None) split_qkv_biases(config, qkv)",
    "megatron.bridge.models.conversion.utils remove_non_pickleables(obj, max_depth=3, current_depth=0)",
    "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge build_conversion_tasks(self, "
    "hf_pretrained, megatron_model, weight_dtype=None)",
]
"""Each a module or class, and functions of it with their arguments, without annotations."""

ATTRIBUTES = [
    f"{ROUTER} calculate_per_token_loss tp_cp_group",  # router_losses
    # saved_state
    f"{LAYER} mlp_norm_manager off_interface",
    f"{CORE}.transformer.moe.shared_experts:SharedExpertMLP _overlap_state",
    f"{CORE}.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher _comm_manager",
    f"{CORE}.transformer.moe.moe_layer:MoELayer token_dispatcher cudagraph_tensor_store",
    f"{CORE}.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup per_param_grad_ready_counts grad_reduce_handle",
    # cpu_optimizer, and residency.streamed.init_state
    f"{DISTRIBUTED} model_float16_groups shard_float16_groups shard_fp32_from_float16_groups",
    f"{CORE}.optimizer.optimizer:Float16OptimizerWithFloat16Params float16_groups fp32_from_float16_groups",
    f"{DDP} grad_accs bucket_groups expert_parallel_bucket_groups",  # gradient_nodes, saved_state
    f"{ROTARY} inv_freq",  # rotary_frequencies
    f"{COLUMN} weight sequence_parallel",  # output_layer, linear_logprob
    # activation_offload
    f"{RANDOM}:CheckpointWithoutOutput outputs",
    f"{OFFLOAD}:PipelineOffloadManager OFFLOAD_MGR _in_replay",
]
"""Each a module and class, and attributes that its source sets."""

GLOBALS = [
    f"{CORE}.optimizer HybridDeviceOptimizer",
    f"{CORE}.optimizer.distrib_optimizer HybridDeviceOptimizer",
    f"{CORE}.dist_checkpointing.strategies.filesystem_async _results_queue",
    f"{CORE}.transformer.moe.token_dispatcher maybe_move_tensor_to_cpu",
    *(f"{name} torch" for name in MODULES_WITH_LITERAL_CUDA),
]
"""Each a module, and a global name that its source binds."""


IMPORTS = (ast.Import, ast.ImportFrom)


@functools.cache
def source_of(module: str) -> ast.Module:
    path = module.replace(".", "/")
    files = [Path(folder, path).with_suffix(".py") for folder in sys.path]
    files += [Path(folder, path, "__init__.py") for folder in sys.path]
    return ast.parse(next(file for file in files if file.is_file()).read_text())


def found(module: str, name: str) -> ast.AST:
    """Finds a function or class of a module, at its top or inside its `if`s and `try`s, or a method of a class."""
    scope: ast.AST = source_of(module)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        scope = next(node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part)
    return scope


def signature(function: ast.AST) -> str:
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(function.args)})"


def test_functions_are_called_as_they_were():
    for owner, functions in (entry.split(" ", 1) for entry in UPSTREAM):
        module, _, scope = owner.partition(":")
        for name, arguments in re.findall(r"(\w+)(\([^)]*\))", functions):
            assert signature(found(module, f"{scope}.{name}".lstrip("."))) == arguments, f"{owner} {name}"


def test_classes_have_these_attributes():
    for symbol, *attributes in map(str.split, ATTRIBUTES):
        body = list(ast.walk(found(*symbol.split(":"))))
        names = {node.attr for node in body if isinstance(node, ast.Attribute)}
        names |= {node.id for node in body if isinstance(node, ast.Name)}
        assert set(attributes) <= names, symbol


def test_modules_have_these_globals():
    for module, expected in map(str.split, GLOBALS):
        top = [node for node in source_of(module).body if isinstance(node, (ast.Assign, *IMPORTS))]
        names = {node.id for statement in top for node in ast.walk(statement) if isinstance(node, ast.Name)}
        names |= {alias.name for statement in top if isinstance(statement, IMPORTS) for alias in statement.names}
        assert expected in names, module


def test_methods_of_tensors_that_are_replaced_exist():
    assert {"cuda", "type"} <= set(dir(torch._C.TensorBase))


def test_every_patch_says_what_it_was_written_for():
    modules = {module.name for module in pkgutil.iter_modules(patches.__path__)}
    assert set(patches.WRITTEN_FOR) == modules
    for versions in patches.WRITTEN_FOR.values():
        for distribution, releases in versions.items():
            assert importlib.metadata.version(distribution).startswith(releases), distribution
