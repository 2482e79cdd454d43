// Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
//
// Owns the state of the simulated devices: their memory and page-locked memory (both the host's, and kept apart), what
// streams have still to do, and which thread uses which device. Must not know of torch's interfaces for devices.
//
// [Note: Streams]
//     The default stream computes at once, on the calling thread. Every other stream is a thread that lags: it only
//     waits for events, records them, and copies bytes. What cannot be left to it (a cast, a copy that blocks or whose
//     host memory is pageable) waits on the host until the stream is idle, and is counted. When a copy is done, both
//     of its memories have to exist still; that they do not is found there, and raised by whatever comes next.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr int64_t kTotalBytes = int64_t{64} << 20;  // of each device
constexpr size_t kAlignment = 512;

struct Moment {  // what an event was when it was recorded
  bool there = false;
  double ms = 0;
  std::vector<std::shared_ptr<Moment>> after;
  bool reached() const {
    for (auto& moment : after)
      if (!moment->reached()) return false;
    return there;
  }
};
using MomentPtr = std::shared_ptr<Moment>;

struct Queue {
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> todo;
  bool busy = false;
  bool idle() const { return todo.empty() && !busy; }
};

// One lock for everything: tests are small. Leaked, as threads of streams outlive static objects.
struct Machine {
  std::mutex lock;
  std::condition_variable changed;
  std::map<uintptr_t, std::pair<size_t, int>> device_memory;  // start: (size, device)
  std::map<uintptr_t, size_t> pinned_memory;
  std::vector<Queue*> queues{nullptr};  // by stream id; the default streams have none
  std::map<int64_t, MomentPtr> moments;  // of collectives
  int64_t in_use[kDevices] = {}, peak[kDevices] = {};
  int64_t lag_us = 0, host_waits = 0, deferred_copies = 0, next_moment = 1;
  std::mt19937 random{0};
  std::string fault;
};
Machine& machine = *new Machine();

thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
thread_local bool has_set_device = false;  // by torch.npu.set_device: what sets it in passing does not count

using Lock = std::unique_lock<std::mutex>;

void check_thread() {
  TORCH_CHECK(has_set_device, "this thread uses an npu and has never called torch.npu.set_device");
}

void check_fault() {  // with the lock; a device that has failed stays so
  TORCH_CHECK(machine.fault.empty(), "the simulated npu failed earlier: ", machine.fault);
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void serve(Queue* queue) {
  Lock lock(machine.lock);
  while (true) {
    machine.changed.wait(lock, [&] { return !queue->todo.empty(); });
    auto work = std::move(queue->todo.front());
    queue->todo.pop_front();
    queue->busy = true;
    work(lock);
    queue->busy = false;
    machine.changed.notify_all();
  }
}

void lag(Lock& lock) {
  if (machine.lag_us == 0) return;
  auto pause = std::chrono::microseconds(machine.random() % machine.lag_us);
  lock.unlock();
  std::this_thread::sleep_for(pause);
  lock.lock();
}

void wait_for(Lock& lock, const MomentPtr& moment) {
  machine.changed.wait(lock, [&] { return moment->reached(); });
}

Queue* queue_of(const c10::Stream& stream) { return machine.queues.at(stream.id()); }

Queue* current_queue(int device) { return machine.queues.at(current_stream[device]); }

void submit(Lock&, Queue* queue, std::function<void(Lock&)> work) {
  queue->todo.push_back(std::move(work));
  machine.changed.notify_all();
}

// The default stream has a queue of nothing but waits: they are done when the next kernel wants to compute.
thread_local std::vector<MomentPtr> waits[kDevices];

void wait_for_default(Lock& lock, int device) {
  for (auto& moment : waits[device]) wait_for(lock, moment);
  waits[device].clear();
}

// Before a kernel computes on the calling thread: all that its stream was given is done.
void begin_kernel(int device) {
  check_thread();
  Lock lock(machine.lock);
  check_fault();
  Queue* queue = current_queue(device);
  if (queue == nullptr) return wait_for_default(lock, device);
  machine.host_waits += queue->idle() ? 0 : 1;
  machine.changed.wait(lock, [&] { return queue->idle(); });
}

// ---------------------------------------------------------------------------------------------------------- memory

void free_device(void* memory) {
  Lock lock(machine.lock);
  auto found = machine.device_memory.find(reinterpret_cast<uintptr_t>(memory));
  machine.in_use[found->second.second] -= found->second.first;
  machine.device_memory.erase(found);
  std::free(memory);
}

void free_pinned(void* memory) {
  Lock lock(machine.lock);
  machine.pinned_memory.erase(reinterpret_cast<uintptr_t>(memory));
  std::free(memory);
}

void* aligned(size_t nbytes) {
  return std::aligned_alloc(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    check_thread();
    c10::Device device(c10::DeviceType::PrivateUse1, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &free_device, device};
    Lock lock(machine.lock);
    check_fault();
    int64_t used = machine.in_use[current_device] + nbytes;
    TORCH_CHECK_WITH(OutOfMemoryError, used <= kTotalBytes, "simulated npu out of memory: tried ", nbytes, " bytes");
    void* memory = aligned(nbytes);
    std::memset(memory, 0xff, nbytes);  // NaN: what was never written shows
    machine.device_memory[reinterpret_cast<uintptr_t>(memory)] = {nbytes, current_device};
    machine.in_use[current_device] = used;
    machine.peak[current_device] = std::max(machine.peak[current_device], used);
    return {memory, memory, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
DeviceAllocator device_allocator;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    void* memory = aligned(nbytes);
    Lock lock(machine.lock);
    machine.pinned_memory[reinterpret_cast<uintptr_t>(memory)] = nbytes;
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* address, size_t nbytes) {  // with the lock
  auto next = machine.pinned_memory.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == machine.pinned_memory.begin()) return false;
  auto [start, size] = *std::prev(next);
  return reinterpret_cast<uintptr_t>(address) + nbytes <= start + size;
}

bool is_device_memory(const void* address, size_t nbytes) {  // with the lock
  auto next = machine.device_memory.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == machine.device_memory.begin()) return false;
  auto& [start, entry] = *std::prev(next);
  return reinterpret_cast<uintptr_t>(address) + nbytes <= start + entry.first;
}

}  // namespace
