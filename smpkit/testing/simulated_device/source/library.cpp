// A simulated accelerator on the CPU, for tests: the device "sim". See order.h for the idea, and the package for its use.

#include "communication.h"

namespace c10::sim_registration {
C10_REGISTER_GUARD_IMPL(PrivateUse1, ::sim::Guard);
static const bool done = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &::sim::device_memory());
  at::RegisterPrivateUse1HooksInterface(new ::sim::Hooks);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &::sim::host_memory());
  at::addGlobalCallback(at::RecordFunctionCallback(&::sim::before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  return true;
}();
}  // namespace c10::sim_registration

namespace sim {
void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}
// Whether `a.data = b` is allowed, which `Module.to` asks: as between the CPU and CUDA, if both are dense.
bool can_take_data(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == c10::kStrided && from.layout() == c10::kStrided;
}
void refuse_sparse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: sparse tensors are not simulated (", op.schema().name(),
                              "); use sparse=False, or test this code on the CPU or a GPU");
}
}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }

// Sparse tensors begin with the operator that makes one; the dense fallback knows nothing of their two parts.
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::refuse_sparse>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("resize_", sim::resize_);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("view", sim::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_foreach_copy_", sim::foreach_copy_);
  m.impl("_has_compatible_shallow_copy_type", sim::can_take_data);
  m.impl("_local_scalar_dense", sim::item);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage_at);
  m.impl("record_stream", sim::record_stream);
  m.impl("_fused_sdp_choice", sim::sdp_choice);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGH(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(HIGH)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET)
  AT_FORALL_PROMOTE(PROMOTE)
}

namespace {
using sim::locked;
using Strings = std::vector<std::string>;
}  // namespace

TORCH_LIBRARY(sim, m) {
  m.def("policy(str name, int seed) -> ()", [](std::string name, int64_t seed) {
    locked([&](auto& w) { w.policy = name, w.seed = seed, w.dice.seed(seed); });
  });
  m.def("options(bool strict, bool poison, bool serial_messages, bool traced, bool lines, int capacity) -> ()",
        [](bool strict, bool poison, bool serial, bool traced, bool lines, int64_t capacity) {
          locked([&](auto& w) {
            w.strict = strict, w.poison = poison, w.serial_messages = serial, w.traced = traced, w.capacity = capacity;
            sim::lines().on = lines;
          });
        });
  m.def("speeds(float flops, float memory, float out, float back, float peer, float latency, float launch) -> ()",
        [](double flops, double memory, double out, double back, double peer, double latency, double launch) {
          locked([&](auto& w) { w.speeds = {flops, memory, out, back, peer, latency, launch}; });
        });
  m.def("hide(str[] beginnings) -> ()", [](Strings beginnings) { sim::lines().hidden = beginnings; });
  m.def("races() -> str[]", [] {
    return locked([](auto& w) {
      w.known_races.clear();
      return std::exchange(w.races, {});
    });
  });
  m.def("now() -> float", [] { return locked([](auto& w) { return w.host_time; }); });
  m.def("spans() -> (str[] what, int[] device, int[] stream, float[] begin, float[] end)", [] {
    return locked([](auto& w) {
      Strings what;
      std::vector<int64_t> device, stream;
      std::vector<double> begin, end;
      for (auto& each : std::exchange(w.spans, {})) {
        what.push_back(each.what), device.push_back(each.device), stream.push_back(w.lanes[each.lane].is_default ? 0 : each.lane);
        begin.push_back(each.begin), end.push_back(each.end);
      }
      return std::make_tuple(what, device, stream, begin, end);
    });
  });
  m.def("waits() -> (str[] what, str[] where, int[] times)", [] {
    return locked([](auto& w) {
      Strings what, where;
      std::vector<int64_t> times;
      for (auto& [each, n] : w.waited) what.push_back(each.first), where.push_back(each.second), times.push_back(n);
      return std::make_tuple(what, where, times);
    });
  });
  m.def("sleep(float seconds) -> ()", &sim::sleep);
  m.def("host_access(Tensor tensor, bool writes, str what) -> ()", &sim::host_access);
  m.def("host_register(int pointer, int size) -> ()", &sim::host_register);
  m.def("host_unregister(int pointer) -> ()", &sim::host_unregister);
  m.def("default_generator(int device) -> Generator?", [](int64_t d) { return std::optional<at::Generator>(sim::default_generator(d)); });
  m.def("get_rng_state(int device) -> Tensor", [](int64_t d) { return sim::default_generator(d).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t d, at::Tensor state) {
    auto generator = sim::default_generator(d);
    generator.set_state(state);
  });
  m.def("manual_seed(int device, int seed) -> ()", [](int64_t d, int64_t seed) {
    auto generator = sim::default_generator(d);
    generator.set_current_seed(seed);
  });
  m.def("add_backend", &sim::add_backend);
}
