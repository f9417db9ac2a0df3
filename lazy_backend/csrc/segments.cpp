// Which segment an op belongs to: in forward what its thread runs now, in backward where the node that autograd runs was made.
#include "core.h"
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <map>

namespace lazysched {
namespace {

constexpr size_t kRanges = 50000;
// Nodes made by one thread while a segment ran: (thread, first number, minus the number behind the last). Of two that begin
// together the inner one comes last.
using Made = std::tuple<uint64_t, int64_t, int64_t>;
std::map<Made, int32_t> made;
std::atomic<bool> any_made{false};
thread_local int32_t forward = 0;

}  // namespace

int32_t enter_segment(int32_t segment) { return std::exchange(forward, segment); }

void note_backward(int64_t first, int32_t segment) {
  const auto end = static_cast<int64_t>(at::sequence_number::peek());
  if (first == end) return;
  std::unique_lock<std::shared_mutex> lock(tables_mutex);
  made[{at::RecordFunction::currentThreadId(), first, -end}] = segment;
  if (made.size() > kRanges) made.erase(made.begin());  // numbers only grow: its graph is most likely gone
  any_made = true;
}

int32_t current_segment(const torch::autograd::Node* node) {
  if (!node || !any_made) return forward;
  const auto number = static_cast<int64_t>(node->sequence_nr());
  std::shared_lock<std::shared_mutex> lock(tables_mutex);
  for (auto it = made.upper_bound({node->thread_id(), number, 0}); it != made.begin();) {
    const auto& [thread, first, end] = (--it)->first;
    if (thread != node->thread_id()) break;
    if (-end > number) return it->second;
  }
  return forward;
}

}  // namespace lazysched
