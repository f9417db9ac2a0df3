// What the parts of the native core share: buffers, the recording, the recorder of a device, programs.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <torch/csrc/lazy/core/hash.h>

#include <atomic>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace lazysched {

using c10::IValue;
using torch::jit::Stack;
using torch::lazy::hash_t;

constexpr auto kLazy = c10::DeviceType::PrivateUse1;

// Where the user's Python stood: a code object (kept alive for ever by the table of frames.cpp) and its instruction.
struct Site {
  const void* code = nullptr;
  int32_t lasti = 0;
};
Site capture_site();
int64_t backward_sequence();  // sequence number of the autograd node that runs now, -1 outside backward
void set_capture(bool on);

enum class BufferKind : uint8_t { Input, Fresh, Generator };

// What a storage owns. All fields but the constants are guarded by the mutex of the device's recorder.
struct Buffer final : c10::intrusive_ptr_target {
  Buffer(size_t n, c10::DeviceIndex d) : nbytes(n), device(d) {}
  size_t nbytes;
  const c10::DeviceIndex device;
  bool owned = true;     // a storage (or generator) still holds it
  bool touched = false;  // some op has read or written it
  uint64_t pending_in = 0;  // the recording whose end will give it its newest value; 0: none
  uint64_t trace = 0;    // the recording that numbers it, and its number there
  int32_t index = -1;
  c10::Storage physical;  // bytes on the physical device; null until computed
  at::Generator generator;
  std::shared_ptr<const std::string> error;  // why its value could never be computed
};
using BufferPtr = c10::intrusive_ptr<Buffer>;

inline Buffer* buffer_of(const c10::Storage& s) {
  auto* b = static_cast<Buffer*>(s.data_ptr().get_context());
  TORCH_CHECK(b, "lazysched: this storage was not made by the lazysched allocator");
  return b;
}
inline Buffer* buffer_of(const at::Tensor& t) { return buffer_of(t.unsafeGetTensorImpl()->unsafe_storage()); }

// ---- the recording -------------------------------------------------------------------------------------------------

enum class Mode : uint8_t { Undefined, Read, Write, ReadWrite };

// A buffer seen through a layout; sizes and strides lie in Trace::dims.
struct Operand {
  int32_t buffer = -1;
  int32_t dims = 0;
  int16_t ndim = 0;
  at::ScalarType dtype = at::kFloat;
  Mode mode = Mode::Undefined;
  bool conj = false, neg = false;
  int64_t offset = 0;
};

enum class ArgKind : uint8_t { Const, Tensor, TensorList, OptTensorList, Scalar, ScalarList, HostScalar, Generator, Device };

// One argument of a recorded op. `first`/`count` index operands (tensors, lists) or scalars.
struct Arg {
  ArgKind kind = ArgKind::Const;
  int32_t first = 0, count = 0;
  at::ScalarType dtype = at::kDouble;  // of a host scalar: a 0-d CPU tensor, `wrapped` where it was a Python number
  bool wrapped = false;
  IValue value;  // constants
};

struct ArgInfo {
  ArgKind kind;
  bool is_float_type;  // `float`, not `Scalar`
  bool writes, out;    // written; a keyword-only output
};

enum class Recordable : uint8_t { Yes, DataDependent, ReturnsNumber, No };

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);
  c10::OperatorHandle handle;
  std::string name;     // "aten::add.out"
  uint64_t name_hash;
  std::vector<ArgInfo> args;
  std::vector<int> return_alias;  // argument that a return is (-1: a new tensor)
  bool random = false, generator_arg = false, view = false, floats_shape = false, pow_like = false,
       checks_dtypes = false, indexing = false;
  Recordable recordable = Recordable::Yes;
  bool list_return = false;
};
const OpInfo& op_info(const c10::OperatorHandle& op);

struct Instr {
  const OpInfo* op;
  int32_t args, outs, n_outs;  // ranges in Trace::args and, for new outputs, Trace::operands
  int32_t generator = -1;      // buffer of the random generator that it draws from
  Site site;
  int64_t sequence, backward;
};

struct Trace {
  uint64_t id;
  std::vector<Instr> instrs;
  std::vector<Arg> args;
  std::vector<Operand> operands;
  std::vector<int64_t> dims;
  std::vector<IValue> scalars;
  std::vector<BufferPtr> buffers;
  std::vector<BufferKind> kinds;
  std::vector<uint8_t> written;
  std::vector<uint8_t> live;  // filled when the recording ends
  int64_t held_bytes = 0;  // pending results that somebody holds, plus inputs kept alive only by the recording
  hash_t hash{static_cast<uint64_t>(0x1a2f5c)};
  void reset(uint64_t new_id);
  int32_t number(Buffer* b, std::vector<uint64_t>& words);
};

// ---- programs: what a cached recording runs ----------------------------------------------------------------------------

struct Program;
using ProgramPtr = std::shared_ptr<Program>;

// ---- barriers --------------------------------------------------------------------------------------------------------

struct BarrierEvent {
  std::string kind, reason;
  Site site;
  int64_t ops = 0, device = 0;
  double milliseconds = 0;
  bool hit = false;
};

struct Stats {
  int64_t recorded = 0, compiles = 0, cache_hits = 0, nodes_run = 0, nodes_dead = 0, kernels_run = 0, fallbacks = 0, infers = 0,
          evicted = 0, flushes = 0;
};

struct CacheKey {
  hash_t hash;
  std::vector<uint8_t> live;
  bool operator==(const CacheKey& o) const { return hash == o.hash && live == o.live; }
};
struct CacheKeyHash {
  size_t operator()(const CacheKey& k) const;
};

// Records the ops of one device index and runs them at barriers.
class Recorder {
 public:
  explicit Recorder(c10::DeviceIndex i);
  void record(const OpInfo& op, Stack* stack);
  void run_now(const OpInfo& op, Stack* stack, const char* kind, const std::string& reason);
  void barrier(const char* kind, const std::string& reason);  // run what is recorded
  bool is_pending(const Buffer* b);
  // The physical bytes behind `t`, computed if need be.
  at::Tensor materialise(const at::Tensor& t, const char* kind, const std::string& reason);
  void on_storage_death(Buffer* b);
  std::mutex mutex;        // the recording; never held while waiting for the GIL or running anything
  std::mutex flush_mutex;  // one barrier at a time; taken without the GIL
  int64_t pending_ops() { return static_cast<int64_t>(trace_->instrs.size()); }
  const c10::DeviceIndex index;

  void flush_locked(const char* kind, const std::string& reason, Site site);
  const Trace& peek() const { return *trace_; }  // with `mutex` held
  void clear_cache();

 private:
  void check_limits();
  ProgramPtr find(const CacheKey& key, bool& hit, Trace& trace);
  std::unique_ptr<Trace> trace_, spare_;
  uint64_t next_id_ = 1;
  using Entry = std::pair<CacheKey, ProgramPtr>;
  std::list<Entry> lru_;
  std::unordered_map<CacheKey, std::list<Entry>::iterator, CacheKeyHash> cache_;
  std::unordered_map<hash_t, std::vector<CacheKey>, torch::lazy::HashReducer> variants_;
};

Recorder& recorder(c10::DeviceIndex i);
int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex i);
c10::DeviceType physical_type();
c10::Device physical_device(c10::DeviceIndex i);
void init_device(bool cuda, int count);
void install_hooks();
Buffer* default_generator_buffer(c10::DeviceIndex i);
Buffer* generator_buffer(const at::Generator& g);

// Tensors
at::Tensor make_lazy(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, c10::DeviceIndex device);
at::Tensor make_empty(c10::IntArrayRef size, at::ScalarType dtype, c10::DeviceIndex device, std::optional<at::MemoryFormat> format);
at::Tensor alias_storage(const c10::Storage& s, c10::DispatchKeySet keys, at::ScalarType dtype, c10::IntArrayRef size, c10::IntArrayRef stride,
                         int64_t offset);
at::Tensor physical_view(const c10::Storage& physical, const at::Tensor& like);
at::Tensor wrap_physical(const at::Tensor& t, c10::DeviceIndex device);  // a lazy tensor over bytes that exist

void record_boxed(const c10::OperatorHandle& op, Stack* stack);  // entry of every op of the device

struct Limits {
  int64_t max_ops = 20000, max_bytes = 0;
  bool eager = false, log = false;
  size_t cache_size = 256;
};
Limits& limits();
Stats& stats();
std::mutex& log_mutex();
void log_barrier(BarrierEvent event);
ProgramPtr compile_trace(Trace& trace, c10::DeviceIndex device);  // calls Python; takes the GIL
std::string describe_site(const Site& site);                      // takes the GIL
void count(const std::string& counter);
void prefork_lock(bool lock);

// Below every key that could divert a physical op back to Python, autograd or autocast.
struct PlainDispatch {
  PlainDispatch();
  c10::impl::ForceDispatchKeyGuard guard;
};
// Gives the GIL up while waiting for a lock or running kernels.
struct GilRelease {
  GilRelease();
  ~GilRelease();
  void* state = nullptr;
};

}  // namespace lazysched
