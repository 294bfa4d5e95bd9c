// A process that takes part in host_budget_test: it allocates pinned memory under a fixture host's
// budget until it is told to stop, or is killed.
//
//   growing_process ROOT LEDGER PROCESS SEED fill   takes as much as it gets, and keeps it
//   growing_process ROOT LEDGER PROCESS SEED churn  takes and releases at random

#include <cstdint>
#include <cstdlib>
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
#include "pinion/allocator/host_ledger.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/tests/allocator/shared_host.h"

namespace pinion::testing {
namespace {

// What it hands out is committed on the fixture host, some time after it was admitted.
class CommittingSource final : public HostMemorySource {
 public:
  CommittingSource(SharedHost& host, int process, std::mt19937_64& random)
      : host_(host), process_(process), random_(random) {}

  std::string name() const override { return "committing"; }
  uint64_t granularity_bytes() const override { return 4096; }

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 300)));
    host_.Commit(process_, size_bytes);
    absl::SleepFor(absl::Microseconds(static_cast<int64_t>(random_() % 300)));
    return HostSegment{.data = std::aligned_alloc(4096, size_bytes), .size_bytes = size_bytes};
  }

  absl::Status Free(const HostSegment& segment) override {
    std::free(segment.data);
    host_.Release(process_, segment.size_bytes);
    return absl::OkStatus();
  }

 private:
  SharedHost& host_;
  const int process_;
  std::mt19937_64& random_;
};

void Fill(const SharedHost& host, PinnedAllocator& allocator) {
  std::vector<PinnedBlock> blocks;
  while (true) {
    absl::StatusOr<PinnedBlock> block = allocator.Allocate(900 * kKiB);
    if (block.ok()) {
      blocks.push_back(*std::move(block));
    } else if (!absl::StrContains(block.status().message(), "about to be pinned")) {
      break;  // full, whatever the others do
    }
  }
  while (!host.state().stop) absl::SleepFor(absl::Milliseconds(1));
}

void Churn(const SharedHost& host, PinnedAllocator& allocator, std::mt19937_64& random) {
  std::vector<PinnedBlock> blocks;
  while (!host.state().stop) {
    absl::StatusOr<PinnedBlock> block = allocator.Allocate(kMiB + random() % (4 * kMiB));
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

int Run(char** arguments) {
  const int process = std::atoi(arguments[3]);
  std::mt19937_64 random(std::strtoull(arguments[4], nullptr, 10));
  SharedHost host(arguments[1], /*make=*/false);
  SetLogSink([](LogSeverity, const std::string&) {});  // warnings of the marks
  AllocatorOptions options;
  options.segment_bytes = kMiB;
  const std::shared_ptr<PinnedAllocator> allocator =
      PinnedAllocator::Create(options, std::make_shared<CommittingSource>(host, process, random),
                              {host.Probe(), HostLedger::Open(arguments[2]).value()})
          .value();
  if (arguments[5] == std::string("fill")) {
    Fill(host, *allocator);
  } else {
    Churn(host, *allocator, random);
  }
  return 0;
}

}  // namespace
}  // namespace pinion::testing

int main(int argc, char** argv) { return argc == 6 ? pinion::testing::Run(argv) : 2; }
