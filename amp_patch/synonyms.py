"""Other words for what this package calls by one name: what `errors.did_you_mean` knows besides the spelling.

Where a word has several meanings, the names that are allowed in its place decide.
"""

_ROWS = """
# ops
attention sdpa flash_attention self_attention dot_product_attention -> scaled_dot_product_attention
mha multihead_attention -> multi_head_attention_forward
conv convolve -> conv1d conv2d conv3d
conv_transpose transposed_conv deconv deconvolution -> conv_transpose1d conv_transpose2d conv_transpose3d
max_pool -> max_pool1d max_pool2d max_pool3d
avg_pool average_pool -> avg_pool1d avg_pool2d avg_pool3d
fc dense fully_connected -> linear
gemm matrix_multiply -> matmul mm
batch_matmul batched_matmul bgemm -> bmm
bn batch_norm1d batch_norm2d batch_norm3d -> batch_norm
gn -> group_norm
ce ce_loss cross_entropy_loss -> cross_entropy
bce bce_loss -> binary_cross_entropy
bce_with_logits bce_with_logits_loss -> binary_cross_entropy_with_logits
mse -> mse_loss
mae l1 -> l1_loss
nll -> nll_loss
kld kl kl_div_loss -> kl_div
swish -> silu
power -> pow
average -> mean
standard_deviation -> std
variance -> var
plus -> add
minus -> sub
times -> mul
inverse_sqrt reciprocal_sqrt -> rsqrt
concatenation -> cat

# classes of modules
attention mha -> MultiheadAttention
conv convolution -> Conv1d Conv2d Conv3d
batch_norm -> BatchNorm1d BatchNorm2d BatchNorm3d
dense fc -> Linear

# keys of lists
allow allowlist allowed white low_ops half_ops -> whitelist
deny denylist denied blocklist block black fp32_ops float32_ops -> blacklist
low low_precision fp16 float16 half bf16 bfloat16 -> whitelist
fp32 float32 full_precision high_precision -> blacklist
widest widen upcast -> promote
ban forbid forbidden error -> banned
ignore skip exclude remove off -> neutral
inherit inherits inherit_from base bases parent parents from include includes import -> extends
layer layers module submodules -> modules
inplace in_place -> inplace_blacklist
title comment about summary -> description
name function func -> op match
reason because note comment -> why
min_version from from_version version -> since
max_version to before -> until
missing_ok may_be_missing -> optional
pattern path glob regex module -> match
class cls kind -> type
dtype precision in rule -> run

# words that are values
float16 fp16 f16 half bfloat16 bf16 16 16bit low_precision lower -> low
fp32 f32 float single full full_precision high 32 32bit -> float32
f16 16 16bit half_float -> float16
bf brain_float bfp16 -> bfloat16
float64 double fp64 -> float32
auto automatic adaptive -> dynamic
yes on 1 y -> true
no off 0 n -> false
raise refuse ban -> error
allow keep -> match
hardware device float16 bfloat16 -> native
emulate emulated -> float32
gpu nvidia rocm -> cuda

# keys of loss scales
initial start init_scale init_value -> init
growth grow scale_factor factor -> growth_factor
backoff shrink_factor -> backoff_factor
interval scale_window window growth_every -> growth_interval
delayed_shift patience -> hysteresis

# properties of levels, and arguments
keep_bn_fp32 keep_batchnorm bn_fp32 -> keep_batchnorm_fp32
master masters fp32_weights main_params -> master_weights
scale scaler grad_scale loss_scaler -> loss_scale
patch patch_functions patch_torch -> patch_torch_functions
dtype low_dtype -> patch_torch_functions_type cast_model_type
model_dtype cast_model cast_type -> cast_model_type
level preset -> opt_level
oplists op_lists list -> lists

# shipped lists
fp16 half -> float16
bf16 -> bfloat16
autocast amp torch -> autocast-cuda autocast-cpu
nvidia -> apex

# commands
list op_lists -> lists
lint audit -> doctor
profile why -> explain
bench benchmark -> compare
debug nan overflow -> trace
search optimize -> tune
exec train start launch -> run
validate lint verify -> check
print view cat display list -> show
difference compare -> diff
describe what -> explain
new create make start -> init
"""


def _read(rows: str) -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for row in rows.splitlines():
        words, arrow, names = row.partition(" -> ")
        if arrow:
            for word in words.split():
                table[word] = tuple(dict.fromkeys((*table.get(word, ()), *names.split())))
    return table


SYNONYMS = _read(_ROWS)
"""From another word to the names that may be meant, of those that are allowed."""
