// A process group for ranks that are processes: collectives and messages as work on streams, carried by gloo.
//
// As with NCCL, each communicator has a stream of its own: an operation waits for what its caller's stream was given
// before, and `wait()` makes the caller's stream wait for it. Operations of one communicator are carried in order;
// nothing else is promised, so two communicators may overtake each other. With `one_communicator_at_a_time` they may
// not: then an operation holds the device until its peers have come, in the order in which the host queued them. Programs
// that need two communicators at once, which NCCL does not promise, end in a deadlock there, and with an error.
//
// Pairs of ranks have communicators of their own for `send` and `recv`, as in torch; a batch uses the group's.
//
// A thread for each communicator carries its messages: what comes before a message is executed by that thread, because
// other ranks need it now, whatever the host has yet to know.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>

#include "operators.h"

namespace sim {

using WorkRef = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;
using Milliseconds = std::chrono::milliseconds;
// What an operation uses, held until its caller's stream waits for it, or until the host knows that it is over; as
// NCCL's backend does. Who frees it then without a wait of its own stream has a race.
using Kept = std::shared_ptr<std::vector<c10::Storage>>;

struct Part {  // one operation; several are carried together in a batch
  Tensors inputs, outputs;  // of the device, seen by the CPU
  Tensors in, out;          // copies that gloo reads and writes
  std::function<std::vector<WorkRef>(Part&)> start;
  std::function<void(Part&)> finish;
};

struct Job {
  std::string what;
  std::vector<Part> parts;
  MessageRef message = std::make_shared<Message>();
  DeviceIndex device = 0;
  Milliseconds timeout{0};
};
using JobRef = std::shared_ptr<Job>;

struct Channel {  // a communicator: a stream of each device, and a thread
  std::string name;
  std::map<DeviceIndex, size_t> lanes;
  std::deque<JobRef> jobs;
  bool has_thread = false;
};

struct Communicators {  // what outlives the backend while its threads run
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::string name;
  std::map<std::string, Channel> channels;
  bool aborted = false, closed = false;
  uint64_t count = 0;
};
using CommunicatorsRef = std::shared_ptr<Communicators>;

inline void finish(World& w, const JobRef& job, std::exception_ptr error) {
  if (job->message->arrived) return;  // it was aborted
  job->message->error = error;
  job->message->ready = job->message->arrived = true;
  w.open_messages.erase({job->device, job->message->number});
  w.monitor.changed();
}

inline std::exception_ptr failure(const std::string& text) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, uint32_t(__LINE__)}, "sim: " + text));
}

inline void carry(World& w, const CommunicatorsRef& all, const Channel& channel, const JobRef& job) {
  const auto end = std::chrono::steady_clock::now() + job->timeout;
  auto late = [&] { return std::chrono::steady_clock::now() > end; };
  std::vector<WorkRef> works;
  try {
    {
      Lock lock(w.monitor);
      auto ended = [&] { return all->aborted; };
      if (!execute_until(w, job->message->ready, channel.lanes.at(job->device), ended)) return;
      if (w.serial_messages) {  // what was queued before on this device, on any communicator
        while (!all->aborted && *w.open_messages.lower_bound({job->device, 0}) != std::pair{job->device, job->message->number}) {
          if (late()) {
            return finish(w, job, failure(job->what + " of communicator " + channel.name + " could not begin in " +
                std::to_string(job->timeout.count()) + " ms: an operation of another communicator, queued before it on this device, "
                "holds the device until its peers come (one communicator at a time)"));
          }
          w.monitor.wait(0.1);
        }
      }
      if (job->message->arrived) return;
      for (auto& part : job->parts) {
        for (auto& each : part.inputs) part.in.push_back(each.clone(at::MemoryFormat::Contiguous));
        for (auto& each : part.outputs) part.out.push_back(at::empty(each.sizes(), each.options()));
      }
    }
    for (auto& part : job->parts) for (auto& work : part.start(part)) works.push_back(work);
    for (auto& work : works) work->wait(job->timeout);
    for (auto& part : job->parts) if (part.finish) part.finish(part);
    Lock lock(w.monitor);
    finish(w, job, nullptr);
  } catch (const std::exception& error) {
    Lock lock(w.monitor);
    finish(w, job, failure(job->what + " of communicator " + channel.name + " failed: " + error.what()));
  }
}

inline void carry_all(CommunicatorsRef all, Channel* channel) {
  ++in_kernel;  // what happens here is not the host's
  auto& w = world();
  while (true) {
    JobRef job;
    {
      Lock lock(w.monitor);
      while (channel->jobs.empty() && !all->closed && !all->aborted) w.monitor.wait(10);
      if (channel->jobs.empty()) {
        channel->has_thread = false;
        return;
      }
      job = channel->jobs.front();
      channel->jobs.pop_front();
    }
    carry(w, all, *channel, job);
  }
}

struct SimWork final : c10d::Work {
  SimWork(int rank, c10d::OpType type, PointRef end, MessageRef message, Kept memory, Tensors results, bool blocks)
      : c10d::Work(rank, type), end_(std::move(end)), message_(std::move(message)), memory_(std::move(memory)),
        results_(std::move(results)), blocks_(blocks) {}
  bool isCompleted() override { return locked([&](World& w) { return ask(w, end_); }); }
  bool isSuccess() const override {
    return locked([&](World&) { return message_->arrived && !message_->error; });
  }
  std::exception_ptr exception() const override { return locked([&](World&) { return message_->error; }); }
  void synchronize() override {
    auto& w = world();
    std::vector<c10::Storage> free;
    Lock lock(w.monitor);
    const auto device = w.lanes[end_->lane].device;
    give(w, lane_of(current_stream(device)), {.wait = end_});
    memory_->swap(free);
  }
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (blocks_ || timeout != kNoTimeout) locked([&](World& w) { settle(w, end_); });
    return true;
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  PointRef end_;
  MessageRef message_;
  Kept memory_;
  Tensors results_;
  bool blocks_;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name, double timeout)
      : Backend(gloo->getRank(), gloo->getSize()), all_(std::make_shared<Communicators>()),
        timeout_(Milliseconds(int64_t(1e3 * timeout))) {
    all_->gloo = std::move(gloo);
    all_->name = std::move(name);
  }
  ~SimBackend() override { shutdown(); }
  const std::string getBackendName() const override { return "sim"; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return all_->count; }
  bool supportsCoalescing() const override { return true; }

  void startCoalescing() override {
    TORCH_CHECK(!batch_, "sim: a batch has begun already");
    batch_.emplace();
  }
  WorkRef endCoalescing() override {
    auto batch = std::exchange(batch_, std::nullopt);
    TORCH_CHECK(batch, "sim: no batch has begun");
    if (batch->parts.empty()) return c10::make_intrusive<c10d::Work>();
    return queue(group_, c10d::OpType::COALESCED, "batch of " + std::to_string(batch->parts.size()), std::move(*batch));
  }

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    Step step(opts.timeout);
    for (auto& each : tensors) {
      step.add({each}, {each}, [=, all = all_](Part& part) {
        c10d::BroadcastOptions o;
        o.rootRank = opts.rootRank, o.rootTensor = opts.rootTensor;
        return std::vector{all->gloo->broadcast(part.in, o)};
      }, [](Part& part) { part.out[0].copy_(part.in[0]); });
    }
    return queue(group_, c10d::OpType::BROADCAST, "broadcast", std::move(step));
  }
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduction("all_reduce", c10d::OpType::ALLREDUCE, tensors, opts);
  }
  WorkRef allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return reduction("all_reduce", c10d::OpType::ALLREDUCE_COALESCED, tensors, opts);
  }
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    c10d::AllreduceOptions all;  // other ranks' tensors stay as they are
    all.reduceOp = opts.reduceOp, all.timeout = opts.timeout;
    return reduction("reduce", c10d::OpType::REDUCE, tensors, all, opts.rootRank);
  }
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Step step(opts.timeout);
    for (size_t i = 0; i < inputs.size(); ++i) step.add({inputs[i]}, outputs[i], gather_into());
    return queue(group_, c10d::OpType::ALLGATHER, "all_gather", std::move(step));
  }
  WorkRef _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    Step step(opts.timeout);
    for (size_t i = 0; i < inputs.size(); ++i) step.add({inputs[i]}, {outputs[i]}, gather_into());
    return queue(group_, c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor", std::move(step));
  }
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    Step step(opts.timeout);
    for (size_t i = 0; i < outputs.size(); ++i) step.add(inputs[i], {outputs[i]}, reduce_part(opts.reduceOp));
    return queue(group_, c10d::OpType::REDUCE_SCATTER, "reduce_scatter", std::move(step));
  }
  WorkRef _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    Step step(opts.timeout);
    for (size_t i = 0; i < outputs.size(); ++i) step.add({inputs[i]}, {outputs[i]}, reduce_part(opts.reduceOp));
    return queue(group_, c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", std::move(step));
  }
  WorkRef alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    Step step(opts.timeout);
    step.add({input}, {output}, [=, all = all_](Part& part) mutable {
      return std::vector{all->gloo->alltoall_base(part.out[0], part.in[0], output_sizes, input_sizes, {})};
    });
    return queue(group_, c10d::OpType::ALLTOALL_BASE, "all_to_all_single", std::move(step));
  }
  WorkRef alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    Step step(opts.timeout);
    step.add(inputs, outputs, [all = all_](Part& part) {
      std::vector<int64_t> in_sizes, out_sizes;
      Tensors in_flat, out_flat;
      for (auto& each : part.in) in_sizes.push_back(each.numel()), in_flat.push_back(each.flatten());
      for (auto& each : part.out) out_sizes.push_back(each.numel()), out_flat.push_back(each.flatten());
      part.in = {at::cat(in_flat)};
      part.in.push_back(at::empty_like(at::cat(out_flat)));
      return std::vector{all->gloo->alltoall_base(part.in[1], part.in[0], out_sizes, in_sizes, {})};
    }, [](Part& part) {
      int64_t at = 0;
      for (auto& each : part.out) {
        each.copy_(part.in[1].narrow(0, at, each.numel()).view_as(each));
        at += each.numel();
      }
    });
    return queue(group_, c10d::OpType::ALLTOALL, "all_to_all", std::move(step));
  }
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    Step step(opts.timeout);
    step.add(inputs, outputs.empty() ? Tensors{} : outputs[0], [=, all = all_](Part& part) {
      c10d::GatherOptions o;
      o.rootRank = opts.rootRank;
      std::vector<Tensors> lists;
      if (!part.out.empty()) lists.push_back(part.out);
      return std::vector{all->gloo->gather(lists, part.in, o)};
    });
    return queue(group_, c10d::OpType::GATHER, "gather", std::move(step));
  }
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    Step step(opts.timeout);
    step.add(inputs.empty() ? Tensors{} : inputs[0], outputs, [=, all = all_](Part& part) {
      c10d::ScatterOptions o;
      o.rootRank = opts.rootRank;
      std::vector<Tensors> lists;
      if (!part.in.empty()) lists.push_back(part.in);
      return std::vector{all->gloo->scatter(part.out, lists, o)};
    });
    return queue(group_, c10d::OpType::SCATTER, "scatter", std::move(step));
  }
  WorkRef send(Tensors& tensors, int peer, int) override {
    Step step(c10d::kUnsetTimeout);
    const int tag = batch_ ? 2 : 1;
    for (auto& each : tensors) {
      step.add({each}, {}, [=, all = all_](Part& part) { return std::vector{all->gloo->send(part.in, peer, tag)}; });
    }
    return queue(pair(peer), c10d::OpType::SEND, "send to rank " + std::to_string(peer), std::move(step));
  }
  WorkRef recv(Tensors& tensors, int peer, int) override {
    Step step(c10d::kUnsetTimeout);
    const int tag = batch_ ? 2 : 1;
    for (auto& each : tensors) {
      step.add({}, {each}, [=, all = all_](Part& part) { return std::vector{all->gloo->recv(part.out, peer, tag)}; });
    }
    return queue(pair(peer), c10d::OpType::RECV, "receive from rank " + std::to_string(peer), std::move(step));
  }
  WorkRef barrier(const c10d::BarrierOptions& opts) override {
    Step step(opts.timeout);
    step.device = opts.device ? opts.device->index() : current_device;
    step.blocks = true;
    step.parts.push_back({.start = [all = all_](Part&) { return std::vector{all->gloo->barrier({})}; }});
    return queue(group_, c10d::OpType::BARRIER, "barrier", std::move(step));
  }

  // All that waits ends with an error; nothing can be queued any more.
  void abort() override {
    auto& w = world();
    Lock lock(w.monitor);
    all_->aborted = true;
    for (auto& job : unfinished_) finish(w, job, failure(job->what + " of communicator " + all_->name + " was aborted"));
    unfinished_.clear();
    w.monitor.changed();
  }
  void shutdown() override {
    auto& w = world();
    Lock lock(w.monitor);
    all_->closed = true;
    w.monitor.changed();
  }

 private:
  using Start = std::function<std::vector<WorkRef>(Part&)>;

  struct Step {
    explicit Step(Milliseconds timeout = c10d::kUnsetTimeout) : timeout(timeout) {}
    void add(const Tensors& inputs, const Tensors& outputs, Start start, std::function<void(Part&)> finish = nullptr) {
      Part part{.start = std::move(start), .finish = std::move(finish)};
      for (auto& each : inputs) part.inputs.push_back(use(each, false));
      for (auto& each : outputs) part.outputs.push_back(use(each, true)), results.push_back(each);
      parts.push_back(std::move(part));
    }
    Tensor use(const Tensor& t, bool writes) {
      TORCH_CHECK(here(t), "sim: the process group of the simulated device takes its tensors only, not those of ", t.device());
      TORCH_CHECK(device < 0 || device == t.device().index(), "sim: one operation takes tensors of one device");
      device = t.device().index();
      uses.push_back(use_of(t, writes));
      keep.push_back(t);
      return seen_by_cpu(t);
    }
    Milliseconds timeout;
    DeviceIndex device = -1;
    bool blocks = false;
    std::vector<Part> parts;
    std::vector<Use> uses;
    Tensors keep, results;
  };

  std::string pair(int peer) const {
    return std::to_string(std::min(getRank(), peer)) + "-" + std::to_string(std::max(getRank(), peer));
  }

  Start gather_into() {
    return [all = all_, size = getSize()](Part& part) {
      std::vector<Tensors> chunks{part.out.size() == 1 && size > 1 ? part.out[0].view({-1}).chunk(size) : part.out};
      if (part.out.size() == 1) for (auto& each : chunks[0]) each = each.view_as(part.in[0]);
      return std::vector{all->gloo->allgather(chunks, part.in, {})};
    };
  }

  // Gloo knows no mean, and halves of it are of different precision on different machines: sums of 16 bits are made in 32.
  static bool is_narrow(const Tensor& t) { return t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf; }

  static WorkRef reduce_in_place(c10d::Backend& gloo, Tensor& sum, const c10d::ReduceOp& op) {
    c10d::AllreduceOptions o;
    o.reduceOp = op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors list{sum};
    return gloo.allreduce(list, o);
  }

  static void check_op(const c10d::ReduceOp& op) {
    TORCH_CHECK(!(op == c10d::ReduceOp::PREMUL_SUM), "sim: reductions with a factor of their own are not simulated");
  }

  WorkRef reduction(const std::string& name, c10d::OpType type, Tensors& tensors, const c10d::AllreduceOptions& opts, int root = -1) {
    check_op(opts.reduceOp);
    Step step(opts.timeout);
    const auto op = opts.reduceOp;
    const bool takes = root < 0 || root == getRank();
    for (auto& each : tensors) {
      step.add({each}, {each}, [=, all = all_](Part& part) {
        part.out[0].copy_(part.in[0]);
        if (is_narrow(part.in[0])) part.in[0] = part.in[0].to(at::kFloat);
        return std::vector{reduce_in_place(*all->gloo, part.in[0], op)};
      }, [=, size = getSize()](Part& part) {
        if (op == c10d::ReduceOp::AVG) part.in[0].div_(size);
        if (takes) part.out[0].copy_(part.in[0]);
      });
    }
    return queue(group_, type, name, std::move(step));
  }

  Start reduce_part(const c10d::ReduceOp& op) {
    check_op(op);
    return [=, all = all_, rank = getRank(), size = getSize()](Part& part) {
      Tensors flat;
      for (auto& each : part.in) flat.push_back(each.flatten());
      auto sum = flat.size() == 1 ? flat[0] : at::cat(flat);
      if (is_narrow(sum)) sum = sum.to(at::kFloat);
      reduce_in_place(*all->gloo, sum, op)->wait();
      if (op == c10d::ReduceOp::AVG) sum.div_(size);
      const auto length = part.out[0].numel();
      part.out[0].copy_(sum.narrow(0, rank * length, length).view_as(part.out[0]));
      return std::vector<WorkRef>{};
    };
  }

  WorkRef queue(const std::string& key, c10d::OpType type, const std::string& name, Step step) {
    if (batch_ && type != c10d::OpType::COALESCED) {
      for (auto& part : step.parts) batch_->parts.push_back(std::move(part));
      for (auto& use : step.uses) batch_->uses.push_back(use);
      for (auto& each : step.keep) batch_->keep.push_back(each);
      for (auto& each : step.results) batch_->results.push_back(each);
      batch_->device = step.device;
      return c10::make_intrusive<c10d::Work>();
    }
    if (step.device < 0) step.device = current_device;
    auto job = std::make_shared<Job>();
    job->what = name + " (number " + std::to_string(++all_->count) + ")";
    job->device = step.device;
    job->timeout = step.timeout.count() > 0 ? step.timeout : timeout_;
    job->parts = std::move(step.parts);
    auto memory = std::make_shared<std::vector<c10::Storage>>();
    for (auto& each : step.keep) memory->push_back(each.storage());
    const auto at_line = where();
    auto& w = world();
    PointRef end;
    size_t lane;
    {
      Lock lock(w.monitor);
      TORCH_CHECK(!all_->aborted, "sim: communicator ", all_->name, " was aborted");
      auto& channel = all_->channels[key];
      channel.name = all_->name + (key == group_ ? "" : " (ranks " + key + ")");
      if (!channel.lanes.count(step.device)) {
        auto& made = w.lanes.emplace_back();
        made.device = step.device, made.is_default = false;
        channel.lanes[step.device] = w.lanes.size() - 1;
      }
      lane = channel.lanes[step.device];
      job->message->number = ++w.messages;
      w.open_messages.insert({job->device, job->message->number});
      while (!unfinished_.empty() && unfinished_.front()->message->arrived) unfinished_.pop_front();
      unfinished_.push_back(job);
      auto before = mark(w, lane_of(current_stream(step.device)));
      end = give(w, lane, {.run = [job] {
                             for (auto& part : job->parts) {
                               for (size_t i = 0; i < part.outputs.size(); ++i) part.outputs[i].copy_(part.out[i]);
                             }
                           },
                           .what = name, .where = at_line, .uses = step.uses, .wait = before, .marks = true, .message = job->message,
                           .seconds = w.speeds.latency + bytes_of(step.uses) / w.speeds.peer, .keep = memory});
      channel.jobs.push_back(job);
      if (!std::exchange(channel.has_thread, true)) std::thread(carry_all, all_, &channel).detach();
      w.monitor.changed();
    }
    auto work = c10::make_intrusive<SimWork>(getRank(), type, end, job->message, std::move(memory), step.results, step.blocks);
    const Device device(kSim, step.device);
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector{device});
    c10::StreamGuard on(Stream(Stream::UNSAFE, device, lane));
    work->future->markCompleted(IValue(step.results));
    return work;
  }

  const std::string group_ = "group";
  CommunicatorsRef all_;
  std::deque<JobRef> unfinished_;
  Milliseconds timeout_;
  std::optional<Step> batch_;
};

inline void add_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string name, double timeout) {
  group->setBackend(kSim, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<SimBackend>(group->getBackend(c10::kCPU), std::move(name), timeout));
}

}  // namespace sim
