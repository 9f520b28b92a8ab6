// Memory of the device. A device pointer is a host address with bit 54 set: no machine maps that, so host code that
// follows one dies at once. Kernels clear the bit.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/version.h>

#include "counts.h"

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr uintptr_t kDeviceBit = uintptr_t(1) << 54;

thread_local int current_device = 0;
int64_t bytes_in_use[kDevices], peak_bytes[kDevices];

void* to_device(void* pointer) {
    return pointer ? (void*)((uintptr_t)pointer | kDeviceBit) : nullptr;
}
void* to_host(const void* pointer) {
    return (void*)((uintptr_t)pointer & ~kDeviceBit);
}

c10::Device device_at(int index) {
    return {kSim, (c10::DeviceIndex)index};
}
int index_or_current(int index) {
    return index < 0 ? current_device : index;
}

struct Block {
    void* host;
    size_t size;
    int device;
    c10::intrusive_ptr<c10::StorageImpl> owner;  // host storage that a kernel has made; else the block owns the memory
};

void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
        std::lock_guard<std::recursive_mutex> guard(mutex);
        bytes_in_use[block->device] -= block->size;
    }
    if (!block->owner)
        free(block->host);
    delete block;
}

at::DataPtr take_over(void* host, size_t size, int device, c10::intrusive_ptr<c10::StorageImpl> owner = {}) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    bytes_in_use[device] += size;
    peak_bytes[device] = std::max(peak_bytes[device], bytes_in_use[device]);
    return {to_device(host), new Block{host, size, device, std::move(owner)}, &release, device_at(device)};
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#define SIM_IS_DEVICE_ALLOCATOR
using AllocatorBase = c10::DeviceAllocator;
#else  // torch.accelerator knows no memory there
using AllocatorBase = c10::Allocator;
#endif

struct Allocator final : AllocatorBase {
    at::DataPtr allocate(size_t size) override {
        if (size == 0)
            return {nullptr, nullptr, &c10::detail::deleteNothing, device_at(current_device)};
        void* host = nullptr;
        TORCH_CHECK(posix_memalign(&host, 64, size) == 0, "sim: out of memory");
        memset(host, 0xff, size);  // what is read before it is written is NaN
        return take_over(host, size, current_device);
    }
    at::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, std::size_t size) const override {
        memcpy(to_host(to), to_host(from), size);
    }
#ifdef SIM_IS_DEVICE_ALLOCATOR
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        for (auto* one : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
            one->current = bytes_in_use[device];
            one->peak = peak_bytes[device];
        }
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex device) override { peak_bytes[device] = bytes_in_use[device]; }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
        size_t all = size_t(1) << 34;
        return {all - bytes_in_use[device], all};
    }
#endif
};

Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator)

c10::Storage make_storage(size_t size, at::DataPtr data) {
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(data), &allocator, /*resizable=*/true);
}

// Pinned memory of the host, by address.
std::map<const char*, size_t> pinned;

void unpin(void* host) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    pinned.erase(static_cast<char*>(host));
    free(host);
}

bool is_pinned(const void* host) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(host));
    return after != pinned.begin() && std::prev(after)->first + std::prev(after)->second > host;
}

struct PinnedAllocator final : c10::Allocator {
    at::DataPtr allocate(size_t size) override {
        std::lock_guard<std::recursive_mutex> guard(mutex);
        void* host = nullptr;
        TORCH_CHECK(posix_memalign(&host, 64, std::max(size, size_t(1))) == 0, "sim: out of memory");
        pinned[static_cast<char*>(host)] = size;
        return {host, host, &unpin, c10::Device(c10::kCPU)};
    }
    at::DeleterFnPtr raw_deleter() const override { return &unpin; }
    void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};

PinnedAllocator pinned_allocator;

// Have a storage hold `size` bytes at least; 0 empties it.
void grow(const c10::Storage& storage, size_t size) {
    auto* impl = storage.unsafeGetStorageImpl();
    if (size != 0 && size <= impl->nbytes())
        return;
    c10::DeviceGuard guard(impl->device());
    auto data = allocator.allocate(size);
    if (size != 0 && impl->nbytes() != 0)
        memcpy(to_host(data.get()), to_host(impl->data()), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
}
}  // namespace sim
