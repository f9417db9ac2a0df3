// The device as c10 sees it: allocator, guard, hooks, generators.
#include "core.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lazysched {
namespace {

bool cuda_ = false;
std::atomic<int> count_{1};
thread_local c10::DeviceIndex current_ = 0;

c10::impl::VirtualGuardImpl physical_guard() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }
c10::Stream to_physical(const c10::Stream& s) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, s.device_index()), s.id()); }
c10::Stream to_lazy(const c10::Stream& s) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kLazy, s.device_index()), s.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLazy; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = current_;
    setDevice(d);
    return {kLazy, old};
  }
  c10::Device getDevice() const override { return {kLazy, current_}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < count_, "lazysched: device index ", static_cast<int>(d.index()), " is out of range; there ",
                count_ == 1 ? "is 1 device" : "are " + std::to_string(count_) + " devices");
    if (d.index() >= 0) current_ = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_ = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    return cuda_ ? to_lazy(physical_guard().getStream({c10::kCUDA, d.index()})) : c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    return cuda_ ? to_lazy(physical_guard().getNewStream({c10::kCUDA, d.index()}, priority)) : c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high) const override {
    return cuda_ ? to_lazy(physical_guard().getStreamFromGlobalPool({c10::kCUDA, d.index()}, high)) : c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return cuda_ ? to_lazy(physical_guard().exchangeStream(to_physical(s))) : s; }
  bool queryStream(const c10::Stream& s) const override { return cuda_ ? physical_guard().queryStream(to_physical(s)) : true; }
  void synchronizeStream(const c10::Stream& s) const override {
    recorder(s.device_index()).barrier("wait", "the stream was synchronised");
    if (cuda_) physical_guard().synchronizeStream(to_physical(s));
  }
  void synchronizeDevice(const c10::DeviceIndex i) const override {
    recorder(i).barrier("wait", "the device was synchronised");
    if (cuda_) physical_guard().synchronizeDevice(i);
  }
  // An event marks a place in what was recorded, so what stands before it has to be launched first.
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex i, const c10::EventFlag flag) const override {
    recorder(s.device_index()).barrier("event", "an event was recorded");
    if (cuda_) physical_guard().record(event, to_physical(s), i, flag);
  }
  void block(void* event, const c10::Stream& s) const override {
    if (cuda_) physical_guard().block(event, to_physical(s));
  }
  bool queryEvent(void* event) const override { return cuda_ ? physical_guard().queryEvent(event) : true; }
  void synchronizeEvent(void* event) const override {
    if (cuda_) physical_guard().synchronizeEvent(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex i) const noexcept override {
    if (cuda_) physical_guard().destroyEvent(event, i);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex i) const override {
    TORCH_CHECK(cuda_, "lazysched: elapsed_time needs events with timing, which a CPU does not have");
    return physical_guard().elapsedTime(a, b, i);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count_.load()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The storage knows its size but owns no bytes. The address of its Buffer serves as data pointer: unique, and never read.
void release_buffer(void* ctx) {
  auto buffer = BufferPtr::reclaim(static_cast<Buffer*>(ctx));
  recorder(buffer->device).on_storage_death(buffer.get());
}
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return allocate_on(n, current_); }
  static c10::DataPtr allocate_on(size_t n, c10::DeviceIndex i) {
    auto* b = c10::make_intrusive<Buffer>(n, i).release();
    return {b, b, &release_buffer, c10::Device(kLazy, i)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_buffer; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "lazysched: storages are copied through tensors, not raw memory");
  }
};
Allocator& allocator() {
  static auto* a = new Allocator();
  return *a;
}

// A generator of the device: draws happen on the physical generator, in recorded order, because its state is a buffer.
struct Generator final : c10::GeneratorImpl {
  Generator(at::Generator g, c10::DeviceIndex i)
      : GeneratorImpl(c10::Device(kLazy, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), buffer(c10::make_intrusive<Buffer>(1, i)) {
    buffer->generator = std::move(g);
  }
  ~Generator() override { recorder(buffer->device).on_storage_death(buffer.get()); }
  at::Generator& settled(const char* why) const {
    auto& r = recorder(device_.index());
    if (r.is_pending(buffer.get())) r.barrier("generator_state", why);
    return buffer->generator;
  }
  void set_current_seed(uint64_t seed) override { settled("the generator was seeded").set_current_seed(seed); }
  void set_offset(uint64_t o) override { settled("the generator's offset was set").set_offset(o); }
  uint64_t get_offset() const override { return settled("the generator's offset was read").get_offset(); }
  uint64_t current_seed() const override { return buffer->generator.current_seed(); }
  uint64_t seed() override { return settled("the generator was seeded").seed(); }
  void set_state(const c10::TensorImpl& s) override { settled("the generator's state was set").unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return settled("the generator's state was read").unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(settled("the generator was cloned").clone(), device_.index()); }
  BufferPtr buffer;
};

at::Generator new_physical(c10::DeviceIndex i) {
  return cuda_ ? at::detail::getCUDAHooks().getNewGenerator(i) : at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
}
const at::Generator& default_generator(c10::DeviceIndex i) {
  static std::mutex m;
  static auto* all = new std::unordered_map<int, at::Generator>();
  if (i < 0) i = current_;
  std::lock_guard<std::mutex> lock(m);
  auto it = all->find(i);
  if (it == all->end()) {
    // On CUDA the device's own default generator: ops without a generator argument draw from it.
    auto physical = cuda_ ? at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, i)) : new_physical(i);
    it = all->emplace(i, at::make_generator<Generator>(physical, i)).first;
  }
  return it->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count_.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_; }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({kLazy, i}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return Guard().exchangeDevice({kLazy, i}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return i < 0 ? current_ : exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    if (i < 0) i = current_;
    return at::make_generator<Generator>(new_physical(i), i);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kLazy, current_}; }
  bool isPinnedPtr(const void* p) const override { return cuda_ && at::detail::getCUDAHooks().isPinnedPtr(p); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return cuda_ ? at::detail::getCUDAHooks().getPinnedMemoryAllocator() : c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* b = buffer_of(s);
    auto& r = recorder(b->device);
    if (r.is_pending(b)) r.barrier("storage", "a storage was resized");
    if (b->physical && b->physical.nbytes() < n) {
      auto bigger = at::empty({static_cast<int64_t>(n)}, at::TensorOptions().dtype(at::kByte).device(b->physical.device()));
      auto old = at::empty({0}, bigger.options()).set_(b->physical, 0, {static_cast<int64_t>(b->physical.nbytes())}, {1});
      bigger.narrow(0, 0, old.numel()).copy_(old);
      b->physical = bigger.storage();
    } else if (n == 0) {
      b->physical = c10::Storage();
    }
    b->nbytes = n;
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

}  // namespace

void init_device(bool cuda, int count) {
  cuda_ = cuda;
  count_ = count;
}
void install_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kLazy, &allocator());
}
int device_count() { return count_; }
c10::DeviceIndex current_device() { return current_; }
void set_current_device(c10::DeviceIndex i) { Guard().setDevice({kLazy, i}); }
c10::DeviceType physical_type() { return cuda_ ? c10::kCUDA : c10::kCPU; }
c10::Device physical_device(c10::DeviceIndex i) { return cuda_ ? c10::Device(c10::kCUDA, i) : c10::Device(c10::kCPU); }

Buffer* generator_buffer(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->buffer.get(); }
Buffer* default_generator_buffer(c10::DeviceIndex i) { return generator_buffer(default_generator(i)); }

at::Tensor make_lazy(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, c10::DeviceIndex device) {
  auto old = current_;
  current_ = device;
  auto t = at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  current_ = old;
  return t;
}
at::Tensor make_empty(c10::IntArrayRef size, at::ScalarType dtype, c10::DeviceIndex device, std::optional<at::MemoryFormat> format) {
  auto old = current_;
  current_ = device;
  auto t = at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, format);
  current_ = old;
  return t;
}

at::Tensor alias_storage(const c10::Storage& s, c10::DispatchKeySet keys, at::ScalarType dtype, c10::IntArrayRef size, c10::IntArrayRef stride,
                         int64_t offset) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(s), keys, c10::scalarTypeToTypeMeta(dtype));
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride);
  if (offset) impl->set_storage_offset(offset);
  return t;
}

at::Tensor physical_view(const c10::Storage& physical, const at::Tensor& like) {
  auto keys = c10::DispatchKeySet(physical.device_type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto t = alias_storage(physical, keys, like.scalar_type(), like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

at::Tensor wrap_physical(const at::Tensor& p, c10::DeviceIndex device) {
  auto data = Allocator::allocate_on(p.storage().nbytes(), device);
  auto* b = static_cast<Buffer*>(data.get_context());
  b->physical = p.storage();
  b->touched = true;
  c10::Storage s(c10::Storage::use_byte_size_t(), p.storage().nbytes(), std::move(data), &allocator(), true);
  auto t = alias_storage(s, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), p.scalar_type(), p.sizes(), p.strides(), p.storage_offset());
  if (p.is_conj()) t._set_conj(true);
  if (p.is_neg()) t._set_neg(true);
  return t;
}

}  // namespace lazysched
