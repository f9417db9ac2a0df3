// Infers shapes: runs an op on Meta once per (op, layouts, constants), and checks there what eager would check.
#include "core.h"
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
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

// Runs the op on the physical device, on zeros of the same layout; if `tiny`, with each size cut to 1.
Stack run_on_zeros(const OpInfo& op, const IValue* args, DeviceIndex device, bool tiny, Stack& given) {
  auto zeros = [&](const at::Tensor& t) {
    if (!is_lazy(t)) return t;
    auto sizes = t.sizes().vec();
    for (auto& n : sizes) n = tiny ? std::min<int64_t>(n, 1) : n;
    auto bytes = physical_bytes(at::detail::computeStorageNbytes(sizes, t.strides(), t.element_size()), device);
    bytes_of(bytes).zero_();
    return alias_storage(bytes, t.scalar_type(), sizes, t.strides(), 0, t.is_conj(), t.is_neg());
  };
  for (size_t i = 0; i < op.args.size(); i++)
    given.push_back(args[i].isDevice() ? IValue(physical_device(device)) : map_tensors(args[i], zeros));
  Stack stack = given;  // `given` holds on to them, see Runner::run
  op.handle.callBoxed(&stack);
  return stack;
}

// Meta kernels written in Python may promise other layouts than the op gives, or refuse calls that it takes. What it refuses for
// zeros, eager mode decides.
void correct(const OpInfo& op, const IValue* args, DeviceIndex device, Stack& given, Inference& known) {
  Stack after;
  try {
    const auto real = run_on_zeros(op, args, device, false, after);
    known.returns.clear();
    for (const auto& v : real)
      known.returns.push_back(map_tensors(v, [](const at::Tensor& t) { return t.defined() ? to_meta(t) : t; }));
    given = after;
  } catch (const std::exception&) {
    known.refusal = "it fails for zeros, so that it has to see the values";
  }
}

enum class Meta { Good, Refuses, Missing };

Meta call_meta(const OpInfo& op, Stack& stack) {
  try {
    op.handle.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return Meta::Missing;
  } catch (python_error& e) {
    pybind11::gil_scoped_acquire gil;
    if (!PyErr_GivenExceptionMatches(e.type, PyExc_Exception)) throw;
    return PyErr_GivenExceptionMatches(e.type, PyExc_NotImplementedError) ? Meta::Missing : Meta::Refuses;
  } catch (const std::exception&) {
    return Meta::Refuses;
  }
  return Meta::Good;
}

// Torch functions of the user's Python must not see Meta calls.
struct NoTorchFunction {
  using TLS = at::impl::PythonTorchFunctionTLS;
  NoTorchFunction() { TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~NoTorchFunction() { TLS::set_disabled_state(before); }
  const at::impl::TorchFunctionDisabledState before = TLS::get_disabled_state();
};

// The layout that an output takes when resized. Meta kernels in Python say contiguous; pointwise ops give that of their first operand.
at::Tensor resized(const OpInfo& op, const Stack& given, at::Tensor out) {
  if (op.handle.hasTag(at::Tag::pointwise))
    for (size_t i = 0; i < op.args.size(); i++)
      if (!op.args[i].writes && is_tensor(given[i]) && given[i].toTensor().sizes() == out.sizes())
        return at::empty_like(given[i].toTensor());
  return to_meta(out);
}

InferencePtr infer(const OpInfo& op, const IValue* args, DeviceIndex device) {
  PlainDispatch plain(device);
  NoTorchFunction python_is_off;
  stats[kInfers]++;
  auto result = std::make_shared<Inference>();
  if (op.indexing && boolean_index(op, args)) return result;  // index_put_: Meta refuses masks, but the result is `self` anyhow
  Stack given = meta_args(op, args);
  result->returns = given;
  const auto meta = call_meta(op, result->returns);
  if (meta == Meta::Missing || (meta == Meta::Refuses && !op.corrected)) {
    result->refusal = meta == Meta::Missing ? "it has no Meta kernel, so that its result's shape is not known before it runs"
                                            : "its Meta kernel refuses this call, so that eager mode decides";
    return result;
  }
  Stack tiny;
  if (op.checks_dtypes) run_on_zeros(op, args, device, true, tiny);  // Meta does not check every dtype
  if (op.corrected) correct(op, args, device, given, *result);
  for (size_t i = 0; i < op.args.size(); i++) {
    if (!op.args[i].writes || !is_tensor(given[i])) continue;
    const auto &before = args[i].toTensor(), &after = given[i].toTensor();
    if (before.sizes() != after.sizes()) result->resized.emplace_back(i, resized(op, given, after));
    else if (before.strides() != after.strides()) result->resized.emplace_back(i, to_meta(after));  // CPU kernels may do that
  }
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

std::shared_ptr<const Inference> inference(const OpInfo& op, const IValue* args, hash_t call, DeviceIndex device) {
  static auto* mutex = new std::shared_mutex();
  static auto* table = new std::unordered_map<hash_t, InferencePtr, torch::lazy::HashReducer>();
  {
    std::shared_lock<std::shared_mutex> lock(*mutex);
    auto it = table->find(call);
    if (it != table->end()) return it->second;
  }
  auto known = infer(op, args, device);
  std::unique_lock<std::shared_mutex> lock(*mutex);
  if (table->size() > kRemembered) table->clear();
  (*table)[call] = known;
  return known;
}

}  // namespace lazysched
