// Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
//
// Owns two simulated devices for torch's PrivateUse1: memory of theirs and page-locked memory (both the host's, and kept
// apart), streams, events, and the few kernels that a backend has to bring. Every other operator computes on the CPU.
// Must not know what it is used for.
//
// [Note: Streams]
//     The default stream computes at once, on the calling thread. Every other stream is a thread that lags: it only
//     waits for events, records them, and copies bytes. What cannot be left to it (a cast, a copy that blocks or whose
//     host memory is pageable) waits on the host until the stream is idle, and is counted. When a copy is done, both of
//     its memories have to exist still; that they do not is found there, and raised by whatever comes next.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

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
#include <thread>

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
thread_local bool has_set_device = false;

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

// --------------------------------------------------------------------------------------------- devices and streams

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    has_set_device = true;
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(machine.lock);
    return is_pinned(data, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator.allocate(nbytes);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device of(int index) const { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
  c10::Device getDevice() const override { return of(current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return of(std::exchange(current_device, static_cast<int>(device.index())));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "no simulated ", device);
    has_set_device = true;
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream stream(c10::Device device, int64_t id) const { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[device.index()]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    check_thread();
    Lock lock(machine.lock);
    machine.queues.push_back(new Queue());
    std::thread(serve, machine.queues.back()).detach();
    return stream(device.has_index() ? device : getDevice(), static_cast<int64_t>(machine.queues.size()) - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    auto device = other.device();
    return stream(device, std::exchange(current_stream[device.index()], other.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(machine.lock);
    return queue_of(stream) == nullptr || queue_of(stream)->idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(machine.lock);
    if (Queue* queue = queue_of(stream)) machine.changed.wait(lock, [&] { return queue->idle(); });
    else wait_for_default(lock, stream.device_index());
    check_fault();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(machine.lock);
    wait_for_default(lock, device);
    for (Queue* queue : machine.queues)
      if (queue != nullptr) machine.changed.wait(lock, [&] { return queue->idle(); });
    check_fault();
  }

  // Events: a pointer to the moment of the last record.
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    check_thread();
    Lock lock(machine.lock);
    auto moment = std::make_shared<Moment>();
    if (*event == nullptr) *event = new MomentPtr();
    *static_cast<MomentPtr*>(*event) = moment;
    auto reach = [moment](Lock&) {
      moment->ms = now_ms();
      moment->there = true;
    };
    if (Queue* queue = queue_of(stream)) return submit(lock, queue, reach);
    moment->after = waits[stream.device_index()];
    reach(lock);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock(machine.lock);
    MomentPtr moment = *static_cast<MomentPtr*>(event);
    Queue* queue = queue_of(stream);
    if (queue == nullptr) waits[stream.device_index()].push_back(moment);
    else submit(lock, queue, [moment](Lock& held) { wait_for(held, moment); });
  }
  bool queryEvent(void* event) const override {
    Lock lock(machine.lock);
    return event == nullptr || (*static_cast<MomentPtr*>(event))->reached();
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(machine.lock);
    if (event != nullptr) wait_for(lock, *static_cast<MomentPtr*>(event));
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    Lock lock(machine.lock);
    return (*static_cast<MomentPtr*>(end))->ms - (*static_cast<MomentPtr*>(start))->ms;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --------------------------------------------------------------------------------------------------------- kernels

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void set_current(c10::optional<c10::Device> device, c10::OptionalDeviceGuard& guard) {
  if (device.has_value() && device->has_index()) guard.reset_device(*device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard;
  set_current(device, guard);
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard;
  set_current(device, guard);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor host_alias(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.scalar_type()).device(c10::DeviceType::CPU));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

// Whether a stream can do this copy by itself.
bool is_plain(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes() || from.strides() != to.strides() ||
      !from.is_non_overlapping_and_dense() || from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg())
    return false;
  const at::Tensor& host = from.is_cpu() ? from : to;
  if (!host.is_cpu()) return true;
  Lock lock(machine.lock);
  return non_blocking && is_pinned(host.const_data_ptr(), host.nbytes());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  int device = (from.is_cpu() ? to : from).device().index();
  check_thread();
  if (from.numel() == 0) return to;
  if (is_plain(from, to, non_blocking)) {
    Lock lock(machine.lock);
    check_fault();
    if (Queue* queue = current_queue(device)) {
      auto* source = from.const_data_ptr();
      auto* target = to.data_ptr();
      size_t nbytes = from.nbytes();
      ++machine.deferred_copies;
      submit(lock, queue, [=](Lock& held) {
        lag(held);
        auto exists = [&](const void* memory) { return is_pinned(memory, nbytes) || is_device_memory(memory, nbytes); };
        if (!exists(source) || !exists(target))
          machine.fault = "memory of a copy was freed before the copy was done";
        else
          std::memcpy(target, source, nbytes);
      });
      return to;
    }
  }
  begin_kernel(device);
  host_alias(to).copy_(host_alias(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  begin_kernel(self.device().index());
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

// What convolution calls on devices that torch does not know; it has no kernel on the CPU to fall back on.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  begin_kernel(input.device().index());
  std::optional<at::Tensor> host_bias;
  if (bias.has_value() && bias->defined()) host_bias = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding,
                         groups)
      .to(input.device());
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  begin_kernel(current_device);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);  // metadata alone
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("convolution_overrideable", &convolution);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}

// ------------------------------------------------------------------------------------- what the Python side asks for

TORCH_LIBRARY(simulated_npu, m) {
  has_set_device = true;  // the thread that loads this is the main one
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator);
  m.def("lag(int microseconds, int seed) -> ()", [](int64_t microseconds, int64_t seed) {
    Lock lock(machine.lock);
    machine.lag_us = microseconds;
    machine.random.seed(seed);
  });
  m.def("memory(int device) -> int[]", [](int64_t device) -> std::vector<int64_t> {
    Lock lock(machine.lock);
    return {machine.in_use[device], machine.peak[device], kTotalBytes};
  });
  m.def("reset_peak(int device) -> ()", [](int64_t device) {
    Lock lock(machine.lock);
    machine.peak[device] = machine.in_use[device];
  });
  m.def("counts() -> int[]", []() -> std::vector<int64_t> {
    Lock lock(machine.lock);
    return {machine.host_waits, machine.deferred_copies, static_cast<int64_t>(machine.pinned_memory.size())};
  });
  // A collective that ends on the host: the current stream waits for the moment that `reach` names.
  m.def("new_moment() -> int", []() -> int64_t {
    Lock lock(machine.lock);
    machine.moments[machine.next_moment] = std::make_shared<Moment>();
    return machine.next_moment++;
  });
  m.def("reach(int moment) -> ()", [](int64_t moment) {
    Lock lock(machine.lock);
    machine.moments.at(moment)->there = true;
    machine.moments.erase(moment);
    machine.changed.notify_all();
  });
  m.def("wait_for(int moment) -> ()", [](int64_t id) {
    Lock lock(machine.lock);
    auto found = machine.moments.find(id);
    if (found == machine.moments.end()) return;  // reached already
    MomentPtr moment = found->second;
    Queue* queue = current_queue(current_device);
    if (queue == nullptr) waits[current_device].push_back(moment);
    else submit(lock, queue, [moment](Lock& held) { wait_for(held, moment); });
  });
}

}  // namespace
