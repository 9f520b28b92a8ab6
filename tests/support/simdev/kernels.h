// Every op with a CPU kernel, by that kernel on the same memory: one launch each.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "device.h"

namespace sim {
using c10::IValue;

// Ops whose indices may be tensors of the CPU, as on CUDA.
const std::unordered_set<std::string> takes_cpu_tensors = {
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
};

// Ops that read one number (0-dim) from the host, beside those that go element by element: of those with a kernel for
// CUDA that native_functions.yaml exempts from its check of devices, these ask where the number is.
const std::unordered_set<std::string> takes_cpu_number = {
    "aten::rsub.Tensor",
    "aten::floor_divide",
    "aten::floor_divide_.Tensor",
    "aten::fill_.Tensor",
    "aten::masked_fill_.Tensor",
    "aten::index_fill_.int_Tensor",
    "aten::_foreach_mul.Tensor",
    "aten::_foreach_mul_.Tensor",
    "aten::_foreach_div.Tensor",
    "aten::_foreach_div_.Tensor",
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_.tensor_lr",
    "aten::_fused_adagrad_.tensor_lr",
};

// Ops after which the host waits to know how large the result is.
const std::unordered_set<std::string> finds_its_shape = {
    "aten::nonzero",
    "aten::nonzero.out",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
};

// One call of a CPU kernel: its arguments as tensors of the CPU, and what it gives as tensors of the device.
struct Call {
    struct Both {
        Tensor of_device, alias;
    };
    std::unordered_map<at::TensorImpl*, Both> by_alias;
    std::unordered_map<c10::StorageImpl*, c10::Storage> alias_of;   // by storage of the device
    std::unordered_map<c10::StorageImpl*, c10::Storage> device_of;  // by storage of the host
    int device = -1;
    Tensor first_input, last_output;

    Tensor alias(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.device().is_privateuseone())
            return tensor;
        if (!first_input.defined())
            first_input = tensor;
        auto alias = at::detail::make_tensor<at::TensorImpl>(
            alias_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        auto* impl = alias.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            impl->set_wrapped_number(true);
        if (tensor.is_conj())
            alias._set_conj(true);
        if (tensor.is_neg())
            alias._set_neg(true);
        by_alias[impl] = {tensor, alias};
        return alias;
    }

    IValue alias_value(const IValue& value) {
        if (value.isTensor())
            return alias(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> aliases;
            for (const Tensor& tensor : value.toTensorVector())
                aliases.push_back(alias(tensor));
            return aliases;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> aliases;
            for (std::optional<Tensor> tensor : value.toOptionalTensorList())
                aliases.push_back(tensor ? std::optional<Tensor>(alias(*tensor)) : tensor);
            return aliases;
        }
        if (value.isDevice() && value.toDevice().is_privateuseone())
            return c10::Device(c10::kCPU);
        if (is_device_generator(value))
            return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
        return value;
    }

    Tensor from_host(const Tensor& result) {
        if (!result.defined() || !result.is_cpu() || result.layout() != at::kStrided)
            return result;
        auto argument = by_alias.find(result.unsafeGetTensorImpl());
        if (argument != by_alias.end())
            return last_output = argument->second.of_device;
        auto tensor = at::detail::make_tensor<at::TensorImpl>(
            device_storage(result.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
        auto* impl = tensor.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        if (result.unsafeGetTensorImpl()->is_wrapped_number())
            impl->set_wrapped_number(true);
        return last_output = tensor;
    }

    IValue value_from_host(const IValue& value) {
        if (value.isTensor())
            return from_host(value.toTensor());
        if (!value.isTensorList())
            return value;
        c10::List<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector())
            tensors.push_back(from_host(tensor));
        return tensors;
    }

    // What the kernel has resized is resized on the device.
    void write_back() {
        for (auto& [impl, both] : by_alias) {
            auto& [tensor, alias] = both;
            auto* storage = alias.storage().unsafeGetStorageImpl();
            if (to_device(storage->mutable_data()) != tensor.storage().data()) {
                grow(tensor.storage(), storage->nbytes());
                memcpy(to_host(tensor.storage().data()), storage->data(), storage->nbytes());
            }
            const bool is_same = alias.sizes() == tensor.sizes() && alias.strides() == tensor.strides() &&
                                 alias.storage_offset() == tensor.storage_offset();
            if (!is_same)
                tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                                    alias.storage_offset());
        }
    }

    static bool is_device_generator(const IValue& value) {
        return value.isGenerator() && value.toGenerator().defined() && value.toGenerator().device().is_privateuseone();
    }

 private:
    c10::Storage alias_storage(const c10::Storage& storage) {
        auto* key = storage.unsafeGetStorageImpl();
        auto found = alias_of.find(key);
        if (found != alias_of.end())
            return found->second;
        at::DataPtr data(to_host(key->data()), c10::Device(c10::kCPU));
        c10::Storage alias(c10::Storage::use_byte_size_t(), key->nbytes(), std::move(data), c10::GetCPUAllocator(),
                           /*resizable=*/true);
        device_of[alias.unsafeGetStorageImpl()] = storage;
        alias_of[key] = alias;
        return alias;
    }

    c10::Storage device_storage(const c10::Storage& storage) {
        auto* key = storage.unsafeGetStorageImpl();
        auto found = device_of.find(key);
        if (found != device_of.end())
            return found->second;
        auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(key);
        auto made = make_storage(key->nbytes(), take_over(key->mutable_data(), key->nbytes(), device, owner));
        device_of[key] = made;
        return made;
    }
};

// Torch's kernels below are no concern of autograd, autocast or Python.
struct Below {
    c10::impl::ExcludeDispatchKeyGuard guard{
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet(
            {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch})};
};

// While it lives, the CPU draws the random numbers of a device.
struct RandomNumbers {
    std::lock_guard<std::recursive_mutex> guard{mutex};
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    at::Generator& own;
    Tensor before = cpu.get_state();
    explicit RandomNumbers(int device) : own(default_generator(device)) { cpu.set_state(own.get_state()); }
    ~RandomNumbers() {
        own.set_state(cpu.get_state());
        cpu.set_state(before);
    }
};

bool has_boolean_index(const std::vector<IValue>& args) {
    for (const auto& value : args) {
        if (!value.isOptionalTensorList())
            continue;
        for (std::optional<Tensor> index : value.toOptionalTensorList())
            if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
                return true;
    }
    return false;
}

std::vector<Tensor> tensors_in(const IValue& value) {
    if (value.isTensor())
        return {value.toTensor()};
    if (value.isTensorList())
        return value.toTensorVector();
    std::vector<Tensor> found;
    if (value.isOptionalTensorList())
        for (std::optional<Tensor> tensor : value.toOptionalTensorList())
            found.push_back(tensor.value_or(Tensor()));
    return found;
}

// The device that an op runs on: that of the first tensor on one, or that of what it makes; -1 where nothing says so.
int find_device(const std::vector<IValue>& args) {
    for (const auto& value : args)
        for (const Tensor& tensor : tensors_in(value))
            if (tensor.defined() && tensor.device().is_privateuseone())
                return tensor.device().index();
    for (const auto& value : args)
        if (value.isDevice() && value.toDevice().is_privateuseone())
            return index_or_current(value.toDevice().index());
    return -1;
}

bool is_written(const c10::FunctionSchema& schema, size_t place) {
    const auto* alias = schema.arguments()[place].alias_info();
    return alias && alias->isWrite();
}

// Refuse what CUDA refuses: tensors of any shape on another device, and numbers of the host but where one may be.
void check_devices(const c10::OperatorHandle& op, const std::string& name, const std::vector<IValue>& args, int device) {
    const bool moves_numbers = name == "aten::where.self";
    bool takes_number = op.hasTag(at::Tag::pointwise) || takes_cpu_number.count(name);
    for (size_t place = 0; place < args.size(); ++place) {
        for (const Tensor& tensor : tensors_in(args[place])) {
            if (!tensor.defined() || tensor.device() == device_at(device))
                continue;
            const bool is_number = tensor.dim() == 0 && !args[place].isTensorList() && !is_written(op.schema(), place);
            if (is_number && moves_numbers)
                continue;
            if (tensor.is_cpu() && place > 0 && takes_cpu_tensors.count(name))
                continue;
            TORCH_CHECK(tensor.is_cpu() && is_number && takes_number,
                        "Expected all tensors to be on the same device, but found at least two devices, sim:", device,
                        " and ", tensor.device(), "! (argument ", op.schema().arguments()[place].name(), " of ", name,
                        ")");
            takes_number = false;  // one of them
        }
    }
    for (const auto& value : args) {
        const bool is_wrong = value.isGenerator() && value.toGenerator().defined() && !Call::is_device_generator(value);
        TORCH_CHECK(!is_wrong, "Expected a 'sim' device type for generator but found 'cpu'");
    }
}

bool is_view(const c10::FunctionSchema& schema) {
    if (schema.returns().empty())
        return false;
    for (const auto& result : schema.returns())
        if (!result.alias_info() || result.alias_info()->isWrite())
            return false;
    return true;
}

bool begins_with(const std::string& name, const char* start) {
    return name.rfind(start, 0) == 0;
}

bool are_on_several_devices(const std::vector<IValue>& args) {
    std::optional<c10::Device> device;
    for (const auto& value : args) {
        if (!value.isTensorList())
            continue;
        for (const Tensor& tensor : value.toTensorVector()) {
            if (device && tensor.device() != *device)
                return true;
            device = tensor.device();
        }
    }
    return false;
}

// Kernels for lists count what they write for autograd; for a single tensor torch does it before.
void count_writes(const c10::FunctionSchema& schema, const std::vector<IValue>& args) {
    for (size_t place = 0; place < args.size(); ++place)
        for (const Tensor& tensor : is_written(schema, place) ? tensors_in(args[place]) : std::vector<Tensor>())
            if (!tensor.is_inference())
                tensor.unsafeGetTensorImpl()->bump_version();
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// An op on lists of tensors of several devices, as on CUDA: a launch for each tensor.
void run_one_by_one(const c10::OperatorHandle& op, const std::vector<IValue>& args, torch::jit::Stack* stack) {
    torch::jit::drop(*stack, args.size());
    if (op.schema().name() == "aten::_foreach_copy_") {  // the one that may go from one device to another
        const auto targets = args[0].toTensorVector(), sources = args[1].toTensorVector();
        for (size_t place = 0; place < targets.size(); ++place)
            targets[place].copy_(sources[place], args[2].toBool());
        return;
    }
    c10::List<Tensor> results;
    for (size_t place = 0; place < args[0].toTensorVector().size(); ++place) {
        torch::jit::Stack one;
        for (const auto& value : args) {
            if (!value.isList()) {
                one.push_back(value);
                continue;
            }
            auto list = value.toList().copy();
            auto item = list.get(place);
            list.clear();
            list.push_back(item);
            one.push_back(list);
        }
        run(op, &one);
        if (!one.empty())
            results.push_back(one.back().toTensorVector().at(0));
    }
    if (!op.schema().returns().empty())
        stack->push_back(results);
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto overload = schema.overload_name();
    const auto name = overload.empty() ? schema.name() : schema.name() + "." + overload;
    const size_t begin = stack->size() - schema.arguments().size();
    const std::vector<IValue> args(stack->begin() + begin, stack->end());
    const bool has_rows = name == "aten::_foreach_copy_" || (args[0].isTensorList() && args[0].toTensorVector().size() > 1);
    if (begins_with(name, "aten::_foreach_") && has_rows && are_on_several_devices(args))
        return run_one_by_one(op, args, stack);
    Call call;
    call.device = find_device(args);
    if (call.device >= 0)
        check_devices(op, name, args, call.device);
    else
        call.device = current_device;
    for (size_t place = 0; place < args.size(); ++place)
        (*stack)[begin + place] = call.alias_value(args[place]);
    {
        std::optional<RandomNumbers> random;
        if (op.hasTag(at::Tag::nondeterministic_seeded))
            random.emplace(call.device);
        Below below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    call.write_back();
    if (begins_with(name, "aten::_foreach_"))
        count_writes(schema, args);
    bool gives_number = false;
    for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); ++place) {
        auto& value = (*stack)[place];
        gives_number = gives_number || (!value.isTensor() && !value.isTensorList());
        value = call.value_from_host(value);
    }
    if (!is_view(schema))
        note("launch", name, call.first_input, call.last_output);
    if (gives_number || finds_its_shape.count(name) || has_boolean_index(args))
        wait(name, call.first_input);
}

// Ops on many tensors and convolutions are composed on a CPU; on a device they are one launch.
bool is_one_launch(const c10::OperatorName& name) {
    for (const char* start :
         {"aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad", "aten::_amp_"})
        if (begins_with(name.name, start))
            return true;
    return name.overload_name.empty() &&
           (name.name == "aten::convolution" || name.name == "aten::convolution_backward");
}

void register_kernels() {
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (!begins_with(name.name, "aten::"))
            continue;
        auto op = dispatcher.findOp(name);
        if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
            continue;
        if (!is_one_launch(name) && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
            continue;
        auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
        auto full = name.name.substr(6) + overload;
        library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
    }
}
}  // namespace sim
