// Makes the device the backend behind `torch._lazy`: mark_step, wait_device_ops, step closures, default device.
#include "core.h"
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/backend/lowering_context.h>
#include <torch/csrc/lazy/core/lazy_graph_executor.h>

namespace lazysched {
namespace {

using namespace torch::lazy;

struct DeviceType final : BackendDeviceType {
  DeviceType() { type = 0; }
  std::string toString() const override { return "lazysched"; }
};

void mark(const BackendDevice& device) {
  recorder(static_cast<c10::DeviceIndex>(device.ordinal())).barrier("mark_step", "torch._lazy.mark_step()");
}

struct Executor final : LazyGraphExecutor {
  void SyncLiveTensorsGraph(const BackendDevice* device, c10::ArrayRef<std::string>, bool wait) override {
    if (device) mark(*device);
    else
      for (int i = 0; i < device_count(); i++) recorder(static_cast<c10::DeviceIndex>(i)).barrier("mark_step", "torch._lazy.mark_step()");
    if (wait) wait_for_all();
  }
  void MarkStep(const BackendDevice&) override { count("MarkStep"); }
  static void wait_for_all() {
    GilRelease nogil;
    for (int i = 0; i < device_count(); i++) {
      recorder(static_cast<c10::DeviceIndex>(i)).barrier("wait", "wait_device_ops()");
      if (physical_type() == c10::kCUDA) c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(static_cast<c10::DeviceIndex>(i));
    }
  }
};

// The device records ATen ops itself, so the parts of the interface that serve LTC's own IR are never reached.
[[noreturn]] void unused(const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "lazysched: ", what, " belongs to torch::lazy's own IR, which the device does not use");
}

struct Backend final : BackendImplInterface {
  void PrepareToExit() const override {}
  void SetRngSeed(size_t seed) const override { default_generator_buffer(current_device())->generator.set_current_seed(seed); }
  const IrBuilder* GetIrBuilder() const override { unused("GetIrBuilder"); }
  BackendDataPtr MakeComputationDataFromTensor(const at::Tensor&, const Shape&, const BackendDevice&) const override { unused("MakeComputationDataFromTensor"); }
  BackendDataPtr MakeComputationDataFromScalar(const at::Scalar&, const BackendDevice&) const override { unused("MakeComputationDataFromScalar"); }
  BackendDataPtr CreateDataPlaceholder(const BackendDevice&, const Shape&) const override { unused("CreateDataPlaceholder"); }
  BackendDataPtr GetComputationDataFromNode(const Node*) const override { unused("GetComputationDataFromNode"); }
  at::Tensor MakeTensorFromComputationData(const BackendDataPtr, std::optional<at::ScalarType>) const override { unused("MakeTensorFromComputationData"); }
  std::unique_ptr<LoweringContext> CreateLoweringContext(const std::string&, BackendDevice, c10::ArrayRef<const Node*>, Util::EmissionMap) const override {
    unused("CreateLoweringContext");
  }
  std::unique_ptr<LoweringContext> CreateLoweringContext(const std::string&, BackendDevice) const override { unused("CreateLoweringContext"); }
  std::vector<std::string> GetCompilationDevices(const std::string& device, c10::ArrayRef<std::string>) const override { return {device}; }
  std::vector<ComputationPtr> Compile(std::vector<ComputationPtr>) const override { unused("Compile"); }
  std::vector<BackendDataPtr> ExecuteComputation(ComputationPtr, c10::ArrayRef<BackendDataPtr>, const BackendDevice&) const override {
    unused("ExecuteComputation");
  }
  std::shared_ptr<BackendDeviceType> GetDefaultDeviceType() const override { return std::make_shared<DeviceType>(); }
  void SetDefaultDeviceType(int8_t) override {}
  int64_t GetDefaultDeviceOrdinal() const override { return current_device(); }
  void SetDefaultDeviceOrdinal(int64_t i) override { set_current_device(static_cast<c10::DeviceIndex>(i)); }
  at::DeviceType EagerFallbackDeviceType() const override { return physical_type(); }
  std::vector<BackendDevice> GetBackendDevices() const override {
    std::vector<BackendDevice> all;
    for (int i = 0; i < device_count(); i++) all.emplace_back(GetDefaultDeviceType(), i);
    return all;
  }
  BackendDevice GetBackendDevice(c10::Device d) const override { return BackendDevice(GetDefaultDeviceType(), d.has_index() ? d.index() : current_device()); }
  std::string GetComputationBackendText(const ComputationPtr) const override { unused("GetComputationBackendText"); }
};

// The engine counts devices at the first backward; where that ran before our device existed, it has no thread for it.
struct EngineAccess : torch::autograd::Engine {
  static constexpr auto queues = &EngineAccess::device_ready_queues_;
  static constexpr auto start = &EngineAccess::start_device_threads;
};

}  // namespace

void start_autograd_threads() {
  GilRelease nogil;
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.initialize_device_threads_pool();
  if ((engine.*EngineAccess::queues).empty()) (engine.*EngineAccess::start)();
}

void register_lazy_core() {
  LazyGraphExecutor::Register(new Executor());
  static auto* registrar = new BackendRegistrar(new Backend());
  (void)registrar;
}

}  // namespace lazysched
