// A compiled recording: the steps that a cached barrier runs, without Python.
#pragma once
#include "core.h"
#include <functional>

namespace lazysched {

struct Program {
  // A tensor on a slot's storage.
  struct View {
    int32_t slot = -1;
    at::ScalarType dtype = at::kFloat;
    bool conj = false, neg = false;
    c10::SmallVector<int64_t, 5> size, stride;
    int64_t offset = 0;
  };
  struct CallArg {
    ArgKind kind = ArgKind::Const;
    int32_t first = 0, count = 0;
    at::ScalarType dtype = at::kDouble;
    bool wrapped = false, doubles = false;
    IValue value;
  };
  // One ATen op on physical tensors.
  struct Call {
    const OpInfo* op;
    std::vector<CallArg> args;
    std::vector<View> views;  // operands in argument order, then expected new outputs
    int32_t outs = 0;         // where the new outputs begin in `views`
    int32_t generator = -1;   // slot of the generator
  };
  struct LaunchArg {
    enum Kind : uint8_t { Pointer, Float, Double, Int32, Int64, Bool } kind;
    int32_t slot = -1, scalar = -1;  // a pointer into a slot, a number of this step, or `value`
    int64_t value = 0;               // byte offset, or the constant
  };
  struct Launch {
    void* function;
    uint32_t grid[3], threads, shared;
    std::vector<LaunchArg> args;
  };
  struct Alloc { int32_t slot; int64_t nbytes; };
  struct Free { int32_t slot; };
  struct Python { std::function<void(std::vector<c10::Storage>&, const std::vector<IValue>&)> run; };
  struct Step {
    enum Kind : uint8_t { kCall, kLaunch, kAlloc, kFree, kPython } kind;
    int32_t index;
    int32_t instr;  // recorded instruction to name when it fails
  };

  std::vector<Call> calls;
  std::vector<Launch> launches;
  std::vector<Alloc> allocs;
  std::vector<Free> frees;
  std::vector<Python> pythons;
  std::vector<Step> steps;
  int32_t slots = 0;
  struct Output { int32_t buffer, slot, ready; };  // `ready`: the step after which the slot holds the result
  std::vector<std::pair<int32_t, int32_t>> inputs;  // (buffer, slot)
  std::vector<Output> outputs;
  int64_t nodes = 0, dead = 0;
  std::string note;  // what to tell a user who looks: engine, kernels

  // Runs on the physical device. On failure `failed` names the instruction; results that were ready are handed out all the same.
  void run(Trace& trace, c10::DeviceIndex device, int32_t& failed);

 private:
  void call(const Call& c, std::vector<c10::Storage>& slots, Trace& trace, c10::DeviceIndex device);
  void launch(const Launch& l, std::vector<c10::Storage>& slots, Trace& trace, void* stream);
};

void* physical_stream(c10::DeviceIndex i);

}  // namespace lazysched
