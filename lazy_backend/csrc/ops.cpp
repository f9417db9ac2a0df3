// Registers the device's ops: factories, views and copies natively, everything else through the recorder.
#include "core.h"
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/TensorOperators.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/strides.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace lazysched {
namespace {

using at::Tensor;
using std::optional;

c10::DeviceIndex index_of(const optional<at::Device>& d) {
  const auto index = d && d->has_index() ? d->index() : current_device();
  recorder(index);  // raises where there is no such device
  return index;
}

void check_layout(const optional<at::Layout>& layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "lazysched: only strided tensors are recorded, got layout ", *layout);
}

Tensor empty_memory_format(c10::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> layout, optional<at::Device> device,
                           optional<bool> pin, optional<at::MemoryFormat> format) {
  check_layout(layout);
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return make_empty(size, c10::dtype_or_default(dtype), index_of(device), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout> layout,
                     optional<at::Device> device, optional<bool>) {
  check_layout(layout);
  return make_lazy(size, stride, c10::dtype_or_default(dtype), index_of(device));
}

// A ZeroTensor has no storage; the device gives it one that holds zeros.
Tensor efficient_zeros(c10::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> layout, optional<at::Device> device,
                       optional<bool> pin) {
  return empty_memory_format(size, dtype, layout, device, pin, std::nullopt).zero_();
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }

// ---- copies -----------------------------------------------------------------------------------------------------------

const OpInfo& copy_op() {
  static const auto& op = op_info(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  return op;
}

void record_copy(const Tensor& dst, const Tensor& src) {
  Stack stack{dst, src, false};
  recorder(dst.device().index()).record(copy_op(), &stack);
}

// Bytes from elsewhere arrive now: the caller may change the source as soon as this returns.
void copy_in(const Tensor& dst, const Tensor& src, bool non_blocking) {
  PlainDispatch plain;
  auto device = physical_device(dst.device().index());
  auto options = at::TensorOptions().dtype(dst.scalar_type()).device(device);
  const bool dense = dst.is_non_overlapping_and_dense();
  auto staged = dense ? at::empty_strided(dst.sizes(), dst.strides(), options) : at::empty(dst.sizes(), options);
  staged.copy_(src, non_blocking);
  auto* b = buffer_of(dst);
  auto& r = recorder(dst.device().index());
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    if (!b->touched && dense && !dst.is_neg() && !dst.is_conj() && dst.storage_offset() == 0 && staged.storage().nbytes() == b->nbytes) {
      b->physical = staged.storage();
      b->touched = true;
      return;
    }
  }
  record_copy(dst, wrap_physical(staged, dst.device().index()));
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  auto src = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  const bool from = src.device().type() == kLazy, to = dst.device().type() == kLazy;
  if (from && to && src.device() == dst.device()) {
    record_copy(dst, src);
  } else if (to) {
    if (from) {
      src = recorder(src.device().index()).materialise(src, "device_copy", "copied to another device");
      GilRelease nogil;
      copy_in(dst, src, non_blocking);
    } else {
      copy_in(dst, src, non_blocking);
    }
  } else {
    auto bytes = recorder(src.device().index()).materialise(src, "value_access", std::string("copied to ") + c10::DeviceTypeName(dst.device().type(), true));
    PlainDispatch plain;
    dst.copy_(bytes, non_blocking);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto bytes = recorder(self.device().index()).materialise(self, "value_access", "item() or a conversion to a Python number");
  PlainDispatch plain;
  return bytes.item();
}

// ---- storages -----------------------------------------------------------------------------------------------------------

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size && !format) return self;
  for (auto s : size) TORCH_CHECK(s >= 0, "Trying to create tensor with negative dimension ", s, ": ", size);
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t need = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (self.numel() && self.storage().nbytes() < need) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device_type() == kLazy, "Attempted to set the storage of a tensor on device \"", self.device(), "\" to a storage on different device \"",
              source.device(), "\".  This is no longer allowed; the devices must match.");
  impl->set_storage_keep_dtype(source);
  const auto contiguous = c10::contiguous_strides(size);
  if (stride.data() == nullptr) stride = contiguous;
  impl->set_sizes_and_strides(size, stride, offset);
  const size_t need = at::detail::computeStorageNbytes(size, stride, self.element_size(), offset);
  if (self.numel() && source.nbytes() < need) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(source, need);
  return self;
}
Tensor& set_source_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {n}, {1});
}
Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  auto fresh = make_empty({0}, self.scalar_type(), self.device().index(), std::nullopt);
  return set_storage(self, fresh.storage(), 0, {0}, {1});
}
bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() && self.storage_offset() == other.storage_offset() &&
         self.sizes() == other.sizes() && self.strides() == other.strides();
}
void record_stream(Tensor&, c10::Stream) {}  // memory is reused in the order of the one stream that runs a recording

// ---- composites that must stay whole, or must choose what the physical device would choose ---------------------------------

// Shape-only stand-in on the physical device, for choosing a kernel.
Tensor shadow(const Tensor& t) {
  auto device = physical_device(t.device().index());
  auto keys = c10::DispatchKeySet(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  auto s = alias_storage(empty, keys, t.scalar_type(), t.sizes(), t.strides(), 0);
  s.set_requires_grad(t.requires_grad());
  return s;
}

int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double p, bool causal, optional<double> scale, bool gqa) {
  auto m = mask && mask->defined() ? optional<Tensor>(shadow(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(shadow(q), shadow(k), shadow(v), m, p, causal, scale, gqa);
}

Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double p, bool causal, optional<double> scale, bool gqa) {
  if (physical_type() == c10::kCPU && q.device().type() == kLazy && q.dim() == 4 && k.device() == q.device() && v.device() == q.device()) {
    if (sdp_choice(q, k, v, mask, p, causal, scale, gqa) == static_cast<int64_t>(sdp::SDPBackend::flash_attention)) {
      auto m = mask;
      if (m && m->defined() && m->scalar_type() == at::kBool)
        m = at::where(*m, at::scalar_tensor(0.0, q.options()), at::scalar_tensor(-std::numeric_limits<double>::infinity(), q.options()));
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, m, scale));
    }
  }
  return at::native::scaled_dot_product_attention(q, k, v, mask, p, causal, scale, gqa);
}

int64_t sdp_choice_stub(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double p, bool causal, optional<double> scale,
                        bool gqa) {
  if (physical_type() == c10::kCPU) return static_cast<int64_t>(sdp::SDPBackend::math);
  return sdp_choice(q, k, v, mask, p, causal, scale, gqa);
}

// The CPU's dropout draws through bernoulli_, CUDA's through one fused op: each gives the numbers its eager form gives.
Tensor dropout(const Tensor& input, double p, bool train) {
  if (physical_type() == c10::kCUDA || p == 0 || !train || input.numel() == 0) return at::native::dropout(input, p, train);
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  auto noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return input * noise;
}

// Ops with a composite kernel that would fall apart before it reaches us.
void keep_whole(torch::Library& m) {
  auto boxed = [&](const std::string& name) { m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&record_boxed>()); };
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution", "convolution_backward", "binary_cross_entropy_with_logits"})
    boxed(name);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    boxed(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  keep_whole(m);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("scaled_dot_product_attention", sdpa);
  m.impl("dropout", dropout);
}
// copy_ resolves conjugate and negative bits itself; their fallbacks would clone, which copies again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_boxed>()); }

}  // namespace lazysched

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lazysched::sdp_choice_stub);
}
