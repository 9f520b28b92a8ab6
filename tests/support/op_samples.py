"""Tiny arguments for every op of the shipped lists, by name. Floating tensors are float32; who uses a sample casts
them.

A name stands for all its spellings; where one takes its arguments differently, it has an entry under its full name as
well.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One call. The tensors are shared: whoever may write to them works on copies.

    `variables` is how many of the floating tensors, from the first, may take gradients; the rest are targets and the
    like.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    variables: int = 99


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Between 0.1 and 0.9, where every function is defined and no two values coincide in 8 bits by design of
    the seed.
    """
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


def call(*args: Any, variables: int = 99, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, variables)


VECTOR, VECTOR2, VECTOR3 = rand(4), rand(4, seed=1), rand(4, seed=2)
MATRIX, MATRIX2, MATRIX3 = rand(4, 4), rand(4, 4, seed=1), rand(4, 4, seed=2)
BATCH, BATCH2, BATCH3 = rand(2, 3, 4), rand(2, 4, 3, seed=1), rand(2, 3, 3, seed=2)
POSITIVE = MATRIX @ MATRIX.T + 4 * torch.eye(4)
IMAGE, VOLUME = rand(1, 2, 5, 5), rand(1, 2, 4, 4, 4)
FILTERS, BIAS, STRIDES = rand(3, 2, 3, 3, seed=1), rand(3, seed=2), ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
GRID, GRID3 = rand(1, 3, 3, 2, seed=1), rand(1, 2, 2, 2, 3, seed=1)
SIGNAL = rand(16)
CLASSES, SIGNS, MASK = (
    torch.tensor([0, 3, 1, 2]),
    torch.tensor([1.0, -1.0, 1.0, -1.0]),
    torch.tensor([True, False, True, False]),
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that CSR is in beta
    SPARSE_ROWS = MATRIX.to_sparse_csr()
SPECTRUM = torch.stft(SIGNAL, 4, window=torch.ones(4), return_complex=True)
LU, PIVOTS = torch.linalg.lu_factor(POSITIVE)
LD, LD_PIVOTS = torch.linalg.ldl_factor(POSITIVE)
REFLECTORS, TAU = torch.geqrf(MATRIX)
POOLED, PLACES = torch.nn.functional.max_pool2d(IMAGE[..., :4, :4], 2, return_indices=True)
POOLED3, PLACES3 = torch.nn.functional.max_pool3d(VOLUME, 2, return_indices=True)
POOLED1, PLACES1 = torch.nn.functional.max_pool1d(rand(1, 2, 6), 2, return_indices=True)
FIELD_2D, FIELD_3D = torch.tensor([[[0.3, 0.6], [0.2, 0.7]]]), torch.tensor([[[0.3, 0.6, 0.1], [0.2, 0.7, 0.5]]])


def recurrent(gates: int, *, is_lstm: bool = False) -> Sample:
    """input [2, 3, 4], states [1, 3, 4], one layer of width 4 with `gates` gates."""
    state = rand(1, 3, 4, seed=1)
    weights = [rand(4 * gates, 4, seed=2), rand(4 * gates, 4, seed=3), rand(4 * gates, seed=4), rand(4 * gates, seed=5)]
    return call(
        rand(2, 3, 4), (state, rand(1, 3, 4, seed=6)) if is_lstm else state, weights, True, 1, 0.0, True, False, False
    )


def cell(gates: int, *, is_lstm: bool = False) -> Sample:
    _, state, weights, *_ = recurrent(gates, is_lstm=is_lstm).args
    return call(rand(3, 4), tuple(one[0] for one in state) if is_lstm else state[0], *weights)


def attention() -> tuple[Any, ...]:
    """Embedding size, heads, and the two projections of self-attention of width 4."""
    return 4, 2, rand(12, 4, seed=1) - 0.5, rand(12, seed=2), rand(4, 4, seed=3) - 0.5, rand(4, seed=4)


def encoder_layer() -> Sample:
    width, heads, in_weight, in_bias, out_weight, out_bias = attention()
    norms, feed = (rand(4), rand(4), rand(4), rand(4)), (rand(8, 4) - 0.5, rand(8), rand(4, 8) - 0.5, rand(4))
    return call(
        rand(2, 3, 4), width, heads, in_weight, in_bias, out_weight, out_bias, False, False, 1e-5, *norms, *feed
    )


def _each(names: str, sample: Sample) -> dict[str, Sample]:
    return dict.fromkeys(names.split(), sample)


_UNARY = (
    "acos arccos asin arcsin atanh arctanh cosh sinh tan erfinv exp expm1 log log1p log2 log10 reciprocal rsqrt square"
)
_SPECIAL = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
    spherical_bessel_j0 erfcx ndtri log_ndtr"""
_POLYNOMIALS = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p"""
_COMPARED = "eq ge gt le lt ne __eq__ __ge__ __gt__ __le__ __lt__ __ne__ equal"
_ARITHMETIC = (
    "add div mul __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__"
    " __rpow__ pow"
)
_AUGMENTED = "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__"

_OUT_OF_PLACE: dict[str, Sample] = {
    **_each(_UNARY, call(MATRIX)),
    **_each(f"{_COMPARED} {_ARITHMETIC} {_AUGMENTED} atan2 arctan2", call(MATRIX, MATRIX2)),
    # products
    **_each("matmul mm __matmul__ __rmatmul__ inner tensordot", call(MATRIX, MATRIX2)),
    **_each("addmm", call(MATRIX, MATRIX2, MATRIX3, beta=0.5)),
    **_each("_addmm_activation", call(VECTOR, MATRIX2, MATRIX3)),
    **_each("mv", call(MATRIX, VECTOR)),
    **_each("addmv", call(VECTOR, MATRIX, VECTOR2)),
    **_each("addr", call(MATRIX, VECTOR, VECTOR2)),
    **_each("dot vdot", call(VECTOR, VECTOR2)),
    **_each("vecdot", call(MATRIX, MATRIX2)),
    **_each("bmm", call(BATCH, BATCH2)),
    **_each("addbmm", call(BATCH3[0], BATCH, BATCH2)),
    **_each("baddbmm", call(BATCH3, BATCH, BATCH2)),
    **_each("chain_matmul", call(MATRIX, MATRIX2, MATRIX3)),
    **_each("multi_dot", call([MATRIX, MATRIX2, MATRIX3])),
    **_each("einsum", call("ij,kj->ik", MATRIX, MATRIX2)),
    **_each("cross", call(BATCH3, BATCH3.flip(0), dim=2)),
    **_each("linear", call(BATCH, MATRIX, VECTOR)),
    **_each("bilinear", call(MATRIX, MATRIX2, rand(2, 4, 4, seed=2), rand(2, seed=3))),
    **_each("scaled_dot_product_attention", call(rand(1, 2, 3, 4), rand(1, 2, 3, 4, seed=1), rand(1, 2, 3, 4, seed=2))),
    **_each("_native_multi_head_attention", call(BATCH, BATCH, BATCH, *attention())),
    **_each("_transformer_encoder_layer_fwd", encoder_layer()),
    **_each("grouped_mm _grouped_mm", call(rand(2, 8, 8), rand(2, 8, 8, seed=1))),
    "torch.foreach.mm": call([MATRIX, MATRIX2], [MATRIX2, MATRIX3]),
    **_each("flex_attention", call(*(rand(1, 2, 16, 16, seed=seed) for seed in range(3)), variables=0)),
    **_each("conv1d_input", call((1, 2, 5), rand(3, 2, 3, seed=1), rand(1, 3, 3))),
    **_each("conv1d_weight", call(rand(1, 2, 5), (3, 2, 3), rand(1, 3, 3))),
    **_each("conv2d_input", call((1, 2, 5, 5), FILTERS, rand(1, 3, 3, 3))),
    **_each("conv2d_weight", call(IMAGE, (3, 2, 3, 3), rand(1, 3, 3, 3))),
    **_each("conv3d_input", call((1, 2, 5, 5, 5), rand(3, 2, 3, 3, 3), rand(1, 3, 3, 3, 3))),
    **_each("conv3d_weight", call(rand(1, 2, 5, 5, 5), (3, 2, 3, 3, 3), rand(1, 3, 3, 3, 3))),
    **_each("prelu", call(MATRIX - 0.5, VECTOR)),
    # convolutions
    **_each("conv1d", call(rand(1, 2, 5), rand(3, 2, 3, seed=1), rand(3, seed=2))),
    **_each("conv2d", call(IMAGE, FILTERS, BIAS)),
    **_each("conv3d", call(VOLUME, rand(3, 2, 2, 2, 2, seed=1), rand(3, seed=2))),
    **_each("conv_transpose1d", call(rand(1, 2, 5), rand(2, 3, 3, seed=1), rand(3, seed=2))),
    **_each("conv_transpose2d", call(IMAGE, rand(2, 3, 3, 3, seed=1), rand(3, seed=2))),
    **_each("conv_transpose3d", call(VOLUME, rand(2, 3, 2, 2, 2, seed=1), rand(3, seed=2))),
    **_each("conv_tbc", call(rand(5, 1, 2), rand(3, 2, 4, seed=1), rand(4, seed=2))),
    **_each("convolution", call(IMAGE, FILTERS, BIAS, *STRIDES)),
    **_each("_convolution", call(IMAGE, FILTERS, BIAS, *STRIDES, False, False, True, True)),
    # recurrent layers
    "lstm": recurrent(4, is_lstm=True),
    "gru": recurrent(3),
    "rnn_tanh": recurrent(1),
    "rnn_relu": recurrent(1),
    "lstm_cell": cell(4, is_lstm=True),
    "gru_cell": cell(3),
    "rnn_tanh_cell": cell(1),
    "rnn_relu_cell": cell(1),
    # sums, norms, distances
    **_each("sum nansum prod std var std_mean var_mean trace norm nuclear_norm logdet", call(POSITIVE)),
    **_each("cumsum cumprod logcumsumexp logsumexp softmax log_softmax softmin", call(MATRIX, 1)),
    **_each("sum_to_size", call(MATRIX, (1, 4))),
    **_each("frobenius_norm", call(MATRIX, [0, 1])),
    **_each("vector_norm matrix_norm normalize softplus gelu cpu", call(MATRIX)),
    **_each("cov corrcoef", call(MATRIX)),
    **_each("renorm", call(MATRIX, 2, 0, 0.5)),
    **_each("cosine_similarity pairwise_distance dist cdist", call(MATRIX, MATRIX2)),
    **_each("pdist", call(MATRIX)),
    **_each("trapezoid trapz cumulative_trapezoid", call(MATRIX, MATRIX2.cumsum(1))),
    **_each("mvlgamma multigammaln", call(MATRIX + 2, 2)),
    # normalization layers
    **_each("layer_norm native_layer_norm", call(MATRIX, (4,), VECTOR, VECTOR2, 1e-5)),
    **_each("rms_norm", call(MATRIX, (4,), VECTOR, 1e-5)),
    **_each("group_norm", call(IMAGE, 2, rand(2), rand(2, seed=1))),
    # with the statistics of training, which are not written
    **_each("torch.nn.functional.batch_norm", call(IMAGE, rand(2), rand(2, seed=1), variables=1)),
    **_each("torch.batch_norm", call(IMAGE, rand(2), rand(2), rand(2), rand(2), False, 0.1, 1e-5, False, variables=1)),
    **_each("local_response_norm", call(IMAGE, 2)),
    # losses
    **_each(
        "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits",
        call(MATRIX, MATRIX2),
    ),
    **_each("cross_entropy nll_loss multi_margin_loss", call(MATRIX, CLASSES)),
    **_each("soft_margin_loss hinge_embedding_loss", call(VECTOR, SIGNS, variables=1)),
    **_each("multilabel_soft_margin_loss", call(MATRIX, (MATRIX2 > 0.5).float(), variables=1)),
    **_each("multilabel_margin_loss", call(MATRIX, torch.tensor([[0, 1, -1, -1]] * 4))),
    **_each("gaussian_nll_loss", call(VECTOR, VECTOR2, VECTOR3)),
    "poisson_nll_loss": call(VECTOR, VECTOR2, True, False, 1e-8, 1),
    "torch.nn.functional.poisson_nll_loss": call(VECTOR, VECTOR2, full=True),
    **_each("margin_ranking_loss", call(VECTOR, VECTOR2, SIGNS, 0.1, variables=2)),
    **_each("cosine_embedding_loss", call(MATRIX, MATRIX2, SIGNS, variables=2)),
    **_each("triplet_margin_loss", call(MATRIX, MATRIX2, MATRIX3)),
    **_each(
        "ctc_loss",
        call(rand(5, 2, 4).log_softmax(2), torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([2, 2])),
    ),
    # resampling and pooling
    **_each("interpolate", call(IMAGE, scale_factor=2, mode="bilinear")),
    **_each("grid_sample", call(IMAGE, GRID, align_corners=False)),
    **_each("grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback", call(IMAGE, GRID, 0, 0, False)),
    **_each("affine_grid", call(rand(2, 2, 3), (2, 1, 4, 4), align_corners=False)),
    **_each("affine_grid_generator", call(rand(2, 2, 3), (2, 1, 4, 4), False)),
    **_each("grid_sampler_3d", call(VOLUME, GRID3, 0, 0, False)),
    **_each("avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d", call(VOLUME, 2)),
    **_each("fractional_max_pool2d", call(IMAGE, 2, 2, variables=1, _random_samples=FIELD_2D)),
    **_each("fractional_max_pool3d", call(VOLUME, 2, 2, variables=1, _random_samples=FIELD_3D)),
    **_each("max_unpool1d", call(POOLED1, PLACES1, 2)),
    **_each("max_unpool2d", call(POOLED, PLACES, 2)),
    **_each("max_unpool3d", call(POOLED3, PLACES3, 2)),
    **_each("fake_quantize_per_tensor_affine", call(MATRIX, 0.1, 0, 0, 255)),
    # Fourier transforms
    **_each(
        "fft ifft rfft ihfft hfft irfft fft2 ifft2 rfft2 ihfft2 hfft2 irfft2 fftn ifftn rfftn ihfftn hfftn irfftn",
        call(MATRIX),
    ),
    **_each("stft", call(SIGNAL, 4, window=torch.ones(4), return_complex=True)),
    **_each("istft", call(SPECTRUM, 4, window=torch.ones(4), length=16)),
    # factorizations and solvers
    **_each(
        "cholesky cholesky_ex cholesky_inverse lu lu_factor lu_factor_ex ldl_factor ldl_factor_ex qr geqrf svd svdvals",
        call(POSITIVE),
    ),
    **_each(
        "_lu_with_info eigh eigvalsh eig eigvals cond matrix_rank inverse inv inv_ex pinverse pinv det slogdet"
        " matrix_exp matrix_sqrth",
        call(POSITIVE),
    ),
    **_each("svd_lowrank pca_lowrank", call(POSITIVE, 2)),
    **_each("lobpcg", call(torch.diag(torch.arange(1.0, 10)), 2, X=rand(9, 2), variables=0)),
    **_each("cholesky_solve", call(MATRIX, POSITIVE)),
    **_each("lu_solve", call(MATRIX, LU, PIVOTS)),
    "torch.linalg.lu_solve": call(LU, PIVOTS, MATRIX),
    **_each("ldl_solve", call(LD, LD_PIVOTS, MATRIX)),
    **_each("solve solve_ex", call(POSITIVE, MATRIX)),
    **_each("lstsq", call(POSITIVE, MATRIX, driver="gels")),  # the default driver's result varies from call to call
    **_each("solve_triangular", call(POSITIVE, MATRIX, upper=True)),
    **_each("triangular_solve", call(MATRIX, POSITIVE)),
    **_each("orgqr householder_product", call(REFLECTORS, TAU)),
    **_each("ormqr", call(REFLECTORS, TAU, MATRIX2)),
    **_each("tensorinv", call(POSITIVE.reshape(2, 2, 4))),
    **_each("tensorsolve", call(POSITIVE.reshape(4, 2, 2), VECTOR)),
    # float32 kernels alone
    **_each("polar complex", call(VECTOR, VECTOR2)),
    "torch.linalg.polar": call(POSITIVE),
    **_each("histogram", call(SIGNAL, 4)),
    **_each("histogramdd", call(rand(4, 2), [2, 2])),
    **_each("sampled_addmm", call(SPARSE_ROWS, MATRIX2, MATRIX3)),
    **_each("view_as_complex", call(rand(3, 2))),
    **_each("quantile nanquantile", call(MATRIX, 0.3, 1)),
    # special functions
    **_each(_SPECIAL, call(MATRIX)),
    **_each(_POLYNOMIALS, call(MATRIX, torch.tensor(2))),
    **_each("zeta", call(MATRIX + 1, MATRIX2)),
    "torch.polygamma": call(1, MATRIX),
    "torch.special.polygamma": call(1, MATRIX),
    "torch.Tensor.polygamma": call(MATRIX, 1),
    "torch.Tensor.polygamma_": call(MATRIX, 1),
    **_each("vander", call(VECTOR)),
    # several tensors of one dtype
    **_each("cat concat concatenate stack", call([MATRIX, MATRIX2])),
    **_each("addcmul addcdiv", call(MATRIX, MATRIX2, MATRIX3)),
    **_each("lerp", call(MATRIX, MATRIX2, MATRIX3)),
    **_each("heaviside isclose allclose", call(MATRIX, MATRIX2)),
    **_each("embedding_bag", call(torch.tensor([[0, 1], [2, 3]]), MATRIX, per_sample_weights=rand(2, 2), mode="sum")),
    "torch.embedding_bag": call(MATRIX, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2]), False, 0, False, VECTOR),
    **_each("spmm dsmm hspmm hsmm smm", call(MATRIX.to_sparse(), MATRIX2, variables=0)),
    **_each("sspaddmm saddmm", call(MATRIX.to_sparse(), MATRIX2.to_sparse(), MATRIX3)),
    **_each("matrix_power", call(POSITIVE, -2)),
    **_each("torch.sparse.softmax torch.sparse.log_softmax", call(MATRIX.to_sparse(), 1, variables=0)),
    "torch.sparse.mm": call(MATRIX.to_sparse(), MATRIX2),
    "torch.sparse.addmm": call(MATRIX, MATRIX2.to_sparse(), MATRIX3),
    **_each("index_put", call(MATRIX, (torch.tensor([0, 2]),), MATRIX2[:2])),
    "__setitem__": call(MATRIX, (torch.tensor([0, 2]),), MATRIX2[:2]),
    **_each("index_copy index_add", call(MATRIX, 0, torch.tensor([0, 2]), MATRIX2[:2])),
    **_each("scatter scatter_add", call(MATRIX, 1, torch.tensor([[0, 1], [2, 3]]), MATRIX2[:2, :2])),
    **_each("index_reduce", call(MATRIX, 0, torch.tensor([0, 2]), MATRIX2[:2], "prod")),
    **_each("put", call(MATRIX, torch.tensor([0, 2]), VECTOR[:2])),
    **_each("scatter_reduce", call(MATRIX, 1, torch.tensor([[0, 1], [2, 3]]), MATRIX2[:2, :2], "sum")),
    **_each("masked_scatter", call(MATRIX, MASK, MATRIX2)),
}

# `exp_` is called as `exp` is.
SAMPLES = {**_OUT_OF_PLACE, **{f"{name}_": sample for name, sample in _OUT_OF_PLACE.items() if not name.endswith("_")}}

NO_SAMPLE = {
    "_cudnn_rnn": "cuDNN's layer",
    "cudnn_convolution": "cuDNN's kernel",
    "cudnn_convolution_transpose": "cuDNN's kernel",
    "_mps_convolution": "the kernel of Apple GPUs",
    "_scaled_dot_product_flash_attention": "the flash kernel of GPUs",
    "mkldnn_rnn_layer": "returns its workspace, memory that nobody clears; it is the body of torch.lstm, which is here",
}


def find_sample(owner_name: str, name: str) -> Sample | None:
    return SAMPLES.get(f"{owner_name}.{name}", SAMPLES.get(name))
