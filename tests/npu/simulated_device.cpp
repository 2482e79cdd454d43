// Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
//
// Owns two simulated devices as torch's PrivateUse1: streams and events, the few kernels that a backend has to bring,
// and what Python asks about them. Every other operator computes on the CPU. Must not know what it is used for.

#include "simulated_machine.h"

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

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
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
        auto exists = [&](const void* at) { return is_pinned(at, nbytes) || is_device_memory(at, nbytes); };
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
  m.def("use_in_this_thread() -> ()", []() { has_set_device = true; });
  m.def("fail(str why) -> ()", [](const std::string& why) {
    Lock lock(machine.lock);
    machine.fault = why;
  });
  m.def("take_fault() -> str", []() -> std::string {
    Lock lock(machine.lock);
    return std::exchange(machine.fault, "");
  });
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
