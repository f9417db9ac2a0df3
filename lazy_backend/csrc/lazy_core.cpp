// Makes the device the backend behind `torch._lazy`: mark_step, wait_device_ops, step closures, default device.
#include "core.h"
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/backend/lowering_context.h>
#include <torch/csrc/lazy/core/lazy_graph_executor.h>

namespace lazysched {
namespace {

using namespace torch::lazy;

struct DeviceType final : BackendDeviceType { DeviceType() { type = 0; } std::string toString() const override { return "lazysched"; } };

struct Executor final : LazyGraphExecutor {
  void SyncLiveTensorsGraph(const BackendDevice* device, c10::ArrayRef<std::string>, bool wait) override {
    GilRelease nogil;
    for (auto& r : recorders())
      if (!device || device->ordinal() == r->index) r->barrier("mark_step", "torch._lazy.mark_step()");
    if (wait) for (auto& r : recorders()) r->barrier("wait", "wait_device_ops()"), synchronize(r->index);
  }
  void MarkStep(const BackendDevice&) override { count("MarkStep"); }
};

// The device records ATen ops itself, so the parts of the interface that serve LTC's own IR are never reached.
#define UNUSED(returns, name, ...)                                                                                     \
  returns name(__VA_ARGS__) const override {                                                                           \
    TORCH_CHECK_NOT_IMPLEMENTED(false, "lazysched: " #name " belongs to torch::lazy's own IR, which the device does not use"); \
  }

struct Backend final : BackendImplInterface {
  using ContextPtr = std::unique_ptr<LoweringContext>; using Text = const std::string&;
  UNUSED(BackendDataPtr, MakeComputationDataFromTensor, const at::Tensor&, const Shape&, const BackendDevice&)
  UNUSED(BackendDataPtr, MakeComputationDataFromScalar, const at::Scalar&, const BackendDevice&)
  UNUSED(BackendDataPtr, CreateDataPlaceholder, const BackendDevice&, const Shape&)
  UNUSED(const IrBuilder*, GetIrBuilder) UNUSED(BackendDataPtr, GetComputationDataFromNode, const Node*)
  UNUSED(at::Tensor, MakeTensorFromComputationData, const BackendDataPtr, std::optional<at::ScalarType>)
  UNUSED(ContextPtr, CreateLoweringContext, Text, BackendDevice, c10::ArrayRef<const Node*>, Util::EmissionMap)
  UNUSED(ContextPtr, CreateLoweringContext, Text, BackendDevice)
  UNUSED(std::vector<BackendDataPtr>, ExecuteComputation, ComputationPtr, c10::ArrayRef<BackendDataPtr>, const BackendDevice&)
  UNUSED(std::vector<ComputationPtr>, Compile, std::vector<ComputationPtr>)
  UNUSED(std::string, GetComputationBackendText, const ComputationPtr)
  void SetRngSeed(size_t seed) const override { default_generator_buffer(current_device())->generator.set_current_seed(seed); }
  std::vector<std::string> GetCompilationDevices(Text device, c10::ArrayRef<std::string>) const override { return {device}; }
  std::shared_ptr<BackendDeviceType> GetDefaultDeviceType() const override { return std::make_shared<DeviceType>(); }
  void SetDefaultDeviceType(int8_t) override {} void PrepareToExit() const override {}
  int64_t GetDefaultDeviceOrdinal() const override { return current_device(); }
  void SetDefaultDeviceOrdinal(int64_t i) override { set_current_device(static_cast<DeviceIndex>(i)); }
  at::DeviceType EagerFallbackDeviceType() const override { return physical_type(); }
  std::vector<BackendDevice> GetBackendDevices() const override {
    std::vector<BackendDevice> all;
    for (int i = 0; i < device_count(); i++) all.emplace_back(GetDefaultDeviceType(), i);
    return all;
  }
  BackendDevice GetBackendDevice(c10::Device d) const override {
    return {GetDefaultDeviceType(), d.has_index() ? d.index() : current_device()};
  }
};

// The engine counts devices at the first backward; where that ran before our device existed, it has no thread for it.
struct EngineAccess : torch::autograd::Engine {
  static constexpr auto queues = &EngineAccess::device_ready_queues_;
  static constexpr auto start = &EngineAccess::start_device_threads;
};

void start_autograd_threads() {
  GilRelease nogil;
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.initialize_device_threads_pool();
  if ((engine.*EngineAccess::queues).empty()) (engine.*EngineAccess::start)();
}

}  // namespace

void register_lazy_core() {
  LazyGraphExecutor::Register(new Executor());
  BackendRegistrar(new Backend());
  start_autograd_threads();
}

}  // namespace lazysched
