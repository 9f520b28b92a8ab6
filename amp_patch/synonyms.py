"""Words that users write for an op, a class of modules, an argument, a key or a value, each with the names it means.

`errors.did_you_mean` suggests these names rather than names with a similar spelling, but only names that are allowed
where the word was given.
"""

# Each row has words on the left, and on the right the names that each of them means.
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

# keys of lists, and the words for their dtypes
allow allowlist allowed white low low_precision fp16 float16 half bf16 bfloat16 -> whitelist
deny denylist blocklist block black fp32 float32 full_precision -> blacklist
reason comment -> why
float16 fp16 half bfloat16 bf16 -> low
fp32 float full double float64 -> float32
yes on -> true
no off -> false
auto -> dynamic
fp16 half -> float16
bf16 -> bfloat16
layer layers -> modules
gpu nvidia -> cuda

# arguments
keep_bn_fp32 -> keep_batchnorm_fp32
level preset -> opt_level
"""


def _read(rows: str) -> dict[str, tuple[str, ...]]:
    """Return the names that each word means. A word on several rows means the names of all of them."""
    table: dict[str, tuple[str, ...]] = {}
    for row in rows.splitlines():
        words, arrow, names = row.partition(" -> ")
        if arrow:
            for word in words.split():
                table[word] = tuple(dict.fromkeys((*table.get(word, ()), *names.split())))
    return table


SYNONYMS = _read(_ROWS)
"""The names that a word may mean, by the word."""
