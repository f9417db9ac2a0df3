// A compiled recording: the steps that a cached barrier runs, without Python.
#pragma once
#include "core.h"

#include <functional>
#include <variant>

namespace lazysched {

// Runs recordings of one hash: they differ in their buffers and numbers alone, so ops are read from the recording itself.
struct Program {
  // The recorded op on physical tensors. A slot for each tensor operand, then for each new output. -1: none; -2 - a: the tensor
  // is the same as argument `a`, which some ops ask for (attention: are key and query one tensor?).
  struct Call { std::vector<int32_t> slots; };
  struct LaunchArg {
    enum Kind : uint8_t { Pointer, Float, Double, Integer } kind;
    int32_t index;  // the pointer's slot; the number of this recording, or -1: `value`
    int64_t value;  // the pointer's byte offset, or a constant
  };
  struct Launch {
    void* function;
    std::array<uint32_t, 3> grid;
    uint32_t threads, shared;
    std::vector<LaunchArg> args;
  };
  struct Alloc { int32_t slot; size_t nbytes; };
  struct Free { int32_t slot; };
  struct Mark { size_t depth; std::string name; };  // profiler's ranges: ends those from `depth` on, begins one unless unnamed
  // A Python function of every slot's bytes (none where it is empty) and the recording's numbers.
  using Python = std::function<void(const std::vector<std::optional<at::Tensor>>&, const std::vector<c10::Scalar>&)>;
  struct Step {
    std::variant<Call, Launch, Alloc, Free, Mark, Python> what;
    int32_t instr;  // the recorded op that it runs, to name when it fails
  };

  std::vector<Step> steps;
  int32_t slots = 0;
  std::vector<std::pair<int32_t, int32_t>> inputs;  // (buffer, slot)
  std::vector<std::array<int32_t, 3>> outputs;      // (buffer, slot, the step after which the slot holds the result)
  std::vector<int32_t> rest, kept;  // instructions that stay recorded, and the buffers that they need
  int64_t nodes = 0, dead = 0, launches = 0;
  int64_t order = -1;  // which report tells how its segments were ordered

  // Runs on the physical device. On failure `failed` names the instruction; results that were ready are handed out all the same.
  void run(Trace& trace, DeviceIndex device, int32_t& failed) const;
};

}  // namespace lazysched
