// Checks the text of a session's statistics, and that they begin at zero.

#include "pinion/hooks/activations/offload_stats.h"

#include "gtest/gtest.h"

namespace pinion::testing {
namespace {

TEST(OffloadStats, SayWhereEverySavedTensorWent) {
  OffloadStats stats;
  stats.kept_small = 1;
  stats.kept_parameter = 2;
  stats.kept_held = 4;
  stats.kept_no_host_memory = 8;
  stats.kept_in_backward = 16;
  stats.kept_scope_ended = 32;
  stats.kept_capturing = 64;
  stats.kept_copy_failed = 128;
  stats.kept_unsupported = 256;
  stats.kept_as_planned = 512;
  stats.kept_head = 1024;
  EXPECT_EQ(stats.kept(), 2047u);
  stats.packed = 1000;
  stats.offloaded = 1001;
  stats.offloaded_bytes = 1024;
  stats.grouped = 1002;
  stats.groups = 1003;
  stats.shared = 1004;
  stats.evicted_bytes = 2048;
  stats.evicted_not_freed = 1005;
  stats.unpacked = 1006;
  stats.reused_on_device = 1007;
  stats.prefetch_hits = 1008;
  stats.fetched_on_demand = 1009;
  stats.fetched_bytes = 3072;
  stats.prefetches_dropped = 1010;
  stats.prefetches_refused = 1011;
  stats.verified = 1012;
  stats.live_handles = 1013;
  stats.cast_again = 1014;
  stats.recast = 1015;
  stats.steps_over_target = 1016;
  stats.most_bytes_over_target = 3072;
  EXPECT_EQ(
      stats.ToString(),
      "saved tensors: 1000 packed = 1001 offloaded (1 KiB, 1002 of them in 1003 groups) + "
      "1014 cast again + 1004 shared + 2047 kept (small 1, parameter 2, head 1024, held 4, no host "
      "memory 8, in backward "
      "16, scope ended 32, capturing 64, copy failed 128, unsupported 256, as planned 512)\n"
      "evicted 2 KiB, 1005 not freed; steps over the memory target 1016, by 3 KiB at most; "
      "unpacked 1006 = 1007 still on the device + 1008 "
      "prefetched + 1009 fetched on demand + 1015 cast again + repeats; fetched 3 KiB; "
      "prefetches dropped "
      "1010, refused 1011; verified 1012; 1013 handles alive\n");
}

TEST(OffloadStats, BeginAtZero) {
  const OffloadStats stats;
  EXPECT_EQ(
      stats.ToString(),
      "saved tensors: 0 packed = 0 offloaded (0 B, 0 of them in 0 groups) + 0 cast again + 0 "
      "shared + 0 "
      "kept (small 0, parameter 0, head 0, held 0, no host memory 0, in backward 0, scope ended 0, "
      "capturing 0, copy failed 0, unsupported 0, as planned 0)\n"
      "evicted 0 B, 0 not freed; steps over the memory target 0, by 0 B at most; unpacked 0 = 0 "
      "still on the device + 0 prefetched + 0 "
      "fetched on demand + 0 cast again + repeats; fetched 0 B; prefetches dropped 0, "
      "refused 0; verified "
      "0; 0 handles alive\n");
  EXPECT_EQ(stats.prefetch_looks, 0u);
  EXPECT_EQ(stats.pack_unpack_us, 0);
}

}  // namespace
}  // namespace pinion::testing
