// Runs a program. At every barrier.
#include "runner.h"
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lazysched {
namespace {

constexpr int64_t kWarmRuns = 2;  // before a stretch is captured: libraries make their handles, and memory settles

// An out= call may resize its output on the way to the shape it had; what a user did wrong was said when recording.
struct QuietResize final : c10::WarningHandler {
  explicit QuietResize(c10::WarningHandler* user) : user_(user) {}
  void process(const c10::Warning& w) override {
    if (w.msg().rfind("An output with one or more elements was resized", 0) != 0) user_->process(w);
  }
  c10::WarningHandler* user_;
};

}  // namespace

void Program::run(Trace& trace, DeviceIndex device, int32_t& failed) {
  PlainDispatch plain(device);
  QuietResize quiet(c10::WarningUtils::get_warning_handler());
  c10::WarningUtils::WarningHandlerGuard warnings(&quiet);
  const auto stream = [&] {
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    const auto current = cuda.getStream(physical_device(device));
    // The driver knows no context in a thread that has not called the CUDA runtime yet: this call makes it known.
    [[maybe_unused]] static thread_local const bool asked = cuda.queryStream(current);
    return current.native_handle();
  };
  Runner runner{trace, *this, device, launches ? stream() : nullptr, std::vector<c10::Storage>(slots)};
  for (auto [buffer, slot] : inputs) {
    auto& b = trace.buffers[buffer];
    if (!b->physical) b->physical = physical_bytes(b->nbytes, device);  // read before anything wrote it: torch.empty
    runner.slots[slot] = b->physical;
    if (!trace.live[buffer]) b->physical = c10::Storage();  // donated: its memory is free after its last use
  }
  runs++;
  size_t& at = runner.step;
  auto hand_out = [&] {
    for (auto [buffer, slot, ready] : outputs)
      if (ready < static_cast<int32_t>(at)) trace.buffers[buffer]->physical = runner.slots[slot];
  };
  try {
    size_t next = 0;
    while (at < steps.size()) {
      while (next < graphs.size() && graphs[next].first < at) next++;
      if (next < graphs.size() && graphs[next].first == at && runner.serve(graphs[next], runs > kWarmRuns)) {
        at = graphs[next].last;
        continue;
      }
      failed = steps[at].instr;
      runner.run_step();
      at++;
    }
  } catch (...) {
    hand_out();
    throw;
  }
  failed = -1;
  hand_out();
}

}  // namespace lazysched
