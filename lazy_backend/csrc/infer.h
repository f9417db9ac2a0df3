// What an op's results look like: inferred once on Meta, then remembered.
#pragma once
#include "core.h"

namespace lazysched {

struct TensorMeta {
  bool defined = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> size, stride;
  int64_t offset = 0;
  bool conj = false, neg = false;
};
struct Return {
  int alias = -1;  // argument handed back
  int count = -1;  // length of a list of new tensors, -1: one tensor
  bool number = false;
  IValue value;
};
struct Inference {
  std::string refusal;  // why the op cannot be recorded; empty: it can
  std::vector<Return> returns;
  std::vector<TensorMeta> outs;                     // new tensors in order
  std::vector<std::pair<int, TensorMeta>> resized;  // written arguments that take a new shape
};
using InferencePtr = std::shared_ptr<const Inference>;

// `call` hashes all that decides the result: op, layouts, constants. May run Python's Meta kernels.
InferencePtr inference(const OpInfo& op, const IValue* args, hash_t call);
bool boolean_index(const OpInfo& op, const IValue* args);

}  // namespace lazysched
