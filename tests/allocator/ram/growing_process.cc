// A process that takes part in host_budget_test: it allocates pinned memory under a fixture host's
// budget until it is told to stop, or is killed.
//
//   growing_process ROOT PROCESS SEED fill   takes as much as it gets, and keeps it
//   growing_process ROOT PROCESS SEED churn  takes and releases at random
//
// With the directory of a cgroup behind that, it joins the cgroup and takes real memory, under the
// cgroup's limits.

#include <signal.h>
#include <sys/prctl.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/ram_probe.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/tests/allocator/ram/shared_host.h"
#include "pinion/tests/support/heap_source.h"
#include "pinion/tests/support/real_cgroup.h"
#include "pinion/tests/support/source_adaptor.h"

namespace pinion::testing {
namespace {

// What it hands out is committed on the shared host, some time after it was admitted.
class CommittingSource final : public SourceAdaptor {
 public:
  CommittingSource(std::shared_ptr<HostMemorySource> upstream, SharedHost& host, int process,
                   std::mt19937_64& random)
      : SourceAdaptor(std::move(upstream)), host_(host), process_(process), random_(random) {}

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 300)));
    absl::StatusOr<HostSegment> segment = SourceAdaptor::Allocate(size_bytes);
    if (segment.ok()) host_.Commit(process_, size_bytes);
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 300)));
    return segment;
  }

  absl::Status Free(const HostSegment& segment) override {
    absl::Status status = SourceAdaptor::Free(segment);
    host_.Release(process_, segment.size_bytes);
    return status;
  }

 private:
  SharedHost& host_;
  const int process_;
  std::mt19937_64& random_;
};

void Fill(const SharedHost& host, PinnedAllocator& allocator) {
  std::vector<PinnedBlock> blocks;
  while (true) {
    absl::StatusOr<PinnedBlock> block = allocator.Allocate(1800 * kKiB);
    if (block.ok()) {
      blocks.push_back(*std::move(block));
    } else if (!absl::StrContains(block.status().message(), "about to be taken")) {
      break;  // full, whatever the others do
    }
  }
  ++host.state().full;
  while (!host.state().stop) absl::SleepFor(absl::Milliseconds(1));
}

void Churn(const SharedHost& host, PinnedAllocator& allocator, std::mt19937_64& random) {
  std::vector<PinnedBlock> blocks;
  while (!host.state().stop) {
    absl::StatusOr<PinnedBlock> block = allocator.Allocate(kMiB + random() % (8 * kMiB));
    if (block.ok()) {
      blocks.push_back(*std::move(block));
    } else {
      PINION_CHECK(absl::IsResourceExhausted(block.status())) << block.status();
      blocks.clear();
    }
    if (random() % 8 == 0) blocks.clear();
    if (random() % 4 == 0) PINION_CHECK(allocator.Trim(0).ok());
  }
}

int Run(const std::vector<std::string>& arguments) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // the test may be killed before it says stop
  const bool real = arguments.size() == 6;
  if (real) RealCgroup::Join(arguments[5]);
  const int process = std::stoi(arguments[2]);
  std::mt19937_64 random(std::stoull(arguments[3]));
  SharedHost host(arguments[1], /*make=*/false);
  SetLogSink([](LogSeverity, const std::string&) {});  // warnings of the marks
  AllocatorOptions options;
  options.segment_bytes = 2 * kMiB;
  std::shared_ptr<HostMemorySource> memory = std::make_shared<HeapSource>();
  if (real) memory = MmapSource::Create().value();
  const std::shared_ptr<PinnedAllocator> allocator =
      PinnedAllocator::Create(
          options, std::make_shared<CommittingSource>(std::move(memory), host, process, random),
          {real ? RealCgroup::Probe(host.real_cgroup_files()) : host.Probe(), host.Ledger()})
          .value();
  if (arguments[4] == "fill") {
    Fill(host, *allocator);
  } else {
    Churn(host, *allocator, random);
  }
  return 0;
}

}  // namespace
}  // namespace pinion::testing

int main(int argc, char** argv) {
  return argc == 5 || argc == 6 ? pinion::testing::Run({argv, argv + argc}) : 2;
}
