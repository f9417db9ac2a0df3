// Records one op: hash, shapes, operands, new outputs. Runs for every op.
#include "core.h"
#include <ATen/MemoryOverlap.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>

#include <bit>

extern "C" void* lazysched_find_site(int32_t* lasti);  // frames.c

namespace lazysched {

Site capture_site() { Site s; if (limits.frames) s.code = lazysched_find_site(&s.lasti); return s; }

const OpInfo& op_info(const c10::OperatorHandle& op) {
  static auto* all = new std::unordered_map<const void*, std::unique_ptr<OpInfo>>();
  static thread_local std::unordered_map<const void*, const OpInfo*> mine;
  const void* key = &op.schema();
  if (auto it = mine.find(key); it != mine.end()) return *it->second;
  auto info = std::make_unique<OpInfo>(OpInfo{op, toString(op.operator_name())});
  info->name_hash = torch::lazy::HashReduce(torch::lazy::DataHash(info->name.data(), info->name.size()));
  read_schema(*info);  // before the lock: it takes the GIL
  std::lock_guard<std::shared_mutex> lock(tables_mutex);
  return *(mine[key] = all->emplace(key, std::move(info)).first->second.get());
}

namespace {

// One word a kind of value, so that no two calls read alike.
enum Word : uint64_t {
  kNone = 1, kInt, kFalse, kTrue, kDouble, kComplex, kOther, kUndefined, kForeign, kWrapped, kDevice, kGenerator, kNumber
};
constexpr uint64_t kList = 0x100, kLayout = 0x200;

void add_layout(const c10::TensorImpl* t, std::vector<uint64_t>& words) {
  const auto dtype = static_cast<uint64_t>(t->dtype().toScalarType()), dims = static_cast<uint64_t>(t->dim());
  words.push_back(kLayout | dims << 32 | dtype << 24 | uint64_t{t->is_neg()} << 17 | uint64_t{t->is_conj()} << 16);
  for (auto shape : {t->sizes(), t->strides()}) words.insert(words.end(), shape.begin(), shape.end());
  words.push_back(static_cast<uint64_t>(t->storage_offset()));
}

void add_tensor(const IValue& v, std::vector<uint64_t>& words) {
  if (!is_tensor(v)) return words.push_back(kUndefined);
  const auto* t = v.unsafeToTensorImpl();
  if (t->device_type() != kLazy) words.push_back(t->is_wrapped_number() ? kWrapped : kForeign);
  add_layout(t, words);
}

Word kind_of(const IValue& v) {
  if (v.isBool()) return v.toBool() ? kTrue : kFalse;
  return v.isNone() ? kNone : v.isInt() ? kInt : v.isDouble() ? kDouble : v.isComplexDouble() ? kComplex : kOther;
}

void add_const(const IValue& v, std::vector<uint64_t>& words) {
  if (v.isList()) {
    words.push_back(kList | v.toListRef().size() << 32);
    for (const auto& e : v.toListRef()) add_const(e, words);
    return;
  }
  const auto kind = kind_of(v);
  words.push_back(kind);
  if (kind == kInt) words.push_back(static_cast<uint64_t>(v.toInt()));
  if (kind == kDouble) words.push_back(std::bit_cast<uint64_t>(v.toDouble()));
  if (kind == kComplex) for (double part : {v.toComplexDouble().real(), v.toComplexDouble().imag()}) words.push_back(std::bit_cast<uint64_t>(part));
  if (kind != kOther) return;
  const auto s = c10::str(v.tagKind(), v);  // rare kinds (strings, layouts): their printed form is their identity
  words.push_back(torch::lazy::HashReduce(torch::lazy::DataHash(s.data(), s.size())));
}

// Is this value, of an argument that may be a number to fill in at run time, a constant? Exponents are where they choose a formula,
// shares where nothing drops, factors where they are an integer 1, as they are unless a program says otherwise.
bool is_const(ArgKind kind, const IValue& v) {
  const double e = v.isDouble() ? std::abs(v.toDouble()) : -1;
  if (kind == ArgKind::Exponent) return !v.isDouble() || e == 0.5 || (e == std::trunc(e) && e <= 3);
  return v.isNone() || (kind == ArgKind::Share && e == 0) || (kind == ArgKind::Factor && v.isInt() && v.toInt() == 1);
}

// All that decides shapes and formulas: layouts, constants, kinds of numbers, and the default dtype, which type promotion reads.
hash_t hash_call(const OpInfo& op, const IValue* args) {
  static thread_local std::vector<uint64_t> words;
  words.assign({op.name_hash, static_cast<uint64_t>(c10::get_default_dtype_as_scalartype())});
  for (size_t i = 0; i < op.args.size(); i++) {
    const auto& v = args[i];
    const auto kind = op.args[i].kind;
    if (kind == ArgKind::Tensor) add_tensor(v, words);
    else if (op.args[i].tensors()) {
      words.push_back(v.isNone() ? kNone : kList | v.toListRef().size() << 32);
      if (!v.isNone()) for (const auto& e : v.toListRef()) add_tensor(e, words);
    } else if (op.args[i].numbers() && !is_const(kind, v)) {
      words.push_back(kNumber | elements(v).size() << 32);
      for (const auto& e : elements(v)) words.push_back(e.isBool() ? kTrue : kind_of(e));
    } else if (kind == ArgKind::Generator) words.push_back(v.isNone() ? kNone : kGenerator);
    else if (kind == ArgKind::Device) words.push_back(kDevice);
    else add_const(v, words);
  }
  return torch::lazy::HashBlock(words.data(), words.size() * sizeof(uint64_t), hash_t(static_cast<uint64_t>(7)));
}

// The device of the op's lazy tensors; checks that nothing else but 0-d CPU tensors is mixed in.
DeviceIndex common_device(const OpInfo& op, const IValue* args) {
  DeviceIndex found = -1; std::optional<c10::Device> foreign;
  each_tensor(op, args, [&](size_t i, const at::Tensor& t) {
    const auto device = t.device();
    const bool scalar = device.is_cpu() && t.dim() == 0 && t.layout() == at::kStrided && op.args[i].kind == ArgKind::Tensor &&
                        !op.args[i].writes;
    if (device.type() == kLazy && (found < 0 || found == device.index())) found = device.index();
    else if (!scalar) foreign = device;
  });
  for (size_t i = 0; i < op.args.size(); i++) {
    const auto& v = args[i];
    if (v.isGenerator())
      TORCH_CHECK(v.toGenerator().device().type() == kLazy, "Expected a 'lazysched' device type for generator but found '",
                  v.toGenerator().device().type(), "'");
    if (found < 0 && v.isDevice() && v.toDevice().type() == kLazy && v.toDevice().has_index()) found = v.toDevice().index();
  }
  if (found < 0) found = current_device();
  TORCH_CHECK(!foreign, "Expected all tensors to be on the same device, but found at least two devices, ", c10::Device(kLazy, found),
              " and ", *foreign, "! (when recording ", op.name, ")");
  return found;
}

// Indexing accepts index tensors on the CPU, as on CUDA.
void move_indices(const OpInfo& op, IValue* args) {
  const bool lazy = is_tensor(args[0]) && is_lazy(args[0].toTensor());
  const auto device = lazy ? args[0].toTensor().device().index() : current_device();
  for (size_t i = 0; i < op.args.size(); i++) {
    if (op.args[i].kind != ArgKind::OptTensorList) continue;
    args[i] = map_tensors(args[i], [&](const at::Tensor& t) {
      if (!t.defined() || !t.device().is_cpu()) return t;
      PlainDispatch plain;
      return wrap_physical(t.to(physical_device(device), /*non_blocking=*/false, /*copy=*/true), device);
    });
  }
}

}  // namespace

void Trace::reset(uint64_t new_id) {
  auto clear = [](auto&... all) { (all.clear(), ...); };  // memory is kept for the next recording
  clear(instrs, args, operands, dims, scalars, buffers, kinds, live, held, needed, refused);
  id = new_id, held_bytes = 0, numbers = 0, hash = hash_t(uint64_t{0x1a2f5c});
}

void Trace::forget(int32_t b) { (buffers[b] = c10::make_intrusive<Buffer>(buffers[b]->nbytes, buffers[b]->device))->owned = false; }

// How something came from numbers alone, given how two things did that it is made of; null where one did not.
static hash_t both(const hash_t& a, const hash_t& b) { return a == 0 || b == 0 ? hash_t() : torch::lazy::HashCombine(a, b); }

int32_t Trace::number(Buffer* b, std::vector<uint64_t>& words) {
  if (b->trace == id) return b->index;
  const auto kind = b->generator.defined() ? BufferKind::Generator : b->physical || b->pending_in ? BufferKind::Input : BufferKind::Fresh;
  b->trace = id, b->index = static_cast<int32_t>(buffers.size()), b->touched = true;
  b->origin = hash_t(uint64_t{kind == BufferKind::Fresh});
  buffers.push_back(BufferPtr::reclaim_copy(b)), kinds.push_back(kind);
  if (kind == BufferKind::Fresh && b->owned) held_bytes += static_cast<int64_t>(b->nbytes);
  words.push_back((static_cast<uint64_t>(kind) << 56) | b->nbytes);
  return b->index;
}

int32_t Trace::use(Buffer* b, bool writes, std::vector<uint64_t>& words) {
  words.push_back(static_cast<uint64_t>(number(b, words)));
  origin = both(origin, b->origin);
  if (writes) b->pending_in = id, written.push_back(b);
  return b->index;
}

Operand Trace::operand(const c10::TensorImpl* t, bool writes, std::vector<uint64_t>& words) {
  const int32_t buffer = use(buffer_of(t->unsafe_storage()), writes, words);
  Operand o{buffer, static_cast<int32_t>(dims.size()), static_cast<int16_t>(t->dim()), t->dtype().toScalarType(), t->is_conj(),
            t->is_neg(), t->storage_offset()};
  for (auto shape : {t->sizes(), t->strides()}) dims.insert(dims.end(), shape.begin(), shape.end());
  return o;
}

void Trace::add_arg(const ArgInfo& info, const IValue& v, Instr& instr, std::vector<uint64_t>& words) {
  Arg& arg = args.emplace_back();
  const auto* tensor = info.kind == ArgKind::Tensor && is_tensor(v) ? v.unsafeToTensorImpl() : nullptr;
  auto add_all = [&](ArgKind kind, const auto& all, auto&& add) {
    arg.kind = kind, arg.first = static_cast<int32_t>(all.size());
    for (const auto& e : elements(v)) add(e);
    arg.count = static_cast<int32_t>(all.size()) - arg.first;
  };
  if (tensor && tensor->device_type() != kLazy) {
    const auto first = static_cast<int32_t>(scalars.size());
    arg = {ArgKind::HostScalar, tensor->is_wrapped_number(), v.toTensor().scalar_type(), first, 1, {}};
    scalars.emplace_back(at::native::_local_scalar_dense_cpu(v.toTensor()));
  } else if (tensor || (info.tensors() && info.kind != ArgKind::Tensor && !v.isNone())) {
    add_all(info.kind, operands, [&](const IValue& e) {
      operands.push_back(is_tensor(e) ? operand(e.unsafeToTensorImpl(), info.writes, words) : Operand());
    });
  } else if (info.numbers() && !is_const(info.kind, v)) {
    const auto kind = info.kind > ArgKind::Scalar && info.kind < ArgKind::ScalarList ? ArgKind::Scalar : info.kind;
    add_all(kind, scalars, [&](const IValue& e) { scalars.push_back(e); });
  } else if (info.kind == ArgKind::Generator || info.kind == ArgKind::Device) {
    arg.kind = info.kind;
    if (v.isGenerator()) instr.generator = number(generator_buffer(v.toGenerator()), words);
  } else arg.value = v, instr.drops &= info.kind != ArgKind::Share;  // None or an undefined tensor: the op's schema tells which
}

void Trace::add_instr(const Instr& instr, std::vector<uint64_t>& words) {
  words.insert(words.end(), {static_cast<uint64_t>(instr.segment), c10::Uint128Low64(instr.call), c10::Uint128High64(instr.call)});
  hash = torch::lazy::HashBlock(words.data(), words.size() * sizeof(uint64_t), hash);
  instrs.push_back(instr), instrs.back().so_far = hash;
  words.clear(); for (; numbers < scalars.size(); numbers++) add_const(scalars[numbers], words);
  if (instr.op->name.rfind("aten::", 0)) origin = hash_t();  // what collectives bring comes from other ranks
  const auto given = origin == 0 ? origin : torch::lazy::HashBlock(words.data(), words.size() * sizeof(uint64_t), instr.call);
  for (auto* b : written) b->origin = origin = both(origin, given);
}

void Trace::replay(const Trace& from, const Instr& in) {
  auto& words = begin();
  auto add = [&](int32_t operand, bool writes) {
    Operand o = from.operands[operand];
    if (o.buffer >= 0) o.buffer = use(from.buffers[o.buffer].get(), writes, words);
    const auto shape = from.dims.begin() + std::exchange(o.dims, static_cast<int32_t>(dims.size()));
    dims.insert(dims.end(), shape, shape + 2 * o.ndim);
    operands.push_back(o);
  };
  Instr instr = in;
  instr.args = static_cast<int32_t>(args.size());
  for (size_t i = 0; i < in.op->args.size(); i++) {
    const Arg& arg = from.args[in.args + i];
    args.push_back(arg);
    const bool tensors = ArgInfo{arg.kind}.tensors();
    args.back().first = static_cast<int32_t>(tensors ? operands.size() : scalars.size());
    for (int32_t k = arg.first; k < arg.first + arg.count; k++)
      tensors ? add(k, in.op->args[i].writes) : scalars.push_back(from.scalars[k]);
  }
  if (in.generator >= 0) instr.generator = use(from.buffers[in.generator].get(), in.op->random, words);
  instr.outs = static_cast<int32_t>(operands.size());
  for (int32_t k = in.outs; k < in.outs + in.n_outs; k++) add(k, true);
  add_instr(instr, words);
}

Recorder::Recorder(DeviceIndex i) : index(i), trace_(new Trace()), spare_(new Trace()) { trace_->reset(next_id_++); }

std::vector<std::unique_ptr<Recorder>>& recorders() {
  static auto* all = one_each([](DeviceIndex i) { return std::make_unique<Recorder>(i); }); return *all;
}

Recorder& recorder(DeviceIndex i) { check_index(i = i < 0 ? current_device() : i); return *recorders()[i]; }

bool Recorder::is_pending(const Buffer* b) { std::lock_guard lock(mutex); return b->pending_in != 0; }
bool Recorder::is_used(const Buffer* b) { std::lock_guard lock(mutex); return b->pending_in != 0 || b->trace == trace_->id; }
Trace Recorder::copy() { std::lock_guard lock(mutex); return *trace_; }

void Recorder::on_storage_death(Buffer* b) {
  std::lock_guard<std::mutex> lock(mutex);
  if (b->owned = false; b->trace != trace_->id) return;
  const auto n = static_cast<int64_t>(b->nbytes);
  trace_->held_bytes += trace_->kinds[b->index] == BufferKind::Input ? n : -n;
}

static void take_shape(const at::Tensor& t, const at::Tensor& meta) {
  if (t.numel() != 0 && t.sizes() != meta.sizes())
    TORCH_WARN("An output with one or more elements was resized since it had shape ", t.sizes(),
               ", which does not match the required output shape ", meta.sizes(), ". This behavior is deprecated.");
  t.resize_(meta.sizes());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
}

// Does the op write a tensor that another argument overlaps in part, or write one twice? Eager mode refuses most of these.
static bool overlaps(const OpInfo& op, const IValue* args) {
  auto tensor = [&](size_t i) { return op.args[i].kind == ArgKind::Tensor && is_tensor(args[i]); };
  auto status = [&](size_t a, size_t b) { return at::get_overlap_status(args[a].unsafeToTensorImpl(), args[b].unsafeToTensorImpl()); };
  for (size_t w = 0; w < op.args.size(); w++)
    for (size_t i = 0; i < op.args.size() && op.args[w].writes && tensor(w); i++)
      if (i != w && tensor(i) && (status(w, i) == at::MemOverlapStatus::Partial ||
                                  (op.args[i].writes && status(w, i) == at::MemOverlapStatus::Full))) return true;
  return false;
}

// Autograd runs a device's backward in a thread of its own, and each thread numbers the nodes that it makes. Backward visits those
// of both in the order of their numbers where it makes nodes, too (create_graph). One thread's would run past the other's from step
// to step, and each step be another recording: a thread that takes over counts on from where the other was, as if both were one.
static int64_t node_number() {
  static std::atomic<uint64_t> reached{0};
  const auto own = static_cast<int64_t>(at::sequence_number::peek());
  if (!at::GradMode::is_enabled()) return own;
  while (at::sequence_number::peek() < reached) at::sequence_number::get_and_increment();
  reached = at::sequence_number::peek();
  return own;
}

constexpr char kLent[] = "another library sees the memory of an operand", kCut[] = "";

// Records all of `t` again, a copy of a recording: `given` stands for buffers of its own, new ones for what nobody held in the end,
// and what was made new and held is made anew. Does the recording have to run now?
bool Recorder::again(Trace& t, const Given& given) {
  for (size_t b = 0; b < t.buffers.size(); b++) if (!t.live[b]) t.forget(static_cast<int32_t>(b));
  for (const auto& [b, tensor] : given) t.buffers[b] = BufferPtr::reclaim_copy(buffer_of(tensor));
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t b = 0; b < t.buffers.size(); b++) {
    t.buffers[b]->check();
    TORCH_CHECK(!t.buffers[b]->is_lent(), kLent);
    TORCH_CHECK(t.buffers[b]->owned || !t.live[b], "memory that it used is gone");
  }
  for (size_t b = 0; b < t.buffers.size(); b++)
    if (auto& own = *t.buffers[b]; t.kinds[b] == BufferKind::Fresh && own.trace != trace_->id && !own.pending_in) own.physical = {};
  for (const auto& in : t.instrs) trace_->replay(t, in);
  stats[kRecorded] += static_cast<int64_t>(t.instrs.size());
  for (const auto& [b, tensor] : given) t.forget(b);
  return static_cast<int64_t>(trace_->instrs.size()) >= limits.max_ops || (limits.max_bytes && trace_->held_bytes > limits.max_bytes);
}

void Recorder::record(const OpInfo& op, Stack* stack) {
  const IValue* args = stack->data() + stack->size() - op.args.size();
  if (overlaps(op, args)) return run_now(op, stack, "unrecordable", op.name + ": its output overlaps an input");
  const auto call = hash_call(op, args);
  const auto known = inference(op, args, call, index);
  if (!known->refusal.empty()) return run_now(op, stack, "unrecordable", op.name + ": " + known->refusal);
  for (const auto& [arg, meta] : known->resized) take_shape(args[arg].toTensor(), meta);
  c10::SmallVector<at::Tensor, 4> outs;
  auto make = [&](const at::Tensor& m) {
    // A view is one of inference mode where its base is, whatever the mode is now.
    if (op.view) { c10::InferenceMode as_base(args[0].toTensor().is_inference()); return alias_storage(args[0].toTensor().storage(), m); }
    return outs.emplace_back(m.defined() ? make_lazy(m.sizes(), m.strides(), m.scalar_type(), index) : m);
  };
  c10::SmallVector<IValue, 4> returns;
  for (size_t r = 0; r < op.return_alias.size(); r++) {
    const int arg = op.handed_back(r);
    returns.push_back(arg >= 0 ? args[arg] : map_tensors(known->returns[r], make));
  }
  const char* limit = op.view ? nullptr : append(op, args, outs, call);
  torch::jit::drop(stack, op.args.size());
  for (auto& r : returns) stack->push_back(std::move(r));
  if (limits.eager) barrier("eager", "LAZYSCHED_MODE=eager runs each op at once");
  else if (limit == kCut) start_early();
  else if (limit) barrier(limit == kLent ? "lent" : "limit", limit);
}

// Returns why the recording has to run now, or kCut, else null.
const char* Recorder::append(const OpInfo& op, const IValue* args, c10::ArrayRef<at::Tensor> outs, hash_t call) {
  const Site site = capture_site();  // these two may wait for the GIL
  const auto node = torch::autograd::get_current_node();
  const int32_t segment = current_segment(node.get());
  std::lock_guard<std::mutex> lock(mutex); bool lent = false;
  each_tensor(op, args, [&](size_t, const at::Tensor& t) {
    if (!is_lazy(t)) return;
    buffer_of(t)->check(), lent |= buffer_of(t)->is_lent();
  });
  Trace& t = *trace_; auto& words = t.begin();
  Instr instr{.op = &op, .args = static_cast<int32_t>(t.args.size()), .n_outs = static_cast<int32_t>(outs.size()), .site = site,
              .sequence = node_number(),
              .backward = node ? static_cast<int64_t>(node->sequence_nr()) : -1, .segment = segment, .call = call};
  for (size_t i = 0; i < op.args.size(); i++) t.add_arg(op.args[i], args[i], instr, words);
  if (op.random && instr.drops)
    instr.generator = t.use(instr.generator < 0 ? default_generator_buffer(index) : t.buffers[instr.generator].get(), true, words);
  instr.outs = static_cast<int32_t>(t.operands.size());
  for (const auto& o : outs) t.operands.push_back(o.defined() ? t.operand(o.unsafeGetTensorImpl(), true, words) : Operand());
  t.add_instr(instr, words);
  stats[kRecorded]++;
  if (lent) return kLent;
  if (static_cast<int64_t>(t.instrs.size()) >= limits.max_ops) return "LAZYSCHED_MAX_OPS ops are recorded";
  if (limits.max_bytes && t.held_bytes > limits.max_bytes) return "LAZYSCHED_MAX_PENDING_BYTES are held by the recording";
  return t.instrs.size() == cut_ops_ ? kCut : nullptr;
}

void record_boxed(const c10::OperatorHandle& handle, Stack* stack) {
  const auto& op = op_info(handle);
  IValue* args = stack->data() + stack->size() - op.args.size();
  if (op.indexing) move_indices(op, args);
  auto& r = recorder(common_device(op, args));
  if (op.refusal.empty() || (op.masks_matter && !boolean_index(op, args))) return r.record(op, stack);
  r.run_now(op, stack, op.refusal.c_str(), op.name + op.why);
}

// Must the recording run before an op that cannot be recorded? `needed`: what it reads, where it writes nothing.
bool Recorder::must_settle(const OpInfo& op, const IValue* args, Needed& needed) {
  bool must = op.random, writes = op.random;
  std::lock_guard<std::mutex> lock(mutex);
  each_tensor(op, args, [&](size_t i, const at::Tensor& t) {
    if (!is_lazy(t)) return;
    const auto* b = buffer_of(t);
    must |= b->pending_in != 0 || (op.args[i].writes && b->trace == trace_->id);
    writes |= op.args[i].writes, needed.push_back(b);
  });
  if (writes) needed.clear();
  return must;
}

// `t` takes what became of its physical side `p`: an output that the op resized.
void Recorder::adopt(const at::Tensor& t, const at::Tensor& p) {
  if (t.is_conj() != p.is_conj()) t._set_conj(p.is_conj());  // some kernels leave the conjugation to whoever reads it
  auto* b = buffer_of(t);
  std::lock_guard<std::mutex> lock(mutex);
  if (t.sizes() == p.sizes() && t.strides() == p.strides() && p.storage().nbytes() <= b->nbytes) return;
  b->physical = p.storage(), b->nbytes = p.storage().nbytes(), t.storage().unsafeGetStorageImpl()->set_nbytes(b->nbytes);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(p.sizes(), p.strides());
}

// Runs an op on the physical tensors, after what it depends on.
void Recorder::run_now(const OpInfo& op, Stack* stack, const char* kind, const std::string& reason) {
  const Stack args = torch::jit::pop(*stack, op.args.size());
  Needed needed;
  if (must_settle(op, args.data(), needed)) barrier(kind, reason, needed);
  stats[kFallbacks]++, count(op.name);
  Stack physical; bool lend = op.random;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (lazy, physical)
  for (const auto& v : args) {
    if (v.isDevice() && v.toDevice().type() == kLazy) physical.emplace_back(physical_device(index));
    else if (v.isGenerator()) physical.emplace_back(generator_buffer(v.toGenerator())->generator), lend = false;
    else physical.push_back(map_tensors(v, [&](const at::Tensor& t) {
      if (!is_lazy(t)) return t;
      for (const auto& [lazy, twin] : std::vector(pairs))  // one argument given twice stays one tensor
        if (lazy.is_same(t)) return pairs.emplace_back(t, twin).second;
      return pairs.emplace_back(t, materialise(t, kind, reason)).second;
    }));
  }
  {
    GilRelease nogil; PlainDispatch plain(index);
    std::optional<LentState> lent;
    if (lend) lent.emplace(default_generator_buffer(index)->generator, index);
    op.handle.callBoxed(&physical);
  }
  size_t next = 0;
  each_tensor(op, args.data(), [&](size_t i, const at::Tensor& t) {
    if (!is_lazy(t)) return;
    const auto& p = pairs[next++].second;
    if (op.args[i].writes) adopt(t, p);
  });
  auto lift = [&](const at::Tensor& p) -> at::Tensor {
    if (!p.defined() || p.device() != physical_device(index)) return p;
    for (const auto& [t, q] : pairs) if (p.is_alias_of(q)) return alias_storage(t.storage(), p);
    return wrap_physical(p, index);
  };
  for (size_t r = 0; r < op.return_alias.size(); r++) {
    const int arg = op.handed_back(r);
    stack->push_back(arg >= 0 ? args[arg] : map_tensors(physical[r], lift));
  }
}

at::Tensor Recorder::lend(const at::Tensor& t, int how) {
  auto* b = buffer_of(t);
  if (is_used(b)) barrier("lent", "its memory is shown to another library");
  auto physical = materialise(t, "lent", "");
  std::lock_guard<std::mutex> lock(mutex);
  if (how && physical.storage().use_count() > 2) pin(physical.storage(), 1);  // a CUDA graph holds it, too
  return b->lent |= how, physical;
}

// A boolean that came from numbers alone is what it was the last time: nothing has to run for it. Models ask such questions of masks
// and positions that they have just made. In training, whose steps are alike: the first answer is waited for, so the recording of
// the second time is another one, and decoding would compile every position twice.
at::Scalar Recorder::read(const at::Tensor& t) {
  constexpr size_t kAnswers = 10000;
  hash_t from; const bool asks = t.scalar_type() == at::kBool;
  if (std::lock_guard lock(mutex); asks && limits.told && at::GradMode::is_enabled() && buffer_of(t)->pending_in) {
    from = both(buffer_of(t)->origin, torch::lazy::MHash(t.storage_offset(), t.is_neg()));
    if (const auto it = told_.find(from); it != told_.end()) return stats[kTold]++, it->second;
  }
  if (asks && asker) if (const auto told = (*asker)(t)) return *told;
  const auto bytes = materialise(t, "value_access", "item() or a conversion to a Python number");
  PlainDispatch plain;
  const auto value = bytes.item();
  if (std::lock_guard lock(mutex); from != 0 && told_.size() < kAnswers) told_.emplace(from, value.toBool());
  return value;
}

at::Tensor Recorder::materialise(const at::Tensor& t, const char* kind, const std::string& reason) {
  auto* b = buffer_of(t); stats[kLooked]++;
  if (is_pending(b)) barrier(kind, reason, {b});
  waited = waited || std::string_view(kind) == "value_access";
  std::unique_lock<std::mutex> lock(mutex);
  b->check();
  if (b->physical) return alias_storage(b->physical, t);
  const auto n = b->nbytes; lock.unlock();
  auto physical = physical_bytes(n, index);  // nothing wrote it yet: torch.empty
  lock.lock(), b->touched = true, b->physical = physical;
  return alias_storage(physical, t);
}

}  // namespace lazysched
