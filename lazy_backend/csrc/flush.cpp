// Ends a recording: finds the program for its key or has Python compile one, runs it, hands out the results.
#include "program.h"
#include <torch/csrc/lazy/core/metrics.h>

#include <algorithm>
#include <chrono>

namespace lazysched {
using Clock = std::chrono::steady_clock;

// torch_xla's counter names, in torch._lazy.metrics.
void count(const std::string& name) { torch::lazy::Counter(name).AddValue(1); }

// Which tensors are alive can depend on when garbage is collected. After a few variants of a recording, a program that computes
// more than is needed serves as well: it must keep all that is alive now, which `trace.live` then says.
ProgramPtr Recorder::find(Trace& trace, bool& hit) {
  constexpr int kExactVariants = 4;
  const auto key = [&] { return torch::lazy::HashBlock(trace.live.data(), trace.live.size(), trace.hash); };
  auto found = cache_.find(key());
  if (found == cache_.end()) {
    int variants = 0;
    auto all = trace.live;
    auto covering = found;
    for (auto it = cache_.begin(); it != cache_.end(); ++it) {
      const auto& live = it->second.live;
      if (!(it->second.trace == trace.hash)) continue;
      variants++;
      if (std::equal(live.begin(), live.end(), trace.live.begin(), std::greater_equal<>())) covering = it;
      std::transform(all.begin(), all.end(), live.begin(), all.begin(), std::bit_or<>());
    }
    if (variants >= kExactVariants) trace.live = all, found = covering;
  }
  hit = found != cache_.end();
  if (!hit) found = cache_.insert_or_assign(key(), Entry{trace.hash, trace.live, compile_trace(trace, index)}).first;
  trace.live = found->second.live;
  found->second.last_use = ++uses_;
  auto program = found->second.program;
  auto older = [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; };
  for (; cache_.size() > limits.cache_size; stats[kEvicted]++) cache_.erase(std::min_element(cache_.begin(), cache_.end(), older));
  return program;
}

void Recorder::barrier(const char* kind, const std::string& reason, const Needed& needed) {
  const Site site = capture_site();
  GilRelease nogil;
  std::lock_guard<std::mutex> lock(flush_mutex);
  flush_locked(kind, reason, site, needed);
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
  trace->reset(0);
  spare_ = std::move(trace);
}

// Where the user's Python recorded an op; for one that backward recorded, where its forward was.
static Site site_of(const Trace& trace, const Instr& instr) {
  if (instr.site.code || instr.backward < 0) return instr.site;
  for (const auto& forward : trace.instrs)
    if (forward.site.code && forward.backward < 0 && forward.sequence - 1 == instr.backward) return forward.site;
  return {};
}

void Recorder::flush_locked(const char* kind, const std::string& reason, Site site, const Needed& needed) {
  auto trace = take_trace(needed);
  if (!trace && index != current_device()) return;  // mark_step() asks every device, most of which never did a thing
  auto log = [&](size_t ops, double milliseconds, bool hit, int64_t order) {
    if (logger) (*logger)(kind, reason, describe_site(site), ops, milliseconds, hit, order);
  };
  if (!trace) return log(0, 0, false, -1);
  stats[kFlushes]++;
  const auto start = Clock::now();
  const size_t ops = trace->instrs.size();
  bool hit = false; int32_t failed = -1; int64_t order = -1;
  std::exception_ptr error; std::string message;
  ProgramPtr program;
  try {
    hold_back(*trace);
    program = find(*trace, hit);
    order = program->order;
    for (int32_t b : program->kept) trace->live[b] = 1;
    count(hit ? "CachedCompile" : "UncachedCompile");
    stats[hit ? kHits : kCompiles]++;
    program->run(*trace, index, failed);
    stats[kNodesRun] += program->nodes, stats[kNodesDead] += program->dead, stats[kKernelsRun] += program->launches;
  } catch (c10::Error& e) {
    if (failed >= 0) {
      const auto& instr = trace->instrs[failed];
      const auto place = describe_site(site_of(*trace, instr));
      e.add_context("raised by " + instr.op->name + (place.empty() ? "" : ", recorded at " + place));
    }
    error = std::current_exception(), message = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = std::current_exception(), message = e.what();
  }
  settle(std::move(trace), error ? &message : nullptr, program ? program->rest : std::vector<int32_t>());
  log(ops, std::chrono::duration<double, std::milli>(Clock::now() - start).count(), hit, order);
  if (error) std::rethrow_exception(error);
}

}  // namespace lazysched
