// Ends a recording: finds the program for its key or has Python compile one, runs it, hands out the results.
#include "program.h"
#include <torch/csrc/lazy/core/metrics.h>

#include <chrono>

namespace lazysched {

Limits& limits() {
  static auto* l = new Limits();
  return *l;
}
Stats& stats() {
  static auto* s = new Stats();
  return *s;
}

// torch_xla's counter names, in torch._lazy.metrics.
void count(const std::string& name) {
  static auto* all = new std::unordered_map<std::string, torch::lazy::Counter*>();
  static std::mutex m;
  std::lock_guard<std::mutex> lock(m);
  auto& counter = (*all)[name];
  if (!counter) counter = new torch::lazy::Counter(name);
  counter->AddValue(1);
}

size_t CacheKeyHash::operator()(const CacheKey& k) const {
  return torch::lazy::HashReduce(torch::lazy::HashBlock(k.live.data(), k.live.size(), k.hash));
}

ProgramPtr Recorder::find(const CacheKey& key, bool& hit, Trace& trace) {
  auto it = cache_.find(key);
  hit = it != cache_.end();
  if (hit) {
    lru_.splice(lru_.begin(), lru_, it->second);
    return it->second->second;
  }
  // Which tensors are alive can depend on when garbage is collected. After a few variants, a program that computes more
  // than is needed serves as well: it must keep all that is alive now.
  auto& variants = variants_[key.hash];
  constexpr size_t kExactVariants = 4;
  CacheKey wanted = key;
  if (variants.size() >= kExactVariants) {
    for (const auto& v : variants) {
      bool covers = v.live.size() == key.live.size();
      for (size_t i = 0; covers && i < v.live.size(); i++) covers = v.live[i] || !key.live[i];
      auto found = covers ? cache_.find(v) : cache_.end();
      if (found == cache_.end()) continue;
      hit = true;
      trace.live = v.live;
      return found->second->second;
    }
    for (const auto& v : variants)
      for (size_t i = 0; i < v.live.size() && i < wanted.live.size(); i++) wanted.live[i] |= v.live[i];
    trace.live = wanted.live;
  }
  auto program = compile_trace(trace, index);
  lru_.emplace_front(wanted, program);
  cache_[wanted] = lru_.begin();
  variants.push_back(wanted);
  while (lru_.size() > limits().cache_size) {
    const auto& oldest = lru_.back().first;
    auto& list = variants_[oldest.hash];
    list.erase(std::remove(list.begin(), list.end(), oldest), list.end());
    if (list.empty()) variants_.erase(oldest.hash);
    cache_.erase(oldest);
    lru_.pop_back();
    stats().evicted++;
  }
  return program;
}

void Recorder::clear_cache() {
  GilRelease nogil;
  std::lock_guard<std::mutex> lock(flush_mutex);
  cache_.clear();
  variants_.clear();
  lru_.clear();
}

void Recorder::barrier(const char* kind, const std::string& reason) {
  const Site site = capture_site();
  GilRelease nogil;
  std::lock_guard<std::mutex> lock(flush_mutex);
  flush_locked(kind, reason, site);
}

void Recorder::flush_locked(const char* kind, const std::string& reason, Site site) {
  std::unique_ptr<Trace> trace;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!trace_->instrs.empty()) {
      trace = std::move(trace_);
      trace_ = spare_ ? std::move(spare_) : std::make_unique<Trace>();
      trace_->reset(next_id_++);
      for (const auto& b : trace->buffers) trace->live.push_back(b->owned ? 1 : 0);
    }
  }
  BarrierEvent event{kind, reason, site};
  event.device = index;
  if (!trace) return log_barrier(std::move(event));
  event.ops = static_cast<int64_t>(trace->instrs.size());
  stats().flushes++;
  const auto start = std::chrono::steady_clock::now();
  int32_t failed = -1;
  std::exception_ptr error;
  std::string message;
  try {
    auto program = find(CacheKey{trace->hash, trace->live}, event.hit, *trace);
    count(event.hit ? "CachedCompile" : "UncachedCompile");
    event.hit ? stats().cache_hits++ : stats().compiles++;
    program->run(*trace, index, failed);
    stats().nodes_run += program->nodes;
    stats().nodes_dead += program->dead;
    stats().kernels_run += static_cast<int64_t>(program->launches.size());
  } catch (const std::exception& e) {
    error = std::current_exception();
    const auto* c10_error = dynamic_cast<const c10::Error*>(&e);
    message = c10_error ? c10_error->what_without_backtrace() : e.what();
  }
  if (error && failed >= 0) {
    const auto& instr = trace->instrs[failed];
    auto place = describe_site(instr.site);
    message += "\n  raised by " + instr.op->name + (place.empty() ? "" : ", recorded at " + place);
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto poison = error ? std::make_shared<const std::string>("lazysched: this tensor was never computed, because an earlier op failed: " + message) : nullptr;
    for (size_t i = 0; i < trace->buffers.size(); i++) {
      auto& b = trace->buffers[i];
      if (b->pending_in != trace->id) continue;
      b->pending_in = 0;
      if (error && trace->kinds[i] != BufferKind::Generator && !b->physical) b->error = poison;
    }
    trace->reset(0);
    spare_ = std::move(trace);
  }
  event.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  log_barrier(std::move(event));
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::IndexError&) {
    TORCH_CHECK_INDEX(false, message);
  } catch (const c10::ValueError&) {
    TORCH_CHECK_VALUE(false, message);
  } catch (const c10::TypeError&) {
    TORCH_CHECK_TYPE(false, message);
  } catch (const c10::NotImplementedError&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, message);
  } catch (const c10::OutOfMemoryError&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, message);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, message);
  }
}

}  // namespace lazysched
