// The contract of HostMemorySource, checked for every implementation.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/heap_source.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/source_adaptor.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::HeapSource;
using ::pinion::testing::IsExhausted;
using ::pinion::testing::IsInvalid;
using ::pinion::testing::IsOk;
using ::pinion::testing::RunThreads;
using ::pinion::testing::SourceAdaptor;

using Source = std::shared_ptr<HostMemorySource>;

Source Mmap() { return MmapSource::Create().value(); }

// Keeps the emulated machine alive as long as its source.
class EmulatedPinned final : public SourceAdaptor {
 public:
  explicit EmulatedPinned(std::shared_ptr<EmulatedMachine> machine)
      : SourceAdaptor(machine->device(0)->pinned_source()), machine_(std::move(machine)) {}

 private:
  const std::shared_ptr<EmulatedMachine> machine_;
};

struct Kind {
  const char* name;
  std::function<Source()> make;
};

bool Holds(const HostSegment& segment, unsigned char fill) {
  const auto* const bytes = static_cast<const unsigned char*>(segment.data);
  return std::all_of(bytes, bytes + segment.size_bytes,
                     [fill](unsigned char byte) { return byte == fill; });
}

class HostMemorySourceTest : public ::testing::TestWithParam<Kind> {
 protected:
  HostMemorySourceTest() : source_(GetParam().make()) {}

  HostSegment Get(uint64_t size_bytes) {
    const absl::StatusOr<HostSegment> segment = source_->Allocate(size_bytes);
    EXPECT_THAT(segment, IsOk());
    if (!segment.ok()) return {};
    EXPECT_EQ(segment->size_bytes, size_bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(segment->data) % source_->granularity_bytes(), 0u);
    return *segment;
  }

  const Source source_;
};

TEST_P(HostMemorySourceTest, ItHasANameAndAGranularityOfPages) {
  EXPECT_FALSE(source_->name().empty());
  EXPECT_TRUE(IsPowerOfTwo(source_->granularity_bytes()));
  EXPECT_GE(source_->granularity_bytes(), 4 * kKiB);
}

TEST_P(HostMemorySourceTest, SegmentsKeepWhatIsWrittenToThem) {
  const uint64_t unit = source_->granularity_bytes();
  std::vector<HostSegment> segments;
  for (uint64_t i = 1; i <= 4; ++i) {
    segments.push_back(Get(i * unit));
    std::memset(segments.back().data, static_cast<int>(i), i * unit);
  }
  for (uint64_t i = 1; i <= 4; ++i) {
    EXPECT_TRUE(Holds(segments[i - 1], static_cast<unsigned char>(i)));
    EXPECT_THAT(source_->Free(segments[i - 1]), IsOk());
  }
}

TEST_P(HostMemorySourceTest, SegmentsMayGoInAnyOrder) {
  std::mt19937_64 random(1);
  const uint64_t unit = source_->granularity_bytes();
  std::vector<HostSegment> held;
  for (int step = 0; step < 100; ++step) {
    if (held.size() < 4 && random() % 2 == 0) {
      held.push_back(Get((1 + random() % 3) * unit));
      std::memset(held.back().data, 1, held.back().size_bytes);
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_THAT(source_->Free(held.back()), IsOk());
      held.pop_back();
    }
  }
  for (const HostSegment& segment : held) EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_P(HostMemorySourceTest, ThreadsMayUseItAtOnce) {
  const uint64_t unit = source_->granularity_bytes();
  RunThreads(4, [&](int thread) {
    for (int i = 0; i < 10; ++i) {
      const absl::StatusOr<HostSegment> segment = source_->Allocate(unit);
      ASSERT_THAT(segment, IsOk());
      std::memset(segment->data, thread, unit);
      EXPECT_THAT(source_->Free(*segment), IsOk());
    }
  });
}

TEST_P(HostMemorySourceTest, ASizeThatIsNoPositiveMultipleOfTheGranularityIsRefused) {
  const uint64_t unit = source_->granularity_bytes();
  for (const uint64_t size_bytes : {uint64_t{0}, uint64_t{1}, unit / 2, unit + 1, UINT64_MAX}) {
    EXPECT_THAT(source_->Allocate(size_bytes),
                IsInvalid(source_->name() + ": " + std::to_string(size_bytes) + " bytes are no",
                          "ask for a positive multiple of granularity_bytes()"));
  }
}

TEST_P(HostMemorySourceTest, MoreThanAnyHostHasIsResourceExhausted) {
  EXPECT_THAT(source_->Allocate(uint64_t{1} << 60), IsExhausted());
  const HostSegment segment = Get(source_->granularity_bytes());
  EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_P(HostMemorySourceTest, AChildThatFreesWhatItInheritedTakesNothingFromTheParent) {
  const HostSegment segment = Get(source_->granularity_bytes());
  std::memset(segment.data, 7, segment.size_bytes);
  ChildProcess child([&] { EXPECT_THAT(source_->Free(segment), IsOk()); });
  EXPECT_EQ(child.Wait(), 0);
  EXPECT_TRUE(Holds(segment, 7));
  EXPECT_THAT(source_->Free(segment), IsOk());
}

TEST_P(HostMemorySourceTest, AnAllocatorRunsOnIt) {
  AllocatorOptions options;
  options.segment_bytes = 4 * kMiB;
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<PinnedAllocator> allocator,
                              PinnedAllocator::Create(options, source_, FakeHost().Probe()));
  for (const uint64_t size_bytes : {uint64_t{100}, 100 * kKiB, 5 * kMiB}) {
    PINION_ASSERT_OK_AND_ASSIGN(const PinnedBlock block, allocator->Allocate(size_bytes));
    std::memset(block.data(), 1, size_bytes);
  }
  EXPECT_THAT(allocator->Trim(0), IsOk());
}

const Kind kKinds[] = {
    {"Fake", [] { return std::make_shared<FakeSource>(); }},
    {"Heap", [] { return std::make_shared<HeapSource>(); }},
    {"Mmap", Mmap},
    {"EmulatedPinned",
     [] {
       return std::make_shared<EmulatedPinned>(EmulatedMachine::Create(EmulatedOptions()).value());
     }},
    {"Adapted", [] { return std::make_shared<SourceAdaptor>(Mmap()); }},
};

INSTANTIATE_TEST_SUITE_P(All, HostMemorySourceTest, ::testing::ValuesIn(kKinds),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace pinion
