// Operators. Of each, a run on meta tensors tells shapes and dtypes of the outputs, once for arguments that are alike,
// and the CPU's kernel is queued on aliases of device memory. An operator whose outputs depend on the data (nonzero,
// indexing with a mask) has no run on meta tensors: it waits for its stream, as CUDA's do.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace sim {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

inline bool here(const Tensor& t) { return t.defined() && t.device().type() == kSim; }
inline size_t lane_of(const Tensor& t) { return lane_of(current_stream(t.device().index())); }

// The memory of a tensor as a tensor of the CPU; it does not keep the memory.
inline Tensor seen_by_cpu(const Tensor& t) {
  auto options = c10::TensorOptions().dtype(t.dtype()).device(c10::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  auto seen = at::from_blob(t.unsafeGetTensorImpl()->mutable_data(), t.sizes(), t.strides(), options);
  if (t.is_conj()) seen._set_conj(true);
  if (t.is_neg()) seen._set_neg(true);
  return seen;
}

inline Use use_of(const Tensor& t, bool writes) {
  const auto* low = static_cast<const char*>(t.unsafeGetTensorImpl()->data());
  Use use{low, low, writes, size_t(t.element_size())};
  if (!t.numel()) return use;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // (stride, count)
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i)) dimensions.push_back({t.stride(i) * t.element_size(), t.size(i)});
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t last = 0;
  for (auto [stride, size] : dimensions) {
    last += (size - 1) * stride;
    if (use.steps.empty() && size_t(stride) == use.size) use.size *= size;
    else use.steps.insert(use.steps.begin(), {size, stride});
  }
  use.high = low + last + t.element_size();
  return use;
}

inline size_t bytes_of(const std::vector<Use>& uses) {
  size_t sum = 0;
  for (auto& use : uses) {
    size_t bytes = use.is_dense() ? use.high - use.low : use.size;
    for (auto [size, _] : use.steps) bytes *= size;
    sum += bytes;
  }
  return sum;
}

inline Tensor on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), DispatchKeySet(DispatchKey::PrivateUse1), dtype);
}

inline void resize_to(const Tensor& t, at::IntArrayRef sizes) {
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t bytes = (t.storage_offset() + t.numel()) * t.element_size();
  if (bytes > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
}

// Operations of matrix products, which alone are worth counting; everything else costs its bytes.
inline double flops_of(const std::string& name, const Stack& stack, size_t begin) {
  auto shape = [&](size_t i) { return stack[begin + i].toTensor().sizes(); };
  auto product = [](at::IntArrayRef a, at::IntArrayRef b) {
    double flops = 2.0 * b.back();
    for (auto size : a) flops *= size;
    return flops;
  };
  if (name == "aten::mm" || name == "aten::bmm") return product(shape(0), shape(1));
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(shape(1), shape(2));
  return 0;
}

struct Call {
  const c10::OperatorHandle& op;
  Stack meta, exec;
  std::vector<Use> uses;
  std::optional<Device> device;
  std::map<const at::TensorImpl*, std::pair<Tensor, Tensor>> twins;  // of the originals
  std::map<const at::TensorImpl*, Tensor> originals;                // of the meta tensors

  std::pair<Tensor, Tensor> twin(const Tensor& t, bool writes) {
    if (!t.defined()) return {t, t};
    if (auto found = twins.find(t.unsafeGetTensorImpl()); found != twins.end()) {
      if (writes) uses.push_back(use_of(t, true));
      return found->second;
    }
    std::pair<Tensor, Tensor> made;
    auto meta_of = [&] {
      return at::empty_strided(t.sizes(), t.strides(), c10::TensorOptions().dtype(t.dtype()).device(c10::kMeta));
    };
    if (here(t)) {
      if (device && device->type() == kSim && device->has_index() && t.dim()) {
        TORCH_CHECK(*device == t.device(), op.schema().operator_name().name, ": Expected all tensors to be on the same device, but found ",
                    *device, " and ", t.device());
      }
      if (!device || t.dim()) device = t.device();
      made = {meta_of(), seen_by_cpu(t)};
      uses.push_back(use_of(t, writes));
    } else {
      // As on CUDA: `x[indices]` takes indices of the host, `index_select` and the others do not.
      static const std::set<std::string> take_host_indices{"aten::index", "aten::index_put", "aten::index_put_",
                                                           "aten::_index_put_impl_"};
      TORCH_CHECK(!t.dim() || t.device().type() != c10::kCPU || take_host_indices.count(op.schema().operator_name().name),
                  op.schema().operator_name().name, ": Expected all tensors to be on the same device, but found sim and cpu");
      // Of the host: its value now. A meta kernel in Python may give its copy a PyObject; what is queued must have none.
      auto value = [&] {
        auto copy = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      };
      made = {t.dim() ? meta_of() : value(), value()};
    }
    originals[made.first.unsafeGetTensorImpl()] = t;
    return twins[t.unsafeGetTensorImpl()] = made;
  }

  void argument(const IValue& value, bool writes) {
    if (value.isTensor()) {
      auto [m, e] = twin(value.toTensor(), writes);
      meta.emplace_back(m), exec.emplace_back(e);
    } else if (value.isTensorList()) {
      c10::List<Tensor> ms, es;
      for (const Tensor& t : value.toTensorVector()) {
        auto [m, e] = twin(t, writes);
        ms.push_back(m), es.push_back(e);
      }
      meta.emplace_back(ms), exec.emplace_back(es);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> ms, es;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        if (t && t->defined()) {
          auto [m, e] = twin(*t, writes);
          ms.push_back(m), es.push_back(e);
        } else {
          ms.push_back(std::nullopt), es.push_back(std::nullopt);
        }
      }
      meta.emplace_back(ms), exec.emplace_back(es);
    } else if (value.isDevice()) {
      device = value.toDevice();
      meta.emplace_back(Device(c10::kMeta)), exec.emplace_back(Device(c10::kCPU));
    } else if (value.isGenerator()) {
      meta.emplace_back(), exec.emplace_back();
    } else {
      meta.push_back(value), exec.push_back(value);
    }
  }
};

// --- what runs on meta tensors have said ----------------------------------------------------------------------------------

// They depend on the shapes and dtypes of tensors and on the other arguments alone. Many of these kernels are written in
// Python, where one takes longer than everything else that an operator does here. So each is asked once.
struct KnownShapes {
  struct One {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    Tensor made() const { return at::empty_strided(sizes, strides, c10::TensorOptions().dtype(dtype).device(c10::kMeta)); }
  };
  struct Result {
    std::vector<One> tensors;
    bool is_list = false, is_undefined = false;  // neither, and no tensors: an argument, which the operator has written
  };
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<Result>> known;
};
inline KnownShapes& known_shapes() {
  static auto* all = new KnownShapes;
  return *all;
}

struct Key {
  std::string text;
  bool is_whole = true;  // otherwise something else may matter, too
  void add(int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(double number) { text.append(reinterpret_cast<const char*>(&number), sizeof number); }
  void add(const std::string& name) { add(int64_t(name.size())), text += name; }
  void add(at::IntArrayRef numbers) {
    add(int64_t(numbers.size()));
    for (auto each : numbers) add(each);
  }
  void add(const Tensor& t) {
    if (!t.defined()) return text.push_back('u');
    const bool is_number = !here(t) && !t.dim();
    is_whole &= !is_number || t.unsafeGetTensorImpl()->is_wrapped_number();  // of others the value may count
    text.push_back(is_number ? 'n' : 't');
    add(int64_t(t.scalar_type())), add(t.sizes()), add(t.strides());
  }
  void add(const IValue& value) {
    if (value.isTensor()) add(value.toTensor());
    else if (value.isTensorList()) {
      text.push_back('l'), add(int64_t(value.toListRef().size()));
      for (const Tensor& t : value.toTensorVector()) add(t);
    } else if (value.isOptionalTensorList()) {
      text.push_back('o'), add(int64_t(value.toListRef().size()));
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) add(t ? *t : Tensor());
    } else if (value.isNone()) text.push_back('-');
    else if (value.isBool()) text.push_back('b'), add(int64_t(value.toBool()));
    else if (value.isInt()) text.push_back('i'), add(value.toInt());
    else if (value.isDouble()) text.push_back('f'), add(value.toDouble());
    else if (value.isString()) text.push_back('s'), add(value.toStringRef());
    else if (value.isIntList()) text.push_back('I'), add(at::IntArrayRef(value.toIntVector()));
    else if (value.isDevice()) text.push_back('d');
    else if (value.isGenerator()) text.push_back('g');
    else is_whole = false;
  }
};

inline Key key_of(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  Key key;
  key.add(op.schema().operator_name().name), key.add(op.schema().operator_name().overload_name);
  key.add(int64_t(c10::typeMetaToScalarType(at::get_default_dtype())));
  for (size_t i = 0; i < op.schema().arguments().size(); ++i) key.add(stack[begin + i]);
  return key;
}

// Put meta tensors like the results into the stack, if the same has been asked before.
inline bool recall(const Key& key, Stack& meta) {
  auto& all = known_shapes();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.known.find(key.text);
  if (!key.is_whole || found == all.known.end()) return false;
  meta.clear();
  for (const auto& result : found->second) {
    if (result.is_list) {
      c10::List<Tensor> list;
      for (auto& each : result.tensors) list.push_back(each.made());
      meta.emplace_back(list);
    } else if (result.is_undefined) meta.emplace_back(Tensor());
    else if (result.tensors.empty()) meta.emplace_back();
    else meta.emplace_back(result.tensors[0].made());
  }
  return true;
}

// Keep what the stack has after a run, unless the run has resized an argument or returned one that it does not write.
inline void remember(const Key& key, const c10::OperatorHandle& op, const Call& call) {
  if (!key.is_whole) return;
  for (auto& [meta, original] : call.originals) {
    if (original.sizes() != meta->sizes() || original.strides() != meta->strides()) return;
  }
  std::vector<KnownShapes::Result> results;
  bool is_known = true;
  auto one = [&](KnownShapes::Result& result, const Tensor& t) {
    is_known &= t.defined() && !call.originals.count(t.unsafeGetTensorImpl());
    if (is_known) result.tensors.push_back({t.sizes().vec(), t.strides().vec(), t.scalar_type()});
  };
  for (size_t i = 0; i < op.schema().returns().size(); ++i) {
    auto& result = results.emplace_back();
    const auto& value = call.meta[i];
    if (op.schema().returns()[i].alias_info()) continue;
    if (value.isTensor() && !value.toTensor().defined()) result.is_undefined = true;
    else if (value.isTensor()) one(result, value.toTensor());
    else if (value.isTensorList()) {
      result.is_list = true;
      for (const Tensor& t : value.toTensorVector()) one(result, t);
    } else is_known = false;
  }
  if (!is_known) return;
  auto& all = known_shapes();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.known.emplace(key.text, std::move(results));
}

inline void put(const std::string& name, const Tensor& to, const Tensor& from) {
  // The CPU's batch norms leave out what nobody reads: statistics in evaluation, and gradients that are not asked for.
  if (from.numel() == 0 && name.find("batch_norm") != std::string::npos) return;
  TORCH_CHECK(to.sizes() == from.sizes(), "sim: the run on meta tensors says ", to.sizes(), ", the CPU ", from.sizes());
  to.copy_(from);
}

// Where the CPU's kernels want other dtypes than those of accelerators give.
inline void adapt(const std::string& name, Stack& exec) {
  if (name == "aten::native_layer_norm_backward" || name == "aten::native_group_norm_backward") {
    // The statistics of 16 bits are 32 bits wide on accelerators; on the CPU they are only if the weight is.
    const auto input = exec[1].toTensor();
    const size_t first = name == "aten::native_layer_norm_backward" ? 3 : 2;
    const auto& weight = exec[first + 2];
    if (weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != input.scalar_type()) return;
    for (size_t i = first; i < first + 2; ++i) exec[i] = exec[i].toTensor().to(input.scalar_type());
  }
}

// The CPU's kernel draws from the CPU's own generator, which the host may use at this moment in another thread.
inline bool run_dropout(uint64_t seed, Stack& exec) {
  const auto input = exec[0].toTensor();
  const double p = exec[1].toDouble();
  if (!exec[2].isNone() && !exec[2].toBool()) return false;
  auto mask = at::empty(input.sizes(), c10::TensorOptions().dtype(c10::kBool).device(c10::kCPU));
  mask.bernoulli_(1 - p, at::make_generator<at::CPUGeneratorImpl>(seed));
  exec = {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
  return true;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size(), begin = stack->size() - num_arguments;
  const auto name = schema.operator_name().name;
  const auto at_line = where();
  Call call{op};
  std::optional<uint64_t> seed;
  std::optional<size_t> generator_at;
  const bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  {
    Below below;
    for (size_t i = 0; i < num_arguments; ++i) {
      const auto& value = (*stack)[begin + i];
      const auto* alias = schema.arguments()[i].alias_info();
      call.argument(value, alias && alias->isWrite());
      if (schema.arguments()[i].name() == "generator") generator_at = i;
      if (value.isGenerator()) seed = draw(value.toGenerator());
    }
  }
  // Some kernels make a scalar `out` larger on their way (mse_loss), which an alias cannot become: they get an empty one.
  std::vector<std::pair<size_t, Tensor>> scalars;
  for (size_t i = 0; i < num_arguments; ++i) {
    const auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !schema.arguments()[i].is_out() || !value.isTensor() || value.toTensor().dim() || !here(value.toTensor())) continue;
    const auto same = std::count_if(stack->end() - num_arguments, stack->end(), [&](const IValue& other) {
      return other.isTensor() && other.toTensor().is_same(value.toTensor());
    });
    if (same > 1) continue;
    Below below;
    const auto dtype = value.toTensor().scalar_type();
    scalars.push_back({i, call.exec[i].toTensor()});
    call.exec[i] = at::empty({0}, c10::TensorOptions().dtype(dtype).device(c10::kCPU));
    call.meta[i] = at::empty({0}, c10::TensorOptions().dtype(dtype).device(c10::kMeta));
  }
  if (!call.device || call.device->type() != kSim || !call.device->has_index()) call.device = Device(kSim, current_device);
  c10::DeviceGuard on(*call.device);
  if (seeded && !seed) seed = draw(default_generator(call.device->index()));
  const auto lane = lane_of(current_stream(call.device->index()));
  auto& w = world();
  const auto flops = flops_of(name, *stack, begin);
  auto seconds = [&] { return flops / w.speeds.flops + bytes_of(call.uses) / w.speeds.memory; };

  bool queued = true;
  {
    Below below;
    const auto key = key_of(op, *stack, begin);
    if (!recall(key, call.meta)) {
      try {
        op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &call.meta);
        remember(key, op, call);
      } catch (const std::exception&) {
        queued = false;  // the outputs depend on the data, or there is no meta kernel
      }
    }
  }

  auto run = [op, name, seed, generator_at, scalars](Stack& exec) {
    const Stack given(scalars.empty() ? Stack{} : exec);
    adapt(name, exec);
    if (seed && name == "aten::native_dropout" && run_dropout(*seed, exec)) return;
    if (seed && generator_at) exec[*generator_at] = at::make_generator<at::CPUGeneratorImpl>(*seed);
    if (seed && !generator_at) {  // the kernel takes the CPU's own generator
      auto generator = at::detail::getDefaultCPUGenerator();
      const auto kept = generator.get_state();
      generator.set_current_seed(*seed);
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &exec);
      generator.set_state(kept);
    } else {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &exec);
    }
    for (auto& [i, alias] : scalars) alias.copy_(given[i].toTensor());
  };
  if (!queued) {
    Lock lock(w.monitor);
    ++w.waited[{name, at_line}];
    settle(w, give(w, lane, {.what = name, .where = at_line, .uses = call.uses, .marks = true, .seconds = seconds()}));
    Below below;
    run(call.exec);
  }

  Stack results;
  std::vector<std::pair<size_t, std::pair<int, Tensor>>> outs;  // of which result, which part of a list, and where to
  auto& shapes = queued ? call.meta : call.exec;
  std::vector<std::pair<Tensor, Tensor>> late;
  std::vector<Use> late_uses;
  auto made = [&](const Tensor& like, size_t i, int part) -> Tensor {
    if (!like.defined()) return like;
    if (queued) {
      if (auto found = call.originals.find(like.unsafeGetTensorImpl()); found != call.originals.end()) return found->second;
    }
    Tensor out;
    {
      Below below;
      out = on_device(like.sizes(), like.strides(), like.scalar_type());
    }
    auto twin = seen_by_cpu(out);
    call.uses.push_back(use_of(out, true));
    if (queued) outs.push_back({i, {part, twin}});
    else late.push_back({twin, like}), late_uses.push_back(use_of(out, true));
    return out;
  };
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t j = 0; j < num_arguments; ++j) {
        const auto* theirs = schema.arguments()[j].alias_info();
        if (theirs && *theirs == *alias) {
          results.push_back((*stack)[begin + j]);
          break;
        }
      }
      continue;
    }
    TORCH_CHECK(!alias, "sim: no kernel for the view ", schema.operator_name());
    const auto& value = shapes[i];
    if (value.isTensor()) {
      results.emplace_back(made(value.toTensor(), i, -1));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      int part = 0;
      for (const Tensor& t : value.toTensorVector()) list.push_back(made(t, i, part++));
      results.emplace_back(list);
    } else {
      results.push_back(value);
    }
  }
  if (queued) {  // an `out` of another size
    for (auto& [impl, twin] : call.twins) {
      auto original = call.originals[twin.first.unsafeGetTensorImpl()];
      if (!here(original) || original.sizes() == twin.first.sizes()) continue;
      resize_to(original, twin.first.sizes());
      Below below;
      auto fresh = seen_by_cpu(original);
      call.uses.push_back(use_of(original, true));
      for (auto& value : call.exec) {
        if (value.isTensor() && value.toTensor().is_same(twin.second)) value = fresh;
      }
    }
  }
  {
    Lock lock(w.monitor);
    if (queued) {
      give(w, lane, {.run = [run, exec = std::move(call.exec), outs, name]() mutable {
                       run(exec);
                       for (auto& [i, out] : outs) {
                         put(name, out.second, out.first < 0 ? exec[i].toTensor() : exec[i].toTensorList().get(out.first));
                       }
                     },
                     .what = name, .where = at_line, .uses = call.uses, .seconds = seconds()});
    } else if (!late.empty()) {
      give(w, lane, {.run = [late, name] { for (auto& [to, from] : late) put(name, to, from); },
                     .what = name, .where = at_line, .uses = late_uses});
    }
  }
  stack->erase(stack->begin() + begin, stack->end());
  for (auto& each : results) stack->push_back(std::move(each));
}

// No lock is held while a handle of the user's tensor is copied: since torch 2.12 that may take the GIL.
inline void queue_copy(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (!self.numel()) return;
  auto& w = world();
  const auto at_line = where();
  std::vector<Use> uses{use_of(self, false), use_of(dst, true)};
  const double bytes = double(dst.numel()) * dst.element_size();
  Below below;
  if (here(self) && here(dst)) {  // on the source's stream; the target's waits, and is waited for
    Tensor from = seen_by_cpu(self), to = seen_by_cpu(dst);
    const auto one = lane_of(self), other = lane_of(dst);
    const bool same = self.device() == dst.device();
    Lock lock(w.monitor);
    PointRef before = same ? nullptr : mark(w, other);
    auto copied = give(w, one, {.run = [from, to] { to.copy_(from); }, .what = "copy", .where = at_line, .uses = uses,
                                .wait = before, .marks = true,
                                .seconds = same ? 2 * bytes / w.speeds.memory : w.speeds.latency + bytes / w.speeds.peer});
    if (!same) give(w, other, {.wait = copied});
    return;
  }
  const bool out = here(self);
  const auto& host = out ? dst : self;
  c10::DeviceGuard on(out ? self.device() : dst.device());
  const bool pinned = at::detail::getPrivateUse1Hooks().isPinnedPtr(host.unsafeGetTensorImpl()->data());
  Tensor to = seen_by_cpu(dst);
  Tensor from = out || pinned ? seen_by_cpu(self) : self.clone();  // pageable: the driver has taken it by the return
  Lock lock(w.monitor);
  const auto lane = lane_of(out ? self : dst);
  give(w, lane, {.run = [from, to] { to.copy_(from); }, .what = out ? "copy to the host" : "copy to the device",
                 .where = at_line, .uses = uses,
                 .seconds = w.speeds.latency + bytes / (out ? w.speeds.out : w.speeds.back), .engine = out ? kOut : kBack});
  if (pinned) host_memory().record_event(host.unsafeGetTensorImpl()->mutable_data(), nullptr, current_stream(current_device));
  if (non_blocking && (pinned || !out)) return;
  ++w.waited[{out ? "copy to the host" : "copy to the device", at_line}];
  settle(w, mark(w, lane));
}

inline Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  queue_copy(self, dst, non_blocking);
  return dst;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (here(dst)) resize_to(dst, self.sizes());
  return copy_from(self, dst, false);
}

inline at::Scalar item(const Tensor& self) {
  auto& w = world();
  const auto at_line = where();
  Lock lock(w.monitor);
  ++w.waited[{"item", at_line}];
  settle(w, give(w, lane_of(self), {.what = "item", .where = at_line, .uses = {use_of(self, false)}, .marks = true,
                                    .seconds = w.speeds.latency}));
  Below below;
  return at::_local_scalar_dense(seen_by_cpu(self));
}

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard on(c10::device_or_default(device));
  return on_device(size, stride, c10::dtype_or_default(dtype));
}
inline Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
inline const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  c10::DeviceGuard on(self.device());
  resize_to(self, C10_AS_INTARRAYREF_SLOW(size));
  return self;
}
inline Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
inline Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
inline Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
inline void record_stream(Tensor& self, Stream stream) { device_memory().recordStream(self.storage().data_ptr(), stream); }
inline int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}
inline void convolution(const c10::OperatorHandle&, Stack* stack) {
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {  // without the bias' sizes, third from the front
  const auto weight = (*stack)[stack->size() - 8].toTensor();
  const bool transposed = (*stack)[stack->size() - 4].toBool();
  const auto groups = (*stack)[stack->size() - 2].toInt();
  c10::List<int64_t> sizes;
  sizes.push_back(transposed ? weight.size(1) * groups : weight.size(0));
  stack->insert(stack->end() - 7, IValue(sizes));
  fallback(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

// A kernel that does nothing for so long, as `torch.cuda._sleep`.
inline void sleep(double seconds) {
  auto& w = world();
  const auto at_line = where();
  Lock lock(w.monitor);
  give(w, lane_of(current_stream(current_device)), {.what = "sleep", .where = at_line, .seconds = seconds});
}

// --- uses by the host -----------------------------------------------------------------------------------------------------

// Compare what the host reads or writes in pinned memory with what the device does there.
inline void host_use(const Use& use, const std::string& what) {
  auto& w = world();
  {
    Lock lock(w.monitor);
    auto* region = region_of(w, use.low);
    if (!region || region->on_device || region->accesses.empty()) return;
  }
  const auto at_line = where();
  Lock lock(w.monitor);
  look(w, kHost, use, what, at_line);
}

inline void host_access(const Tensor& t, bool writes, std::string what) { host_use(use_of(t, writes), what); }

inline bool is_in_pinned(const Tensor& t) {
  auto& w = world();
  Lock lock(w.monitor);
  auto* region = region_of(w, t.unsafeGetTensorImpl()->data());
  return region && !region->on_device && !region->accesses.empty();
}

// Called before each operator. Of the CPU's, those count that have a kernel of their own: the others call these.
inline std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (in_kernel) return nullptr;
  bool any = false, device = false;
  auto each = [&](const IValue& value, auto&& visit) {
    if (value.isTensor()) visit(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) visit(t);
  };
  auto is_plain = [](const Tensor& t) {
    return t.defined() && t.device().is_cpu() && t.layout() == c10::kStrided && t.has_storage() && t.numel();
  };
  for (const auto& input : function.inputs()) {
    each(input, [&](const Tensor& t) {
      device |= here(t);
      any |= is_plain(t) && is_in_pinned(t);
    });
  }
  if (!any || device) return nullptr;
  const auto name = function.operator_name();
  if (!name) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  static const std::set<std::string> only_look{"aten::set_", "aten::resize_", "aten::as_strided", "aten::view", "aten::_reshape_alias",
                                               "aten::unfold", "aten::view_as_real", "aten::view_as_complex", "aten::is_set_to",
                                               "aten::is_pinned", "aten::record_stream", "aten::_has_same_storage_numel"};
  if (!op || only_look.count(name->name) || (!op->hasKernelForDispatchKey(DispatchKey::CPU) && name->name != "aten::copy_")) return nullptr;
  const auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < function.inputs().size() && i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && !alias->isWrite()) return nullptr;  // a view
    each(function.inputs()[i], [&](const Tensor& t) {
      if (is_plain(t)) host_use(use_of(t, alias && alias->isWrite()), name->name);
    });
  }
  return nullptr;
}

}  // namespace sim
