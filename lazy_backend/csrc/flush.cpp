// Ends a recording: finds the program for its key or has Python compile one, runs it, hands out the results.
#include "program.h"
#include <torch/csrc/lazy/core/metrics.h>

#include <algorithm>
#include <chrono>

namespace lazysched {
namespace {

using Clock = std::chrono::steady_clock;

// With these results alive, does a program for `kept` compute all that is wanted?
bool covers(const CacheKey& kept, const CacheKey& wanted) {
  if (kept.hash != wanted.hash) return false;
  for (size_t i = 0; i < wanted.live.size(); i++)
    if (wanted.live[i] && !kept.live[i]) return false;
  return true;
}

}  // namespace

// torch_xla's counter names, in torch._lazy.metrics.
void count(const std::string& name) { torch::lazy::Counter(name).AddValue(1); }

size_t CacheKeyHash::operator()(const CacheKey& k) const {
  return torch::lazy::HashReduce(torch::lazy::HashBlock(k.live.data(), k.live.size(), k.hash));
}

// Which tensors are alive can depend on when garbage is collected. After a few variants of a recording, a program that computes
// more than is needed serves as well: it must keep all that is alive now, which `trace.live` then says.
ProgramPtr Recorder::find(Trace& trace, bool& hit) {
  constexpr int kExactVariants = 4;
  CacheKey key{trace.hash, trace.live};
  auto found = cache_.find(key);
  if (found == cache_.end()) {
    int variants = 0;
    CacheKey wide = key;
    for (auto it = cache_.begin(); it != cache_.end(); ++it) {
      if (it->first.hash != key.hash) continue;
      variants++;
      if (covers(it->first, key)) found = it;
      for (size_t i = 0; i < wide.live.size(); i++) wide.live[i] |= it->first.live[i];
    }
    if (variants < kExactVariants) found = cache_.end();
    else key = found != cache_.end() ? found->first : wide;
  }
  hit = found != cache_.end();
  trace.live = key.live;
  if (!hit) {
    found = cache_.emplace(key, Entry{compile_trace(trace, index), 0}).first;
  }
  found->second.last_use = ++uses_;
  auto program = found->second.program;
  while (cache_.size() > limits.cache_size) {
    auto older = [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; };
    cache_.erase(std::min_element(cache_.begin(), cache_.end(), older));
    stats[kEvicted]++;
  }
  return program;
}

void Recorder::clear_cache() {
  GilRelease nogil;
  std::lock_guard<std::mutex> lock(flush_mutex);
  cache_.clear();
}

void Recorder::barrier(const char* kind, const std::string& reason) {
  const Site site = capture_site();
  GilRelease nogil;
  std::lock_guard<std::mutex> lock(flush_mutex);
  flush_locked(kind, reason, site);
}

// The recording, with what is alive now; null where nothing is recorded.
std::unique_ptr<Trace> Recorder::take_trace() {
  std::lock_guard<std::mutex> lock(mutex);
  if (trace_->instrs.empty()) return nullptr;
  auto trace = std::exchange(trace_, spare_ ? std::move(spare_) : std::make_unique<Trace>());
  trace_->reset(next_id_++);
  for (const auto& b : trace->buffers) trace->live.push_back(b->owned ? 1 : 0);
  return trace;
}

// Its results are there, or never will be.
void Recorder::settle(std::unique_ptr<Trace> trace, const std::string* error) {
  constexpr auto kLost = "lazysched: this tensor was never computed, because an earlier op failed: ";
  const auto poison = error ? std::make_shared<const std::string>(kLost + *error) : nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < trace->buffers.size(); i++) {
    auto& b = trace->buffers[i];
    if (b->pending_in != trace->id) continue;
    b->pending_in = 0;
    if (error && trace->kinds[i] != BufferKind::Generator && !b->physical) b->error = poison;
  }
  trace->reset(0);
  spare_ = std::move(trace);
}

void Recorder::flush_locked(const char* kind, const std::string& reason, Site site) {
  BarrierEvent event{kind, reason, site};
  auto trace = take_trace();
  if (!trace) return log_barrier(event);
  event.ops = static_cast<int64_t>(trace->instrs.size());
  stats[kFlushes]++;
  const auto start = Clock::now();
  int32_t failed = -1;
  std::exception_ptr error;
  std::string message;
  try {
    auto program = find(*trace, event.hit);
    count(event.hit ? "CachedCompile" : "UncachedCompile");
    stats[event.hit ? kCacheHits : kCompiles]++;
    program->run(*trace, index, failed);
    stats[kNodesRun] += program->nodes;
    stats[kNodesDead] += program->dead;
    stats[kKernelsRun] += program->launches;
  } catch (c10::Error& e) {
    if (failed >= 0) {
      const auto& instr = trace->instrs[failed];
      const auto place = describe_site(instr.site);
      e.add_context("raised by " + instr.op->name + (place.empty() ? "" : ", recorded at " + place));
    }
    error = std::current_exception();
    message = e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = std::current_exception();
    message = e.what();
  }
  settle(std::move(trace), error ? &message : nullptr);
  event.milliseconds = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  log_barrier(event);
  if (error) std::rethrow_exception(error);
}

}  // namespace lazysched
