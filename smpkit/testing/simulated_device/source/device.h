// What torch asks a device for: its guard (streams and events), its hooks, its random numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override { return Device(kSim, std::exchange(current_device, checked(d.index()))); }
  Device getDevice() const override { return Device(kSim, current_device); }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return world().num_devices; }
  static DeviceIndex checked(DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < world().num_devices, "sim: there is no sim:", int(index), ", only ",
                int(world().num_devices), " (`devices=` of `simulated_device.load`)");
    return index;
  }
  static DeviceIndex index(Device d) { return d.has_index() ? d.index() : current_device; }
  Stream getStream(Device d) const noexcept override { return current_stream(index(d)); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, Device(kSim, index(d)), 0); }
  Stream getNewStream(Device d, int) const override {
    auto& w = world();
    Lock lock(w.monitor);
    auto& lane = w.lanes.emplace_back();
    lane.device = checked(index(d)), lane.is_default = false;
    return Stream(Stream::UNSAFE, Device(kSim, index(d)), w.lanes.size() - 1);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto old = current_stream(s.device_index());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const Stream& s) const override {
    return locked([&](World& w) { return ask(w, mark(w, lane_of(s))); });
  }
  void synchronizeStream(const Stream& s) const override {
    auto& w = world();
    const auto here = where();
    Lock lock(w.monitor);
    ++w.waited[{"stream", here}];
    settle(w, mark(w, lane_of(s)));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    auto& w = world();
    const auto here = where();
    Lock lock(w.monitor);
    ++w.waited[{"device", here}];
    for (size_t i = 0; i < w.lanes.size(); ++i) {
      if (device < 0 || w.lanes[i].device == device) settle(w, mark(w, i));
    }
  }
  static PointRef& point(void* event) { return *static_cast<PointRef*>(event); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<PointRef*>(event); }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    auto& w = world();
    Lock lock(w.monitor);
    if (!*event) *event = new PointRef;
    point(*event) = mark(w, lane_of(s));
  }
  void block(void* event, const Stream& s) const override {
    if (event) locked([&](World& w) { give(w, lane_of(s), {.wait = point(event)}); });
  }
  bool queryEvent(void* event) const override {
    return !event || locked([&](World& w) { return ask(w, point(event)); });
  }
  void synchronizeEvent(void* event) const override {
    if (event) locked([&](World& w) { settle(w, point(event)); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    device_memory().recordStream(data, s);
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {  // milliseconds
    auto& w = world();
    Lock lock(w.monitor);
    TORCH_CHECK(first && last && ask(w, point(first)) && ask(w, point(last)),
                "sim: the device has not passed both events; synchronize first");
    return 1e3 * (point(last)->at - point(first)->at);
  }
};

// Each kernel gets a seed when it is queued, as CUDA's get offsets of Philox, so the host can read and set the state
// while kernels are still waiting.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(kSim, index);
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (DeviceIndex i = 0; i < world().num_devices; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

inline uint64_t draw(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return world().num_devices; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = Guard::checked(d); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, Guard::checked(d)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current_device : exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  bool isPinnedPtr(const void* pointer) const override {
    auto& w = world();
    Lock lock(w.monitor);
    auto* region = region_of(w, pointer);
    return region && !region->on_device;
  }
  Device getDeviceFromPtr(void* pointer) const override {
    auto& w = world();
    Lock lock(w.monitor);
    auto* region = region_of(w, pointer);
    return Device(kSim, region ? region->device : current_device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard on(storage.device());
    auto fresh = device_memory().allocate(bytes);
    if (const auto both = std::min(bytes, storage.nbytes())) {
      auto& w = world();
      const auto here = where();
      auto *to = static_cast<char*>(fresh.get()), *from = static_cast<char*>(storage.mutable_data());
      Lock lock(w.monitor);
      give(w, lane_of(current_stream(current_device)),
           {.run = [=] { std::memcpy(to, from, both); }, .what = "resize", .where = here,
            .uses = {{from, from + both, false}, {to, to + both, true}}, .seconds = 2 * both / w.speeds.memory});
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

}  // namespace sim
