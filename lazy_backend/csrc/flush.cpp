// Ends a recording: finds the program for its key or has Python compile one, runs it, hands out the results.
#include "runner.h"
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/lazy/core/metrics.h>

#include <algorithm>
#include <chrono>

namespace lazysched {

// torch_xla's counter names, in torch._lazy.metrics, which have a lock that a fork would leave held.
void count(const std::string& name) { std::lock_guard lock(tables_mutex); torch::lazy::Counter(name).AddValue(1); }

// Which tensors are alive can depend on when garbage is collected. After a few variants of a recording, a program that computes
// more than is needed serves as well: it must keep all that is alive now, which `trace.live` then says. One with an op that no
// CUDA graph could hold is compiled anew, for graphs around that op.
ProgramPtr Recorder::find(Trace& trace, bool& hit) {
  constexpr int kExactVariants = 4;
  const auto key = [&] { return torch::lazy::HashBlock(trace.live.data(), trace.live.size(), trace.hash); };
  auto found = cache_.find(key());
  if (found == cache_.end()) {
    int variants = 0; auto all = trace.live; auto covering = found;
    for (auto it = cache_.begin(); it != cache_.end(); ++it) {
      const auto& live = it->second.live;
      if (!(it->second.trace == trace.hash)) continue;
      variants++;
      if (std::equal(live.begin(), live.end(), trace.live.begin(), std::greater_equal<>())) covering = it;
      std::transform(all.begin(), all.end(), live.begin(), all.begin(), std::bit_or<>());
    }
    if (variants >= kExactVariants) trace.live = all, found = covering;
  }
  hit = found != cache_.end() && !found->second.program->stale;
  if (!hit) {
    const auto old = found == cache_.end() ? nullptr : found->second.program;
    if (old) trace.live = found->second.live, trace.refused = old->refused;
    found = cache_.insert_or_assign(key(), Entry{trace.hash, trace.live, compile_trace(trace, index)}).first;
    auto& made = *found->second.program; made.refused = trace.refused, made.turns = old ? old->turns + 1 : 0;
    for (auto& cut : made.cuts) cut.hash = trace.instrs[cut.ops - 1].so_far;
  }
  trace.live = found->second.live, found->second.last_use = ++uses_;
  auto program = found->second.program;
  auto older = [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; };
  for (; cache_.size() > limits.cache_size; stats[kEvicted]++) cache_.erase(std::min_element(cache_.begin(), cache_.end(), older));
  return program;
}

void Recorder::barrier(const char* kind, const std::string& reason, const Needed& needed) {
  const Site site = capture_site();
  GilRelease nogil; std::lock_guard<std::mutex> lock(flush_mutex);
  flush_locked(kind, reason, site, needed);
  waited = waited || std::string_view(kind) == "wait";
}

// The recording, with what is alive now; null where nothing is recorded.
std::unique_ptr<Trace> Recorder::take_trace(const Needed& needed) {
  std::lock_guard<std::mutex> lock(mutex);
  if (trace_->instrs.empty()) return nullptr;
  auto trace = std::exchange(trace_, spare_ ? std::move(spare_) : std::make_unique<Trace>());
  for (const Buffer* b : needed) if (b->trace == trace->id) trace->needed.push_back(b->index);
  trace_->reset(next_id_++);
  for (const auto& b : trace->buffers) trace->live.push_back(b->owned || b->is_lent() ? 1 : 0);
  if (const uint64_t key = schedule_key) trace->hash = torch::lazy::HashCombine(trace->hash, hash_t(key));
  return trace;
}

// Asks the schedule which segments may wait, and makes the answer a part of the key.
void Recorder::hold_back(Trace& trace) {
  if (!schedule_key || trace.needed.empty()) return;
  std::vector<int32_t> recorded;
  for (const auto& in : trace.instrs) if (in.segment) recorded.push_back(in.segment);
  if (!recorded.empty() && holder) trace.held = (*holder)(recorded);
  if (trace.held.empty()) return;
  for (const auto* words : {&trace.held, &trace.needed})
    trace.hash = torch::lazy::HashBlock(words->data(), words->size() * sizeof(int32_t), trace.hash);
}

// Begins what the recording is likely to become while the host goes on recording, where the device would wait for it. That writes
// no memory that was there before: it is dropped if the recording becomes another one. A thread of its own launches it, as that
// takes about as long as recording does. A program that turns out to be in a loop that waits, or in one that does not, is compiled
// anew for that: with the first cut alone it was compiled before anybody waited. 64 steps tell, which have lost about what compiling
// takes, each time four times as many; a loop that waits less often than at every fifth step is one that does not.
void Recorder::start_early() {
  GilRelease nogil; std::lock_guard<std::mutex> flushing(flush_mutex);
  auto& [program, before, runner, number] = head_; if (!program || number == program->cuts.size()) return;
  const auto& cut = program->cuts[number++];
  std::shared_ptr<Trace> recorded; bool anew = false, had = false; const bool alone = program->cuts.size() == 1;
  {
    std::lock_guard<std::mutex> lock(mutex); cut_ops_ = 0;
    const bool apart = runner && runner->stream != current_stream(index);  // autograd's threads may have another
    if (apart || trace_->instrs.size() < cut.ops || !(trace_->instrs[cut.ops - 1].so_far == cut.hash)) return;
    if (!runner) {
      program->idle = waited ? program->idle + 1 : std::min(program->idle, 0);
      program->calm = std::max(program->calm + (waited ? -4 : 1), 0);
      anew = (program->apart ? program->calm : alone ? program->idle : 0) >= 64 << 2 * std::min(program->turns, 8);
      if (!anew && (alone || program->idle < limits.idle)) return;
    }
    recorded = std::make_shared<Trace>(*trace_);
    if (number < program->cuts.size()) cut_ops_ = program->cuts[number].ops;
  }
  if (!runner) for (auto& g : program->graphs) had |= !!g.exec, g.exec = nullptr, g.launch = nullptr, g.made = nullptr, g.home = nullptr;
  // It would lie idle beside what is taken now. The allocator waits for the stream of the capture, and graphs run on another.
  if (had) synchronize(index), c10::getDeviceAllocator(physical_type())->emptyCache();
  if (anew) return void(program->stale = true);
  if (!runner) runner = std::make_shared<Runner>(*program, index);
  if (!launcher) launcher = new c10::ThreadPool(1), std::atexit([] { for (auto& r : recorders()) if (r->launcher) r->launcher->waitWorkComplete(); });
  const auto stream = c10::impl::VirtualGuardImpl(physical_type()).getStream(physical_device(index));
  launcher->run([program = program, runner = runner, recorded = std::move(recorded), at = number - 1, stream] {
    c10::StreamGuard on(stream); runner->failed |= current_stream(runner->device) != runner->stream;  // makes the driver known here
    try { if (!runner->failed) runner->run_early(recorded, program->cuts[at]), stats[kEarly]++; }
    catch (const std::exception& e) { runner->failed = true, count("StartEarlyFailed: " + first_line(e)); }  // so will the run
  });
}

// What has begun of `program`, if that is what the recording became, with the numbers that were guessed; else nothing: what was
// drawn is drawn again. A program whose numbers change is not begun any more.
std::shared_ptr<Runner> Recorder::begun(const ProgramPtr& program, const Trace& trace) {
  auto runner = std::exchange(head_.runner, nullptr);
  if (!runner) return nullptr;
  launcher ? launcher->waitWorkComplete() : void(runner->failed = true);  // a forked child has not got the thread
  const bool found = !runner->failed && program == head_.program && runner->part->id == trace.id && runner->stream == current_stream(index);
  auto right = [&](int32_t n) { return program->numbers[n] == trace.scalars[n]; };
  if (found && std::all_of(program->guessed.begin(), program->guessed.end(), right)) return runner;
  if (found) program->cuts.clear();
  if (runner->stream != current_stream(index)) synchronize(index);
  for (size_t i = 0; i < runner->states.size(); i++)
    if (const auto& s = runner->states[i]; s.defined()) runner->part->buffers[i]->generator.set_state(s.get_state());
  for (auto& [storage, bytes] : runner->saved) bytes_of(storage).copy_(bytes);
  head_.program->idle = -8 * ++head_.program->missed, stats[kInVain]++;
  return nullptr;
}

// What follows `program` is likely to be what followed it the last time.
void Recorder::expect(const ProgramPtr& program) {
  begun(nullptr, *trace_), waited = false; if (head_.before) head_.before->next = program;
  head_ = {program ? program->next.lock() : nullptr, program};
  std::lock_guard<std::mutex> lock(mutex);
  cut_ops_ = head_.program && !head_.program->cuts.empty() ? head_.program->cuts[0].ops : 0;
}

// Its results are there, or never will be; the instructions `rest` are recorded again, before all that came meanwhile.
void Recorder::settle(std::unique_ptr<Trace> trace, const std::string* error, const std::vector<int32_t>& rest) {
  constexpr auto kLost = "lazysched: this tensor was never computed, because an earlier op failed: ";
  const auto poison = error ? std::make_shared<const std::string>(kLost + *error) : nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < trace->buffers.size(); i++) {
    auto& b = trace->buffers[i];
    if (b->pending_in != trace->id) continue;
    b->pending_in = 0;
    if (error && trace->kinds[i] != BufferKind::Generator && !b->physical) b->error = poison;
  }
  if (!error && !rest.empty()) {
    const auto later = std::exchange(trace_, std::make_unique<Trace>());
    trace_->reset(next_id_++);
    for (const auto& b : later->buffers) if (b->pending_in == later->id) b->pending_in = 0;
    for (int32_t i : rest) trace_->replay(*trace, trace->instrs[i]);
    for (const auto& in : later->instrs) trace_->replay(*later, in);
  }
  trace->reset(0), spare_ = std::move(trace);
}

// Where the user's Python recorded an op; for one that backward recorded, where its forward was.
static Site site_of(const Trace& trace, const Instr& instr) {
  if (instr.site.code || instr.backward < 0) return instr.site;
  for (const auto& f : trace.instrs) if (f.site.code && f.backward < 0 && f.sequence - 1 == instr.backward) return f.site;
  return {};
}

void Recorder::flush_locked(const char* kind, const std::string& reason, Site site, const Needed& needed) {
  auto trace = take_trace(needed);
  if (!trace && index != current_device()) return;  // mark_step() asks every device, most of which never did a thing
  auto log = [&](size_t ops, double milliseconds, bool hit, int64_t order) {
    if (logger) (*logger)(kind, reason, describe_site(site), ops, milliseconds, hit, order);
  };
  if (!trace) return log(0, 0, false, -1);
  stats[kFlushes]++; const auto start = std::chrono::steady_clock::now(); const size_t ops = trace->instrs.size();
  bool hit = false; int32_t failed = -1; int64_t order = -1; std::exception_ptr error; std::string message; ProgramPtr program;
  try {
    hold_back(*trace);
    program = find(*trace, hit), order = program->order;
    for (int32_t b : program->kept) trace->live[b] = 1;
    count(hit ? "CachedCompile" : "UncachedCompile"), stats[hit ? kHits : kCompiles]++;
    program->run(*trace, index, failed, begun(program, *trace));
    stats[kNodesRun] += program->nodes, stats[kNodesDead] += program->dead, stats[kKernelsRun] += program->launches;
  } catch (c10::Error& e) {
    if (failed >= 0) {
      const auto& instr = trace->instrs[failed];
      const auto place = describe_site(site_of(*trace, instr));
      e.add_context("raised by " + instr.op->name + (place.empty() ? "" : ", recorded at " + place));
    }
    error = std::current_exception(), message = e.what_without_backtrace();
  } catch (const std::exception& e) { error = std::current_exception(), message = e.what(); }
  expect(program);
  settle(std::move(trace), error ? &message : nullptr, program ? program->rest : std::vector<int32_t>());
  log(ops, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count(), hit, order);
  if (error) std::rethrow_exception(error);
}

}  // namespace lazysched
