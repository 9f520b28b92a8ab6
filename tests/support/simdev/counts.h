// What the device has done: launches, waits and copies, and the copies that are still on their way.
#pragma once
#include <ATen/ATen.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {
using at::Tensor;

struct Record {
    std::string op, kind, from, to;  // dtypes of the first tensor that came in, and of the last that came out
    std::vector<int64_t> shape;
    int64_t bytes;
};

std::recursive_mutex mutex;
std::vector<Record> records;
std::map<std::string, int64_t> totals;
bool is_recording = false;
bool must_not_wait = false;
int64_t launches = 0;  // of the process, never reset: events compare with it

int64_t size_of(const Tensor& tensor) {
    return tensor.defined() ? tensor.numel() * tensor.element_size() : 0;
}

std::string dtype_of(const Tensor& tensor) {
    return tensor.defined() ? toString(tensor.scalar_type()) : "";
}

void note(const std::string& kind, const std::string& op, const Tensor& from = {}, const Tensor& to = {}) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    if (kind == "launch")
        ++launches;
    if (!is_recording)
        return;
    const Tensor& moved = to.defined() ? to : from;
    ++totals[kind];
    totals[kind + "_bytes"] += size_of(moved);
    auto shape = moved.defined() ? moved.sizes().vec() : std::vector<int64_t>{};
    records.push_back({op, kind, dtype_of(from), dtype_of(to), shape, size_of(moved)});
}

// ---- copies to the host that nobody has waited for: NaN there until somebody does -----------------------------------

struct Copy {
    uint64_t number;
    Tensor target, values;
};

std::deque<Copy> copies_under_way;
uint64_t last_copy = 0;

void begin_copy(const Tensor& target, const Tensor& values) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    copies_under_way.push_back({++last_copy, target, values});
    if (target.is_non_overlapping_and_dense())
        memset(target.data_ptr(), 0xff, size_of(target));
}

void end_copies(uint64_t up_to) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    while (!copies_under_way.empty() && copies_under_way.front().number <= up_to) {
        copies_under_way.front().target.copy_(copies_under_way.front().values);
        copies_under_way.pop_front();
    }
}

// The host waits for all that is queued.
void wait(const std::string& why, const Tensor& tensor = {}) {
    note("sync", why, tensor);
    TORCH_CHECK(!must_not_wait, "sim: the host waits for the device: ", why);
    end_copies(last_copy);
}
}  // namespace sim
