// Streams, events, and the order of things.
//
// A stream is a queue without a thread. The host queues work; a piece of it runs when somebody has to wait for it, or
// when the policy says so. Nothing else decides, so a run can be had again:
//
//   eager     all that can run runs at once           lazy    nothing runs before it must
//   compute   the default streams run, others lag     copies  the other streams run, the default streams lag
//   random    a seeded choice after each call          timed   what the device would have done by now, in virtual time
//
// "Runs" has two meanings here. A piece of work is *executed* when its kernel has been run, and *seen* when the host
// may know of that. They differ where another rank waits: the threads that carry messages execute what a message needs
// (see communication.h) at a moment that no seed decides, so the host must not learn of it early.
//
// Two pieces of work are ordered if the clock of the later one contains the earlier one. Clocks are vectors with a
// number for each stream; waits of streams, waits of the host and successful queries join them. All uses of memory
// are compared when they are queued. So a missing wait is found whatever the policy, even if the values are right.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "python.h"

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Stream;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr size_t kHost = size_t(-1);  // in place of a stream's number

// A recursive mutex with a condition. Who waits for it lets go of the GIL: `Event.record` and others come with the
// GIL, and a kernel's arguments may need it, so holding one while waiting for the other would be a deadlock.
class Monitor {
 public:
  void lock() {
    if (owner_ == std::this_thread::get_id()) {
      ++depth_;
      return;
    }
    if (!mutex_.try_lock()) {
      WithoutGil without;
      mutex_.lock();
    }
    own(1);
  }
  void unlock() {
    if (--depth_) return;
    owner_ = std::thread::id();
    mutex_.unlock();
  }
  // Let other threads in until one of them changes something, or until `seconds` have passed.
  void wait(double seconds) {
    const int depth = depth_;
    owner_ = std::thread::id();
    {
      WithoutGil without;
      std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
      changed_.wait_for(lock, std::chrono::duration<double>(seconds));
      lock.release();
    }
    own(depth);
  }
  void changed() { changed_.notify_all(); }

 private:
  void own(int depth) {
    owner_ = std::this_thread::get_id();
    depth_ = depth;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};
using Lock = std::lock_guard<Monitor>;

using Clock = std::vector<uint64_t>;  // by stream: the last piece of work there that comes before

inline void join(Clock& mine, const Clock& other) {
  if (mine.size() < other.size()) mine.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) mine[i] = std::max(mine[i], other[i]);
}

struct Point {  // what an event stands for
  size_t lane;
  Clock clock;
  double at = 0;  // when the device passes it, in seconds of virtual time
  bool executed = false, seen = false;
  int asked = 0;
};
using PointRef = std::shared_ptr<Point>;

// What a message carries is read when `ready`, and written where it belongs by the item's own `run` after `arrived`.
struct Message {
  uint64_t number = 0;
  bool ready = false, arrived = false;
  std::exception_ptr error;
};
using MessageRef = std::shared_ptr<Message>;

struct Item {
  std::function<void()> run;
  PointRef wait, mark;
  MessageRef message;
  std::string what, where;
  std::shared_ptr<void> keep;  // let go of when it is seen: memory must not hang on when a message comes
  bool executed = false;
};

struct Lane {  // a stream
  DeviceIndex device = 0;
  bool is_default = true;
  std::deque<Item> items;  // not seen yet
  uint64_t given = 0;
  Clock clock;
  double at = 0;
};

// A set of bytes: `count[i]` steps of `stride[i]` bytes in each dimension, `size` bytes at each place.
struct Use {
  const char* low = nullptr;
  const char* high = nullptr;
  bool writes = false;
  size_t size = 0;
  std::vector<std::pair<int64_t, int64_t>> steps;  // (count, stride); empty: all bytes from low to high

  bool is_dense() const { return steps.empty(); }
  template <class Each>
  void for_each(const Each& each) const {
    std::vector<int64_t> index(steps.size());
    while (true) {
      int64_t offset = 0;
      for (size_t i = 0; i < steps.size(); ++i) offset += index[i] * steps[i].second;
      each(low + offset, low + offset + size);
      size_t i = steps.size();
      while (i && ++index[i - 1] == steps[i - 1].first) index[--i] = 0;
      if (!i) return;
    }
  }
};

// Extents of interleaved views (columns of one matrix, say) meet where their bytes do not.
inline bool overlap(const Use& a, const Use& b) {
  const char *low = std::max(a.low, b.low), *high = std::min(a.high, b.high);
  if (low >= high) return false;
  if (a.is_dense() && b.is_dense()) return true;
  std::vector<bool> taken(high - low);
  auto clipped = [&](const Use& use, auto&& each) {
    auto part = [&](const char* begin, const char* end) {
      for (auto* p = std::max(begin, low); p < std::min(end, high); ++p) each(p - low);
    };
    if (use.is_dense()) part(use.low, use.high);
    else use.for_each(part);
  };
  bool met = false;
  clipped(a, [&](size_t i) { taken[i] = true; });
  clipped(b, [&](size_t i) { met |= taken[i]; });
  return met;
}

struct Access : Use {
  size_t lane;
  uint64_t number;
  std::string what, where;
};

struct Region {  // a block of device memory, or pinned memory of the host
  size_t size = 0, lane = 0;
  DeviceIndex device = 0;
  bool on_device = false, registered = false;
  std::vector<Access> accesses;
  std::set<size_t> users;         // record_stream
  std::vector<PointRef> pending;  // not to be used again before
};

struct Span {  // a piece of work in virtual time
  std::string what;
  DeviceIndex device;
  size_t lane;
  double begin, end;
};

// How long things take, in seconds of virtual time. The host's own Python takes none.
struct Speeds {
  double flops = 100e12;        // operations per second of matrix products
  double memory = 2e12;         // bytes per second of all kernels
  double out = 50e9, back = 50e9;  // bytes per second of copies from a device to the host, and to a device
  double peer = 100e9;          // bytes per second between devices and between ranks
  double latency = 10e-6;       // of each copy and message
  double launch = 5e-6;         // of the host, for each piece of work
};

struct World {
  Monitor monitor;
  std::deque<Lane> lanes;
  Clock host;
  double host_time = 0;
  std::string policy = "random";
  uint64_t seed = 0;
  std::mt19937_64 dice{0};
  bool strict = false, poison = true, serial_messages = false, traced = false;
  double grace = 1;
  int running = 0;
  uint64_t messages = 0;
  std::set<std::pair<DeviceIndex, uint64_t>> open_messages;
  std::exception_ptr error;
  std::vector<std::string> races;
  std::set<std::string> known_races;
  std::map<std::pair<std::string, std::string>, int64_t> waited;  // by what the host waited for, and where
  std::vector<Span> spans;
  Speeds speeds;
  std::map<std::pair<DeviceIndex, int>, std::map<double, double>> engines;  // busy from, to
  std::map<const char*, Region> regions;
  std::map<std::pair<size_t, size_t>, std::vector<char*>> free;  // of a stream and size
  std::map<size_t, std::vector<std::pair<char*, std::string>>> freed;  // of a stream, since its last allocation, and where
  std::vector<char*> held, held_host;
  std::map<size_t, std::vector<char*>> free_host;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
  size_t capacity = size_t(8) << 30;
  DeviceIndex num_devices = 1;

  World() {
    if (auto* text = std::getenv("SIM_DEVICES")) num_devices = std::max(1, std::atoi(text));
    stats.resize(num_devices);
    for (DeviceIndex i = 0; i < num_devices; ++i) lanes.emplace_back().device = i;
  }
};

inline World& world() {
  static auto* w = new World;  // outlives all that is freed at exit
  return *w;
}

// Use the world while nobody else does.
template <class Body>
auto locked(Body body) {
  auto& w = world();
  Lock lock(w.monitor);
  return body(w);
}

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::map<DeviceIndex, c10::StreamId> current_streams;
inline thread_local int in_kernel = 0;

inline Stream current_stream(DeviceIndex device) {
  auto found = current_streams.find(device);
  return Stream(Stream::UNSAFE, Device(kSim, device), found == current_streams.end() ? 0 : found->second);
}
// A stream's id is its number, but 0 is each device's default stream.
inline size_t lane_of(const Stream& stream) { return stream.id() ? stream.id() : stream.device_index(); }

inline std::string stream_name(const World& w, size_t lane) {
  if (lane == kHost) return "the host";
  const auto& one = w.lanes[lane];
  return (one.is_default ? std::string("the default stream") : "stream " + std::to_string(lane)) + " of sim:" +
      std::to_string(one.device);
}

// Kernels must not meet the modes and dispatch keys of the thread that happens to run them.
struct Below {
  Below() { ++in_kernel; }
  ~Below() { --in_kernel; }
  c10::impl::ForceDispatchKeyGuard guard{
      DispatchKeySet(DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize})};
  at::RecordFunctionGuard unrecorded{false};
};

// --- where in the user's program -----------------------------------------------------------------------------------------

// A thread of the autograd engine has no Python of the user's. The node that it runs was made by an operator of the
// forward pass, whose lines were kept under the node's number.
struct ForwardLines {
  std::mutex mutex;
  std::map<std::pair<uint64_t, uint64_t>, std::string> of;
  std::deque<std::pair<uint64_t, uint64_t>> order;
};

inline ForwardLines& forward_lines() {
  static auto* all = new ForwardLines;
  return *all;
}

inline std::string where() {
  if (!lines().on) return "";
  auto found = lines().now();
  auto& forward = forward_lines();
  if (auto node = torch::autograd::get_current_node()) {
    std::string text = "in " + node->name();
    std::lock_guard<std::mutex> lock(forward.mutex);
    if (auto made = forward.of.find({node->thread_id(), node->sequence_nr()}); made != forward.of.end()) {
      text += ", of the forward pass at\n" + made->second;
    }
    return found.empty() ? text : found + "\n" + text;
  }
  if (const auto next = at::sequence_number::peek(); next && !found.empty()) {
    // The operator that makes a node is the first one that comes here after the node has got its number.
    const std::pair<uint64_t, uint64_t> key{at::RecordFunction::currentThreadId(), next - 1};
    std::lock_guard<std::mutex> lock(forward.mutex);
    if (forward.of.emplace(key, found).second) forward.order.push_back(key);
    if (forward.order.size() > 65536) {
      forward.of.erase(forward.order.front());
      forward.order.pop_front();
    }
  }
  return found;
}

// --- running -------------------------------------------------------------------------------------------------------------

inline void run(World& w, Item& item) {
  if (item.message && item.message->error && !w.error) w.error = item.message->error;
  if (item.run && !(item.message && item.message->error)) {
    ++w.running;
    try {
      Below below;
      item.run();
    } catch (const std::exception& error) {  // the host meets it at its next wait, and would not know whose it is
      const auto* own = dynamic_cast<const c10::Error*>(&error);
      auto text = std::string(own ? own->what_without_backtrace() : error.what()) + " (" + item.what +
          (item.where.empty() ? "" : ", queued at " + item.where) + ")";
      std::replace(text.begin(), text.end(), '\n', ' ');
      if (!w.error) w.error = std::make_exception_ptr(c10::Error({__func__, __FILE__, uint32_t(__LINE__)}, std::move(text)));
    }
    --w.running;
  }
  auto done = std::exchange(item.run, nullptr);  // what it holds may be freed only now, and freeing queues work
  item.executed = true;
  if (item.mark) item.mark->executed = true;
  w.monitor.changed();
}

// Whether a message's item may run; its message may leave from now on.
inline bool arrived(World& w, Item& item) {
  if (!item.message) return true;
  if (!std::exchange(item.message->ready, true)) w.monitor.changed();
  return item.message->arrived;
}

// Make the first item of a stream seen, and execute it if need be. False: it waits for something. When a message comes
// no seed decides, so only who waits for it passes it.
inline bool step(World& w, size_t lane, bool passes_messages = false) {
  auto& items = w.lanes[lane].items;
  if (items.empty()) return false;
  auto& item = items.front();
  if ((item.wait && !item.wait->seen) || (item.message && !passes_messages)) return false;
  if (!item.executed) {
    if (!arrived(w, item)) return false;
    run(w, item);
  }
  if (item.mark) item.mark->seen = true;
  const auto keep = std::move(item.keep);  // freeing queues work, so only when the item is gone
  items.pop_front();
  return true;
}

constexpr double kForever = 1e9;

// Run all that a point needs; false: a message has not arrived after so many seconds.
inline bool force(World& w, const PointRef& point, double seconds = kForever) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, kForever));
  while (!point->seen) {
    auto& items = w.lanes[point->lane].items;
    TORCH_INTERNAL_ASSERT(!items.empty());
    if (auto before = items.front().wait; before && !before->seen) {
      if (!force(w, before, std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count())) return false;
    } else if (!step(w, point->lane, true)) {  // other ranks have to act
      const auto left = std::chrono::duration<double>(end - std::chrono::steady_clock::now()).count();
      if (left <= 0) return false;
      w.monitor.wait(std::min(left, 1.0));
    }
  }
  return true;
}

// Execute a stream's work until something is reached (a point executed, a message ready), for other ranks: the host learns
// nothing of it.
inline bool execute_until(World& w, const bool& reached, size_t lane, const std::function<bool()>& ended) {
  while (!reached) {
    auto& items = w.lanes[lane].items;
    auto next = std::find_if(items.begin(), items.end(), [](const Item& item) { return !item.executed; });
    TORCH_INTERNAL_ASSERT(next != items.end());
    if (auto before = next->wait; before && !before->executed) {
      if (!execute_until(w, before->executed, before->lane, ended)) return false;
    } else if (arrived(w, *next)) {
      run(w, *next);
    } else if (!reached) {
      if (ended()) return false;
      w.monitor.wait(0.1);
    }
  }
  return true;
}

inline void progress(World& w, size_t lane) {
  if (w.running) return;
  auto all = [&](auto&& which) {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t i = 0; i < w.lanes.size(); ++i) moved |= which(i) && step(w, i);
    }
  };
  const bool is_default = w.lanes[lane].is_default;
  if (w.policy == "eager") {
    all([](size_t) { return true; });
  } else if (w.policy == "compute" && is_default) {
    auto& items = w.lanes[lane].items;
    while (!items.empty()) {
      std::set<size_t> passed;  // the streams that the default stream waits for run as far as it needs them
      size_t at = lane;
      while (!step(w, at)) {
        auto& waiting = w.lanes[at].items;
        if (waiting.empty() || !waiting.front().wait || waiting.front().wait->seen || !passed.insert(at).second) return;
        at = waiting.front().wait->lane;
      }
    }
  } else if (w.policy == "copies" && !is_default) {
    all([&](size_t i) { return !w.lanes[i].is_default; });
  } else if (w.policy == "random") {
    for (auto n = w.dice() % 4; n; --n) step(w, w.dice() % w.lanes.size());
  }
}

// --- uses of memory ------------------------------------------------------------------------------------------------------

inline Region* region_of(World& w, const void* pointer) {
  auto after = w.regions.upper_bound(static_cast<const char*>(pointer));
  if (after == w.regions.begin()) return nullptr;
  --after;
  return static_cast<const char*>(pointer) < after->first + after->second.size ? &after->second : nullptr;
}

inline bool comes_before(const Clock& clock, const Access& old) {
  return old.lane < clock.size() && clock[old.lane] >= old.number;
}

// Compare a use of memory with those before it, and keep it for those after it.
inline void look(World& w, size_t lane, const Use& use, const std::string& what, const std::string& where) {
  auto* region = use.low < use.high ? region_of(w, use.low) : nullptr;
  if (!region) return;
  const auto& clock = lane == kHost ? w.host : w.lanes[lane].clock;
  std::string found;
  auto& all = region->accesses;
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& old) {
    if (comes_before(w.host, old)) return true;  // whatever is queued from now on comes after it, too
    const bool ordered = old.lane == lane || comes_before(clock, old);
    if (!ordered && (old.writes || use.writes) && found.empty() && overlap(old, use)) {
      const char* separator = "\x1f";
      found = what + separator + stream_name(w, lane) + separator + (use.writes ? "writes" : "reads") + separator + where +
          separator + old.what + separator + stream_name(w, old.lane) + separator + (old.writes ? "writes" : "reads") +
          separator + old.where + separator +
          (region->on_device ? "memory of sim:" + std::to_string(region->device) : std::string("pinned host memory"));
    }
    return ordered && lane != kHost && (use.writes || (!old.writes && old.lane == lane)) && use.is_dense() &&
        use.low <= old.low && old.high <= use.high;
  }), all.end());
  if (lane != kHost) {
    all.push_back({use, lane, w.lanes[lane].given, what, where});
  }
  if (!found.empty() && w.known_races.insert(found).second) {
    w.races.push_back(found);
    const bool in_destructor = what.rfind("the allocator", 0) == 0;
    if (w.strict && !in_destructor) {
      for (char& c : found) if (c == '\x1f' || c == '\n') c = ' ';
      TORCH_CHECK(false, "sim: a race: ", found);
    }
  }
}

// --- queueing ------------------------------------------------------------------------------------------------------------

constexpr int kOut = 0, kBack = 1;  // copy engines, of which each device has one for each direction

struct Launch {
  std::function<void()> run = nullptr;
  std::string what = "", where = "";
  std::vector<Use> uses = {};
  PointRef wait = nullptr;
  bool marks = false;
  MessageRef message = nullptr;
  double seconds = 0;
  int engine = -1;
  std::shared_ptr<void> keep = nullptr;
};

// The first time from `ready` on at which a copy engine is free for so long.
inline double reserve(std::map<double, double>& busy, double ready, double seconds) {
  double begin = ready;
  auto next = busy.upper_bound(begin);
  if (next != busy.begin()) begin = std::max(begin, std::prev(next)->second);
  for (; next != busy.end() && next->first < begin + seconds; ++next) begin = std::max(begin, next->second);
  if (seconds > 0) busy[begin] = begin + seconds;
  return begin;
}

inline PointRef give(World& w, size_t lane, Launch launch) {
  auto& mine = w.lanes[lane];
  join(mine.clock, w.host);
  if (launch.wait) join(mine.clock, launch.wait->clock);
  if (mine.clock.size() <= lane) mine.clock.resize(lane + 1);
  mine.clock[lane] = ++mine.given;
  for (auto& use : launch.uses) look(w, lane, use, launch.what, launch.where);

  double begin = std::max({mine.at, w.host_time, launch.wait ? launch.wait->at : 0});
  if (launch.engine >= 0) begin = reserve(w.engines[{mine.device, launch.engine}], begin, launch.seconds);
  mine.at = begin + launch.seconds;
  if (launch.seconds > 0) {
    w.host_time += w.speeds.launch;
    if (w.traced) w.spans.push_back({launch.what, mine.device, lane, begin, mine.at});
  }
  PointRef mark;
  if (launch.marks) mark = std::make_shared<Point>(Point{lane, mine.clock, mine.at});
  mine.items.push_back({std::move(launch.run), std::move(launch.wait), mark, std::move(launch.message),
                        std::move(launch.what), std::move(launch.where), std::move(launch.keep)});
  progress(w, lane);
  return mark;
}

inline PointRef mark(World& w, size_t lane) { return give(w, lane, {.marks = true}); }

// The host waits.
inline void settle(World& w, const PointRef& point) {
  force(w, point);
  join(w.host, point->clock);
  w.host_time = std::max(w.host_time, point->at);
  if (w.error) std::rethrow_exception(std::exchange(w.error, nullptr));
}

// Whether the host may know that the device has passed a point. Who asks again and again is told yes in the end.
inline bool ask(World& w, const PointRef& point) {
  if (!point->seen) {
    if (w.policy == "timed") {
      if (point->at > w.host_time) {  // each time the host has waited a little longer
        w.host_time += std::min(point->at - w.host_time, 1e-6 * double(1 << std::min(point->asked++, 30)));
        return false;
      }
      if (!force(w, point, w.grace)) return false;
    } else {
      size_t lane = point->lane;
      while (true) {
        auto& items = w.lanes[lane].items;
        if (items.empty() || !items.front().wait || items.front().wait->seen) break;
        lane = items.front().wait->lane;
      }
      auto& items = w.lanes[lane].items;
      if (!items.empty() && items.front().message) {
        // Whether another rank's message is here must not hang on the machine's speed: the seed says how often the
        // answer is no, and after that the host is patient.
        const auto refusals = (w.seed + items.front().message->number * 2654435761u) % 3;
        if (point->asked++ < int(refusals)) return false;
        if (!force(w, point, w.grace)) return false;
        join(w.host, point->clock);
        return true;
      }
      step(w, lane);
      return false;
    }
  }
  join(w.host, point->clock);
  return true;
}

}  // namespace sim
