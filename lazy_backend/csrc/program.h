// A compiled recording: the steps that a cached barrier runs, without Python.
#pragma once
#include "core.h"

#include <variant>

namespace lazysched {

using Storages = std::vector<c10::Storage>;
// Memory of the results of graphs that replay on `stream`, one graph's at a time; `tenant`: those of the one that did last.
struct Block { c10::Storage memory; void* stream; std::shared_ptr<Storages> tenant; };

// Runs recordings of one hash: they differ in their buffers and numbers alone, so ops are read from the recording itself.
struct Program {
  // The recorded op on physical tensors. A slot for each tensor operand, then for each new output. -1: none; -2 - a: the tensor
  // is the same as argument `a`, which some ops ask for (attention: are key and query one tensor?). `layouts`: those that the
  // compiler chose, slot by slot; none: as recorded.
  // `alone`: by the calling thread, on a CPU. `own`: the number of an op that the compiler chose among those of `own`, or -1.
  // `drawn`: by how much it moved CUDA's generator on when it last ran by itself.
  struct Call { std::vector<int32_t> slots; std::vector<Operand> layouts; bool alone; int own = -1; mutable uint64_t drawn = 0; };
  struct LaunchArg {
    enum Kind : uint8_t { Pointer, Float, Double, Integer, Seed, Offset } kind;
    int32_t index;  // the pointer's slot; the generator's buffer; the number of this recording, or -1: `value`
    int64_t value;  // the pointer's byte offset, how many numbers are drawn, or a constant
    bool fixed() const { return kind == Pointer || (kind <= Integer && index < 0); }
  };
  struct Launch { void* function; std::array<uint32_t, 4> grid; uint32_t threads, shared; bool overlaps; std::vector<LaunchArg> args; };
  struct Alloc { int32_t slot; size_t nbytes; }; struct Free { int32_t slot; };
  struct Mark { size_t depth; std::string name; };  // profiler's ranges: ends those from `depth` on, begins one unless unnamed
  // A Python function of the bytes in each slot, where `slots` names it and it is not empty, and the recording's numbers. What it
  // returns fills the last of `slots`.
  struct Python {
    std::function<std::optional<at::Tensor>(const std::vector<std::optional<at::Tensor>>&, const std::vector<c10::Scalar>&)> run;
    std::vector<int32_t> slots;
  };
  // `instr`: the recorded op that it runs, to name when it fails.
  struct Step { std::variant<Call, Launch, Alloc, Free, Mark, Python> what; int32_t instr; };
  // Steps that the driver replays in one go. Addresses are a part of it, so it serves as long as they hold; see graph.cpp.
  struct Graph {
    size_t first, last;
    // Slots from outside, filled, emptied; the numbers that its calls take; for each of `reads`: may it be copied to where the
    // graph reads it? Of each of `makes` the bytes, and where in the block it lies.
    std::vector<int32_t> reads, makes, frees, numbers, movable;
    std::vector<size_t> sizes, offsets;
    std::pair<int32_t, size_t> block;  // the slot of what lies under results before they are made, or -1; the bytes of both
    void *exec = nullptr, *stream = nullptr;
    std::function<void()> launch;  // keeps its memory; called where its calls draw: PyTorch tells their kernels from which state
    std::vector<const void*> bound; Storages copies;  // where what it reads lay; memory of its own for what moves, else none
    std::shared_ptr<Storages> made; std::shared_ptr<Block> home;  // its results, and where they lie
    std::vector<IValue> given;  // the numbers
    // What is set before each replay: a kernel's words, or the state that a call draws from (its words: generator and count).
    struct Setting { size_t step; void* node; std::vector<uint64_t> words; at::Generator state; };
    std::vector<Setting> settings;
    int misses = 1, served = 0;
  };

  // Steps that may run once `ops` ops are recorded as they were when this was compiled, `hash` in all: the memory that they read is
  // known then, and what they write is new, or lies in the slots `saves`.
  struct Cut { size_t ops; std::vector<int32_t> steps, saves; hash_t hash; };

  std::vector<Step> steps; std::vector<Cut> cuts;
  std::vector<int32_t> guessed;  // numbers that steps of cuts take before they are recorded: those of the last run
  std::vector<IValue> numbers;   // of the last run
  std::weak_ptr<Program> next;  // what ran after it the last time
  int idle = 0, calm = 0, missed = 0;  // how often somebody waited before it of late, or nobody; how often it was begun in vain
  bool apart = false; int turns = 0;   // it was compiled for a loop that waits; how often it was compiled anew
  std::vector<int64_t> dims;  // sizes and strides of the compiler's layouts
  Trace own;                  // ops that were not recorded; where each tensor lies, its call says
  int32_t slots = 0;
  std::vector<std::pair<int32_t, int32_t>> inputs;  // (buffer, slot)
  std::vector<std::array<int32_t, 3>> outputs;      // (buffer, slot, the step after which the slot holds the result)
  std::vector<int32_t> rest, kept;  // instructions that stay recorded, and the buffers that they need
  std::set<int32_t> refused; bool stale = false;  // instructions that no CUDA graph could hold; some since this was compiled
  int64_t nodes = 0, dead = 0, launches = 0, runs = 0;
  int64_t order = -1;  // which report tells how its segments were ordered
  std::vector<Graph> graphs;

  // Runs on the physical device. On failure `failed` names the instruction; results that were ready are handed out all the same.
  // `runner`: what has begun of it, or null.
  void run(Trace& trace, DeviceIndex device, int32_t& failed, std::shared_ptr<Runner> runner);
};

// Calls `body` on a stream that is being captured, in which ops draw from `states`: gives the graph and what launches it and keeps
// its memory. Python's, kept for ever.
using Capturer = std::function<std::pair<uintptr_t, std::function<void()>>(
    DeviceIndex, std::vector<at::Generator> states, std::function<void(uintptr_t)> body)>;
inline Capturer* capturer = nullptr;

}  // namespace lazysched
