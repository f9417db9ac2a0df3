// The Python face of the core: reads recordings out, takes programs in, settings, counters.
#include "program.h"
#include <ATen/Context.h>
#include <pthread.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>

namespace py = pybind11;

namespace lazysched {

void register_lazy_core();
void start_autograd_threads();

namespace {

py::object* compiler_ = nullptr;
py::object* logger_ = nullptr;

py::object dtype_of(at::ScalarType t) { return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(t))); }

py::tuple to_tuple(const int64_t* p, int n) {
  py::tuple t(n);
  for (int i = 0; i < n; i++) t[i] = py::int_(p[i]);
  return t;
}

const char* scalar_kind(const IValue& v) { return v.isDouble() ? "float" : v.isInt() ? "int" : v.isBool() ? "bool" : "complex"; }

// A recording as Python reads it: plain tuples, in recorded order.
struct TraceView {
  const Trace* trace;

  py::object operand(int32_t i) const {
    const auto& o = trace->operands[i];
    if (o.buffer < 0) return py::none();
    const char* modes[] = {"", "r", "w", "rw"};
    return py::make_tuple("t", o.buffer, dtype_of(o.dtype), to_tuple(&trace->dims[o.dims], o.ndim), to_tuple(&trace->dims[o.dims] + o.ndim, o.ndim), o.offset,
                          modes[static_cast<int>(o.mode)], o.conj || o.neg);
  }
  py::object arg(const Arg& a) const {
    switch (a.kind) {
      case ArgKind::Tensor: return operand(a.first);
      case ArgKind::TensorList:
      case ArgKind::OptTensorList: {
        py::list list;
        for (int i = 0; i < a.count; i++) list.append(operand(a.first + i));
        return py::make_tuple("l", list);
      }
      case ArgKind::Scalar: return py::make_tuple("s", a.first, scalar_kind(trace->scalars[a.first]));
      case ArgKind::HostScalar: return py::make_tuple("s", a.first, scalar_kind(trace->scalars[a.first]));
      case ArgKind::ScalarList: {
        py::list list;
        for (int i = 0; i < a.count; i++) list.append(py::make_tuple("s", a.first + i, scalar_kind(trace->scalars[a.first + i])));
        return py::make_tuple("l", list);
      }
      case ArgKind::Generator:
      case ArgKind::Device: return py::none();
      default: return py::make_tuple("c", torch::jit::toPyObject(a.value));
    }
  }
  py::list instrs() const {
    py::list all;
    for (const auto& in : trace->instrs) {
      py::list args, outs;
      for (size_t i = 0; i < in.op->args.size(); i++) args.append(arg(trace->args[in.args + i]));
      for (int i = 0; i < in.n_outs; i++) outs.append(operand(in.outs + i));
      all.append(py::make_tuple(in.op->name, args, outs, in.generator, describe_site(in.site), in.sequence, in.backward));
    }
    return all;
  }
  py::list buffers() const {
    const char* kinds[] = {"input", "fresh", "generator"};
    py::list all;
    for (size_t i = 0; i < trace->buffers.size(); i++)
      all.append(py::make_tuple(trace->buffers[i]->nbytes, kinds[static_cast<int>(trace->kinds[i])], static_cast<bool>(trace->live[i])));
    return all;
  }
  py::list scalars() const {
    py::list all;
    for (const auto& s : trace->scalars) all.append(torch::jit::toPyObject(s));
    return all;
  }
};

// ---- building programs ---------------------------------------------------------------------------------------------------

// `slots`: for each tensor operand of the instruction, then each new output, the slot that holds it (-1: none).
void add_call(Program& p, const TraceView& view, int32_t index, const std::vector<int32_t>& slots) {
  const Trace& t = *view.trace;
  const Instr& in = t.instrs.at(index);
  Program::Call c;
  c.op = in.op;
  c.generator = in.generator;
  size_t next = 0;
  auto add_view = [&](const Operand& o) {
    Program::View v;
    v.slot = slots.at(next++);
    if (o.buffer < 0) v.slot = -1;
    v.dtype = o.dtype;
    v.conj = o.conj;
    v.neg = o.neg;
    v.offset = o.offset;
    const int64_t* dims = t.dims.data() + o.dims;
    v.size.assign(dims, dims + o.ndim);
    v.stride.assign(dims + o.ndim, dims + 2 * o.ndim);
    c.views.push_back(std::move(v));
  };
  for (size_t i = 0; i < in.op->args.size(); i++) {
    const Arg& a = t.args[in.args + i];
    Program::CallArg out{a.kind, a.first, a.count, a.dtype, a.wrapped, false, a.value};
    if (a.kind == ArgKind::Tensor) add_view(t.operands[a.first]);
    if (a.kind == ArgKind::TensorList || a.kind == ArgKind::OptTensorList)
      for (int k = 0; k < a.count; k++) add_view(t.operands[a.first + k]);
    if (a.kind == ArgKind::ScalarList) out.doubles = in.op->args[i].is_float_type;
    c.args.push_back(std::move(out));
  }
  c.outs = static_cast<int32_t>(c.views.size());
  for (int k = 0; k < in.n_outs; k++) add_view(t.operands[in.outs + k]);
  p.steps.push_back({Program::Step::kCall, static_cast<int32_t>(p.calls.size()), index});
  p.calls.push_back(std::move(c));
}

// `args`: ("ptr", slot, byte offset) | ("fp32" | "fp64" | "i32" | "i64" | "i1", scalar index or -1, value)
void add_launch(Program& p, uint64_t function, std::array<uint32_t, 3> grid, uint32_t threads, uint32_t shared,
                const std::vector<std::tuple<std::string, int32_t, int64_t>>& args, int32_t instr) {
  TORCH_CHECK(args.size() <= 134, "lazysched: a kernel takes at most 134 arguments, got ", args.size());
  Program::Launch l{reinterpret_cast<void*>(function), {grid[0], grid[1], grid[2]}, threads, shared, {}};
  for (const auto& [kind, index, value] : args) {
    Program::LaunchArg a;
    a.value = value;
    if (kind == "ptr") a.kind = Program::LaunchArg::Pointer, a.slot = index;
    else {
      a.kind = kind == "fp32" ? Program::LaunchArg::Float : kind == "fp64" ? Program::LaunchArg::Double : Program::LaunchArg::Int64;
      a.scalar = index;
    }
    l.args.push_back(a);
  }
  p.steps.push_back({Program::Step::kLaunch, static_cast<int32_t>(p.launches.size()), instr});
  p.launches.push_back(std::move(l));
}

void add_python(Program& p, py::function fn, int32_t instr) {
  auto held = std::shared_ptr<py::function>(new py::function(std::move(fn)), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  auto run = [held](std::vector<c10::Storage>& store, const std::vector<IValue>& scalars) {
    py::gil_scoped_acquire gil;
    py::list slots, numbers;
    for (const auto& s : store) {
      if (!s) slots.append(py::none());
      else slots.append(py::cast(alias_storage(s, c10::DispatchKeySet(s.device_type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU), at::kByte,
                                               {static_cast<int64_t>(s.nbytes())}, {1}, 0)));
    }
    for (const auto& v : scalars) numbers.append(torch::jit::toPyObject(v));
    try {
      (*held)(slots, numbers);
    } catch (py::error_already_set& e) {
      TORCH_CHECK(false, e.what());
    }
  };
  p.steps.push_back({Program::Step::kPython, static_cast<int32_t>(p.pythons.size()), instr});
  p.pythons.push_back({run});
}

// ---- barrier log -----------------------------------------------------------------------------------------------------------

std::deque<BarrierEvent>& recent() {
  static auto* q = new std::deque<BarrierEvent>();
  return *q;
}
py::tuple event_tuple(const BarrierEvent& e) {
  return py::make_tuple(e.kind, e.reason, describe_site(e.site), e.ops, e.device, e.milliseconds, e.hit);
}

// As nn.Module.to does for devices that PyTorch knows: `p` keeps its identity and takes over the contents of `other`.
void set_data(const at::Tensor& p, const at::Tensor& other) {
  auto* meta = torch::autograd::impl::get_autograd_meta(p);
  if (meta) {
    std::lock_guard<std::mutex> lock(meta->mutex_);
    auto accumulator = meta->grad_accumulator_.lock();
    if (accumulator && (!other.options().type_equal(p.options()) || accumulator->input_metadata(0).device() != other.device()))
      meta->grad_accumulator_.reset();
  }
  p.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

}  // namespace

std::mutex& log_mutex() {
  static auto* m = new std::mutex();
  return *m;
}

// Events wait here for Python, which reads them when somebody asks, when they pile up, or at once under a debug level.
void log_barrier(BarrierEvent e) {
  bool full;
  {
    std::lock_guard<std::mutex> lock(log_mutex());
    recent().push_back(std::move(e));
    full = recent().size() >= 1024;
    if (recent().size() > 4096) recent().pop_front();
  }
  if (!(full || limits().log) || !logger_) return;
  py::gil_scoped_acquire gil;
  try {
    (*logger_)();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("lazysched's barrier log");
  }
}

ProgramPtr compile_trace(Trace& trace, c10::DeviceIndex device) {
  py::gil_scoped_acquire gil;
  TORCH_CHECK(compiler_, "lazysched: the native core has no compiler; import lazy_backend, not its parts");
  TraceView view{&trace};
  try {
    return (*compiler_)(view, static_cast<int>(device)).cast<ProgramPtr>();
  } catch (py::error_already_set& e) {
    std::string text = e.what();
    TORCH_CHECK(false, "lazysched could not compile a recording of ", trace.instrs.size(), " ops: ", text);
  }
}

namespace {

// The recording so far, with only `tensors` counted as results: what a barrier would run for them.
Trace copy_for(const std::vector<at::Tensor>& tensors, c10::DeviceIndex device) {
  auto& r = recorder(device);
  std::lock_guard<std::mutex> lock(r.mutex);
  Trace copy = r.peek();
  copy.live.assign(copy.buffers.size(), 0);
  for (const auto& t : tensors) {
    auto* b = buffer_of(t);
    if (b->trace == copy.id) copy.live[b->index] = 1;
  }
  return copy;
}

struct OwnedTrace {
  Trace trace;
  TraceView view() const { return {&trace}; }
};

}  // namespace
}  // namespace lazysched

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace lazysched;
  m.doc() = "lazysched's native core: records ops, runs programs.";
  m.def("init", [](bool cuda, int count) {
    init_device(cuda, count);
    install_hooks();
    register_lazy_core();
    start_autograd_threads();
    pthread_atfork([] { prefork_lock(true); }, [] { prefork_lock(false); },
                   [] {
                     prefork_lock(false);
                     for (int i = 0; i < device_count(); i++) new (&recorder(static_cast<c10::DeviceIndex>(i)).flush_mutex) std::mutex();
                   });
  });
  m.def("configure", [](int64_t max_ops, int64_t max_bytes, bool eager, size_t cache_size, bool frames, bool log) {
    auto& l = limits();
    l.max_ops = max_ops;
    l.max_bytes = max_bytes;
    l.eager = eager;
    l.cache_size = cache_size;
    l.log = log;
    set_capture(frames);
  });
  m.def("set_compiler", [](py::object f) { delete std::exchange(compiler_, new py::object(std::move(f))); });
  m.def("set_logger", [](py::object f) { delete std::exchange(logger_, new py::object(std::move(f))); });
  m.def("barrier", [](int device, const std::string& kind, const std::string& reason) { recorder(static_cast<c10::DeviceIndex>(device)).barrier(kind.c_str(), reason); },
        py::call_guard<py::gil_scoped_release>());
  m.def("count", &count);
  m.def("pending_ops", [](int device) { return recorder(static_cast<c10::DeviceIndex>(device)).pending_ops(); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int i) { set_current_device(static_cast<c10::DeviceIndex>(i)); });
  m.def("physical", [](const at::Tensor& t) { return recorder(t.device().index()).materialise(t, "value_access", "its physical tensor was asked for"); },
        py::call_guard<py::gil_scoped_release>());
  m.def("set_data", &set_data);
  m.def("default_generator", [](int i) { return at::globalContext().defaultGenerator(c10::Device(kLazy, static_cast<c10::DeviceIndex>(i))); });
  m.def("is_pending", [](const at::Tensor& t) { return recorder(t.device().index()).is_pending(buffer_of(t)); });
  m.def("clear_cache", [](int device) { recorder(static_cast<c10::DeviceIndex>(device)).clear_cache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("stats", [] {
    const auto& s = stats();
    py::dict d;
    d["recorded"] = s.recorded, d["compiles"] = s.compiles, d["cache_hits"] = s.cache_hits, d["nodes_run"] = s.nodes_run, d["nodes_dead"] = s.nodes_dead;
    d["kernels_run"] = s.kernels_run, d["fallbacks"] = s.fallbacks, d["shape_inferences"] = s.infers, d["evicted"] = s.evicted, d["flushes"] = s.flushes;
    return d;
  });
  m.def("take_barriers", [] {
    std::deque<BarrierEvent> taken;
    {
      std::lock_guard<std::mutex> lock(log_mutex());
      taken.swap(recent());
    }
    py::list all;
    for (const auto& e : taken) all.append(event_tuple(e));
    return all;
  });
  m.def("reset_stats", [] { stats() = Stats(); });
  py::class_<TraceView>(m, "Trace").def("instrs", &TraceView::instrs).def("buffers", &TraceView::buffers).def("scalars", &TraceView::scalars);
  py::class_<OwnedTrace>(m, "TraceCopy").def("view", &OwnedTrace::view, py::keep_alive<0, 1>());
  m.def("trace_for", [](const std::vector<at::Tensor>& tensors, int device) { return OwnedTrace{copy_for(tensors, static_cast<c10::DeviceIndex>(device))}; });
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<>())
      .def("call", &add_call)
      .def("launch", &add_launch)
      .def("python", &add_python)
      .def("alloc", [](Program& p, int32_t slot, int64_t nbytes) {
        p.steps.push_back({Program::Step::kAlloc, static_cast<int32_t>(p.allocs.size()), -1});
        p.allocs.push_back({slot, nbytes});
      })
      .def("free", [](Program& p, int32_t slot) {
        p.steps.push_back({Program::Step::kFree, static_cast<int32_t>(p.frees.size()), -1});
        p.frees.push_back({slot});
      })
      .def("finish", [](Program& p, int32_t slots, std::vector<std::pair<int32_t, int32_t>> inputs, const std::vector<std::tuple<int32_t, int32_t, int32_t>>& outputs,
                        int64_t nodes, int64_t dead) {
        p.slots = slots;
        p.inputs = std::move(inputs);
        for (auto [buffer, slot, ready] : outputs) p.outputs.push_back({buffer, slot, ready});
        p.nodes = nodes;
        p.dead = dead;
      })
      .def_property_readonly("steps", [](const Program& p) { return p.steps.size(); })
      .def_property_readonly("launches", [](const Program& p) { return p.launches.size(); });
}
