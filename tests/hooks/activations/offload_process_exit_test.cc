// Checks a graph that is alive when the process exits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/process_exit.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

struct Graph {
  ~Graph() {
    if (!ProcessIsExiting()) std::_Exit(6);  // the test's premise
  }
  at::Tensor carrier;
  at::Tensor loss;
  std::vector<at::Tensor> seen;
};

void LeaveALiveGraph(bool unread_prefetch) {
  auto* const world = new EmuWorld(MachineOptions(), SmallWindows());
  // Destroyed by static destructors. LibTorch's CUDA allocator, loaded with the device, is
  // destroyed after objects made from here on; older objects cannot hold CUDA tensors then.
  static Graph graph;
  graph.carrier = at::ones({1}, at::TensorOptions(world->device())).requires_grad_(true);
  UnpackSaved unpack;
  const at::Tensor later = InScope(world->session(), [&] {
    graph.loss = graph.carrier;
    for (int i = 0; i < 6; ++i) {
      graph.loss = Observe(graph.loss, {Activation(graph.carrier, {64, 64}, i)}, &graph.seen);
    }
    return Probe(graph.carrier, {Activation(graph.carrier, {64, 64}, 7)},
                 [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                   unpack = unpack_in_backward;
                   return grad;
                 });
  });
  later.backward({}, /*retain_graph=*/true);
  // Outside of a backward, because its end would drop the prefetch.
  if (unread_prefetch) unpack();
  const OffloadStats stats = world->session()->GetStats();
  // The test's premises.
  if (stats.evicted_bytes == 0 || stats.live_handles == 0) std::_Exit(3);
  const bool unread = stats.fetched_bytes > 0 && stats.prefetch_hits + stats.fetched_on_demand == 0;
  if (unread_prefetch != unread) std::_Exit(4);
  world->DropSession();
  // The exit must not log anything.
  SetLogSink([](LogSeverity, const std::string&) { std::_Exit(5); });
  std::cerr << "exiting\n";
  std::exit(0);
}

TEST(OffloadProcessExitDeathTest, ALiveGraphInAStaticDoesNotDisturbIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LeaveALiveGraph(/*unread_prefetch=*/false), ::testing::ExitedWithCode(0), "exiting");
  EXPECT_EXIT(LeaveALiveGraph(/*unread_prefetch=*/true), ::testing::ExitedWithCode(0), "exiting");
}

}  // namespace
}  // namespace pinion::testing
