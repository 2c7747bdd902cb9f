// Device memory and pinned host memory. What is freed may be handed out again by the next allocation on its stream, and
// then the stream may write to it. So it is overwritten there with 0xff, whatever the allocation takes: whoever still
// uses it meets NaN, and the overwriting is a use of memory as any other, so it is found to be a race even where the
// values happen to be right.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>

#include "order.h"

namespace sim {

inline char* map_memory(size_t size) {
  void* pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pointer == MAP_FAILED ? nullptr : static_cast<char*>(pointer);
}

inline void count(c10::CachingDeviceAllocator::DeviceStats& stats, int64_t size, bool reserves) {
  auto& stat = reserves ? stats.reserved_bytes[0] : stats.allocated_bytes[0];
  size < 0 ? stat.decrease(-size) : stat.increase(size);
}

// Whether nothing uses a block any more.
inline bool is_over(World& w, Region& region) {
  for (auto& point : region.pending) {
    if (!point->seen && !(w.policy == "timed" && point->at <= w.host_time && force(w, point, 0))) return false;
  }
  for (auto& point : region.pending) join(w.host, point->clock);
  region.pending.clear();
  return true;
}

// Blocks that were freed on a stream can be had again.
inline void recycle(World& w, size_t lane) {
  for (auto& [pointer, where] : std::exchange(w.freed[lane], {})) {
    const auto size = w.regions.at(pointer).size;
    if (w.poison) {
      give(w, lane, {.run = [pointer = pointer, size] { std::memset(pointer, 0xff, size); },
                     .what = "the allocator (freed memory)", .where = where, .uses = {Use{pointer, pointer + size, true}}});
    }
    w.free[{lane, size}].push_back(pointer);
  }
}

inline void free_device(void* pointer) {
  if (!pointer) return;
  auto& w = world();
  const auto here = where();
  Lock lock(w.monitor);
  auto& region = w.regions.at(static_cast<char*>(pointer));
  count(w.stats[region.device], -int64_t(region.size), false);
  for (auto lane : region.users) region.pending.push_back(mark(w, lane));
  region.users.clear();
  if (region.pending.empty()) w.freed[region.lane].push_back({static_cast<char*>(pointer), here});
  else w.held.push_back(static_cast<char*>(pointer));
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    const Device device(kSim, current_device);
    if (!bytes) return {nullptr, nullptr, &free_device, device};
    auto& w = world();
    Lock lock(w.monitor);
    const size_t size = (bytes + 511) / 512 * 512, lane = lane_of(current_stream(current_device));
    free_held(w);
    recycle(w, lane);
    auto& stats = w.stats[current_device];
    if (size_t(stats.allocated_bytes[0].current) + size > w.capacity) {
      release(w);
      TORCH_CHECK_WITH(OutOfMemoryError, size_t(stats.allocated_bytes[0].current) + size <= w.capacity,
                       "sim out of memory. Tried to allocate ", size, " bytes; sim:", int(current_device), " has ",
                       w.capacity, " bytes, of which ", stats.allocated_bytes[0].current, " are allocated");
    }
    auto& same = w.free[{lane, size}];
    char* pointer;
    if (same.empty()) {
      pointer = map_memory(size);
      TORCH_CHECK_WITH(OutOfMemoryError, pointer, "sim: this machine has no memory for ", bytes, " bytes");
      if (w.poison) std::memset(pointer, 0xff, size);
      auto& region = w.regions[pointer];
      region.size = size, region.lane = lane, region.device = current_device, region.on_device = true;
      count(stats, size, true);
    } else {
      pointer = same.back();
      same.pop_back();
    }
    count(stats, size, false);
    return {pointer, pointer, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { locked(release); }
  void recordStream(const c10::DataPtr& data, Stream s) override {
    auto& w = world();
    Lock lock(w.monitor);
    if (auto* region = region_of(w, data.get()); region && region->lane != lane_of(s)) region->users.insert(lane_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return locked([&](World& w) { return w.stats.at(device < 0 ? current_device : device); });
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    auto& w = world();
    Lock lock(w.monitor);
    auto& stats = w.stats.at(device < 0 ? current_device : device);
    stats.allocated_bytes[0].reset_peak();
    stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto& w = world();
    Lock lock(w.monitor);
    const size_t used = w.stats.at(device < 0 ? current_device : device).allocated_bytes[0].current;
    return {w.capacity - std::min(used, w.capacity), w.capacity};
  }

 private:
  static void free_held(World& w) {
    for (auto it = w.held.begin(); it != w.held.end();) {
      auto& region = w.regions.at(*it);
      if (!is_over(w, region)) {
        ++it;
        continue;
      }
      char* pointer = *it;
      it = w.held.erase(it);
      w.freed[region.lane].push_back({pointer, ""});
    }
  }
  // As CUDA's allocator under pressure: wait for the device, and give cached blocks back.
  static void release(World& w) {
    for (size_t i = 0; i < w.lanes.size(); ++i) settle(w, mark(w, i));
    free_held(w);
    for (size_t i = 0; i < w.lanes.size(); ++i) recycle(w, i), settle(w, mark(w, i));
    for (auto& [key, all] : w.free) {
      for (auto* pointer : all) {
        count(w.stats[w.regions.at(pointer).device], -int64_t(key.second), true);
        munmap(pointer, key.second);
        w.regions.erase(pointer);
      }
      all.clear();
    }
  }
};

inline DeviceMemory& device_memory() {
  static auto* one = new DeviceMemory;
  return *one;
}

inline void free_host(void* pointer) {
  if (!pointer) return;
  auto& w = world();
  Lock lock(w.monitor);
  auto& region = w.regions.at(static_cast<char*>(pointer));
  if (is_over(w, region)) {
    std::memset(pointer, 0xff, region.size);
    w.free_host[region.size].push_back(static_cast<char*>(pointer));
  } else {
    w.held_host.push_back(static_cast<char*>(pointer));
  }
}

struct HostMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_host, Device(c10::kCPU)};
    auto& w = world();
    Lock lock(w.monitor);
    const size_t size = (bytes + 4095) / 4096 * 4096;
    for (auto* pointer : std::exchange(w.held_host, {})) free_host(pointer);
    auto& same = w.free_host[size];
    char* pointer;
    if (same.empty()) {
      pointer = map_memory(size);
      TORCH_CHECK(pointer, "sim: no pinned memory for ", bytes, " bytes");
      w.regions[pointer].size = size;
    } else {
      pointer = same.back();
      same.pop_back();
    }
    return {pointer, pointer, &free_host, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_host; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, Stream stream) override {
    auto& w = world();
    Lock lock(w.monitor);
    if (auto* region = region_of(w, pointer)) region->pending.push_back(mark(w, lane_of(stream)));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline HostMemory& host_memory() {
  static auto* one = new HostMemory;
  return *one;
}

inline void host_register(int64_t pointer, int64_t size) {
  auto& w = world();
  Lock lock(w.monitor);
  auto* begin = reinterpret_cast<char*>(pointer);
  TORCH_CHECK(!region_of(w, begin), "sim: this memory is registered already");
  auto& region = w.regions[begin];
  region.size = size, region.registered = true;
}

inline void host_unregister(int64_t pointer) {
  auto& w = world();
  const auto here = where();
  Lock lock(w.monitor);
  auto* begin = reinterpret_cast<char*>(pointer);
  auto found = w.regions.find(begin);
  TORCH_CHECK(found != w.regions.end() && found->second.registered, "sim: this memory is not registered");
  const Use all{begin, begin + found->second.size, true};
  std::set<size_t> late;
  for (auto& each : found->second.accesses) if (!comes_before(w.host, each)) late.insert(each.lane);
  look(w, kHost, all, "unregistering host memory", here);
  for (auto lane : late) force(w, mark(w, lane), w.grace);  // the caller unmaps it: a race is to be told, not to end the process
  // Drivers take no memory back that is not there any more. The host meets this at its next wait, as what kernels do.
  if (msync(begin - reinterpret_cast<size_t>(begin) % 4096, found->second.size, MS_ASYNC) && !w.error) {
    w.error = std::make_exception_ptr(c10::Error({__func__, __FILE__, uint32_t(__LINE__)}, "sim: this memory was unmapped while it was registered"));
  }
  w.regions.erase(begin);
}

}  // namespace sim
