// Infers shapes: runs an op on Meta once per (op, layouts, constants), and checks there what eager would check.
#include "core.h"
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <shared_mutex>

namespace lazysched {
namespace {

using InferencePtr = std::shared_ptr<const Inference>;
constexpr size_t kRemembered = 100000;

at::Tensor to_meta(const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // Python numbers stay on the CPU, also for Meta
  auto m = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.scalar_type()).device(c10::kMeta));
  if (t.is_conj()) m._set_conj(true);
  if (t.is_neg()) m._set_neg(true);
  return m;
}

Stack meta_args(const OpInfo& op, const IValue* args) {
  Stack metas;
  std::unordered_map<const void*, at::Tensor> seen;  // one argument given twice stays one tensor
  auto convert = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    auto& m = seen[t.unsafeGetTensorImpl()];
    if (!m.defined()) m = to_meta(t);
    return m;
  };
  for (size_t i = 0; i < op.args.size(); i++) {
    if (op.args[i].kind == ArgKind::Generator) metas.emplace_back();
    else if (args[i].isDevice()) metas.emplace_back(c10::Device(c10::kMeta));
    else metas.push_back(map_tensors(args[i], convert));
  }
  return metas;
}

// Meta does not check every dtype. A run on the physical device with each size cut to 1 raises what eager would raise.
void check_dtypes(const OpInfo& op, const IValue* args) {
  Stack tiny;
  auto shrink = [](const at::Tensor& t) {
    if (!is_lazy(t)) return t;
    std::vector<int64_t> size;
    for (auto n : t.sizes()) size.push_back(std::min<int64_t>(n, 1));
    return at::zeros(size, at::TensorOptions().dtype(t.scalar_type()).device(physical_device(t.device().index())));
  };
  for (size_t i = 0; i < op.args.size(); i++) tiny.push_back(map_tensors(args[i], shrink));
  const Stack held = tiny;  // see Runner::run
  op.handle.callBoxed(&tiny);
}

// Calls the op; false where it has no Meta kernel, in C++ or Python.
bool call_meta(const OpInfo& op, Stack& stack) {
  try {
    op.handle.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (python_error& e) {
    pybind11::gil_scoped_acquire gil;
    if (!PyErr_GivenExceptionMatches(e.type, PyExc_NotImplementedError)) throw;
    return false;
  }
  return true;
}

// Torch functions of the user's Python must not see Meta calls.
struct NoTorchFunction {
  using TLS = at::impl::PythonTorchFunctionTLS;
  NoTorchFunction() { TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~NoTorchFunction() { TLS::set_disabled_state(before); }
  const at::impl::TorchFunctionDisabledState before = TLS::get_disabled_state();
};

// Meta kernels in Python resize an output to contiguous strides; a pointwise op gives it those of its first operand.
at::Tensor restrided(const OpInfo& op, const Stack& given, at::Tensor out) {
  if (!op.handle.hasTag(at::Tag::pointwise)) return out;
  for (size_t i = 0; i < op.args.size(); i++)
    if (!op.args[i].writes && is_tensor(given[i]) && given[i].toTensor().sizes() == out.sizes())
      return at::empty_like(given[i].toTensor());
  return out;
}

InferencePtr infer(const OpInfo& op, const IValue* args) {
  PlainDispatch plain;
  NoTorchFunction python_is_off;
  stats[kInfers]++;
  auto result = std::make_shared<Inference>();
  if (op.indexing && boolean_index(op, args)) return result;  // index_put_: Meta refuses masks, but the result is `self` anyhow
  const Stack given = meta_args(op, args);
  result->returns = given;
  if (!call_meta(op, result->returns)) {
    result->refusal = "its result's shape cannot be inferred without running it (no Meta kernel)";
    return result;
  }
  if (op.checks_dtypes) check_dtypes(op, args);
  for (size_t i = 0; i < op.args.size(); i++)
    if (op.args[i].writes && is_tensor(given[i]) && args[i].toTensor().sizes() != given[i].toTensor().sizes())
      result->resized.emplace_back(i, restrided(op, given, given[i].toTensor()));
  return result;
}

}  // namespace

bool boolean_index(const OpInfo& op, const IValue* args) {
  bool found = false;
  each_tensor(op, args, [&](size_t i, const at::Tensor& t) {
    found |= op.args[i].kind == ArgKind::OptTensorList && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
  });
  return found;
}

std::shared_ptr<const Inference> inference(const OpInfo& op, const IValue* args, hash_t call) {
  static auto* mutex = new std::shared_mutex();
  static auto* table = new std::unordered_map<hash_t, InferencePtr, torch::lazy::HashReducer>();
  {
    std::shared_lock<std::shared_mutex> lock(*mutex);
    auto it = table->find(call);
    if (it != table->end()) return it->second;
  }
  auto known = infer(op, args);
  std::unique_lock<std::shared_mutex> lock(*mutex);
  if (table->size() > kRemembered) table->clear();
  (*table)[call] = known;
  return known;
}

}  // namespace lazysched
