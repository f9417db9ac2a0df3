// Runs a program. At every barrier.
#include "runner.h"
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

namespace lazysched {

constexpr int64_t kWarmRuns = 2;  // before a stretch is captured: libraries make their handles, and memory settles

void Program::run(Trace& trace, DeviceIndex device, int32_t& failed) {
  PlainDispatch plain(device);
  // An out= call may resize its output on the way to the shape it had; what a user did wrong was said when recording.
  NoWarnings quiet("An output with one or more elements was resized");
  const auto stream = [&] {
    const c10::impl::VirtualGuardImpl cuda(c10::kCUDA);
    const auto current = cuda.getStream(physical_device(device));
    // The driver knows no context in a thread that has not called the CUDA runtime yet: this call makes it known.
    [[maybe_unused]] static thread_local const bool asked = cuda.queryStream(current);
    return current.native_handle();
  };
  Runner runner{trace, *this, device, physical_type() == c10::kCUDA ? stream() : nullptr, std::vector<c10::Storage>(slots)};
  for (auto [buffer, slot] : inputs) {
    auto& b = trace.buffers[buffer];
    if (!b->physical) b->physical = physical_bytes(b->nbytes, device);  // read before anything wrote it: torch.empty
    runner.slots[slot] = b->physical;
    if (!trace.live[buffer]) b->physical = c10::Storage();  // donated: its memory is free after its last use
  }
  runs++;
  size_t& at = runner.step;
  const auto hand_out = c10::make_scope_exit([&] {  // what was ready before something failed, too
    for (auto [buffer, slot, ready] : outputs)
      if (ready < static_cast<int32_t>(at)) trace.buffers[buffer]->physical = runner.slots[slot];
  });
  size_t next = 0;
  while (at < steps.size()) {
    while (next < graphs.size() && graphs[next].first < at) next++;
    const bool graph = next < graphs.size() && graphs[next].first == at;
    if (graph && runner.serve(graphs[next], runs > kWarmRuns)) at = graphs[next].last;
    else failed = steps[at].instr, runner.run_step(), at++;
  }
  failed = -1;
}

}  // namespace lazysched
