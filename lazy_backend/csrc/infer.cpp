// Infers shapes: has infer.py run an op on Meta once per (op, layouts, constants), and remembers what it said.
#include "core.h"
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <shared_mutex>

namespace lazysched {
namespace {

using InferencePtr = std::shared_ptr<const Inference>;
constexpr size_t kRemembered = 100000;

at::Tensor to_meta(const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;  // Python numbers stay on the CPU, also for Meta
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kMeta);
  auto m = t.storage_offset() == 0 ? at::empty_strided(t.sizes(), t.strides(), options)
                                   : at::empty({static_cast<int64_t>(t.storage().nbytes() / t.element_size())}, options)
                                         .as_strided(t.sizes(), t.strides(), t.storage_offset());
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

// What the user did wrong is said when the op itself is recorded or run.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

InferencePtr infer(const OpInfo& op, const IValue* args, DeviceIndex device) {
  PlainDispatch plain(device);
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard warnings(&silent);
  stats[kInfers]++;
  auto result = std::make_shared<Inference>();
  // index_put_: Meta refuses masks, but the result is `self` anyhow
  if (!op.indexing || !boolean_index(op, args)) infer_in_python(op, args, meta_args(op, args), device, *result);
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
