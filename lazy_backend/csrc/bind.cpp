// The Python face of the core: reads recordings out, takes programs in, settings, counters.
#include "program.h"
#include <ATen/Context.h>
#include <pthread.h>

#include <pybind11/functional.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

extern "C" PyObject* lazysched_describe_site(void* code, int32_t lasti);  // frames.c

namespace lazysched {

void register_lazy_core();

std::string describe_site(const Site& site) {
  if (!site.code) return "";
  py::gil_scoped_acquire gil;
  return py::reinterpret_steal<py::str>(lazysched_describe_site(site.code, site.lasti));
}

GilRelease::GilRelease() { if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread(); }
GilRelease::~GilRelease() { if (state) PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

namespace {

// What Python gave: compile(trace, device), read_schema(name), infer(op, arguments).
// Kept for ever: the core may outlive Python.
py::object *compiler_ = nullptr, *schema_reader_ = nullptr, *inferrer_ = nullptr;

template <class F> auto keeper(F*& slot) { return [&slot](F f) { slot = new F(std::move(f)); }; }

template <class T, class F> py::list to_list(const std::vector<T>& all, F&& f) {
  py::list list;
  for (const T& item : all) list.append(f(item));
  return list;
}

py::list instrs(const Trace& t) {
  return to_list(t.instrs, [](const Instr& in) {
    return py::make_tuple(in.op->name, in.args, in.op->args.size(), in.outs, in.n_outs, in.generator, describe_site(in.site),
                          in.sequence, in.backward, in.segment);
  });
}
py::list args(const Trace& t) {
  return to_list(t.args, [](const Arg& a) {
    const bool host = a.kind == ArgKind::HostScalar && !a.wrapped;  // a 0-d CPU tensor promotes by its own dtype
    return py::make_tuple(static_cast<int>(a.kind), a.first, a.count, host ? py::cast(a.dtype) : torch::jit::toPyObject(a.value));
  });
}
py::list operands(const Trace& t) {
  return to_list(t.operands, [&](const Operand& o) {
    const py::tuple size = py::cast(t.sizes(o).vec()), stride = py::cast(t.strides(o).vec());
    return py::make_tuple(o.buffer, o.dtype, size, stride, o.offset, o.conj || o.neg);
  });
}
py::list scalars(const Trace& t) { return to_list(t.scalars, [](const IValue& v) { return torch::jit::toPyObject(v); }); }
py::list buffers(const Trace& t) {
  return to_list(t.buffers, [&, next = size_t{0}](const BufferPtr& b) mutable {
    const size_t i = next++;
    return py::make_tuple(b->nbytes, static_cast<int>(t.kinds[i]), static_cast<bool>(t.live[i]), reinterpret_cast<uintptr_t>(b.get()));
  });
}

void keep(Trace& t, const std::vector<size_t>& only) {
  for (const auto all = std::exchange(t.instrs, {}); auto i : only) t.instrs.push_back(all[i]);
}

// The recording so far, with only `tensors` counted as results, or without any all that is held: what a barrier would run for them.
Trace trace_for(const std::vector<at::Tensor>& tensors, DeviceIndex device) {
  auto copy = recorder(device).copy();
  for (const auto& b : copy.buffers) copy.live.push_back(tensors.empty() && b->owned);
  for (const auto& t : tensors) if (const auto* b = buffer_of(t); b->trace == copy.id) copy.live[b->index] = 1;
  return copy;
}

// `args`: (LaunchArg's kind, index, value). `grid`: blocks along three axes, and how many of the first form a cluster
void add_launch(Program& p, uint64_t function, std::array<uint32_t, 4> grid, uint32_t threads, uint32_t shared, bool overlaps,
                const std::vector<std::tuple<int, int32_t, int64_t>>& args, int32_t instr) {
  Program::Launch l{reinterpret_cast<void*>(function), grid, threads, shared, overlaps, {}};
  for (auto [kind, index, value] : args) l.args.push_back({static_cast<Program::LaunchArg::Kind>(kind), index, value});
  p.steps.push_back({std::move(l), instr}), p.launches++;
}

// `layouts`: (dtype, size, stride, offset) for each slot where the compiler chose them, else nothing.
using Layout = std::tuple<at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t>;
void add_call(Program& p, int32_t instr, std::vector<int32_t> slots, const std::vector<Layout>& layouts, bool alone) {
  Program::Call call{std::move(slots), {}, alone, -1};
  for (const auto& [dtype, size, stride, offset] : layouts) {
    call.layouts.push_back({0, static_cast<int32_t>(p.dims.size()), static_cast<int16_t>(size.size()), dtype, false, false, offset});
    for (const auto* shape : {&size, &stride}) p.dims.insert(p.dims.end(), shape->begin(), shape->end());
  }
  p.steps.push_back({std::move(call), instr});
}

// An op that was not recorded: its name, of tensors how many slots each argument takes, of others the constant, how many it returns.
void add_own(Program& p, std::tuple<std::string, std::vector<py::object>, int32_t> chosen, std::vector<int32_t> slots,
             const std::vector<Layout>& layouts, bool alone, int32_t instr) {
  const auto& [name, given, results] = chosen;
  const auto& op = op_info(c10::Dispatcher::singleton().findOp(torch::jit::parseName(name)).value());
  p.own.instrs.push_back({&op, static_cast<int32_t>(p.own.args.size()), 0, results});
  for (size_t i = 0; i < given.size(); i++) {
    Arg& arg = p.own.args.emplace_back();
    const bool tensors = op.args[i].tensors() && !given[i].is_none();
    if (tensors || op.args[i].kind == ArgKind::Device) arg.kind = op.args[i].kind;
    if (tensors) arg.count = given[i].cast<int32_t>();
    else arg.value = torch::jit::toIValue(given[i], op.handle.schema().arguments()[i].type());
  }
  p.own.operands.resize(std::max(p.own.operands.size(), slots.size()), Operand{0});
  add_call(p, instr, std::move(slots), layouts, alone);
  std::get<Program::Call>(p.steps.back().what).own = static_cast<int>(p.own.instrs.size()) - 1;
}

template <class Step, class... Fields>
void add_step(Program& p, Fields... fields) { p.steps.push_back({Step{std::move(fields)...}, -1}); }

// As nn.Module.to does for devices that PyTorch knows: `p` keeps its identity and takes over the contents of `other`.
void set_data(const at::Tensor& p, const at::Tensor& other) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(p)) {
    std::lock_guard lock(meta->mutex_);
    auto kept = meta->grad_accumulator_.lock(); const bool alike = other.options().type_equal(p.options());
    if (kept && !(alike && kept->input_metadata(0).device() == other.device())) meta->grad_accumulator_.reset();
  }
  p.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

void start(bool cuda, int count) {
  start_device(cuda, count);
  register_lazy_core();
  constexpr auto lock = [] { for (auto& r : recorders()) r->mutex.lock(); tables_mutex.lock(); };
  constexpr auto unlock = [] { tables_mutex.unlock(); for (auto& r : recorders()) r->mutex.unlock(); };
  pthread_atfork(lock, unlock, [] {  // a shared_mutex remembers its thread's number, which is another in the child
    for (auto& r : recorders()) r->mutex.unlock(), r->launcher = nullptr, new (&r->flush_mutex) std::mutex();
    new (&tables_mutex) std::shared_mutex();
  });
}

}  // namespace

ProgramPtr compile_trace(Trace& trace, DeviceIndex device) {
  py::gil_scoped_acquire gil;
  TORCH_CHECK(compiler_, "lazysched: the native core has no compiler; import lazy_backend, not its parts");
  try {
    return (*compiler_)(py::cast(&trace, py::return_value_policy::reference), device).cast<ProgramPtr>();
  } catch (py::error_already_set& e) {
    TORCH_CHECK(false, "lazysched could not compile a recording of ", trace.instrs.size(), " ops: ", e.what());
  }
}

void infer_in_python(const OpInfo& op, const IValue* args, DeviceIndex device, Inference& known) {
  py::gil_scoped_acquire gil;
  TORCH_CHECK(inferrer_, "lazysched: the native core cannot infer shapes; import lazy_backend, not its parts");
  py::tuple given(op.args.size());
  for (size_t i = 0; i < op.args.size(); i++)  // toPyObject makes a number of a tensor that stands for one
    given[i] = is_tensor(args[i]) ? py::cast(args[i].toTensor()) : torch::jit::toPyObject(args[i]);
  using Row = std::tuple<std::string, bool, py::list, std::vector<std::pair<size_t, at::Tensor>>>;
  auto [refusal, here, returns, resized] = (*inferrer_)(op.name, given, torch::jit::toPyObject(physical_device(device))).cast<Row>();
  known.refusal = refusal, known.here = here, known.resized = resized;
  for (size_t r = 0; r < returns.size(); r++)
    known.returns.push_back(torch::jit::toIValue(returns[r], op.handle.schema().returns()[r].type()));
}

void read_schema(OpInfo& op) {
  py::gil_scoped_acquire gil;
  TORCH_CHECK(schema_reader_, "lazysched: the native core has no schema reader; import lazy_backend, not its parts");
  using Row = std::tuple<std::vector<std::pair<int, bool>>, std::vector<int>, std::string, std::string, bool, bool, bool, bool, bool>;
  auto [args, aliases, refusal, why, random, generator, view, indexing, masks] = (*schema_reader_)(op.name).cast<Row>();
  for (auto [kind, writes] : args) op.args.push_back({static_cast<ArgKind>(kind), writes});
  op.return_alias = aliases, op.refusal = refusal, op.why = why;
  op.random = random, op.generator_arg = generator, op.view = view, op.indexing = indexing, op.masks_matter = masks;
}

}  // namespace lazysched

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace lazysched;
  py::class_<Limits>(m, "Limits").def(py::init<int64_t, int64_t, bool, size_t, bool, int, bool>());
  m.def("configure", [](const Limits& now) { limits = now; }).def("set_schedule_key", [](uint64_t key) { schedule_key = key; });
  m.def("init", &start).def("keep_whole", &keep_whole).def("enter_segment", &enter_segment).def("note_backward", &note_backward);
  m.def("set_compiler", keeper(compiler_)).def("set_schema_reader", keeper(schema_reader_)).def("set_inferrer", keeper(inferrer_));
  m.def("set_logger", keeper(logger)).def("set_holder", keeper(holder)).def("set_asker", keeper(asker)).def("set_capturer", keeper(capturer));
  m.def("barrier", [](DeviceIndex i, const char* kind, const std::string& reason) { recorder(i).barrier(kind, reason); });
  m.def("current_device", &current_device).def("set_device", &set_current_device);
  m.def("current_stream", [](DeviceIndex i) { return c10::impl::getDeviceGuardImpl(kLazy)->getStream({kLazy, i}).id(); });
  m.def("set_stream", [](DeviceIndex i, int64_t id) {
    c10::impl::getDeviceGuardImpl(kLazy)->exchangeStream(c10::Stream(c10::Stream::UNSAFE, {kLazy, i}, id));
  });
  m.def("waited", [](DeviceIndex i) { return recorder(i).waited.load(); }).def("set_data", &set_data).def("trace_for", &trace_for);
  m.def("count", &count, py::call_guard<py::gil_scoped_release>()).def("stats", [] { return std::vector<int64_t>(stats.begin(), stats.end()); });
  m.def("reset_peak", [] { stats[kPeak] = stats[kHeld].load(); }).def("pin", [](const at::Tensor& t, int by) { pin(t.storage(), by); })
      .def("lend", [](const at::Tensor& t, int how) { return recorder(t).lend(t, how); });
  m.def("default_generator", [](DeviceIndex i) { return at::globalContext().defaultGenerator(c10::Device(kLazy, i)); });
  m.def("backward_segment", [] {  // of the node that autograd runs in this thread; -1: it runs none
    const auto node = torch::autograd::get_current_node(); return node ? current_segment(node.get()) : -1;
  });
  m.def("again", [](Trace& t, DeviceIndex i, const Recorder::Given& given) { return recorder(i).again(t, given); });
  py::class_<Trace>(m, "Trace").def("forget", &Trace::forget).def("set_scalar", [](Trace& t, size_t i, double v) { t.scalars[i] = v; })
      .def_readwrite("live", &Trace::live).def("keep", &keep)
      .def("bytes", [](const Trace& t, size_t i) { auto& s = t.buffers[i]->physical; return s ? bytes_of(s) : at::Tensor(); })
      .def_readonly("held", &Trace::held).def_readonly("needed", &Trace::needed).def_readonly("refused", &Trace::refused)
      .def("instrs", &instrs).def("args", &args).def("operands", &operands).def("scalars", &scalars).def("buffers", &buffers);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program").def(py::init<>())
      .def_readwrite("order", &Program::order).def_readwrite("nodes", &Program::nodes).def_readwrite("dead", &Program::dead)
      .def_readwrite("guessed", &Program::guessed).def_readwrite("slots", &Program::slots).def_readwrite("inputs", &Program::inputs)
      .def_readwrite("outputs", &Program::outputs).def_readwrite("rest", &Program::rest).def_readwrite("kept", &Program::kept)
      .def_readwrite("apart", &Program::apart).def("call", &add_call).def("own", &add_own)
      .def("graph", [](Program& p, size_t first, size_t last, std::array<std::vector<int32_t>, 5> of,
                       std::array<std::vector<size_t>, 2> bytes, std::pair<int32_t, size_t> block) {
        p.graphs.push_back({first, last, of[0], of[1], of[2], of[3], of[4], bytes[0], bytes[1], block});
      })
      .def("cut", [](Program& p, size_t n, std::array<std::vector<int32_t>, 2> of) { p.cuts.push_back({n, of[0], of[1]}); })
      .def("launch", &add_launch)
      .def("python", [](Program& p, decltype(Program::Python::run) run, int32_t instr, std::vector<int32_t> slots) {
        p.steps.push_back({Program::Python{std::move(run), std::move(slots)}, instr});
      })
      .def("alloc", &add_step<Program::Alloc, int32_t, size_t>).def("free", &add_step<Program::Free, int32_t>)
      .def("mark", &add_step<Program::Mark, size_t, std::string>);
}
