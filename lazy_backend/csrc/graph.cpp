// Stretches of a program as CUDA graphs: a driver's recording of launches, replayed in one call. Addresses and numbers are part
// of a graph. Memory that moves from run to run is copied to where the graph reads it; numbers of kernels are set anew.
#include "runner.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace lazysched {

static std::unordered_map<const void*, int> pins;  // by address; of new memory none counts yet
void pin(const c10::Storage& s, int by) { std::lock_guard lock(tables_mutex); auto& n = pins[s.data()]; n = by ? n + by : 0; }

// Does anybody hold it who knows its address?
static bool is_pinned(const c10::Storage& ours) {
  std::lock_guard<std::shared_mutex> lock(tables_mutex);
  if (ours.use_count() == 1) pins.erase(ours.data());
  return pins.count(ours.data()) && pins[ours.data()] > 0;
}

constexpr int kMisses = 4;  // captures, the first among them, before a stretch is left alone

bool Runner::serve(Program::Graph& g, bool warm) {
  if (!capturer || g.misses >= kMisses || (g.exec && g.stream != stream)) return false;
  if (g.exec && ready(g)) return replay(g), true;
  const bool had = g.exec != nullptr, same = rebind(g);
  if (g.misses += warm && (had || !same); !warm) return false;
  try {
    TORCH_CHECK(g.misses < kMisses, "memory that it reads moves, others keep what it makes, or numbers of its ATen calls change");
    if (!same) return false;  // how much its calls draw may depend on their numbers: they run by themselves first
    capture(g);
  } catch (const std::exception& e) {
    std::string why = first_line(e);
    const size_t at = std::exchange(step, g.first);
    if (const int32_t instr = at < g.last ? program.steps[at].instr : -1; instr >= 0 && why.find("out of memory") == why.npos) {
      why = trace->instrs[instr].op->name + ": " + why;
      program.stale |= program.refused.insert(instr).second;
    }
    count("CudaGraphRefused: " + why);
    g = {g.first, g.last}, g.misses = kMisses;  // gives its memory back
    return false;
  }
  return replay(g), true;
}

bool Runner::ready(const Program::Graph& g) const {
  for (size_t i = 0; i < g.reads.size(); i++) if (!g.copies[i] && slots[g.reads[i]].data() != g.bound[i]) return false;
  for (size_t i = 0; i < g.numbers.size(); i++) if (trace->scalars[g.numbers[i]] != g.given[i]) return false;
  return std::none_of(g.home->tenant->begin(), g.home->tenant->end(), &is_pinned);
}

// Notes what the stretch reads. Memory that lies elsewhere than last time is copied from now on, where that is possible, and so is
// the host's, which only some ops' plain launches can read. A graph of other places and numbers serves no longer. Are its calls'
// numbers those of last time?
bool Runner::rebind(Program::Graph& g) {
  g.exec = nullptr, g.copies.resize(g.reads.size()), g.bound.resize(g.reads.size());
  for (size_t i = 0; i < g.reads.size(); i++) {
    const auto& s = slots[g.reads[i]];
    const auto* before = std::exchange(g.bound[i], s.data());
    const bool moves = before && (before != s.data() || s.device_type() != physical_type());
    if (moves && !g.copies[i] && g.movable[i]) g.copies[i] = physical_bytes(s.nbytes(), device);
  }
  std::vector<IValue> now; for (int32_t n : g.numbers) now.push_back(trace->scalars[n]);
  return std::exchange(g.given, now) == now;
}

constexpr size_t kShared = 1 << 24, kLittle = 1 << 16;  // bytes

// A block for the results of `g`. A step has variants (its loss is kept or not, its batch is longer), whose gradients are as large:
// one may have them where another had its own, if hardly any of that is held now and nothing that it reads in place lies there.
std::shared_ptr<Block> Runner::home_of(const Program::Graph& g) const {
  const size_t n = g.block.second;
  auto& known = recorder(device).blocks;
  const auto fits = [&](const Block& b) {
    const auto* start = static_cast<const char*>(b.memory.data());
    size_t has = b.memory.nbytes(), held = 0;
    for (const auto& s : *b.tenant) if (s.use_count() > 1) held += is_pinned(s) ? has : s.nbytes();
    for (size_t i = 0; i < g.reads.size(); i++) if (!g.copies[i] && g.bound[i] >= start && g.bound[i] < start + has) return false;
    return b.stream == stream && has / 2 <= n && n <= has && held <= kLittle;
  };
  for (const auto& b : known) if (auto there = b.lock(); there && fits(*there)) return there;
  const auto b = std::make_shared<Block>(physical_bytes(n, device), stream, std::make_shared<Storages>());
  if (n >= kShared) known.push_back(b);
  return b;
}

void Runner::capture(Program::Graph& g) {
  const auto restore = c10::make_scope_exit([&, before = slots, mine = stream] { slots = before, stream = mine, captured = nullptr; });
  step = g.last;  // where it fails before one runs, none is to blame
  g.stream = stream, g.launch = nullptr, g.made = std::make_shared<Storages>(), g.home = nullptr, g.settings.clear();
  std::vector<at::Generator> states;
  for (size_t i = g.first; i < g.last; i++) {
    const auto* c = std::get_if<Program::Call>(&program.steps[i].what);
    if (!c || !c->drawn) continue;
    const auto from = static_cast<size_t>(trace->instrs[program.steps[i].instr].generator);
    g.settings.push_back({i, nullptr, {from, c->drawn}, states.emplace_back(trace->buffers[from]->generator.clone())});
  }
  for (size_t i = 0; i < g.reads.size(); i++) if (g.copies[i]) slots[g.reads[i]] = g.copies[i];
  // Results lie side by side outside of the pool that graphs share: others are replayed before these have been read. Each is a
  // storage of its own that keeps the block, so that values which die before it is made have its memory until then.
  const auto block = (g.home = home_of(g))->memory;
  if (g.block.first >= 0) slots[g.block.first] = block;
  for (size_t i = 0; i < g.makes.size(); i++) {
    auto* start = static_cast<char*>(block.mutable_data()) + g.offsets[i];
    const auto part = at::from_blob(start, {static_cast<int64_t>(g.sizes[i])}, [block](void*) {}, bytes_of(block).options());
    pin(slots[g.makes[i]] = g.made->emplace_back(part.storage()), 0);
  }
  auto [exec, launch] = (*capturer)(device, states, [&](uintptr_t other) {
    stream = reinterpret_cast<void*>(other), captured = &g;
    for (step = g.first; step < g.last; step++) run_step();
    for (size_t i = 0; i < g.makes.size(); i++) {  // what ATen has allocated
      const auto& s = slots[g.makes[i]]; auto& ours = (*g.made)[i];
      if (s.device_type() != physical_type()) ours = s;  // a random seed without a use
      else if (s.data() != ours.data()) bytes_of(ours).copy_(bytes_of(s).narrow(0, 0, g.sizes[i]), true);
    }
  });
  g.exec = reinterpret_cast<void*>(exec), g.launch = std::move(launch);
  std::sort(g.settings.begin(), g.settings.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
}

void Runner::note_kernel(const Program::Launch& l) {
  if (std::all_of(l.args.begin(), l.args.end(), [](const auto& a) { return a.fixed(); })) return;
  size_t n = 0; void* last = nullptr;  // what the next launch would wait for: the kernel that was just launched
  check_driver(lazysched_last_captured(stream, &last, &n), "looking at a capture");
  TORCH_CHECK(n == 1, "a launch left ", n, " loose ends");
  captured->settings.push_back({step, last, words, {}});
}

void Runner::replay(Program::Graph& g) {
  for (size_t i = 0; i < g.reads.size(); i++) if (g.copies[i]) bytes_of(g.copies[i]).copy_(bytes_of(slots[g.reads[i]]), true);
  const auto before = std::exchange(g.home->tenant, g.made);
  for (auto& ours : *before) {
    // Else somebody still has the last run's result: it gets memory of its own.
    if (ours.use_count() == 1 || ours.device_type() != physical_type()) continue;
    auto theirs = physical_bytes(ours.nbytes(), device);
    bytes_of(theirs).copy_(bytes_of(ours), true);
    auto *a = ours.unsafeGetStorageImpl(), *b = theirs.unsafeGetStorageImpl();
    b->set_data_ptr_noswap(a->set_data_ptr(b->set_data_ptr(c10::DataPtr())));
    ours = theirs;
  }
  bool draws = false;
  for (auto& k : g.settings) {
    if (k.state.defined()) {
      auto& ours = trace->buffers[k.words[0]]->generator;
      k.state.set_current_seed(ours.current_seed()), k.state.set_offset(ours.get_offset());
      ours.set_offset(ours.get_offset() + k.words[1]), draws = true;
      continue;
    }
    const auto& l = std::get<Program::Launch>(program.steps[k.step].what);
    bool changed = false;
    for (size_t i = 0; i < l.args.size(); i++)
      if (const auto old = k.words[i]; !l.args[i].fixed()) changed |= (k.words[i] = launch_word(l.args[i])) != old;
    if (!changed) continue;
    check_driver(lazysched_set_kernel(g.exec, k.node, l.function, l.grid.data(), l.threads, l.shared, pointers(k.words)),
                 "setting a kernel's numbers");
  }
  if (draws) g.launch();
  else check_driver(lazysched_run_graph(g.exec, stream), "a graph's launch");
  stats[kReplays]++;
  if (++g.served % 64 == 0) g.misses = 0;
  for (size_t i = 0; i < g.makes.size(); i++) slots[g.makes[i]] = (*g.made)[i];
  for (int32_t slot : g.frees) slots[slot] = c10::Storage();
}

}  // namespace lazysched
