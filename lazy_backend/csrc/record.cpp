// Records one op: hash, shapes (inferred once on Meta, then remembered), operands, new outputs. Runs for every op.
#include "core.h"
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TensorUtils.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <shared_mutex>

namespace lazysched {
namespace {

// ---- what a schema says --------------------------------------------------------------------------------------------

ArgInfo arg_info(const c10::Argument& a) {
  auto type = a.type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->expectRef<c10::OptionalType>().getElementType();
  auto kind = ArgKind::Const;
  bool is_float = false;
  switch (type->kind()) {
    case c10::TypeKind::TensorType: kind = ArgKind::Tensor; break;
    case c10::TypeKind::NumberType: kind = ArgKind::Scalar; break;
    case c10::TypeKind::FloatType: kind = ArgKind::Scalar; is_float = true; break;
    case c10::TypeKind::GeneratorType: kind = ArgKind::Generator; break;
    case c10::TypeKind::DeviceObjType: kind = ArgKind::Device; break;
    case c10::TypeKind::ListType: {
      auto element = type->expectRef<c10::ListType>().getElementType();
      if (element->kind() == c10::TypeKind::TensorType) kind = ArgKind::TensorList;
      else if (element->kind() == c10::TypeKind::OptionalType) kind = ArgKind::OptTensorList;
      else if (element->kind() == c10::TypeKind::NumberType) kind = ArgKind::ScalarList;
      else if (element->kind() == c10::TypeKind::FloatType) kind = ArgKind::ScalarList, is_float = true;
      break;
    }
    default: break;
  }
  bool writes = a.alias_info() && a.alias_info()->isWrite();
  return {kind, is_float, writes, writes && a.kwarg_only()};
}

bool starts(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

// Ops whose int returns are sizes that Meta knows.
bool returns_sizes(const std::string& name) {
  return starts(name, "aten::_scaled_dot_product") || starts(name, "aten::_flash_attention") || starts(name, "aten::_efficient_attention") ||
         starts(name, "aten::_cudnn_attention");
}

// Beside pointwise ops: those that refuse some dtypes only when they run.
bool checked_by_running(const std::string& name) {
  for (const char* op : {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "dot", "_softmax", "_log_softmax", "mean"})
    if (name == std::string("aten::") + op || starts(name, (std::string("aten::") + op + ".").c_str())) return true;
  return false;
}

// Ops whose Meta kernels promise other shapes than the real ones give.
bool meta_is_wrong(const std::string& name) { return starts(name, "aten::_embedding_bag"); }

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) : handle(op) {
  const auto& schema = op.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  name_hash = torch::lazy::HashReduce(torch::lazy::DataHash(name.data(), name.size()));
  bool tensors = false, scales = false;
  for (const auto& a : schema.arguments()) {
    args.push_back(arg_info(a));
    const auto kind = args.back().kind;
    tensors |= (kind == ArgKind::Tensor || kind == ArgKind::TensorList) && !args.back().out;
    scales |= starts(a.name(), "scale");
    generator_arg |= kind == ArgKind::Generator;
    indexing |= kind == ArgKind::OptTensorList;
  }
  random = op.hasTag(at::Tag::nondeterministic_seeded) || generator_arg;
  floats_shape = !tensors || (scales && starts(name, "aten::_upsample")) || starts(name, "aten::upsample");
  checks_dtypes = !random && (op.hasTag(at::Tag::pointwise) || checked_by_running(name));
  pow_like = starts(name, "aten::pow") || starts(name, "aten::_foreach_pow");  // the exponent chooses the formula
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) recordable = Recordable::DataDependent;
  if (meta_is_wrong(name)) recordable = Recordable::No;
  for (const auto& r : schema.returns()) {
    int alias = -1;
    if (const auto* info = r.alias_info()) {
      for (size_t i = 0; i < args.size(); i++) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && *other == *info) alias = static_cast<int>(i);
      }
      if (!info->isWrite()) view = true;
    }
    return_alias.push_back(alias);
    auto kind = r.type()->kind();
    if (kind == c10::TypeKind::ListType) list_return = true;
    bool tensor = kind == c10::TypeKind::TensorType ||
                  (kind == c10::TypeKind::ListType && r.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType);
    if (!tensor && !returns_sizes(name) && recordable != Recordable::No) recordable = Recordable::ReturnsNumber;
  }
}

const OpInfo& op_info(const c10::OperatorHandle& op) {
  static auto* all = new std::unordered_map<const void*, std::unique_ptr<OpInfo>>();
  static std::mutex m;
  static thread_local std::unordered_map<const void*, const OpInfo*> mine;
  const void* key = &op.schema();
  auto it = mine.find(key);
  if (it != mine.end()) return *it->second;
  std::lock_guard<std::mutex> lock(m);
  auto& slot = (*all)[key];
  if (!slot) slot = std::make_unique<OpInfo>(op);
  mine[key] = slot.get();
  return *slot;
}

namespace {

// ---- inference --------------------------------------------------------------------------------------------------------

struct TensorMeta {
  bool defined = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> size, stride;
  int64_t offset = 0;
  bool conj = false, neg = false;
};
struct Return {
  int alias = -1;      // argument handed back
  int count = -1;      // length of a list of new tensors, -1: one tensor
  bool number = false;
  IValue value;
};
struct Inference {
  Recordable recordable = Recordable::Yes;
  std::string reason;
  std::vector<Return> returns;
  std::vector<TensorMeta> outs;                          // new tensors in order
  std::vector<std::pair<int, TensorMeta>> resized;       // written tensor operands that take a new shape
};
using InferencePtr = std::shared_ptr<const Inference>;

struct Memo {
  std::shared_mutex mutex;
  std::unordered_map<hash_t, InferencePtr, torch::lazy::HashReducer> table;
};
Memo& memo() {
  static auto* m = new Memo();
  return *m;
}

TensorMeta describe(const at::Tensor& t) {
  if (!t.defined()) return {};
  return {true, t.scalar_type(), t.sizes().vec(), t.strides().vec(), t.storage_offset(), t.is_conj(), t.is_neg()};
}

at::Tensor to_meta(const at::Tensor& t) {
  if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // Python numbers stay on the CPU, also for Meta
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kMeta);
  auto m = at::empty_strided(t.sizes(), t.strides(), options);
  if (t.is_conj()) m._set_conj(true);
  if (t.is_neg()) m._set_neg(true);
  return m;
}

template <class F>
IValue map_tensors(const IValue& v, F&& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

// Meta does not check every dtype. A run on the physical device with each size cut to 1 raises what eager would raise.
void check_dtypes(const OpInfo& op, const Stack& stack, size_t base) {
  Stack tiny;
  auto shrink = [&](const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kLazy) return t;
    std::vector<int64_t> size;
    for (auto n : t.sizes()) size.push_back(std::min<int64_t>(n, 1));
    return at::zeros(size, at::TensorOptions().dtype(t.scalar_type()).device(physical_device(t.device().index())));
  };
  for (size_t i = 0; i < op.args.size(); i++) tiny.push_back(map_tensors(stack[base + i], shrink));
  const Stack held = tiny;  // see Program::call
  op.handle.callBoxed(&tiny);
}

bool boolean_index(const OpInfo& op, const Stack& stack, size_t base) {
  for (size_t i = 0; i < op.args.size(); i++) {
    if (op.args[i].kind != ArgKind::OptTensorList) continue;
    for (const auto& e : stack[base + i].toListRef())
      if (e.isTensor() && e.toTensor().defined() && (e.toTensor().scalar_type() == at::kBool || e.toTensor().scalar_type() == at::kByte)) return true;
  }
  return false;
}

InferencePtr no_meta(const std::shared_ptr<Inference>& result) {
  result->recordable = Recordable::No;
  result->reason = "its result's shape cannot be inferred without running it (no Meta kernel)";
  return result;
}

// Runs the op on Meta once per (op, layouts, constants): checks what eager would check, and yields shapes.
InferencePtr infer(const OpInfo& op, const Stack& stack, size_t base) {
  PlainDispatch plain;
  auto disabled = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  struct Restore {
    at::impl::TorchFunctionDisabledState s;
    ~Restore() { at::impl::PythonTorchFunctionTLS::set_disabled_state(s); }
  } restore{disabled};
  stats().infers++;
  auto result = std::make_shared<Inference>();
  if (op.indexing && boolean_index(op, stack, base)) {  // index_put_: Meta refuses masks, but the result is `self` whatever they hold
    result->returns.push_back({op.return_alias[0], -1, false, {}});
    return result;
  }
  Stack metas;
  std::vector<at::Tensor> written;
  std::unordered_map<const void*, at::Tensor> seen;  // one argument given twice stays one tensor
  auto convert = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    auto& m = seen[t.unsafeGetTensorImpl()];
    if (!m.defined()) m = to_meta(t);
    return m;
  };
  for (size_t i = 0; i < op.args.size(); i++) {
    const auto& v = stack[base + i];
    if (op.args[i].kind == ArgKind::Generator) metas.emplace_back();
    else if (v.isDevice()) metas.emplace_back(c10::Device(c10::kMeta));
    else metas.push_back(map_tensors(v, convert));
  }
  Stack args = metas;
  try {
    op.handle.callBoxed(&metas);
  } catch (const c10::NotImplementedError&) {
    return no_meta(result);
  } catch (python_error& e) {
    pybind11::gil_scoped_acquire gil;
    if (!PyErr_GivenExceptionMatches(e.type, PyExc_NotImplementedError)) throw;
    return no_meta(result);
  }
  if (op.checks_dtypes) check_dtypes(op, stack, base);
  for (size_t r = 0; r < op.return_alias.size(); r++) {
    Return ret;
    const auto& v = metas[r];
    if (op.return_alias[r] >= 0 && !op.view) {
      ret.alias = op.return_alias[r];
    } else if (v.isTensor()) {
      result->outs.push_back(describe(v.toTensor()));
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      ret.count = static_cast<int>(list.size());
      for (const auto& t : list) result->outs.push_back(describe(t));
    } else {
      ret.number = true;
      ret.value = v;
    }
    result->returns.push_back(ret);
  }
  for (size_t i = 0; i < op.args.size(); i++) {
    if (!op.args[i].writes || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const auto& before = stack[base + i].toTensor();
    const auto& after = args[i].toTensor();
    if (before.sizes() != after.sizes()) result->resized.emplace_back(static_cast<int>(i), describe(after));
  }
  return result;
}

// ---- hashing ------------------------------------------------------------------------------------------------------------

struct Scratch {
  std::vector<uint64_t> words, numbers;
};
Scratch& scratch() {
  static thread_local Scratch s;
  s.words.clear();
  s.numbers.clear();
  return s;
}

void add_layout(const c10::TensorImpl* t, std::vector<uint64_t>& words) {
  auto sizes = t->sizes();
  auto strides = t->strides();
  uint64_t flags = (t->is_conj() ? 1 : 0) | (t->is_neg() ? 2 : 0);
  words.push_back(0x7e00000000ULL | (static_cast<uint64_t>(t->dtype().toScalarType()) << 16) | (flags << 8) | sizes.size());
  for (auto s : sizes) words.push_back(static_cast<uint64_t>(s));
  for (auto s : strides) words.push_back(static_cast<uint64_t>(s));
  words.push_back(static_cast<uint64_t>(t->storage_offset()));
}

uint64_t bits(double d) {
  uint64_t u;
  std::memcpy(&u, &d, sizeof u);
  return u;
}

void add_const(const IValue& v, std::vector<uint64_t>& words) {
  if (v.isNone()) return words.push_back(0x01);
  if (v.isInt()) return words.insert(words.end(), {0x02, static_cast<uint64_t>(v.toInt())}), void();
  if (v.isBool()) return words.push_back(v.toBool() ? 0x04 : 0x03);
  if (v.isDouble()) return words.insert(words.end(), {0x05, bits(v.toDouble())}), void();
  if (v.isIntList()) {
    auto list = v.toIntVector();
    words.push_back(0x0600 | (list.size() << 16));
    for (auto i : list) words.push_back(static_cast<uint64_t>(i));
    return;
  }
  // Rare kinds (strings, bool lists, layouts): their printed form is their identity.
  std::ostringstream text;
  text << v.tagKind() << v;
  auto s = text.str();
  words.push_back(torch::lazy::HashReduce(torch::lazy::DataHash(s.data(), s.size())));
}

void add_number(const IValue& v, bool value_matters, std::vector<uint64_t>& words) {
  words.push_back(v.isNone() ? 0x10 : v.isDouble() ? 0x11 : v.isInt() ? 0x12 : v.isBool() ? 0x13 : 0x14);
  if (value_matters && !v.isNone()) add_const(v.isComplexDouble() ? IValue(v.toComplexDouble().real()) : v, words);
}

bool host_scalar(const c10::TensorImpl* t) { return t->device_type() == c10::kCPU && t->dim() == 0 && t->layout() == at::kStrided; }

IValue read_host(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble: return *t.const_data_ptr<double>();
    case at::kFloat: return static_cast<double>(*t.const_data_ptr<float>());
    case at::kLong: return *t.const_data_ptr<int64_t>();
    case at::kBool: return *t.const_data_ptr<bool>();
    default: return IValue(t.item());
  }
}

[[noreturn]] void mixed_devices(const OpInfo& op, const c10::Device& a, const c10::Device& b) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b, "! (when recording ", op.name,
              ")");
}

// The device of the op's lazy tensors; checks that nothing else but 0-d CPU tensors is mixed in.
c10::DeviceIndex common_device(const OpInfo& op, const Stack& stack, size_t base) {
  c10::DeviceIndex found = -1;
  std::optional<c10::Device> foreign;
  auto look = [&](const c10::TensorImpl* t, bool in_list) {
    if (t == c10::UndefinedTensorImpl::singleton()) return;
    if (t->device_type() != kLazy) {
      if (in_list || !host_scalar(t)) foreign = t->device();
    } else if (found < 0) {
      found = t->device().index();
    } else if (found != t->device().index()) {
      mixed_devices(op, c10::Device(kLazy, found), t->device());
    }
  };
  for (size_t i = 0; i < op.args.size(); i++) {
    const auto& v = stack[base + i];
    if (v.isGenerator())
      TORCH_CHECK(v.toGenerator().device().type() == kLazy, "Expected a 'lazysched' device type for generator but found '", v.toGenerator().device().type(), "'");
    if (v.isTensor()) look(v.unsafeToTensorImpl(), false);
    else if (v.isTensorList() || v.isOptionalTensorList()) {
      for (const auto& e : v.toListRef())
        if (e.isTensor()) look(e.unsafeToTensorImpl(), true);
    } else if (v.isDevice() && found < 0 && v.toDevice().type() == kLazy && v.toDevice().has_index()) {
      found = v.toDevice().index();
    }
  }
  if (found < 0) found = current_device();
  if (foreign) mixed_devices(op, c10::Device(kLazy, found), *foreign);
  return found;
}

// Indexing accepts index tensors on the CPU, as on CUDA.
void move_indices(const OpInfo& op, Stack* stack, size_t base) {
  c10::DeviceIndex device = current_device();
  if ((*stack)[base].isTensor() && (*stack)[base].toTensor().device().type() == kLazy) device = (*stack)[base].toTensor().device().index();
  for (size_t i = 0; i < op.args.size(); i++) {
    if (op.args[i].kind != ArgKind::OptTensorList) continue;
    (*stack)[base + i] = map_tensors((*stack)[base + i], [&](const at::Tensor& t) {
      if (!t.defined() || t.device().type() != c10::kCPU) return t;
      PlainDispatch plain;
      return wrap_physical(t.to(physical_device(device), /*non_blocking=*/false, /*copy=*/true), device);
    });
  }
}

}  // namespace

// ---- the recorder ---------------------------------------------------------------------------------------------------------

void Trace::reset(uint64_t new_id) {
  id = new_id;
  instrs.clear();
  args.clear();
  operands.clear();
  dims.clear();
  scalars.clear();
  buffers.clear();
  kinds.clear();
  written.clear();
  live.clear();
  held_bytes = 0;
  hash = hash_t(static_cast<uint64_t>(0x1a2f5c));
}

int32_t Trace::number(Buffer* b, std::vector<uint64_t>& words) {
  if (b->trace == id) return b->index;
  b->trace = id;
  b->index = static_cast<int32_t>(buffers.size());
  auto kind = b->generator.defined() ? BufferKind::Generator : (b->physical || b->pending_in) ? BufferKind::Input : BufferKind::Fresh;
  buffers.push_back(BufferPtr::reclaim_copy(b));
  kinds.push_back(kind);
  written.push_back(0);
  b->touched = true;
  if (kind == BufferKind::Fresh && b->owned) held_bytes += static_cast<int64_t>(b->nbytes);
  words.push_back((static_cast<uint64_t>(kind) << 56) | b->nbytes);
  return b->index;
}

namespace {

Operand add_operand(Trace& t, const c10::TensorImpl* impl, Mode mode, std::vector<uint64_t>& words) {
  Operand o;
  if (impl == c10::UndefinedTensorImpl::singleton()) return o;
  auto* b = buffer_of(impl->unsafe_storage());
  o.buffer = t.number(b, words);
  words.push_back(static_cast<uint64_t>(o.buffer));
  o.dims = static_cast<int32_t>(t.dims.size());
  o.ndim = static_cast<int16_t>(impl->dim());
  o.dtype = impl->dtype().toScalarType();
  o.mode = mode;
  o.conj = impl->is_conj();
  o.neg = impl->is_neg();
  o.offset = impl->storage_offset();
  t.dims.insert(t.dims.end(), impl->sizes().begin(), impl->sizes().end());
  t.dims.insert(t.dims.end(), impl->strides().begin(), impl->strides().end());
  if (mode != Mode::Read) {
    b->pending_in = t.id;
    t.written[o.buffer] = 1;
  }
  return o;
}

void check_usable(const IValue& v) {
  auto one = [](const c10::TensorImpl* t) {
    if (t == c10::UndefinedTensorImpl::singleton() || t->device_type() != kLazy) return;
    auto* b = buffer_of(t->unsafe_storage());
    TORCH_CHECK(!b->error, *b->error);
  };
  if (v.isTensor()) one(v.unsafeToTensorImpl());
  else if (v.isTensorList() || v.isOptionalTensorList())
    for (const auto& e : v.toListRef())
      if (e.isTensor()) one(e.unsafeToTensorImpl());
}

void take_shape(const at::Tensor& t, const TensorMeta& m) {
  if (t.numel() != 0)
    TORCH_WARN("An output with one or more elements was resized since it had shape ", t.sizes(), ", which does not match the required output shape ",
               at::IntArrayRef(m.size), ". This behavior is deprecated.");
  t.resize_(m.size);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(m.size, m.stride);
}

}  // namespace

Recorder::Recorder(c10::DeviceIndex i) : index(i), trace_(std::make_unique<Trace>()), spare_(std::make_unique<Trace>()) { trace_->reset(next_id_++); }

Recorder& recorder(c10::DeviceIndex i) {
  static auto* all = [] {
    auto* v = new std::vector<std::unique_ptr<Recorder>>();
    for (int d = 0; d < device_count(); d++) v->push_back(std::make_unique<Recorder>(static_cast<c10::DeviceIndex>(d)));
    return v;
  }();
  if (i < 0) i = current_device();
  TORCH_CHECK(i < static_cast<int>(all->size()), "lazysched: there is no device lazysched:", static_cast<int>(i));
  return *(*all)[i];
}

bool Recorder::is_pending(const Buffer* b) {
  std::lock_guard<std::mutex> lock(mutex);
  return b->pending_in != 0;
}

void Recorder::on_storage_death(Buffer* b) {
  std::lock_guard<std::mutex> lock(mutex);
  b->owned = false;
  if (b->trace != trace_->id) return;
  trace_->held_bytes += trace_->kinds[b->index] == BufferKind::Input ? static_cast<int64_t>(b->nbytes) : -static_cast<int64_t>(b->nbytes);
}

void Recorder::record(const OpInfo& op, Stack* stack) {
  const size_t n = op.args.size(), base = stack->size() - n;
  auto& s = scratch();
  s.words.push_back(op.name_hash);
  for (size_t i = 0; i < n; i++) {
    const auto& v = (*stack)[base + i];
    const auto& a = op.args[i];
    switch (a.kind) {
      case ArgKind::Tensor:
        if (!v.isTensor() || v.unsafeToTensorImpl() == c10::UndefinedTensorImpl::singleton()) s.words.push_back(0x20);
        else {
          auto* t = v.unsafeToTensorImpl();
          if (t->device_type() != kLazy) s.words.push_back(t->is_wrapped_number() ? 0x22 : 0x21);
          add_layout(t, s.words);
        }
        break;
      case ArgKind::TensorList:
      case ArgKind::OptTensorList:
        if (v.isNone()) { s.words.push_back(0x23); break; }
        s.words.push_back(0x2400 | (v.toListRef().size() << 16));
        for (const auto& e : v.toListRef()) {
          if (e.isTensor() && e.unsafeToTensorImpl() != c10::UndefinedTensorImpl::singleton()) add_layout(e.unsafeToTensorImpl(), s.words);
          else s.words.push_back(0x20);
        }
        break;
      case ArgKind::Scalar: add_number(v, op.floats_shape || (op.pow_like && !v.isDouble()), s.words); break;
      case ArgKind::ScalarList:
        if (v.isNone()) { s.words.push_back(0x25); break; }
        if (v.isDoubleList()) s.words.push_back(0x2600 | (v.toDoubleList().size() << 16));
        else {
          s.words.push_back(0x2700 | (v.toListRef().size() << 16));
          for (const auto& e : v.toListRef()) add_number(e, op.floats_shape, s.words);
        }
        if (op.floats_shape) add_const(v, s.words);
        break;
      case ArgKind::Generator: s.words.push_back(v.isNone() ? 0x28 : 0x29); break;
      case ArgKind::Device: s.words.push_back(0x2a); break;
      default: add_const(v, s.words);
    }
  }
  const auto meta_hash = torch::lazy::HashBlock(s.words.data(), s.words.size() * 8, hash_t(static_cast<uint64_t>(7)));

  InferencePtr known;
  {
    std::shared_lock<std::shared_mutex> lock(memo().mutex);
    auto it = memo().table.find(meta_hash);
    if (it != memo().table.end()) known = it->second;
  }
  if (!known) {
    known = infer(op, *stack, base);
    std::unique_lock<std::shared_mutex> lock(memo().mutex);
    if (memo().table.size() > 200000) memo().table.clear();
    memo().table[meta_hash] = known;
  }
  if (known->recordable != Recordable::Yes) return run_now(op, stack, "unrecordable", op.name + ": " + known->reason);
  for (size_t i = 0; i < n; i++) check_usable((*stack)[base + i]);
  for (const auto& [arg, m] : known->resized) take_shape((*stack)[base + arg].toTensor(), m);

  c10::SmallVector<at::Tensor, 4> outs;
  if (op.view) {
    const auto& source = (*stack)[base].toTensor();
    for (const auto& m : known->outs) {
      auto offset = source.storage_offset() * static_cast<int64_t>(source.element_size()) / static_cast<int64_t>(c10::elementSize(m.dtype)) + m.offset;
      auto t = alias_storage(source.storage(), source.key_set(), m.dtype, m.size, m.stride, offset);
      if (m.conj != t.is_conj()) t._set_conj(m.conj);
      if (m.neg != t.is_neg()) t._set_neg(m.neg);
      outs.push_back(std::move(t));
    }
  } else {
    for (const auto& m : known->outs) outs.push_back(m.defined ? make_lazy(m.size, m.stride, m.dtype, index) : at::Tensor());
    const Site site = capture_site();
    const int64_t backward = backward_sequence();
    std::lock_guard<std::mutex> lock(mutex);
    Trace& t = *trace_;
    Instr instr{&op, static_cast<int32_t>(t.args.size()), 0, static_cast<int32_t>(outs.size()), -1, site,
                static_cast<int64_t>(at::sequence_number::peek()), backward};
    for (size_t i = 0; i < n; i++) {
      auto& v = (*stack)[base + i];
      const auto& a = op.args[i];
      const Mode mode = !a.writes ? Mode::Read : a.out ? Mode::Write : Mode::ReadWrite;
      Arg arg;
      switch (a.kind) {
        case ArgKind::Tensor:
          if (v.isTensor() && v.toTensor().defined() && v.toTensor().device().type() != kLazy) {
            arg.kind = ArgKind::HostScalar;
            arg.first = static_cast<int32_t>(t.scalars.size());
            arg.dtype = v.toTensor().scalar_type();
            arg.wrapped = v.unsafeToTensorImpl()->is_wrapped_number();
            t.scalars.push_back(read_host(v.toTensor()));
          } else if (v.isTensor() && v.toTensor().defined()) {
            arg.kind = ArgKind::Tensor;
            arg.first = static_cast<int32_t>(t.operands.size());
            t.operands.push_back(add_operand(t, v.unsafeToTensorImpl(), mode, s.numbers));
          } else {
            arg.value = v;  // None or an undefined tensor: which of the two the op wants depends on its schema
          }
          break;
        case ArgKind::TensorList:
        case ArgKind::OptTensorList:
          if (v.isNone()) break;
          arg.kind = a.kind;
          arg.first = static_cast<int32_t>(t.operands.size());
          arg.count = static_cast<int32_t>(v.toListRef().size());
          for (const auto& e : v.toListRef())
            t.operands.push_back(e.isTensor() ? add_operand(t, e.unsafeToTensorImpl(), mode, s.numbers) : Operand());
          break;
        case ArgKind::Scalar:
          if (v.isNone() || op.floats_shape || (op.pow_like && !v.isDouble())) { arg.value = v; break; }
          arg.kind = ArgKind::Scalar;
          arg.first = static_cast<int32_t>(t.scalars.size());
          t.scalars.push_back(v);
          break;
        case ArgKind::ScalarList:
          if (v.isNone() || op.floats_shape) { arg.value = v; break; }
          arg.kind = ArgKind::ScalarList;
          arg.first = static_cast<int32_t>(t.scalars.size());
          if (v.isDoubleList()) {
            for (double d : v.toDoubleVector()) t.scalars.emplace_back(d);
          } else {
            for (const auto& e : v.toListRef()) t.scalars.push_back(e);
          }
          arg.count = static_cast<int32_t>(t.scalars.size()) - arg.first;
          break;
        case ArgKind::Generator:
          arg.kind = ArgKind::Generator;
          if (!v.isNone()) instr.generator = t.number(generator_buffer(v.toGenerator()), s.numbers);
          break;
        case ArgKind::Device: arg.kind = ArgKind::Device; break;
        default: arg.value = v;
      }
      t.args.push_back(std::move(arg));
    }
    if (op.random) {
      if (instr.generator < 0) instr.generator = t.number(default_generator_buffer(index), s.numbers);
      s.numbers.push_back(static_cast<uint64_t>(instr.generator));
      t.buffers[instr.generator]->pending_in = t.id;
      t.written[instr.generator] = 1;
    }
    instr.outs = static_cast<int32_t>(t.operands.size());
    for (const auto& o : outs) {
      t.operands.push_back(add_operand(t, o.unsafeGetTensorImpl(), Mode::Write, s.numbers));
    }
    t.instrs.push_back(instr);
    s.numbers.push_back(static_cast<uint64_t>(torch::lazy::HashReduce(meta_hash)));
    s.numbers.push_back(c10::Uint128High64(meta_hash));
    t.hash = torch::lazy::HashBlock(s.numbers.data(), s.numbers.size() * 8, t.hash);
    stats().recorded++;
  }

  c10::SmallVector<IValue, 4> returns;
  size_t next = 0;
  for (const auto& r : known->returns) {
    if (r.alias >= 0) returns.push_back((*stack)[base + r.alias]);
    else if (r.number) returns.push_back(r.value);
    else if (r.count >= 0) {
      c10::List<at::Tensor> list;
      for (int k = 0; k < r.count; k++) list.push_back(outs[next++]);
      returns.emplace_back(std::move(list));
    } else {
      returns.emplace_back(outs[next++]);
    }
  }
  stack->erase(stack->end() - static_cast<int64_t>(n), stack->end());
  for (auto& r : returns) stack->push_back(std::move(r));
  check_limits();
}

void Recorder::check_limits() {
  const auto& l = limits();
  if (l.eager) return barrier("eager", "LAZYSCHED_MODE=eager runs each op at once");
  if (pending_ops() >= l.max_ops) return barrier("limit", "LAZYSCHED_MAX_OPS ops are recorded");
  if (l.max_bytes && trace_->held_bytes > l.max_bytes) return barrier("limit", "LAZYSCHED_MAX_PENDING_BYTES are held by the recording");
}

// Runs an op that cannot be recorded, on the physical tensors, after what it depends on.
void Recorder::run_now(const OpInfo& op, Stack* stack, const char* kind, const std::string& reason) {
  const size_t n = op.args.size(), base = stack->size() - n;
  bool settle = op.random;
  auto each = [&](const IValue& v, auto&& f) {
    if (v.isTensor()) f(v.toTensor());
    else if (v.isTensorList() || v.isOptionalTensorList())
      for (const auto& e : v.toListRef())
        if (e.isTensor()) f(e.toTensor());
  };
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t i = 0; i < n; i++)
      each((*stack)[base + i], [&](const at::Tensor& t) {
        if (!t.defined() || t.device().type() != kLazy) return;
        auto* b = buffer_of(t);
        settle |= b->pending_in != 0 || (op.args[i].writes && b->trace == trace_->id);
      });
  }
  if (settle) barrier(kind, reason);
  stats().fallbacks++;
  count(op.name);

  Stack args(stack->begin() + static_cast<int64_t>(base), stack->end());
  Stack physical;
  std::vector<std::pair<at::Tensor, at::Tensor>> sources, written;  // (lazy, physical)
  for (size_t i = 0; i < n; i++) {
    const auto& v = args[i];
    if (v.isDevice() && v.toDevice().type() == kLazy) physical.emplace_back(physical_device(index));
    else if (v.isGenerator()) physical.emplace_back(generator_buffer(v.toGenerator())->generator);
    else physical.push_back(map_tensors(v, [&](const at::Tensor& t) {
      if (!t.defined() || t.device().type() != kLazy) return t;
      auto p = materialise(t, kind, reason);
      sources.emplace_back(t, p);
      if (op.args[i].writes) written.emplace_back(t, p);
      return p;
    }));
  }
  std::vector<c10::Storage> before;
  for (auto& [t, p] : written) before.push_back(p.storage());
  {
    GilRelease nogil;
    PlainDispatch plain;
    c10::OptionalDeviceGuard guard;
    if (physical_type() == c10::kCUDA) guard.reset_device(physical_device(index));
    op.handle.callBoxed(&physical);
  }
  for (auto& [t, p] : written) {  // an output that the op resized
    if (t.sizes() == p.sizes() && t.strides() == p.strides() && p.storage().nbytes() <= buffer_of(t)->nbytes) continue;
    auto* b = buffer_of(t);
    std::lock_guard<std::mutex> lock(mutex);
    b->physical = p.storage();
    b->nbytes = p.storage().nbytes();
    t.storage().unsafeGetStorageImpl()->set_nbytes(b->nbytes);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(p.sizes(), p.strides());
  }
  auto lift = [&](const at::Tensor& p) -> at::Tensor {
    if (!p.defined() || p.device() != physical_device(index)) return p;
    for (auto& [t, q] : sources)
      if (p.is_alias_of(q)) return alias_storage(t.storage(), t.key_set(), p.scalar_type(), p.sizes(), p.strides(), p.storage_offset());
    return wrap_physical(p, index);
  };
  stack->erase(stack->end() - static_cast<int64_t>(n), stack->end());
  for (size_t r = 0; r < op.return_alias.size(); r++) {
    if (op.return_alias[r] >= 0 && !op.view) stack->push_back(args[op.return_alias[r]]);
    else stack->push_back(map_tensors(physical[r], lift));
  }
}

at::Tensor Recorder::materialise(const at::Tensor& t, const char* kind, const std::string& reason) {
  auto* b = buffer_of(t);
  if (is_pending(b)) barrier(kind, reason);
  TORCH_CHECK(!b->error, *b->error);
  if (!b->physical) {
    PlainDispatch plain;
    b->physical = at::empty({static_cast<int64_t>(b->nbytes)}, at::TensorOptions().dtype(at::kByte).device(physical_device(index))).storage();
    b->touched = true;
  }
  return physical_view(b->physical, t);
}

void record_boxed(const c10::OperatorHandle& handle, Stack* stack) {
  const auto& op = op_info(handle);
  const size_t base = stack->size() - op.args.size();
  if (op.indexing) move_indices(op, stack, base);
  auto& r = recorder(common_device(op, *stack, base));
  auto recordable = op.recordable;
  if (op.indexing && starts(op.name, "aten::index.")) recordable = boolean_index(op, *stack, base) ? Recordable::DataDependent : Recordable::Yes;
  switch (recordable) {
    case Recordable::Yes: return r.record(op, stack);
    case Recordable::DataDependent: return r.run_now(op, stack, "data_dependent_shape", op.name + ": its result depends on the values");
    case Recordable::ReturnsNumber: return r.run_now(op, stack, "value_access", op.name + " returns a Python value");
    default: return r.run_now(op, stack, "unrecordable", op.name + " cannot be recorded");
  }
}

PlainDispatch::PlainDispatch()
    : guard(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

void prefork_lock(bool lock) {
  for (int i = 0; i < device_count(); i++) lock ? recorder(i).mutex.lock() : recorder(i).mutex.unlock();
}

}  // namespace lazysched
