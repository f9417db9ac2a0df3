// Runs a program: ATen calls through the dispatcher, Triton kernels through the driver. Runs at every barrier.
#include "program.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstring>

namespace lazysched {
namespace {

using LaunchFn = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using ErrorFn = int (*)(int, const char**);

// The driver is found at run time, so that the core builds without CUDA.
LaunchFn launch_fn() {
  static auto* fn = [] {
    void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    TORCH_CHECK(lib, "lazysched: libcuda.so.1 cannot be loaded: ", dlerror());
    return reinterpret_cast<LaunchFn>(dlsym(lib, "cuLaunchKernel"));
  }();
  return fn;
}

std::string driver_error(int code) {
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  auto fn = reinterpret_cast<ErrorFn>(dlsym(lib, "cuGetErrorString"));
  const char* text = nullptr;
  if (fn) fn(code, &text);
  return text ? text : std::to_string(code);
}

at::Tensor view(const Program::View& v, const std::vector<c10::Storage>& slots) {
  if (v.slot < 0) return {};
  const auto& s = slots[v.slot];
  TORCH_INTERNAL_ASSERT(s, "slot ", v.slot, " is empty");
  auto keys = c10::DispatchKeySet(s.device_type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto t = alias_storage(s, keys, v.dtype, v.size, v.stride, v.offset);
  if (v.conj) t._set_conj(true);
  if (v.neg) t._set_neg(true);
  return t;
}

void to_device(c10::Storage& s) {
  auto bytes = at::empty({0}, at::TensorOptions().dtype(at::kByte)).set_(s, 0, {static_cast<int64_t>(s.nbytes())}, {1});
  s = bytes.to(physical_device(current_device())).storage();
}

// Ops that draw without a generator argument use the CPU's default one: lend it our state for the call.
struct LentState {
  explicit LentState(at::Generator g) : ours(std::move(g)), theirs(at::globalContext().defaultGenerator(c10::kCPU)) {
    saved = theirs.get_state();
    theirs.set_state(ours.get_state());
  }
  ~LentState() {
    ours.set_state(theirs.get_state());
    theirs.set_state(saved);
  }
  at::Generator ours, theirs;
  at::Tensor saved;
};

}  // namespace

void* physical_stream(c10::DeviceIndex i) {
  if (physical_type() != c10::kCUDA) return nullptr;
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(physical_device(i)).native_handle();
}

void Program::call(const Call& c, std::vector<c10::Storage>& slots, Trace& trace, c10::DeviceIndex device) {
  Stack stack;
  stack.reserve(c.args.size() + 2);
  size_t operand = 0;
  for (const auto& a : c.args) {
    switch (a.kind) {
      case ArgKind::Tensor: stack.emplace_back(view(c.views[operand++], slots)); break;
      case ArgKind::TensorList: {
        c10::List<at::Tensor> list;
        list.reserve(a.count);
        for (int k = 0; k < a.count; k++) list.push_back(view(c.views[operand++], slots));
        stack.emplace_back(std::move(list));
        break;
      }
      case ArgKind::OptTensorList: {
        c10::List<std::optional<at::Tensor>> list;
        for (int k = 0; k < a.count; k++) {
          auto t = view(c.views[operand++], slots);
          list.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
        }
        stack.emplace_back(std::move(list));
        break;
      }
      case ArgKind::Scalar: stack.push_back(trace.scalars[a.first]); break;
      case ArgKind::ScalarList:
        if (a.doubles) {
          c10::List<double> list;
          for (int k = 0; k < a.count; k++) list.push_back(trace.scalars[a.first + k].toDouble());
          stack.emplace_back(std::move(list));
        } else {
          c10::List<c10::Scalar> list;
          for (int k = 0; k < a.count; k++) list.push_back(trace.scalars[a.first + k].toScalar());
          stack.emplace_back(std::move(list));
        }
        break;
      case ArgKind::HostScalar: {
        auto t = at::scalar_tensor(trace.scalars[a.first].toScalar(), at::TensorOptions().dtype(a.dtype));
        if (a.wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
        stack.emplace_back(std::move(t));
        break;
      }
      case ArgKind::Generator:
        if (c.generator >= 0) stack.emplace_back(trace.buffers[c.generator]->generator);
        else stack.emplace_back();
        break;
      case ArgKind::Device: stack.emplace_back(physical_device(device)); break;
      default: stack.push_back(a.value);
    }
  }
  {
    std::optional<LentState> lent;
    if (c.generator >= 0 && !c.op->generator_arg && physical_type() == c10::kCPU) lent.emplace(trace.buffers[c.generator]->generator);
    // An op with several outputs hands back references to its arguments after it has dropped them from the stack.
    const Stack held = c.op->return_alias.size() > 1 ? stack : Stack();
    c.op->handle.callBoxed(&stack);
  }
  if (c.outs == static_cast<int32_t>(c.views.size())) return;
  // New outputs: take their storage where it has the layout that was promised at record time, else copy.
  std::vector<at::Tensor> results;
  for (size_t r = 0; r < stack.size(); r++) {
    if (c.op->return_alias[r] >= 0) continue;
    if (stack[r].isTensor()) results.push_back(stack[r].toTensor());
    else if (stack[r].isTensorList())
      for (const at::Tensor& t : stack[r].toTensorVector()) results.push_back(t);
  }
  for (size_t k = 0; k + c.outs < c.views.size() && k < results.size(); k++) {
    const auto& want = c.views[c.outs + k];
    const auto& got = results[k];
    if (want.slot < 0 || !got.defined()) continue;
    // Attention returns its random seed in host memory and wants it back there, so the device is the op's own choice.
    bool alias = got.storage_offset() != 0 || got.is_conj() || got.is_neg();
    for (int32_t v = 0; v < c.outs && !alias; v++) alias = c.views[v].slot >= 0 && slots[c.views[v].slot].unsafeGetStorageImpl() == got.storage().unsafeGetStorageImpl();
    for (size_t j = 0; j < k && !alias; j++) alias = results[j].defined() && results[j].is_alias_of(got);
    if (!alias && got.scalar_type() == want.dtype && got.sizes() == c10::IntArrayRef(want.size) && got.strides() == c10::IntArrayRef(want.stride)) {
      slots[want.slot] = got.storage();
      continue;
    }
    auto fresh = at::empty_strided(want.size, want.stride, at::TensorOptions().dtype(want.dtype).device(got.device()));
    if (got.numel() || !fresh.numel()) {
      TORCH_CHECK(got.sizes() == c10::IntArrayRef(want.size), c.op->name, " promised shape ", c10::IntArrayRef(want.size), ", gave ", got.sizes());
      fresh.copy_(got);
    }  // else statistics that the op leaves out in inference: nobody may read them, in eager mode either
    slots[want.slot] = fresh.storage();
  }
}

void Program::launch(const Launch& l, std::vector<c10::Storage>& slots, Trace& trace, void* stream) {
  uint64_t values[136];
  void* params[136];
  size_t n = 0;
  for (const auto& a : l.args) {
    params[n] = &values[n];
    auto number = [&] { return trace.scalars[a.scalar].toScalar(); };
    switch (a.kind) {
      case LaunchArg::Pointer:
        if (slots[a.slot].device_type() != c10::kCUDA) to_device(slots[a.slot]);
        values[n] = reinterpret_cast<uint64_t>(static_cast<const char*>(slots[a.slot].data()) + a.value); break;
      case LaunchArg::Float: {
        float f = static_cast<float>(number().toDouble());
        std::memcpy(&values[n], &f, sizeof f);
        break;
      }
      case LaunchArg::Double: {
        double d = number().toDouble();
        std::memcpy(&values[n], &d, sizeof d);
        break;
      }
      default: values[n] = static_cast<uint64_t>(a.scalar >= 0 ? number().toLong() : a.value);
    }
    n++;
  }
  for (int k = 0; k < 2; k++) {  // Triton's scratch pointers (global, profile), unused by our kernels
    values[n] = 0;
    params[n] = &values[n];
    n++;
  }
  int code = launch_fn()(l.function, l.grid[0], l.grid[1], l.grid[2], l.threads, 1, 1, l.shared, stream, params, nullptr);
  TORCH_CHECK(code == 0, "kernel launch failed: ", driver_error(code));
}

void Program::run(Trace& trace, c10::DeviceIndex device, int32_t& failed) {
  PlainDispatch plain;
  c10::OptionalDeviceGuard guard;
  if (physical_type() == c10::kCUDA) guard.reset_device(physical_device(device));
  void* stream = launches.empty() ? nullptr : physical_stream(device);
  std::vector<c10::Storage> store(slots);
  for (auto [buffer, slot] : inputs) {
    auto& b = trace.buffers[buffer];
    if (!b->physical) {  // read before anything wrote it: torch.empty
      b->physical = at::empty({static_cast<int64_t>(b->nbytes)}, at::TensorOptions().dtype(at::kByte).device(physical_device(device))).storage();
    }
    store[slot] = b->physical;
    if (!trace.live[buffer]) b->physical = c10::Storage();  // donated: its memory is free after its last use
  }
  size_t done = 0;
  auto hand_out = [&] {
    for (const auto& o : outputs)
      if (o.ready < static_cast<int32_t>(done)) trace.buffers[o.buffer]->physical = store[o.slot];
  };
  try {
    for (; done < steps.size(); done++) {
      const auto& s = steps[done];
      failed = s.instr;
      switch (s.kind) {
        case Step::kCall: call(calls[s.index], store, trace, device); break;
        case Step::kLaunch: launch(launches[s.index], store, trace, stream); break;
        case Step::kAlloc: {
          const auto& a = allocs[s.index];
          store[a.slot] = at::empty({a.nbytes}, at::TensorOptions().dtype(at::kByte).device(physical_device(device))).storage();
          break;
        }
        case Step::kFree: store[frees[s.index].slot] = c10::Storage(); break;
        case Step::kPython: pythons[s.index].run(store, trace.scalars); break;
      }
    }
  } catch (...) {
    hand_out();
    throw;
  }
  failed = -1;
  hand_out();
}

}  // namespace lazysched
