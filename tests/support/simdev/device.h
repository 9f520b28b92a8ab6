// The device as torch asks for it: current device, streams, events, random numbers.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "memory.h"

namespace sim {
int64_t lag = 0;  // how many launches later an event has come to pass: the device is behind the host
thread_local c10::StreamId current_stream[kDevices] = {0, 0};

struct Event {
    uint64_t last_copy;
    int64_t launches;
    std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    Guard() = default;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return kSim; }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    c10::Device getDevice() const override { return device_at(current_device); }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < kDevices, "sim: no device ", (int)device.index());
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0)
            current_device = device.index();
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }

    c10::Stream getStream(c10::Device device) const noexcept override {
        auto index = index_or_current(device.index());
        return c10::Stream(c10::Stream::UNSAFE, device_at(index), current_stream[index]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return c10::Stream(c10::Stream::UNSAFE, device, 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        static c10::StreamId last = 0;
        return c10::Stream(c10::Stream::UNSAFE, device, ++last);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        auto before = getStream(stream.device());
        current_stream[stream.device_index()] = stream.id();
        return before;
    }
    bool queryStream(const c10::Stream&) const override {
        end_copies(last_copy);
        return true;
    }
    void synchronizeStream(const c10::Stream&) const override { wait("synchronizeStream"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { wait("synchronizeDevice"); }

    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (*event == nullptr)
            *event = new Event;
        *static_cast<Event*>(*event) = {last_copy, launches, std::chrono::steady_clock::now()};
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void* opaque) const override {
        auto* event = static_cast<Event*>(opaque);
        if (event == nullptr)
            return true;
        if (event->launches + lag > launches)
            return false;
        end_copies(event->last_copy);
        return true;
    }
    void synchronizeEvent(void* opaque) const override {
        if (queryEvent(opaque))
            return;
        note("event_wait", "synchronizeEvent");
        TORCH_CHECK(!must_not_wait, "sim: the host waits for an event");
        end_copies(static_cast<Event*>(opaque)->last_copy);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
        auto elapsed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
        return std::chrono::duration<double, std::milli>(elapsed).count();
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random numbers of the CPU's kind, of a state of their own.
struct Generator final : c10::GeneratorImpl {
    at::Generator inner;
    explicit Generator(int device)
        : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          inner(at::detail::createCPUGenerator()) {}
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_offset(uint64_t offset) override { inner.set_offset(offset); }
    uint64_t get_offset() const override { return inner.get_offset(); }
    void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    GeneratorImpl* clone_impl() const override {
        auto* clone = new Generator(device().index());
        clone->inner.set_state(inner.get_state());
        return clone;
    }
};

at::Generator make_generator(c10::DeviceIndex device) {
    return at::make_generator<Generator>(index_or_current(device));
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 7  // it asks this instead of the hooks
REGISTER_GENERATOR_PRIVATEUSE1(make_generator)
#endif

at::Generator& default_generator(int device) {
    static std::array<at::Generator, kDevices> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return all.at(index_or_current(device));
}

struct Hooks final : at::PrivateUse1HooksInterface {
    // torch 2.6 does not ask these two
    bool isBuilt() const { return true; }
    bool isAvailable() const { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        auto before = current_device;
        current_device = device;
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return device < 0 ? current_device : exchangeDevice(device);
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    at::Device getDeviceFromPtr(void* pointer) const override {
        TORCH_CHECK((uintptr_t)pointer & kDeviceBit, "sim: this memory is not the device's");
        return device_at(current_device);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
        if (size < storage.nbytes())
            storage.unsafeGetStorageImpl()->set_nbytes(size);
        else
            grow(storage, size);
    }
};
}  // namespace sim
