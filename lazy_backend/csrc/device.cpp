// The device as c10 sees it: allocator, guard, hooks, generators.
#include "core.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace lazysched {
namespace {

using c10::Device, c10::Stream;

bool cuda_ = false; std::atomic<int> count_{1};
thread_local DeviceIndex current_ = 0;
thread_local c10::StreamId stream_ = 0;  // of the CPU, which runs everything in order: streams there are names
std::atomic<c10::StreamId> streams_{0};

const c10::impl::VirtualGuardImpl& cuda() { static const c10::impl::VirtualGuardImpl guard(c10::kCUDA); return guard; }
Stream to_physical(const Stream& s) { return Stream(Stream::UNSAFE, Device(c10::kCUDA, s.device_index()), s.id()); }
Stream to_lazy(const Stream& s) { return Stream(Stream::UNSAFE, Device(kLazy, s.device_index()), s.id()); }

Stream cpu_stream(Device d, c10::StreamId id) { return Stream(Stream::UNSAFE, {kLazy, d.has_index() ? d.index() : current_}, id); }

// Streams and events are CUDA's; what is launched on a CPU has run, and an event there is the time when it was recorded.
using Time = std::chrono::steady_clock::time_point;
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLazy; }
  Device exchangeDevice(Device d) const override { const Device old = getDevice(); setDevice(d); return old; }
  Device getDevice() const override { return {kLazy, current_}; }
  void setDevice(Device d) const override { check_index(d.index()), uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.has_index()) current_ = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(count_.load()); }

  static Device twin(Device d) { return {c10::kCUDA, d.index()}; }
  Stream getDefaultStream(Device d) const override { return cpu_stream(d, 0); }  // on CUDA 0 as well
  Stream getStream(Device d) const override { return cuda_ ? to_lazy(cuda().getStream(twin(d))) : cpu_stream(d, stream_); }
  Stream getNewStream(Device d, int priority) const override {
    return cuda_ ? to_lazy(cuda().getNewStream(twin(d), priority)) : cpu_stream(d, ++streams_);
  }
  Stream getStreamFromGlobalPool(Device d, bool high) const override { return getNewStream(d, high ? -1 : 0); }
  // What was recorded under a stream runs on it. Guards exchange streams as they are destroyed, so nothing may be thrown: what
  // an error left uncomputed says so when it is touched.
  Stream exchangeStream(Stream s) const override {
    const auto old = getStream(s.device());
    if (s != old) try { recorder(s.device_index()).barrier("stream", "the stream was changed"); } catch (std::exception&) {}
    if (cuda_) cuda().exchangeStream(to_physical(s)); else stream_ = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return cuda_ ? to_physical(s).native_handle() : nullptr; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }  // every dtype
  bool queryStream(const Stream& s) const override { return !cuda_ || cuda().queryStream(to_physical(s)); }
  void synchronizeStream(const Stream& s) const override {
    recorder(s.device_index()).barrier("wait", "the stream was synchronised");
    if (cuda_) cuda().synchronizeStream(to_physical(s));
  }
  void synchronizeDevice(const DeviceIndex i) const override {
    recorder(i).barrier("wait", "the device was synchronised"), synchronize(i);
  }
  // An event marks a place in what was recorded, so what stands before it has to be launched first.
  void record(void** event, const Stream& s, const DeviceIndex i, const c10::EventFlag flag) const override {
    recorder(s.device_index()).barrier("event", "an event was recorded");
    if (cuda_) return cuda().record(event, to_physical(s), i, flag);
    destroyEvent(std::exchange(*event, new Time(std::chrono::steady_clock::now())), i);
  }
  void block(void* event, const Stream& s) const override { if (cuda_) cuda().block(event, to_physical(s)); }
  bool queryEvent(void* event) const override { return !cuda_ || cuda().queryEvent(event); }
  void synchronizeEvent(void* event) const override { if (cuda_) cuda().synchronizeEvent(event); }
  void destroyEvent(void* event, const DeviceIndex i) const noexcept override {
    cuda_ ? cuda().destroyEvent(event, i) : delete static_cast<Time*>(event);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex i) const override {
    if (cuda_) return cuda().elapsedTime(a, b, i);
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(b) - *static_cast<Time*>(a)).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Bytes that the device holds where it runs on a CPU; CUDA's allocator counts its own.
struct Counted { c10::DataPtr bytes; const int64_t n; ~Counted() { stats[kHeld] -= n; } };
void delete_counted(void* counted) { delete static_cast<Counted*>(counted); }

// The storage knows its size but owns no bytes. The address of its Buffer serves as data pointer: unique, and never read.
void release_buffer(void* ctx) {
  auto buffer = BufferPtr::reclaim(static_cast<Buffer*>(ctx));
  recorder(buffer->device).on_storage_death(buffer.get());
}
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto* b = c10::make_intrusive<Buffer>(n, current_).release();
    return {b, b, &release_buffer, Device(kLazy, current_)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_buffer; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "storages are copied through tensors"); }
};
Allocator* allocator() { static auto* a = new Allocator(); return a; }

// Allocations inside belong to device `i`.
struct AllocateOn {
  explicit AllocateOn(DeviceIndex i) : before(std::exchange(current_, i)) {} ~AllocateOn() { current_ = before; }
  const DeviceIndex before;
};

c10::DispatchKeySet keys_of(c10::DeviceType type) {
  using Key = c10::DispatchKey;
  return c10::DispatchKeySet(type == kLazy ? Key::PrivateUse1 : type == c10::kCUDA ? Key::CUDA : Key::CPU);
}

// A generator of the device: draws happen on the physical generator, in recorded order, because its state is a buffer.
struct Generator final : c10::GeneratorImpl {
  Generator(at::Generator g, DeviceIndex i)
      : GeneratorImpl(Device(kLazy, i), keys_of(kLazy)), buffer(c10::make_intrusive<Buffer>(1, i)) {
    buffer->generator = std::move(g);
  }
  ~Generator() override { recorder(buffer->device).on_storage_death(buffer.get()); }
  at::Generator& settled(const char* why) const {
    stats[kSettled]++;
    if (auto& r = recorder(device_.index()); r.is_pending(buffer.get())) r.barrier("generator_state", why);
    return buffer->generator;
  }
  void set_current_seed(uint64_t seed) override { settled("the generator was seeded").set_current_seed(seed); }
  // A CPU's generator has no offset: 0, so that pickle, which asks generators of all other devices for one, can keep it.
  void set_offset(uint64_t o) override { if (cuda_ || o) settled("the generator's offset was set").set_offset(o); }
  uint64_t get_offset() const override { return cuda_ ? settled("the generator's offset was read").get_offset() : 0; }
  uint64_t current_seed() const override { return buffer->generator.current_seed(); }
  uint64_t seed() override { return settled("the generator was seeded").seed(); }
  using State = c10::intrusive_ptr<c10::TensorImpl>;
  void set_state(const c10::TensorImpl& s) override {  // one that is recorded shows its bytes to who copies it
    const at::Tensor state(State::reclaim_copy(const_cast<c10::TensorImpl*>(&s)));
    settled("the generator's state was set").set_state(s.key_set().has(c10::DispatchKey::Python) ? state.clone() : state);
  }
  State get_state() const override { return settled("the generator's state was read").unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(settled("the generator was cloned").clone(), device_.index()); }
  BufferPtr buffer;
};

at::Generator new_generator(DeviceIndex i) {
  check_index(i);
  auto physical = cuda_ ? at::detail::getCUDAHooks().getNewGenerator(i)
                        : at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  return at::make_generator<Generator>(physical, i);
}
const at::Generator& default_generator(DeviceIndex i) {
  static auto* all = one_each(&new_generator);
  check_index(i = i < 0 ? current_ : i);
  return (*all)[i];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; } bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  DeviceIndex getCurrentDevice() const override { return current_; }
  void setCurrentDevice(DeviceIndex i) const override { set_current_device(i); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return Guard().exchangeDevice({kLazy, i}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current_ : exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return new_generator(i < 0 ? current_ : i); }
  Device getDeviceFromPtr(void*) const override { return {kLazy, current_}; }
  bool isPinnedPtr(const void* p) const override { return cuda_ && at::detail::getCUDAHooks().isPinnedPtr(p); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return cuda_ ? at::detail::getCUDAHooks().getPinnedMemoryAllocator() : c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize_bytes(s, n); }
};

}  // namespace

void start_device(bool cuda, int count) {
  cuda_ = cuda, count_ = count;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kLazy, allocator());
}
int device_count() { return count_; }
void check_index(DeviceIndex i) {
  TORCH_CHECK(i < count_, "lazysched: invalid device ordinal ", int{i}, ", where the number of devices is ", count_.load());
}
DeviceIndex current_device() { return current_; }
void set_current_device(DeviceIndex i) { Guard().setDevice({kLazy, i}); }
c10::DeviceType physical_type() { return cuda_ ? c10::kCUDA : c10::kCPU; }
Device physical_device(DeviceIndex i) { return cuda_ ? Device(c10::kCUDA, i) : Device(c10::kCPU); }
void* current_stream(DeviceIndex i) {
  if (!cuda_) return nullptr;
  const auto current = cuda().getStream(physical_device(i));
  // The driver knows no context in a thread that has not called the CUDA runtime yet: this call makes it known.
  [[maybe_unused]] static thread_local const bool asked = cuda().queryStream(current);
  return current.native_handle();
}
void synchronize(DeviceIndex i) { if (cuda_) cuda().synchronizeDevice(i); }

// A copy from pageable memory waits until its stream has done all that was asked of it. On a stream of its own it waits for
// nothing, and the host may go on recording while the device computes. What is launched from now on waits for the copy.
void beside(DeviceIndex i, bool apart, const std::function<c10::Storage()>& fill) {
  if (!cuda_ || !apart) return void(fill());
  const auto device = physical_device(i);
  static thread_local std::unordered_map<DeviceIndex, Stream> own;
  auto other = own.find(i);
  if (other == own.end()) other = own.emplace(i, cuda().getNewStream(device, 0)).first;
  const auto mine = cuda().getStream(device);
  c10::Storage filled;
  { c10::StreamGuard on(other->second); filled = fill(); }
  c10::Event done(c10::kCUDA);
  done.record(other->second), done.block(mine);
  cuda().recordDataPtrOnStream(filled.data_ptr(), mine);
}

PlainDispatch::PlainDispatch(DeviceIndex i)
    : keys(c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
           c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {
  if (cuda_ && i >= 0) device.reset_device(physical_device(i));
}

LentState::LentState(at::Generator g, DeviceIndex i)
    : ours(std::move(g)), theirs(at::globalContext().defaultGenerator(physical_device(i))) {
  if (cuda_) saved = theirs.graphsafe_get_state(), theirs.graphsafe_set_state(ours);
  else copied = theirs.get_state(), theirs.set_state(ours.get_state());
}

Buffer* generator_buffer(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->buffer.get(); }
Buffer* default_generator_buffer(DeviceIndex i) { return generator_buffer(default_generator(i)); }

at::Tensor make_lazy(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, DeviceIndex device) {
  AllocateOn here(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), keys_of(kLazy), dtype);
}
at::Tensor make_empty(c10::IntArrayRef size, at::ScalarType dtype, DeviceIndex device, std::optional<at::MemoryFormat> format) {
  AllocateOn here(device);
  return at::detail::empty_generic(size, allocator(), keys_of(kLazy), dtype, format);
}

at::Tensor alias_storage(const c10::Storage& s, at::ScalarType dtype, c10::IntArrayRef size, c10::IntArrayRef stride,
                         int64_t offset, bool conj, bool neg) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(s), keys_of(s.device_type()), c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  if (conj) t._set_conj(true); if (neg) t._set_neg(true);
  return t;
}
at::Tensor alias_storage(const c10::Storage& s, const at::Tensor& like) {
  return alias_storage(s, like.scalar_type(), like.sizes(), like.strides(), like.storage_offset(), like.is_conj(), like.is_neg());
}

const c10::Storage& count_bytes(const c10::Storage& s) {
  if (cuda_ || !s.nbytes() || s.data_ptr().get_deleter() == &delete_counted) return s;
  const auto n = static_cast<int64_t>(s.nbytes());
  const auto now = stats[kHeld] += n;
  for (auto peak = stats[kPeak].load(); peak < now && !stats[kPeak].compare_exchange_weak(peak, now);) {}
  auto* impl = s.unsafeGetStorageImpl();
  auto* counted = new Counted{impl->set_data_ptr(c10::DataPtr()), n};
  impl->set_data_ptr_noswap({counted->bytes.get(), counted, &delete_counted, s.device()});
  return s;
}

c10::Storage physical_bytes(size_t n, DeviceIndex device) {
  if (!cuda_) {  // asked for every intermediate of a program, so not through the dispatcher
    auto* cpu = c10::GetCPUAllocator();
    return count_bytes(c10::Storage(c10::Storage::use_byte_size_t(), n, cpu->allocate(n), cpu, true));
  }
  PlainDispatch plain;
  return at::empty({static_cast<int64_t>(n)}, at::TensorOptions().dtype(at::kByte).device(physical_device(device))).storage();
}
at::Tensor bytes_of(const c10::Storage& s) { return alias_storage(s, at::kByte, {static_cast<int64_t>(s.nbytes())}, {1}, 0); }

at::Tensor wrap_physical(const at::Tensor& p, DeviceIndex device) {
  const size_t n = p.storage().nbytes();
  AllocateOn here(device);
  c10::Storage s(c10::Storage::use_byte_size_t(), n, allocator()->allocate(n), allocator(), true);
  buffer_of(s)->physical = count_bytes(p.storage()), buffer_of(s)->touched = true;
  return alias_storage(s, p);
}

void resize_bytes(const c10::Storage& s, size_t n) {
  auto* b = buffer_of(s);
  auto& r = recorder(b->device);
  if (r.is_used(b)) r.barrier("storage", "a storage was resized");
  auto physical = n ? b->physical : c10::Storage();
  if (physical && physical.nbytes() < n) {
    const auto old = bytes_of(physical);
    physical = physical_bytes(n, b->device);
    PlainDispatch plain(b->device);
    bytes_of(physical).narrow(0, 0, old.numel()).copy_(old);
  }
  std::lock_guard lock(r.mutex);
  b->physical = physical, b->nbytes = n, s.unsafeGetStorageImpl()->set_nbytes(n);
}

}  // namespace lazysched
