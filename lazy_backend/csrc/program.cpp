// Runs a program. At every barrier.
#include "runner.h"

namespace lazysched {

// Before a stretch is captured libraries make their handles, and memory settles. Two more show whether to start early instead.
constexpr int64_t kWarmRuns = 2;

// Puts inputs into their slots, as far as they are recorded; `whole`: the recording has ended.
void Runner::bind(bool whole) {
  const auto recorded = static_cast<int32_t>(trace->buffers.size());
  for (; bound < program.inputs.size() && program.inputs[bound].first < recorded; bound++) {
    const auto [buffer, slot] = program.inputs[bound];
    auto& b = trace->buffers[buffer];
    if (!b->physical && !whole) return;
    if (!b->physical) b->physical = physical_bytes(b->nbytes, device);  // read before anything wrote it: torch.empty
    slots[slot] = b->physical;
  }
  for (auto [buffer, slot] : program.inputs)
    if (whole && !trace->live[buffer]) trace->buffers[buffer]->physical = c10::Storage();  // donated: free after its last use
}

// An out= call may resize its output on the way to the shape it had; what a user did wrong was said when recording.
constexpr char kResized[] = "An output with one or more elements was resized";

void Runner::run_early(std::shared_ptr<Trace> recorded, const Program::Cut& cut) {
  PlainDispatch plain(device); NoWarnings quiet(kResized);
  part = std::move(recorded), trace = part.get();
  std::unique_lock lock(recorder(device).mutex);  // others give memory to what is read before anything wrote it
  for (size_t i = part->scalars.size(); i < program.numbers.size(); i++) part->scalars.push_back(program.numbers[i]);
  for (size_t i = states.size(); i < trace->buffers.size(); i++)
    states.push_back(trace->kinds[i] == BufferKind::Generator ? trace->buffers[i]->generator.clone() : at::Generator());
  bind(false), lock.unlock();
  for (int32_t slot : cut.saves) saved.emplace_back(slots[slot], bytes_of(slots[slot]).clone());
  done.resize(program.steps.size());
  for (int32_t i : cut.steps) step = static_cast<size_t>(i), run_step(), done[i] = true;
  ranges.clear();  // they would end in another thread
}

void Program::run(Trace& trace, DeviceIndex device, int32_t& failed, std::shared_ptr<Runner> begun) {
  PlainDispatch plain(device); NoWarnings quiet(kResized);
  if (!begun) begun = std::make_shared<Runner>(*this, device);
  Runner& runner = *begun;
  runner.trace = &trace, runner.step = 0, runner.bind(true);
  if (runs++; !cuts.empty()) numbers = trace.scalars;
  size_t& at = runner.step;
  const auto hand_out = c10::make_scope_exit([&] {  // what was ready before something failed, too
    for (auto [buffer, slot, ready] : outputs)
      if (ready < static_cast<int32_t>(at)) trace.buffers[buffer]->physical = runner.slots[slot];
  });
  size_t next = 0;
  while (at < steps.size()) {
    while (next < graphs.size() && graphs[next].first < at) next++;
    const bool graph = runner.done.empty() && next < graphs.size() && graphs[next].first == at;
    if (!runner.done.empty() && runner.done[at]) at++;
    else if (graph && runner.serve(graphs[next], runs > kWarmRuns + 2 * !cuts.empty())) at = graphs[next].last;
    else failed = steps[at].instr, runner.run_step(), at++;
  }
  failed = -1;
}

}  // namespace lazysched
