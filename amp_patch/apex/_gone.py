"""Parts of Apex that amp_patch's stand-in for Apex lacks, each with its purpose and what to use in its place."""

_GONE = {
    "apex.amp.wrap": (
        "the makers of casting wrappers: use amp.half_function, float_function and promote_function, or"
        " amp.register_half_function and its like"
    ),
    "apex.RNN": "recurrent cells for float16: use torch.nn.LSTM, GRU and RNN, which amp casts",
    "apex.reparameterization": "weight normalization: use torch.nn.utils.parametrizations.weight_norm",
    "apex.fused_dense": (
        "linear layers with fused bias and GELU: use torch.nn.Linear and torch.nn.GELU, with torch.compile for speed"
    ),
    "apex.pyprof": "a profiler: use torch.profiler",
    "apex.transformer": (
        "tensor and pipeline parallel transformers: use Megatron-Core (megatron.core), or"
        " torch.distributed.tensor.parallel and torch.distributed.pipelining; for its fused softmax use"
        " torch.nn.functional.scaled_dot_product_attention"
    ),
    "apex.fp16_utils.FP16Model": (
        "a float16 model that casts its inputs: use apex.fp16_utils.network_to_half, or amp.initialize at O2 or O3"
    ),
    "apex.contrib.bottleneck": (
        "fused ResNet bottlenecks: use the blocks of torchvision.models.resnet, with torch.compile for speed"
    ),
    "apex.contrib.conv_bias_relu": "fused convolutions: use torch.nn.Conv2d and ReLU, with torch.compile for speed",
    "apex.contrib.cudnn_gbn": "BatchNorm over a group of processes: use torch.nn.SyncBatchNorm with a process_group",
    "apex.contrib.fmha": "fused attention: use torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "a fused focal loss: use torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "GroupNorm for channels-last: use torch.nn.GroupNorm",
    "apex.contrib.groupbn": "BatchNorm over a group of processes: use torch.nn.SyncBatchNorm with a process_group",
    "apex.contrib.index_mul_2d": "a fused `a[index] * b`: write it so, with torch.compile for speed",
    "apex.contrib.layer_norm": "a fast LayerNorm: use torch.nn.LayerNorm",
    "apex.contrib.gpu_direct_storage": "files read straight to the GPU: use torch.cuda.gds",
    "apex.contrib.nccl_allocator": "memory registered with NCCL: use torch.cuda.MemPool",
    "apex.contrib.nccl_p2p": "halo exchange between GPUs: use torch.distributed.batch_isend_irecv",
    "apex.contrib.optimizers.fp16_optimizer": "one class: use `from apex.contrib.optimizers import FP16_Optimizer`",
    "apex.contrib.optimizers.fused_lamb": "one class: use `from apex.contrib.optimizers import FusedLAMB`",
    "apex.contrib.optimizers.fused_sgd": "one class: use `from apex.contrib.optimizers import FusedSGD`",
    "apex.contrib.peer_memory": "halo exchange between GPUs: use torch.distributed.batch_isend_irecv",
    "apex.contrib.multihead_attn": (
        "fused attention layers: use torch.nn.MultiheadAttention or torch.nn.functional.scaled_dot_product_attention"
    ),
    "apex.contrib.optimizers.DistributedFusedAdam": (
        "Adam with its states in shards: use torch.distributed.fsdp.fully_shard, or ZeroRedundancyOptimizer at an"
        " opt_level without master weights"
    ),
    "apex.contrib.optimizers.DistributedFusedLAMB": (
        "LAMB with its states in shards: use apex.optimizers.FusedLAMB under DistributedDataParallel"
    ),
    "apex.contrib.optimizers.distributed_fused_adam": (
        "Adam with its states in shards: use torch.distributed.fsdp.fully_shard, or ZeroRedundancyOptimizer at an"
        " opt_level without master weights"
    ),
    "apex.contrib.optimizers.distributed_fused_adam_v2": "sharded Adam: use torch.distributed.fsdp.fully_shard",
    "apex.contrib.optimizers.distributed_fused_adam_v3": "sharded Adam: use torch.distributed.fsdp.fully_shard",
    "apex.contrib.optimizers.distributed_fused_lamb": (
        "LAMB with its states in shards: use apex.optimizers.FusedLAMB under DistributedDataParallel"
    ),
    "apex.contrib.openfold_triton": (
        "kernels for OpenFold: use torch.nn.functional.scaled_dot_product_attention and torch.nn.LayerNorm"
    ),
    "apex.contrib.sparsity": (
        "2:4 structured sparsity (ASP): use torch.sparse.to_sparse_semi_structured and torchao.sparsity"
    ),
    "apex.contrib.transducer": "the loss of RNN transducers: use torchaudio.functional.rnnt_loss",
    "apex.parallel.optimized_sync_batchnorm_kernel": "the kernel of a layer: use apex.parallel.SyncBatchNorm",
    # functions for Apex's own optimizers
    "amp_C.multi_tensor_adagrad": "Adagrad: use torch.optim.Adagrad(fused=True)",
    "amp_C.multi_tensor_adam_capturable": "Adam for CUDA graphs: use torch.optim.AdamW(capturable=True)",
    "amp_C.multi_tensor_adam_capturable_master": "Adam for CUDA graphs: use torch.optim.AdamW(capturable=True)",
    "amp_C.multi_tensor_l2norm_mp": "norms of several dtypes: use amp_C.multi_tensor_l2norm, which takes them",
    "amp_C.multi_tensor_l2norm_scale": "norms of scaled tensors: use multi_tensor_scale, then multi_tensor_l2norm",
    "amp_C.multi_tensor_lamb_mp": "LAMB with float32 masters: use amp_C.multi_tensor_lamb on the masters",
    "amp_C.multi_tensor_novograd": "NovoGrad: use apex.optimizers.FusedNovoGrad",
    "amp_C.multi_tensor_unscale_l2norm": (
        "norms of scaled tensors: use amp_C.multi_tensor_l2norm, and multiply by the inverse scale"
    ),
}

COMPILED = {
    "fused_dense_cuda": "the kernels behind apex.fused_dense: use torch.nn.Linear and torch.nn.GELU",
    "mlp_cuda": "the kernels behind apex.mlp: use apex.mlp.MLP",
    "syncbn": "the kernels behind SyncBatchNorm: use apex.parallel.SyncBatchNorm",
    "xentropy_cuda": "the kernels behind a cross entropy: use apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
}
"""Compiled modules of Apex that the stand-in lacks. Importing one raises Python's usual error without advice, because
scripts may try the import only to find out whether the module exists.
"""


def describe(name: str) -> tuple[str, str] | None:
    """Return the missing part of Apex that is or contains the dotted name `name`, and the description of the part.

    For "apex.transformer.tensor_parallel", the part is "apex.transformer". Returns None for any other name.
    """
    parts = {**_GONE, **COMPILED}
    # the longest first, because a part may be inside another part
    for part in sorted(parts, key=len, reverse=True):
        if name == part or name.startswith(part + "."):
            return part, parts[part]
    return None


def advise(name: str) -> str | None:
    """Return the sentence of an error about a missing part of Apex, or None if `describe` returns None."""
    gone = describe(name)
    if gone is None:
        return None
    part, description = gone
    return f"the apex of amp_patch has no {part} ({description})"
