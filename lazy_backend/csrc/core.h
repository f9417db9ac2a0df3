// What the parts of the native core share: buffers, the recording, the recorder of a device, programs.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/thread_pool.h>
#include <torch/csrc/lazy/core/hash.h>

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::autograd { struct Node; }

namespace lazysched {

// Guards tables of the whole process. Taken last and briefly, never around a call that may wait; a process that forks holds it,
// for a child would wait for ever for a thread that it lacks.
inline std::shared_mutex tables_mutex;

using c10::DeviceIndex, c10::IValue, torch::jit::Stack, torch::lazy::hash_t;

constexpr auto kLazy = c10::DeviceType::PrivateUse1;

// Where the user's Python stood: a code object (kept alive for ever) and its instruction, or a line as a negative number.
struct Site { void* code = nullptr; int32_t lasti = 0; };
Site capture_site();
std::string describe_site(const Site& site);  // takes the GIL

// Segments: named parts of the program, see segments.cpp. 0: none.
int32_t enter_segment(int32_t segment);                  // this thread records in it from now on; returns the one before
void note_backward(int64_t first, int32_t segment);      // autograd nodes made in this thread since number `first` are its backward
int32_t current_segment(const torch::autograd::Node* node);  // of an op recorded now, while autograd runs `node` or null

enum class BufferKind : uint8_t { Input, Fresh, Generator };

// What a storage owns. All fields but the constants are guarded by the mutex of the device's recorder.
struct Buffer final : c10::intrusive_ptr_target {
  Buffer(size_t n, DeviceIndex d) : nbytes(n), device(d) {}
  size_t nbytes;
  const DeviceIndex device;
  bool owned = true;        // a storage (or generator) still holds it
  bool touched = false;     // some op has read or written it
  uint8_t lent = 0;         // another library sees its bytes, so ops on them run at once: 1 as long as it holds them, 2 for ever
  uint64_t pending_in = 0;  // the recording whose end will give it its newest value; 0: none
  uint64_t trace = 0;       // the recording that numbers it, and its number there
  int32_t index = -1;
  hash_t origin;          // how its value came from numbers alone within that recording; null: it did not
  c10::Storage physical;  // bytes on the physical device; null until computed
  at::Generator generator;
  std::shared_ptr<const std::string> error;  // why its value could never be computed
  void check() const { TORCH_CHECK(!error, *error); }
  bool is_lent() const { return lent && (lent > 1 || physical.use_count() > 1); }
};
using BufferPtr = c10::intrusive_ptr<Buffer>;

// The data pointer, not its context: torch.save wraps the address of a storage in another storage without an owner.
inline Buffer* buffer_of(const c10::Storage& s) {
  auto* b = s ? static_cast<Buffer*>(s.data_ptr().get()) : nullptr;  // none of a sparse tensor
  TORCH_CHECK(b, "lazysched: this storage was not made by the lazysched allocator");
  return b;
}
inline Buffer* buffer_of(const at::Tensor& t) { return buffer_of(t.unsafeGetTensorImpl()->unsafe_storage()); }

// A buffer seen through a layout; sizes and strides lie in Trace::dims. No buffer: an undefined tensor in a list.
struct Operand {
  int32_t buffer = -1, dims = 0; int16_t ndim = 0;
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false; int64_t offset = 0;
};

// ArgKind in schema.py says the same. Exponent: a scalar whose integers are constants; Share: one whose 0 is; Factor: one whose
// integer 1 is. HostScalar: a 0-d CPU tensor.
enum class ArgKind : uint8_t {
  Const, Tensor, TensorList, OptTensorList, Scalar, Exponent, Share, Factor, ScalarList, FloatList, Generator, Device, HostScalar
};

// One argument of a recorded op. `first`/`count` index operands (tensors, lists) or scalars.
struct Arg {
  ArgKind kind = ArgKind::Const;
  bool wrapped = false;                // of a host scalar: it was a Python number
  at::ScalarType dtype = at::kDouble;  // of a host scalar
  int32_t first = 0, count = 0;
  IValue value;  // of a constant
};

struct ArgInfo {
  ArgKind kind;
  bool writes = false;
  bool tensors() const { return kind >= ArgKind::Tensor && kind <= ArgKind::OptTensorList; }
  bool numbers() const { return kind >= ArgKind::Scalar && kind <= ArgKind::FloatList; }
};

// What schema.py says of an op.
struct OpInfo {
  c10::OperatorHandle handle;
  std::string name;  // "aten::add.out"
  uint64_t name_hash = 0;
  std::vector<ArgInfo> args;
  std::vector<int> return_alias;  // argument that a return is (-1: a new tensor)
  std::string refusal, why;  // the kind of barrier that it asks for where it cannot be recorded, and a reason; "": it can
  bool random = false, generator_arg = false, view = false, indexing = false, masks_matter = false;
  int handed_back(size_t r) const { return view ? -1 : return_alias[r]; }  // the argument that return `r` is, or -1
};
const OpInfo& op_info(const c10::OperatorHandle& op);  // may take the GIL
void read_schema(OpInfo& op);                          // takes the GIL, once per op

struct Instr {
  const OpInfo* op;
  int32_t args = 0, outs = 0, n_outs = 0;  // ranges in Trace::args and, for new outputs, Trace::operands
  int32_t generator = -1;                  // buffer of the random generator that it draws from
  Site site;
  int64_t sequence = 0, backward = -1;
  int32_t segment = 0; bool drops = true;  // drops: false where its share is 0, so that a random op draws nothing
  hash_t call;    // of all that decides shapes and formulas
  hash_t so_far;  // of the recording up to here
};

struct Trace {
  uint64_t id = 0;
  std::vector<Instr> instrs;
  std::vector<Arg> args; std::vector<Operand> operands;
  std::vector<int64_t> dims; std::vector<IValue> scalars;
  std::vector<BufferPtr> buffers; std::vector<BufferKind> kinds;
  std::vector<uint8_t> live;  // filled when the recording ends
  int64_t held_bytes = 0;     // pending results that somebody holds, plus inputs kept alive only by the recording
  std::vector<int32_t> held, needed;  // segments that wait for the schedule, while these buffers are needed now
  std::set<int32_t> refused;          // instructions that no CUDA graph could hold when this ran before
  hash_t hash;
  // Of the instruction that is added: what its hash takes in, how its operands came from numbers alone, and those that it writes;
  // and how many numbers those before it took.
  std::vector<uint64_t> words; hash_t origin; std::vector<Buffer*> written; size_t numbers = 0;
  std::vector<uint64_t>& begin() { words.clear(), written.clear(), origin = hash_t(uint64_t{1}); return words; }
  void reset(uint64_t new_id); void forget(int32_t buffer);
  int32_t number(Buffer* b, std::vector<uint64_t>& words);
  int32_t use(Buffer* b, bool writes, std::vector<uint64_t>& words);
  Operand operand(const c10::TensorImpl* t, bool writes, std::vector<uint64_t>& words);
  void add_arg(const ArgInfo& info, const IValue& v, Instr& instr, std::vector<uint64_t>& words);
  void add_instr(const Instr& instr, std::vector<uint64_t>& words);
  void replay(const Trace& from, const Instr& in);  // records an instruction of another recording here
  c10::IntArrayRef sizes(const Operand& o) const { return {dims.data() + o.dims, static_cast<size_t>(o.ndim)}; }
  c10::IntArrayRef strides(const Operand& o) const { return {dims.data() + o.dims + o.ndim, static_cast<size_t>(o.ndim)}; }
};

struct Program;  // what a cached recording runs
struct Runner;   // one run of it
struct Block;    // memory for results of CUDA graphs
using ProgramPtr = std::shared_ptr<Program>;

// What an op gives, as Meta tensors: inferred once for each `call`, the hash of all that decides it, then remembered.
struct Inference {
  std::string refusal; bool here = false;             // why the op cannot be recorded, perhaps only at this line; empty: it can
  Stack returns;                                      // what is not an argument handed back is right here
  std::vector<std::pair<size_t, at::Tensor>> resized;  // written arguments that take a new shape
};
// May run Python.
std::shared_ptr<const Inference> inference(const OpInfo& op, const IValue* args, hash_t call, DeviceIndex device);
bool boolean_index(const OpInfo& op, const IValue* args);

// Records the ops of one device index and runs them at barriers.
class Recorder {
 public:
  explicit Recorder(DeviceIndex i);
  void record(const OpInfo& op, Stack* stack);
  void run_now(const OpInfo& op, Stack* stack, const char* kind, const std::string& reason);
  // Run what is recorded; where only `needed` is asked for, segments that the schedule holds back may stay recorded.
  using Needed = std::vector<const Buffer*>;
  void barrier(const char* kind, const std::string& reason, const Needed& needed = {});
  bool is_pending(const Buffer* b); bool is_used(const Buffer* b);  // does the recording read or write it?
  // The physical bytes behind `t`, computed if need be.
  at::Tensor materialise(const at::Tensor& t, const char* kind, const std::string& reason);
  at::Scalar read(const at::Tensor& t);  // the one element of `t`
  at::Tensor lend(const at::Tensor& t, int how);  // the same, for another library to hold (`Buffer::lent`, or 0: only to look)
  void on_storage_death(Buffer* b); Trace copy();
  using Given = std::vector<std::pair<int32_t, at::Tensor>>;  // what stands for buffers of a recording
  bool again(Trace& t, const Given& given);
  std::mutex mutex;        // the recording; never held while waiting for the GIL or running anything
  std::mutex flush_mutex;  // one barrier at a time; taken without the GIL
  c10::ThreadPool* launcher = nullptr;  // launches what begins early, in order; kept for ever, guarded by `flush_mutex`
  const DeviceIndex index;
  std::atomic<bool> waited{false};  // has somebody waited for the physical device since a recording ended?
  std::vector<std::weak_ptr<Block>> blocks;  // the large ones

 private:
  const char* append(const OpInfo& op, const IValue* args, c10::ArrayRef<at::Tensor> outs, hash_t call);
  bool must_settle(const OpInfo& op, const IValue* args, Needed& needed);
  void adopt(const at::Tensor& t, const at::Tensor& p);
  void flush_locked(const char* kind, const std::string& reason, Site site, const Needed& needed);
  std::unique_ptr<Trace> take_trace(const Needed& needed); void hold_back(Trace& trace);
  void settle(std::unique_ptr<Trace> trace, const std::string* error, const std::vector<int32_t>& rest);
  ProgramPtr find(Trace& trace, bool& hit);
  void start_early(); void expect(const ProgramPtr& after);
  std::shared_ptr<Runner> begun(const ProgramPtr& program, const Trace& trace);
  struct Entry { hash_t trace; std::vector<uint8_t> live; ProgramPtr program; uint64_t last_use = 0; };  // live: what it computes
  std::unique_ptr<Trace> trace_, spare_;
  uint64_t next_id_ = 1, uses_ = 0;
  // The program that the recording is expected to become, what of it has begun, and how many ops are recorded when more of it may.
  struct Head { ProgramPtr program, before; std::shared_ptr<Runner> runner; size_t cut = 0; } head_; size_t cut_ops_ = 0;
  std::unordered_map<hash_t, Entry, torch::lazy::HashReducer> cache_;
  std::unordered_map<hash_t, bool, torch::lazy::HashReducer> told_;  // what reads of values that came from numbers alone gave
};

std::vector<std::unique_ptr<Recorder>>& recorders();
Recorder& recorder(DeviceIndex i);  // raises where there is no such device
inline Recorder& recorder(const at::Tensor& t) { return recorder(t.device().index()); }
void record_boxed(const c10::OperatorHandle& op, Stack* stack);  // entry of every op of the device

void check_index(DeviceIndex i);  // raises where there is no such device
DeviceIndex current_device(); void set_current_device(DeviceIndex i);
c10::DeviceType physical_type(); c10::Device physical_device(DeviceIndex i);
void synchronize(DeviceIndex i);  // waits for the physical device
void* current_stream(DeviceIndex i);  // the physical one; null on a CPU
void start_device(bool cuda, int count); int device_count();
void beside(DeviceIndex i, bool apart, const std::function<c10::Storage()>& fill);
void resize_bytes(const c10::Storage& s, size_t n);
void keep_whole(const std::vector<std::string>& ops);  // records these, where a composite kernel would take them apart
Buffer* default_generator_buffer(DeviceIndex i); Buffer* generator_buffer(const at::Generator& g);

at::Tensor make_lazy(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, DeviceIndex device);
at::Tensor make_empty(c10::IntArrayRef size, at::ScalarType dtype, DeviceIndex device, std::optional<at::MemoryFormat> format);
c10::Storage physical_bytes(size_t n, DeviceIndex device);
const c10::Storage& count_bytes(const c10::Storage& s);  // as memory of a device that runs on a CPU
at::Tensor bytes_of(const c10::Storage& physical);  // as uint8[nbytes]
void pin(const c10::Storage& physical, int by);  // while above 0, others know its address: no CUDA graph writes there again
// A tensor on `s`, a storage of the lazy device or of the physical one.
at::Tensor alias_storage(const c10::Storage& s, at::ScalarType dtype, c10::IntArrayRef size, c10::IntArrayRef stride,
                         int64_t offset, bool conj = false, bool neg = false);
at::Tensor alias_storage(const c10::Storage& s, const at::Tensor& like);
at::Tensor wrap_physical(const at::Tensor& t, DeviceIndex device);  // a lazy tensor over bytes that exist

struct Limits { int64_t max_ops = 20000, max_bytes = 0; bool eager = false; size_t cache_size = 256; bool frames = true; int idle = 2; bool told = true; };
inline Limits limits;
using Holder = std::function<std::vector<int32_t>(const std::vector<int32_t>&)>;
inline std::function<std::optional<bool>(const at::Tensor&)>* asker = nullptr;  // answers aside, or not; Python's, kept for ever
inline Holder* holder = nullptr;  // which of the recorded segments wait for one not recorded yet; Python's, kept for ever
inline std::atomic<uint64_t> schedule_key{0};  // part of every key; changes with what the schedules ask for

// STATS in api.py names them.
enum Stat {
  kRecorded, kCompiles, kHits, kNodesRun, kNodesDead, kKernelsRun, kFallbacks, kInfers, kEvicted, kFlushes, kHeld, kPeak, kReplays, kEarly, kInVain, kSettled, kTold, kLooked, kStats
};
inline std::array<std::atomic<int64_t>, kStats> stats;
void count(const std::string& counter);  // in torch._lazy.metrics

// These call Python; they take the GIL.
using Logger = std::function<void(const char*, const std::string&, const std::string&, size_t, double, bool, int64_t)>;
inline Logger* logger = nullptr;  // kind, reason, the user's line, ops, milliseconds, cached, order; Python's, kept for ever
ProgramPtr compile_trace(Trace& trace, DeviceIndex device);
void infer_in_python(const OpInfo& op, const IValue* args, DeviceIndex device, Inference& known);

// Below every key that could divert a physical op back to Python, autograd or autocast; on the device's physical twin.
struct PlainDispatch {
  explicit PlainDispatch(DeviceIndex i = -1);
  c10::impl::ForceDispatchKeyGuard keys;
  c10::OptionalDeviceGuard device;
};
// While it lives, warnings that begin with `prefix` are dropped; the others reach the user. So does none about weights that cuDNN's
// recurrent layers copy: where weights lie is not the user's to say.
struct NoWarnings final : c10::WarningHandler {
  explicit NoWarnings(const char* p) : prefix(p), user(c10::WarningUtils::get_warning_handler()), guard(this) {}
  void process(const c10::Warning& w) override { if (w.msg().rfind(prefix, 0) && w.msg().rfind("RNN module", 0)) user->process(w); }
  const char* prefix; c10::WarningHandler* user;
  c10::WarningUtils::WarningHandlerGuard guard;
};
// One thing for each device index, made when it is first asked for and kept for ever.
template <class F> auto* one_each(F&& make) {
  auto* all = new std::vector<decltype(make(DeviceIndex{}))>();
  for (int d = 0; d < device_count(); d++) all->push_back(make(static_cast<DeviceIndex>(d)));
  return all;
}
// Ops that draw without being given a generator use the physical device's default one: lends it our state for the call.
struct LentState {
  LentState(at::Generator ours, DeviceIndex device);
  ~LentState() { saved.defined() ? theirs.graphsafe_set_state(saved) : (ours.set_state(theirs.get_state()), theirs.set_state(copied)); }
  at::Generator ours, theirs, saved;  // CUDA's generators hand their states around, also while a stream is captured
  at::Tensor copied;                  // a CPU's
};
// Gives the GIL up while waiting for a lock or running kernels.
struct GilRelease { GilRelease(); ~GilRelease(); void* state = nullptr; };

inline bool is_tensor(const IValue& v) {
  return v.isTensor() && v.unsafeToTensorImpl() != static_cast<c10::TensorImpl*>(c10::UndefinedTensorImpl::singleton());
}
inline bool is_lazy(const at::Tensor& t) { return t.defined() && t.device().type() == kLazy; }

// The items of a list, or the value itself.
inline c10::ArrayRef<IValue> elements(const IValue& v) { return v.isList() ? v.toListRef() : c10::ArrayRef<IValue>(v); }

// f(argument's position, tensor) for every tensor that an op is given.
template <class F> void each_tensor(const OpInfo& op, const IValue* args, F&& f) {
  for (size_t i = 0; i < op.args.size(); i++) {
    if (!op.args[i].tensors()) continue;
    for (const auto& e : elements(args[i])) if (is_tensor(e)) f(i, e.toTensor());
  }
}

// A list of f(0), f(1), ...
template <class T, class F> IValue make_list(size_t n, F&& f) {
  c10::List<T> list;
  list.reserve(n);
  for (size_t i = 0; i < n; i++) list.push_back(f(i));
  return list;
}

inline std::optional<at::Tensor> if_defined(at::Tensor t) { return t.defined() ? std::optional(std::move(t)) : std::nullopt; }

// `v` with f(tensor) in the place of every tensor, undefined ones too.
template <class F> IValue map_tensors(const IValue& v, F&& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (!v.isTensorList() && !v.isOptionalTensorList()) return v;
  const auto items = v.toListRef();
  auto item = [&](size_t i) { return f(items[i].isTensor() ? items[i].toTensor() : at::Tensor()); };
  if (v.isTensorList()) return make_list<at::Tensor>(items.size(), item);
  return make_list<std::optional<at::Tensor>>(items.size(), [&](size_t i) { return if_defined(item(i)); });
}

}  // namespace lazysched
