// Registers the device's ops: factories, views and copies natively, everything else through the recorder.
#include "core.h"
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/util/strides.h>
#include <torch/library.h>

namespace lazysched {
namespace {

using at::Tensor, std::optional;

// Raises where there is no such device.
DeviceIndex index_of(const optional<at::Device>& d) { return recorder(d ? d->index() : current_device()).index; }

void check_layout(const optional<at::Layout>& layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "lazysched: only strided tensors are recorded, got ", *layout);
}

Tensor empty_memory_format(c10::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> layout,
                           optional<at::Device> device, optional<bool> pin, optional<at::MemoryFormat> format) {
  check_layout(layout);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return make_empty(size, c10::dtype_or_default(dtype), index_of(device), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout> layout,
                     optional<at::Device> device, optional<bool>) {
  check_layout(layout);
  return make_lazy(size, stride, c10::dtype_or_default(dtype), index_of(device));
}

void record_copy(const Tensor& dst, const Tensor& src) {
  static const auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack{dst, src, false};
  recorder(dst).record(op_info(copy), &stack);
}

// Bytes from elsewhere arrive now: the caller may change the source as soon as this returns.
const Tensor& copy_in(const Tensor& dst, const Tensor& src, bool non_blocking) {
  PlainDispatch plain;
  const auto index = dst.device().index();
  const auto options = at::TensorOptions().dtype(dst.scalar_type()).device(physical_device(index));
  const bool dense = dst.is_non_overlapping_and_dense();
  Tensor staged;
  beside(index, src.is_cpu(), [&] {
    staged = dense ? at::empty_strided(dst.sizes(), dst.strides(), options) : at::empty(dst.sizes(), options);
    staged.copy_(src, non_blocking);
    return staged.storage();
  });
  const auto bytes = count_bytes(staged.storage());
  const bool whole = dense && !dst.is_neg() && !dst.is_conj() && dst.storage_offset() == 0;
  std::unique_lock lock(recorder(index).mutex);
  auto* b = buffer_of(dst);
  if (whole && !b->touched && bytes.nbytes() == b->nbytes) return b->physical = bytes, b->touched = true, dst;
  lock.unlock();
  return record_copy(dst, wrap_physical(staged, index)), dst;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto src = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (is_lazy(src) && src.device() == dst.device()) {
    if (src.sizes() != self.sizes()) at::assert_no_internal_overlap(dst), at::assert_no_partial_overlap(dst, self);
    return record_copy(dst, src), dst;
  }
  const bool in = is_lazy(dst);
  const auto reason = "copied to " + (in ? "another device" : c10::DeviceTypeName(dst.device().type(), true));
  if (is_lazy(src)) src = recorder(src).materialise(src, in ? "device_copy" : "value_access", reason);
  GilRelease nogil;
  if (in) return copy_in(dst, src, non_blocking);
  PlainDispatch plain;
  return dst.copy_(src, non_blocking);
}

// The storage takes the bytes that the tensor's shape needs.
void grow_storage(const Tensor& t) {
  const size_t need = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), t.storage_offset());
  if (t.numel() && t.storage().nbytes() < need) resize_bytes(t.storage(), need);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  for (auto s : size) TORCH_CHECK(s >= 0, "Trying to create tensor with negative dimension ", s, ": ", size);
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return grow_storage(self), self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kLazy, "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(), "\".  This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride.data() ? stride : c10::IntArrayRef(c10::contiguous_strides(size)), offset);
  return grow_storage(self), self;
}

// Shape-only stand-in on the physical device, for choosing a kernel.
Tensor shadow(const Tensor& t) {
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, {nullptr, physical_device(t.device().index())}, nullptr, false);
  return alias_storage(empty, t.scalar_type(), t.sizes(), t.strides(), 0).set_requires_grad(t.requires_grad());
}

using Mask = const optional<Tensor>&; using Scale = optional<double>;
using Backend = sdp::SDPBackend; using Draws = const optional<at::Generator>&;

int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, Mask mask, double p, bool causal, Scale scale, bool gqa) {
  if (q.is_nested()) return static_cast<int64_t>(Backend::math);
  const auto m = mask && mask->defined() ? optional<Tensor>(shadow(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(shadow(q), shadow(k), shadow(v), m, p, causal, scale, gqa);
}

// at::native asks the tensors' device which flash kernel to call, and knows CUDA's and the CPU's only.
Tensor flash_on_cuda(const Tensor& q, const Tensor& k, const Tensor& v, double p, bool causal, Scale scale) {
  const auto n = q.size(-1);
  auto pad = [&](const Tensor& t) { return n % 8 ? at::constant_pad_nd(t, {0, 8 - n % 8}) : t; };
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(n)));
  auto out = std::get<0>(at::_scaled_dot_product_flash_attention(pad(q), pad(k), pad(v), p, causal, false, factor));
  return n % 8 ? out.slice(-1, 0, n) : out;
}

Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v, Mask mask, double p, bool causal, Scale scale, bool gqa) {
  auto like_q = [&](const Tensor& t) { return t.device() == q.device() && t.dtype() == q.dtype() && t.dim() == 4; };
  if (!is_lazy(q) || !like_q(q) || !like_q(k) || !like_q(v) ||
      sdp_choice(q, k, v, mask, p, causal, scale, gqa) != static_cast<int64_t>(Backend::flash_attention))
    return at::native::scaled_dot_product_attention(q, k, v, mask, p, causal, scale, gqa);
  if (physical_type() == c10::kCUDA) return flash_on_cuda(q, k, v, p, causal, scale);
  auto m = mask;
  if (m && m->defined() && m->scalar_type() == at::kBool)
    m = at::where(*m, at::zeros({}, q.options()), at::scalar_tensor(-std::numeric_limits<double>::infinity(), q.options()));
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, m, scale));
}

// States that a program keeps and puts back; without a generator those of the default one of the device of `like`.
at::Generator drawn(const Tensor& like, Draws g) { return g ? *g : at::globalContext().defaultGenerator(like.device()); }
Tensor rng_state(const Tensor& like, Draws g) { return drawn(like, g).get_state(); }
void set_rng_state(const Tensor& state, const Tensor& like, Draws g) { drawn(like, g).set_state(state.cpu()); }

}  // namespace

void keep_whole(const std::vector<std::string>& ops) {
  static auto* library = new torch::Library(MAKE_TORCH_LIBRARY_IMPL(aten, PrivateUse1));
  for (const auto& op : ops) library->impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&record_boxed>());
}
TORCH_LIBRARY_IMPL(lazysched_own, CPU, m) { m.impl("rng_state", rng_state).impl("set_rng_state", set_rng_state); }
TORCH_LIBRARY_IMPL(lazysched_own, CUDA, m) { m.impl("rng_state", rng_state).impl("set_rng_state", set_rng_state); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format).impl("empty_strided", empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl)).impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias)).impl("resize_", resize_);
  m.impl("_copy_from", copy_from).impl("_local_scalar_dense", [](const Tensor& t) { return recorder(t).read(t); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to)).impl("scaled_dot_product_attention", sdpa);
}
// Here, too: what autograd looks at finds this one first; under `torch.inference_mode`, which passes autograd by, the one above.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", sdpa); }
// copy_ resolves conjugate and negative bits itself; their fallbacks would clone, which copies again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_boxed>()); }

}  // namespace lazysched

namespace at::native { REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lazysched::sdp_choice); }
