// Runs a program: ATen calls through the dispatcher, Triton kernels through the driver. Runs at every barrier.
#include "program.h"
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <bit>

namespace lazysched {
namespace {

constexpr size_t kMaxLaunchArgs = 134;

// The driver is found at run time, so that the core builds without CUDA.
template <class F>
F driver(const char* name) {
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(lib, "lazysched: libcuda.so.1 cannot be loaded: ", dlerror());
  auto* function = reinterpret_cast<F>(dlsym(lib, name));
  TORCH_CHECK(function, "lazysched: libcuda.so.1 has no ", name);
  return function;
}
using LaunchFn = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
using ErrorFn = int (*)(int, const char**);

std::string driver_error(int code) {
  const char* text = nullptr;
  driver<ErrorFn>("cuGetErrorString")(code, &text);
  return text ? text : std::to_string(code);
}

// An out= call may resize its output on the way to the shape it had; what a user did wrong was said when recording.
struct QuietResize final : c10::WarningHandler {
  explicit QuietResize(c10::WarningHandler* user) : user_(user) {}
  void process(const c10::Warning& w) override {
    if (w.msg().rfind("An output with one or more elements was resized", 0) != 0) user_->process(w);
  }
  c10::WarningHandler* user_;
};

// One run.
struct Runner {
  Trace& trace;
  const DeviceIndex device;
  void* const stream;
  std::vector<c10::Storage> slots;
  Stack stack = {};  // of the op that runs; kept for its memory
  std::vector<std::unique_ptr<at::RecordFunction>> ranges = {};  // the segments that run, the outermost first

  at::Tensor view(const Operand& o, int32_t slot) const {
    if (slot < 0 || o.buffer < 0) return {};
    TORCH_INTERNAL_ASSERT(slots[slot], "slot ", slot, " is empty");
    return alias_storage(slots[slot], o.dtype, trace.sizes(o), trace.strides(o), o.offset, o.conj, o.neg);
  }

  // `slot`: that of the argument's first tensor; moves on behind its last.
  IValue argument(const Arg& a, const Instr& in, const int32_t*& slot) const {
    const auto n = static_cast<size_t>(a.count);
    auto tensor = [&](size_t i) { return view(trace.operands[a.first + i], *slot++); };
    auto number = [&](size_t i) -> const IValue& { return trace.scalars[a.first + i]; };
    switch (a.kind) {
      case ArgKind::Tensor: return *slot < -1 ? IValue(stack[-2 - *slot++]) : tensor(0);
      case ArgKind::TensorList: return make_list<at::Tensor>(n, tensor);
      case ArgKind::OptTensorList:
        return make_list<std::optional<at::Tensor>>(n, [&](size_t i) { return if_defined(tensor(i)); });
      case ArgKind::Scalar: return number(0);
      case ArgKind::FloatList: return make_list<double>(n, [&](size_t i) { return number(i).toDouble(); });
      case ArgKind::ScalarList: return make_list<c10::Scalar>(n, [&](size_t i) { return number(i).toScalar(); });
      case ArgKind::HostScalar: {
        auto t = at::scalar_tensor(number(0).toScalar(), at::TensorOptions().dtype(a.dtype));
        if (a.wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
        return t;
      }
      case ArgKind::Generator: return in.generator >= 0 ? IValue(trace.buffers[in.generator]->generator) : IValue();
      case ArgKind::Device: return physical_device(device);
      default: return a.value;
    }
  }

  // The result's own storage where nothing else holds it and it has the layout that was promised, else a copy.
  c10::Storage keep(const at::Tensor& got, const Operand& want, const OpInfo& op) const {
    const auto size = trace.sizes(want), stride = trace.strides(want);
    const bool own = got.storage().use_count() == 1 && got.storage_offset() == 0 && !got.is_conj() && !got.is_neg();
    if (own && got.scalar_type() == want.dtype && got.sizes() == size && got.strides() == stride) return count_bytes(got.storage());
    // Attention returns its random seed in host memory and wants it back there, so the device is the op's own choice.
    auto fresh = at::empty_strided(size, stride, at::TensorOptions().dtype(want.dtype).device(got.device()));
    // Statistics that the op leaves out in inference: nobody may read them, in eager mode either.
    if (!got.numel()) return count_bytes(fresh.storage());
    TORCH_CHECK(got.sizes() == size, op.name, " promised a result of shape ", size, " and gave ", got.sizes());
    return count_bytes(fresh.copy_(got).storage());
  }

  // `slot`: that of the op's first new output.
  void take_results(const Instr& in, const int32_t* slot) {
    const Operand* want = trace.operands.data() + in.outs;
    const int32_t* end = slot + in.n_outs;
    for (size_t r = 0; r < stack.size(); r++) {
      if (in.op->return_alias[r] >= 0 || !(stack[r].isTensor() || stack[r].isTensorList())) continue;
      for (const auto& e : elements(stack[r])) {
        if (slot == end) return;
        if (*slot >= 0 && is_tensor(e)) slots[*slot] = keep(e.toTensor(), *want, *in.op);
        slot++, want++;
      }
    }
  }

  void run(const Program::Call& call, int32_t index) {
    const Instr& in = trace.instrs[index];
    stack.clear();
    const int32_t* slot = call.slots.data();
    for (size_t i = 0; i < in.op->args.size(); i++) stack.push_back(argument(trace.args[in.args + i], in, slot));
    {
      std::optional<LentState> lent;
      const bool lend = in.generator >= 0 && !in.op->generator_arg;
      if (lend) lent.emplace(trace.buffers[in.generator]->generator, device);
      // An op with several outputs hands back references to its arguments after it has dropped them from the stack.
      const Stack held = in.op->return_alias.size() > 1 ? stack : Stack();
      in.op->handle.callBoxed(&stack);
    }
    resolve(in);
    if (in.n_outs) take_results(in, slot);
    stack.clear();
  }

  // Some kernels leave the conjugation of an output to whoever reads it, which its recorded layout does not say.
  void resolve(const Instr& in) const {
    for (size_t r = 0; r < stack.size(); r++) {
      const int arg = in.op->return_alias[r];
      if (arg < 0 || !is_tensor(stack[r]) || !stack[r].toTensor().is_conj()) continue;
      if (trace.operands[trace.args[in.args + arg].first].conj) continue;
      stack[r].toTensor()._set_conj(false);
      stack[r].toTensor().conj_physical_();
    }
  }

  uint64_t launch_word(const Program::LaunchArg& a) {
    using Arg = Program::LaunchArg;
    if (a.kind == Arg::Pointer) {
      auto& s = slots[a.index];
      if (s.device_type() != physical_type()) s = bytes_of(s).to(physical_device(device)).storage();
      return reinterpret_cast<uint64_t>(static_cast<const char*>(s.data()) + a.value);
    }
    if (a.index < 0) return static_cast<uint64_t>(a.value);
    const auto number = trace.scalars[a.index].toScalar();
    if (a.kind == Arg::Float) return std::bit_cast<uint32_t>(static_cast<float>(number.toDouble()));
    return a.kind == Arg::Double ? std::bit_cast<uint64_t>(number.toDouble()) : static_cast<uint64_t>(number.toLong());
  }

  void run(const Program::Launch& l, int32_t) {
    static const auto launch = driver<LaunchFn>("cuLaunchKernel");
    constexpr size_t kScratch = 2;  // Triton's scratch pointers (global, profile), unused by our kernels
    uint64_t words[kMaxLaunchArgs + kScratch] = {};
    void* params[kMaxLaunchArgs + kScratch];
    const size_t n = l.args.size();
    TORCH_CHECK(n <= kMaxLaunchArgs, "lazysched: a kernel takes at most ", kMaxLaunchArgs, " arguments, got ", n);
    for (size_t i = 0; i < n; i++) words[i] = launch_word(l.args[i]);
    for (size_t i = 0; i < n + kScratch; i++) params[i] = &words[i];
    const int code = launch(l.function, l.grid[0], l.grid[1], l.grid[2], l.threads, 1, 1, l.shared, stream, params, nullptr);
    TORCH_CHECK(code == 0, "kernel launch failed: ", driver_error(code));
  }

  void run(const Program::Alloc& a, int32_t) { slots[a.slot] = physical_bytes(a.nbytes, device); }
  void run(const Program::Free& f, int32_t) { slots[f.slot] = c10::Storage(); }
  void run(const Program::Mark& mark, int32_t) {
    while (ranges.size() > mark.depth) ranges.pop_back();
    if (mark.name.empty()) return;
    ranges.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
    if (ranges.back()->isActive()) ranges.back()->before(mark.name);
  }
  void run(const Program::Python& step, int32_t) {
    std::vector<std::optional<at::Tensor>> bytes;
    std::vector<c10::Scalar> numbers;
    for (const auto& s : slots) bytes.push_back(s ? std::optional<at::Tensor>(bytes_of(s)) : std::nullopt);
    for (const auto& v : trace.scalars) numbers.push_back(v.toScalar());
    step(bytes, numbers);
  }
};

}  // namespace

void Program::run(Trace& trace, DeviceIndex device, int32_t& failed) const {
  PlainDispatch plain(device);
  QuietResize quiet(c10::WarningUtils::get_warning_handler());
  c10::WarningUtils::WarningHandlerGuard warnings(&quiet);
  const auto stream = [&] {
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    const auto current = cuda.getStream(physical_device(device));
    // The driver knows no context in a thread that has not called the CUDA runtime yet: this call makes it known.
    [[maybe_unused]] static thread_local const bool asked = cuda.queryStream(current);
    return current.native_handle();
  };
  Runner runner{trace, device, launches ? stream() : nullptr, std::vector<c10::Storage>(slots)};
  for (auto [buffer, slot] : inputs) {
    auto& b = trace.buffers[buffer];
    if (!b->physical) b->physical = physical_bytes(b->nbytes, device);  // read before anything wrote it: torch.empty
    runner.slots[slot] = b->physical;
    if (!trace.live[buffer]) b->physical = c10::Storage();  // donated: its memory is free after its last use
  }
  int32_t done = 0;
  auto hand_out = [&] {
    for (auto [buffer, slot, ready] : outputs)
      if (ready < done) trace.buffers[buffer]->physical = runner.slots[slot];
  };
  try {
    for (const auto& step : steps) {
      failed = step.instr;
      std::visit([&](const auto& what) { runner.run(what, step.instr); }, step.what);
      done++;
    }
  } catch (...) {
    hand_out();
    throw;
  }
  failed = -1;
  hand_out();
}

}  // namespace lazysched
