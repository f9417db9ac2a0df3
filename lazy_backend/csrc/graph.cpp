// Stretches of a program as CUDA graphs: a driver's recording of launches, replayed in one call. Addresses and numbers are part
// of a graph. Memory that moves from run to run is copied to where the graph reads it; numbers of kernels are set anew.
#include "runner.h"

#include <algorithm>

namespace lazysched {
namespace {

constexpr int kMisses = 4;  // captures in vain, before a stretch is left alone

}  // namespace

bool Runner::serve(Program::Graph& g, bool warm) {
  if (!capturer || g.misses >= kMisses || (g.exec && g.stream != stream)) return false;
  if (g.exec && ready(g)) {
    replay(g);
    return true;
  }
  rebind(g);
  if (!warm) return false;
  try {
    TORCH_CHECK(++g.misses < kMisses, "memory that it reads moves, or numbers of its ATen calls change, at every step");
    capture(g);
  } catch (const std::exception& e) {
    const std::string why = e.what();
    count("CudaGraphRefused: " + why.substr(0, why.find('\n')));
    g = {g.first, g.last};  // gives its memory back
    g.misses = kMisses;
    return false;
  }
  replay(g);
  return true;
}

bool Runner::ready(const Program::Graph& g) const {
  for (size_t i = 0; i < g.reads.size(); i++) if (!g.copies[i] && slots[g.reads[i]].data() != g.bound[i]) return false;
  for (size_t i = 0; i < g.numbers.size(); i++) if (trace.scalars[g.numbers[i]] != g.given[i]) return false;
  return true;
}

// Notes what the stretch reads. Memory that lies elsewhere than last time is copied from now on, where that is possible.
void Runner::rebind(Program::Graph& g) {
  g.copies.resize(g.reads.size());
  g.bound.resize(g.reads.size());
  g.given.clear();
  for (size_t i = 0; i < g.reads.size(); i++) {
    const auto& s = slots[g.reads[i]];
    const auto* before = std::exchange(g.bound[i], s.data());
    if (before && before != s.data() && !g.copies[i] && g.movable[i]) g.copies[i] = physical_bytes(s.nbytes(), device);
  }
  for (int32_t n : g.numbers) g.given.push_back(trace.scalars[n]);
}

void Runner::capture(Program::Graph& g) {
  const auto before = slots;
  void* const mine = stream;
  g.exec.reset(), g.owner.reset(), g.made.clear(), g.kernels.clear();
  for (size_t i = 0; i < g.reads.size(); i++) if (g.copies[i]) slots[g.reads[i]] = g.copies[i];
  auto restore = [&] { slots = before, stream = mine, captured = nullptr, step = g.first; };
  void *graph = nullptr, *exec = nullptr;
  try {
    std::tie(graph, g.owner) = (*capturer)(device, [&](void* other) {
      stream = other, captured = &g;
      for (step = g.first; step < g.last; step++) run_step();
    });
    driver_check(driver<int(void**, void*, uint64_t)>("cuGraphInstantiateWithFlags")(&exec, graph, 0), "making a CUDA graph");
  } catch (...) {
    restore();
    throw;
  }
  for (int32_t slot : g.makes) g.made.push_back(slots[slot]);
  restore();
  g.exec = std::shared_ptr<void>(exec, [](void* e) { driver<int(void*)>("cuGraphExecDestroy")(e); });
  g.stream = stream;
}

void Runner::note_kernel(const Program::Launch& l) {
  if (std::all_of(l.args.begin(), l.args.end(), [](const auto& a) { return a.fixed(); })) return;
  int status = 0;
  void* const* last = nullptr;  // what the next launch would wait for: the kernel that was just launched
  size_t n = 0;
  driver_check(driver<int(void*, int*, uint64_t*, void**, void* const**, size_t*)>("cuStreamGetCaptureInfo_v2")(
                   stream, &status, nullptr, nullptr, &last, &n), "looking at a capture");
  TORCH_CHECK(n == 1, "a launch left ", n, " loose ends");
  captured->kernels.push_back({step, *last, words});
}

void Runner::replay(Program::Graph& g) {
  for (size_t i = 0; i < g.reads.size(); i++)
    if (g.copies[i]) bytes_of(g.copies[i]).copy_(bytes_of(slots[g.reads[i]]), /*non_blocking=*/true);
  for (auto& ours : g.made) {
    if (ours.use_count() == 1) continue;  // else somebody still has the last run's result: it gets memory of its own
    auto theirs = physical_bytes(ours.nbytes(), device);
    bytes_of(theirs).copy_(bytes_of(ours), true);
    auto *a = ours.unsafeGetStorageImpl(), *b = theirs.unsafeGetStorageImpl();
    auto bytes = a->set_data_ptr(b->set_data_ptr(c10::DataPtr()));
    b->set_data_ptr_noswap(std::move(bytes));
    ours = theirs;
  }
  for (auto& k : g.kernels) {
    const auto& l = std::get<Program::Launch>(program.steps[k.step].what);
    bool changed = false;
    for (size_t i = 0; i < l.args.size(); i++) {
      if (l.args[i].fixed()) continue;
      const auto word = launch_word(l.args[i]);
      changed |= std::exchange(k.words[i], word) != word;
    }
    if (!changed) continue;
    // CUDA_KERNEL_NODE_PARAMS
    struct { void* function; unsigned grid[3], block[3], shared; void **params, **extra; void *kernel, *context; } node = {
        l.function, {l.grid[0], l.grid[1], l.grid[2]}, {l.threads, 1, 1}, l.shared, pointers(k.words), nullptr, nullptr, nullptr};
    static auto* const set = driver<int(void*, void*, const void*)>("cuGraphExecKernelNodeSetParams_v2");
    driver_check(set(g.exec.get(), k.node, &node), "setting a kernel's numbers");
  }
  static auto* const launch = driver<int(void*, void*)>("cuGraphLaunch");
  driver_check(launch(g.exec.get(), stream), "a graph's launch");
  stats[kReplays]++;
  if (++g.served % 64 == 0) g.misses = 0;
  for (size_t i = 0; i < g.makes.size(); i++) slots[g.makes[i]] = g.made[i];
  for (int32_t slot : g.frees) slots[slot] = c10::Storage();
}

}  // namespace lazysched
