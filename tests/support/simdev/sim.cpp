// A simulated accelerator: torch's PrivateUse1 device, computed by torch's own CPU kernels. Here are the ops that a
// device must have of its own, autocast, and the door to Python.
#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels.h"

namespace sim {

// ---- memory ---------------------------------------------------------------------------------------------------------

void refuse_pinned(std::optional<bool> pinned) {
    TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
    refuse_pinned(pinned);
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                     format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pinned) {
    refuse_pinned(pinned);
    c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

void grow_for(const Tensor& tensor) {
    auto needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                   tensor.storage_offset());
    if (needed > tensor.storage().nbytes())
        grow(tensor.storage(), needed);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
    if (format)
        impl->empty_tensor_restride(*format);
    grow_for(self);
    return self;
}

Tensor& set_view(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    if (stride.empty() && !size.empty()) {
        impl->set_storage_offset(offset.expect_int());
        impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
    } else {
        impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                    offset.expect_int());
    }
    grow_for(self);
    return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
    int64_t length = storage.nbytes() / self.element_size();
    return set_view(self, std::move(storage), 0, {c10::SymInt(length)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
    return set_view(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
    auto storage = make_storage(0, take_over(nullptr, 0, self.device().index()));
    return set_view(self, storage, 0, {c10::SymInt(0)}, {c10::SymInt(1)});
}

// ---- copies ---------------------------------------------------------------------------------------------------------

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
    if (target.numel() == 0)
        return target;
    Below below;
    Call from, to;
    auto source = from.alias(self), into = to.alias(target);
    const bool is_to_host = target.is_cpu(), is_from_host = self.is_cpu();
    const bool is_between = !is_to_host && !is_from_host && self.device() != target.device();
    note(is_to_host ? "d2h" : is_from_host ? "h2d" : is_between ? "p2p" : "launch", "aten::copy_", self, target);
    if (is_to_host && non_blocking && is_pinned(target.data_ptr())) {
        begin_copy(target, source.to(target.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
        return target;
    }
    into.copy_(source.expand(into.sizes()));
    if (is_to_host)
        wait("copy to the host", self);
    if (is_from_host && !non_blocking)
        wait("copy to the device", self);
    return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
    target.resize_(self.sizes());
    return copy_from(self, target, /*non_blocking=*/false);
}

at::Scalar item(const Tensor& self) {
    wait("item", self);
    Below below;
    Call call;
    return at::_local_scalar_dense(call.alias(self));
}

// ---- ops that a device has instead of others of the CPU -------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
    auto gates = from_input + from_hidden;
    if (input_bias && input_bias->defined())
        gates = gates + *input_bias + *hidden_bias;
    auto parts = gates.chunk(4, 1);
    auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), change = parts[2].tanh(), out = parts[3].sigmoid();
    auto after = forget * cell + in * change;
    return {out * after.tanh(), after, at::cat({in, forget, change, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& hidden_gradient,
                                                      const std::optional<Tensor>& cell_gradient, const Tensor& before,
                                                      const Tensor& after, const Tensor& workspace, bool has_bias) {
    auto parts = workspace.chunk(4, 1);
    auto &in = parts[0], &forget = parts[1], &change = parts[2], &out = parts[3];
    auto of_after = after.tanh(), zero = at::zeros_like(after);
    auto hidden = hidden_gradient && hidden_gradient->defined() ? *hidden_gradient : zero;
    auto cell = hidden * out * (1 - of_after * of_after);
    if (cell_gradient && cell_gradient->defined())
        cell = cell + *cell_gradient;
    auto gates = at::cat({cell * change * in * (1 - in), cell * before * forget * (1 - forget),
                          cell * in * (1 - change * change), hidden * of_after * out * (1 - out)},
                         1);
    return {gates, cell * forget, has_bias ? gates.sum(0) : Tensor()};
}

// Attention is one launch, and one for its backward pass, where the CPU has such a kernel; else products and softmax.
constexpr int64_t kMath = 0, kOverrideable = 4;  // of torch's SDPBackend

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool, std::optional<double>, bool is_grouped) {
    const bool is_plain = query.dim() == 4 && key.dim() == 4 && query.size(-1) == value.size(-1);
    const bool has_learned_mask = mask && mask->defined() && mask->requires_grad();
    return is_plain && dropout == 0.0 && !is_grouped && !has_learned_mask ? kOverrideable : kMath;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
    auto [output, logsumexp] =
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, bias, scale);
    return {output, logsumexp, {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(const Tensor& gradient, const Tensor& query,
                                                           const Tensor& key, const Tensor& value, const Tensor& bias,
                                                           std::array<bool, 4>, const Tensor& output,
                                                           const Tensor& logsumexp, const Tensor&, const Tensor&,
                                                           c10::SymInt, c10::SymInt, double dropout, bool is_causal,
                                                           const Tensor&, const Tensor&, std::optional<double> scale) {
    auto mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, dropout, is_causal, mask, scale);
    return {of_query, of_key, of_value, {}};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("resize_", resize_);
    library.impl("set_.source_Storage_storage_offset", set_view);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("set_", set_empty);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", item);
    library.impl("_scaled_dot_product_fused_attention_overrideable", attend);
    library.impl("_scaled_dot_product_fused_attention_overrideable_backward", attend_backward);
    library.impl("_thnn_fused_lstm_cell", lstm_cell);
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

// A copy takes what a lazy conjugate or negative stands for.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}

// ---- torch.autocast("sim"): the lists that torch shares among devices -----------------------------------------------

namespace {
using namespace at::autocast;

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}
}  // namespace

#define SIM_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){AT_FORALL_LOWER_PRECISION_FP(SIM_LOW) AT_FORALL_FP32(SIM_FLOAT)
                                                     AT_FORALL_FP32_SET_OPT_DTYPE(SIM_DTYPE)
                                                         AT_FORALL_PROMOTE(SIM_PROMOTE)}

// ---- the door to Python ---------------------------------------------------------------------------------------------

PYBIND11_MODULE(_sim, module) {
    static sim::Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    sim::register_kernels();

    module.def("current_device", [] { return sim::current_device; });
    module.def("set_device", [](int device) { sim::Guard().setDevice(sim::device_at(device)); });
    module.def("synchronize", [] { sim::wait("synchronize"); });
    module.def("seed", [](uint64_t seed, int device) { sim::default_generator(device).set_current_seed(seed); });
    module.def("get_rng_state", [](int device) { return sim::default_generator(device).get_state(); });
    module.def("set_rng_state",
               [](const at::Tensor& state, int device) { sim::default_generator(device).set_state(state); });
    module.def("memory_allocated", [](int device) { return sim::bytes_in_use[device]; });
    module.def("max_memory_allocated", [](int device) { return sim::peak_bytes[device]; });
    module.def("reset_peak_memory_stats", [](int device) { sim::peak_bytes[device] = sim::bytes_in_use[device]; });

    module.def("set_lag", [](int64_t launches) { return std::exchange(sim::lag, launches); });
    module.def("forbid_waits", [](bool is_forbidden) { return std::exchange(sim::must_not_wait, is_forbidden); });
    module.def("start_recording", [] {
        std::lock_guard<std::recursive_mutex> guard(sim::mutex);
        sim::totals.clear();
        sim::records.clear();
        sim::is_recording = true;
    });
    module.def("stop_recording", [] {
        std::lock_guard<std::recursive_mutex> guard(sim::mutex);
        sim::is_recording = false;
    });
    module.def("totals", [] { return sim::totals; });
    module.def("records", [] {
        pybind11::list all;
        for (auto& one : sim::records)
            all.append(pybind11::make_tuple(one.op, one.kind, one.from, one.to, one.shape, one.bytes));
        return all;
    });
}
