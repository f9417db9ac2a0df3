// Infers shapes: has infer.py run an op on Meta once per (op, layouts, constants), and remembers what it said.
#include "core.h"

namespace lazysched {

constexpr size_t kRemembered = 100000;

bool boolean_index(const OpInfo& op, const IValue* args) {
  bool found = false;
  each_tensor(op, args, [&](size_t i, const at::Tensor& t) {
    found |= op.args[i].kind == ArgKind::OptTensorList && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
  });
  return found;
}

// The key of an answer that holds at the user's line only, and for training or for the rest.
static hash_t at_line(hash_t call) {
  const auto site = capture_site();
  return torch::lazy::HashCombine(call, torch::lazy::MHash(reinterpret_cast<intptr_t>(site.code), site.lasti, at::GradMode::is_enabled()));
}

std::shared_ptr<const Inference> inference(const OpInfo& op, const IValue* args, hash_t call, DeviceIndex device) {
  static auto* table = new std::unordered_map<hash_t, std::shared_ptr<const Inference>, torch::lazy::HashReducer>();
  for (;; call = at_line(call)) {  // without the lock: it may take the GIL
    std::shared_lock<std::shared_mutex> lock(tables_mutex);
    const auto it = table->find(call);
    if (it == table->end()) break;
    if (!it->second->here) return it->second;
  }
  stats[kInfers]++;
  auto known = std::make_shared<Inference>();
  if (!op.indexing || !boolean_index(op, args)) {  // index_put_: Meta refuses masks, but the result is `self` anyhow
    // What the user did wrong is said when the op itself is recorded or run.
    PlainDispatch plain(device); NoWarnings quiet("");
    infer_in_python(op, args, device, *known);
  }
  const auto here = known->here ? at_line(call) : call;
  std::remove_pointer_t<decltype(table)> old;  // goes after the lock: it may take the GIL
  std::unique_lock<std::shared_mutex> lock(tables_mutex);
  if (table->size() > kRemembered) table->swap(old);
  if (known->here) (*table)[call] = std::make_shared<Inference>(*known), known->here = false;  // asked again at other lines
  return (*table)[here] = known;
}

}  // namespace lazysched
