// One run of a program: ATen calls through the dispatcher, Triton kernels through the driver.
#pragma once
#include "program.h"
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <bit>

namespace lazysched {

// NVIDIA's driver, in driver.c. Each returns null, or what went wrong.
extern "C" {
const char* lazysched_launch(void* function, const uint32_t* grid, uint32_t threads, uint32_t shared, int overlaps, void* stream, void** args);
const char* lazysched_last_captured(void* stream, void** node, size_t* count);
const char* lazysched_set_kernel(void* exec, void* node, void* function, const uint32_t* grid, uint32_t threads, uint32_t shared,
                                 void** args);
const char* lazysched_run_graph(void* exec, void* stream);
void lazysched_use_threads(int count);  // threads.c
}
inline std::string first_line(const std::exception& e) { const std::string all = e.what(); return all.substr(0, all.find('\n')); }
inline void check_driver(const char* error, const char* what) { TORCH_CHECK(!error, what, " failed: ", error); }

struct Runner {
  Runner(Program& p, DeviceIndex i) : program(p), device(i), stream(current_stream(i)), slots(p.slots) {}
  Trace* trace = nullptr; const Trace* source = nullptr;  // of the op that runs: the recording, or the program's own
  Program& program;
  const DeviceIndex device;
  void* stream;
  std::vector<c10::Storage> slots;
  const Program::Call* call = nullptr;  // that runs
  Program::Graph* captured = nullptr;  // the stretch that is being captured
  size_t step = 0;
  Stack stack = {};  // of the op that runs; kept for its memory
  std::vector<uint64_t> words = {};  // arguments of the kernel that is launched
  std::vector<void*> params = {};
  std::vector<std::unique_ptr<at::RecordFunction>> ranges = {};  // the segments that run, the outermost first
  // Of a run that began before its recording had ended: the recording so far, its generators' states before, the steps that ran.
  std::shared_ptr<Trace> part = {};
  std::vector<at::Generator> states = {};
  std::vector<std::pair<c10::Storage, at::Tensor>> saved = {};  // inputs that it has written, and what they held
  std::vector<bool> done = {}; bool failed = false;
  size_t bound = 0;  // how many inputs are in their slots

  // The layout of the tensor in `slot`, one of the call's: `recorded`, unless the compiler chose another.
  const Operand& chosen(const Operand& recorded, const int32_t* slot) const {
    return call->layouts.empty() ? recorded : call->layouts[slot - call->slots.data()];
  }
  c10::IntArrayRef shape(const Operand& o, int16_t from) const {
    return {(call->layouts.empty() ? source->dims : program.dims).data() + o.dims + from, static_cast<size_t>(o.ndim)};
  }

  at::Tensor view(const Operand& recorded, const int32_t* slot) const {
    if (*slot < 0 || recorded.buffer < 0) return {};
    TORCH_INTERNAL_ASSERT(slots[*slot], "slot ", *slot, " is empty");
    const Operand& o = chosen(recorded, slot);
    return alias_storage(slots[*slot], o.dtype, shape(o, 0), shape(o, o.ndim), o.offset, o.conj, o.neg);
  }

  // While a stretch is captured, each op in it draws from a state of its own.
  at::Generator& draws_from(const Instr& in) const {
    if (captured) for (auto& s : captured->settings) if (s.step == step) return s.state;
    return trace->buffers[in.generator]->generator;
  }

  // `slot`: that of the argument's first tensor; moves on behind its last.
  IValue argument(const Arg& a, const Instr& in, const int32_t*& slot) const {
    const auto n = static_cast<size_t>(a.count);
    auto tensor = [&](size_t i) { return view(source->operands[a.first + i], slot++); };
    auto number = [&](size_t i) -> const IValue& { return trace->scalars[a.first + i]; };
    switch (a.kind) {
      case ArgKind::Tensor: return *slot < -1 ? IValue(stack[-2 - *slot++]) : tensor(0);
      case ArgKind::TensorList: return make_list<at::Tensor>(n, tensor);
      case ArgKind::OptTensorList: return make_list<std::optional<at::Tensor>>(n, [&](size_t i) { return if_defined(tensor(i)); });
      case ArgKind::Scalar: return number(0);
      case ArgKind::FloatList: return make_list<double>(n, [&](size_t i) { return number(i).toDouble(); });
      case ArgKind::ScalarList: return make_list<c10::Scalar>(n, [&](size_t i) { return number(i).toScalar(); });
      case ArgKind::HostScalar: {
        auto t = at::scalar_tensor(number(0).toScalar(), at::TensorOptions().dtype(a.dtype));
        if (a.wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
        return t;
      }
      case ArgKind::Generator: return in.generator >= 0 ? IValue(draws_from(in)) : IValue();
      case ArgKind::Device: return physical_device(device);
      default: return a.value;
    }
  }

  // The result's own storage where nothing else holds it and its elements lie as was promised, else a copy.
  c10::Storage keep(const at::Tensor& got, const Operand& want, const OpInfo& op) const {
    const auto size = shape(want, 0), stride = shape(want, want.ndim);
    bool own = got.storage().use_count() == 1 && !got.storage_offset() && !got.is_conj() && !got.is_neg() && got.sizes() == size;
    for (int64_t d = 0; own && d < got.dim(); d++) own = size[d] == 1 || got.stride(d) == stride[d];
    if (own && got.scalar_type() == want.dtype) return count_bytes(got.storage());
    // Attention returns its random seed in host memory and wants it back there, so the device is the op's own choice.
    auto fresh = at::empty_strided(size, stride, at::TensorOptions().dtype(want.dtype).device(got.device()));
    // Statistics that the op leaves out in inference: nobody may read them, in eager mode either.
    if (!got.numel()) return count_bytes(fresh.storage());
    TORCH_CHECK(got.sizes() == size, op.name, " promised a result of shape ", size, " and gave ", got.sizes());
    return count_bytes(fresh.copy_(got).storage());
  }

  // `slot`: that of the op's first new output.
  void take_results(const Instr& in, const int32_t* slot) {
    const Operand* want = source->operands.data() + in.outs;
    const int32_t* end = slot + in.n_outs;
    for (size_t r = 0; r < stack.size(); r++) {
      if (in.op->return_alias[r] >= 0 || !(stack[r].isTensor() || stack[r].isTensorList())) continue;
      for (const auto& e : elements(stack[r])) {
        if (slot == end) return;
        if (*slot >= 0 && is_tensor(e)) slots[*slot] = keep(e.toTensor(), chosen(*want, slot), *in.op);
        slot++, want++;
      }
    }
  }

  void run(const Program::Call& now, int32_t index) {
    call = &now, source = now.own < 0 ? trace : &program.own;
    const Instr& in = source->instrs[now.own < 0 ? index : now.own];
    stack.clear();
    const int32_t* slot = now.slots.data();
    const bool counted = in.generator >= 0 && !captured && physical_type() == c10::kCUDA;
    const uint64_t before = counted ? draws_from(in).get_offset() : 0;
    for (size_t i = 0; i < in.op->args.size(); i++) stack.push_back(argument(source->args[in.args + i], in, slot));
    {
      // Threads that meet for a few microseconds of work wait longer for one another than they gain. Asking how many there are
      // sets up this thread's count, too.
      const auto rejoin = c10::make_scope_exit([n = now.alone ? at::get_num_threads() : 1] { if (n > 1) lazysched_use_threads(n); });
      if (now.alone) lazysched_use_threads(1);
      std::optional<LentState> lent;
      if (in.generator >= 0 && !in.op->generator_arg) lent.emplace(draws_from(in), device);
      // An op with several outputs hands back references to its arguments after it has dropped them from the stack.
      const Stack held = in.op->return_alias.size() > 1 ? stack : Stack();
      in.op->handle.callBoxed(&stack);
    }
    if (counted) now.drawn = draws_from(in).get_offset() - before;
    resolve(in);
    if (in.n_outs) take_results(in, slot);
    stack.clear();
  }

  // Some kernels leave the conjugation of an output to whoever reads it, which its recorded layout does not say.
  void resolve(const Instr& in) const {
    for (size_t r = 0; r < stack.size(); r++) {
      const int arg = in.op->return_alias[r];
      if (arg < 0 || !is_tensor(stack[r]) || !stack[r].toTensor().is_conj()) continue;
      if (source->operands[source->args[in.args + arg].first].conj) continue;
      stack[r].toTensor()._set_conj(false);
      stack[r].toTensor().conj_physical_();
    }
  }

  // What a launch takes: the address of each argument. The words behind the last are Triton's scratch pointers, which are null.
  static constexpr size_t kScratch = 2;
  void** pointers(std::vector<uint64_t>& all) {
    params.clear(); for (auto& word : all) params.push_back(&word);
    return params.data();
  }

  uint64_t launch_word(const Program::LaunchArg& a) {
    using Arg = Program::LaunchArg;
    if (a.kind == Arg::Pointer) {
      auto& s = slots[a.index];
      if (s.device_type() != physical_type()) s = bytes_of(s).to(physical_device(device)).storage();
      return reinterpret_cast<uint64_t>(static_cast<const char*>(s.data()) + a.value);
    }
    if (a.fixed()) return static_cast<uint64_t>(a.value);
    if (a.kind == Arg::Seed || a.kind == Arg::Offset) {
      auto& generator = trace->buffers[a.index]->generator;
      if (a.kind == Arg::Seed) return generator.current_seed();
      const auto offset = generator.get_offset();
      generator.set_offset(offset + static_cast<uint64_t>(a.value));
      return offset;
    }
    const auto number = trace->scalars[a.index].toScalar();
    if (a.kind == Arg::Float) return std::bit_cast<uint32_t>(static_cast<float>(number.toDouble()));
    return a.kind == Arg::Double ? std::bit_cast<uint64_t>(number.toDouble()) : static_cast<uint64_t>(number.toLong());
  }

  void run(const Program::Launch& l, int32_t) {
    words.assign(l.args.size() + kScratch, 0);
    for (size_t i = 0; i < l.args.size(); i++) if (!captured || l.args[i].fixed()) words[i] = launch_word(l.args[i]);
    check_driver(lazysched_launch(l.function, l.grid.data(), l.threads, l.shared, l.overlaps, stream, pointers(words)), "a launch");
    if (captured) note_kernel(l);
  }

  void run(const Program::Alloc& a, int32_t) { if (!captured || !slots[a.slot]) slots[a.slot] = physical_bytes(a.nbytes, device); }
  void run(const Program::Free& f, int32_t) { slots[f.slot] = c10::Storage(); }
  void run(const Program::Mark& mark, int32_t) {
    while (ranges.size() > mark.depth) ranges.pop_back();
    if (mark.name.empty()) return;
    ranges.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
    if (ranges.back()->isActive()) ranges.back()->before(mark.name);
  }
  void run(const Program::Python& step, int32_t) {
    std::vector<std::optional<at::Tensor>> bytes(slots.size()); std::vector<c10::Scalar> numbers;
    for (auto s : step.slots) if (slots[s]) bytes[s] = bytes_of(slots[s]);
    for (const auto& v : trace->scalars) numbers.push_back(v.toScalar());
    if (auto made = step.run(bytes, numbers)) slots[step.slots.back()] = made->storage();
  }

  void run_step() { std::visit([&](const auto& what) { run(what, program.steps[step].instr); }, program.steps[step].what); }

  // program.cpp
  void bind(bool whole);
  void run_early(std::shared_ptr<Trace> recorded, const Program::Cut& cut);

  // graph.cpp
  bool serve(Program::Graph& g, bool warm);  // runs the stretch as a graph, if that is possible
  bool ready(const Program::Graph& g) const;
  bool rebind(Program::Graph& g);
  std::shared_ptr<Block> home_of(const Program::Graph& g) const;
  void capture(Program::Graph& g);
  void replay(Program::Graph& g);
  void note_kernel(const Program::Launch& l);
};

}  // namespace lazysched
