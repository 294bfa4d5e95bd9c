// Random operations against a trivial model: who holds which bytes, and who may not be reused yet.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;

constexpr int kTimelines = 3;

class Model {
 public:
  explicit Model(uint64_t seed) : random_(seed) {
    options_.segment_bytes = kMiB;
    options_.max_locked_bytes = 12 * kMiB;
    for (auto& timeline : timelines_) timeline = std::make_shared<FakeTimeline>();
    allocator_ = PinnedAllocator::Create(options_, source_, FakeHost().Probe()).value();
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) {
      SCOPED_TRACE(::testing::Message() << "step " << i);
      Step();
      CheckBooks();
    }
    while (!live_.empty() && !::testing::Test::HasFatalFailure()) Release({});
    for (int t = 0; t < kTimelines; ++t) timelines_[t]->CompleteOnDevice(last_ticket_[t]);
    ASSERT_THAT(allocator_->Trim(0), IsOk());
    ASSERT_EQ(source_->outstanding_bytes(), 0u);
  }

 private:
  struct Live {
    PinnedBlock block;
    unsigned char fill;
  };
  struct Busy {
    uint64_t end;
    std::vector<FenceTicket> tickets;
  };

  void Step() {
    const uint64_t choice = random_() % 100;
    if (choice < 45) return Allocate();
    if (choice < 60) return Release({});
    if (choice < 80) return ReleaseWithTickets();
    if (choice < 95) {
      const int t = static_cast<int>(random_() % kTimelines);
      const uint64_t value = random_() % (last_ticket_[t] + 1);
      if (random_() % 2 == 0) {
        timelines_[t]->CompleteOnDevice(value);
      } else {
        timelines_[t]->CompleteVisibly(value);
      }
      return;
    }
    if (choice < 98) {
      ASSERT_THAT(allocator_->Trim(random_() % (12 * kMiB)), IsOk());
    } else {
      (void)allocator_->Reserve(random_() % (4 * kMiB));
    }
  }

  void Allocate() {
    const uint64_t wish = uint64_t{1} << (random_() % 21);
    const uint64_t size_bytes = wish + random_() % wish;
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(size_bytes);
    if (!block.ok()) {
      ASSERT_THAT(block, StatusIs(absl::StatusCode::kResourceExhausted));
      return;
    }
    const auto begin = reinterpret_cast<uint64_t>(block->data());
    const uint64_t end = begin + block->capacity_bytes();
    ASSERT_EQ(block->size_bytes(), size_bytes);
    for (const Live& live : live_) {
      const auto other = reinterpret_cast<uint64_t>(live.block.data());
      ASSERT_TRUE(end <= other || other + live.block.capacity_bytes() <= begin) << "overlap";
    }
    for (auto busy = busy_.begin(); busy != busy_.end();) {
      if (end <= busy->first || busy->second.end <= begin) {
        ++busy;
        continue;
      }
      for (const FenceTicket& ticket : busy->second.tickets) {
        ASSERT_TRUE(ticket.IsDone()) << "reused before ticket " << ticket.value;
      }
      busy = busy_.erase(busy);
    }
    const auto fill = static_cast<unsigned char>(random_());
    std::memset(block->data(), fill, size_bytes);
    requested_bytes_ += size_bytes;
    live_.push_back({*std::move(block), fill});
  }

  void ReleaseWithTickets() {
    std::vector<FenceTicket> tickets;
    for (int t = 0; t < kTimelines; ++t) {
      if (random_() % 2 == 0) continue;
      last_ticket_[t] += random_() % 2;
      tickets.push_back(timelines_[t]->Ticket(last_ticket_[t]));
    }
    Release(tickets);
  }

  void Release(const std::vector<FenceTicket>& tickets) {
    if (live_.empty()) return;
    std::swap(live_[random_() % live_.size()], live_.back());
    Live live = std::move(live_.back());
    live_.pop_back();
    const auto* bytes = static_cast<const unsigned char*>(live.block.data());
    ASSERT_TRUE(std::all_of(bytes, bytes + live.block.size_bytes(), [&](unsigned char byte) {
      return byte == live.fill;
    })) << "contents changed";
    requested_bytes_ -= live.block.size_bytes();
    const auto begin = reinterpret_cast<uint64_t>(bytes);
    busy_.insert({begin, {begin + live.block.capacity_bytes(), tickets}});
    std::move(live.block).ReleaseAfter(tickets);
  }

  void CheckBooks() {
    const AllocatorStats stats = allocator_->GetStats();
    ASSERT_THAT(stats.CheckInvariants(), IsOk());
    ASSERT_EQ(stats.requested_bytes.current, requested_bytes_);
    ASSERT_EQ(stats.locked_bytes.current, source_->outstanding_bytes());
    ASSERT_LE(stats.locked_bytes.peak, options_.max_locked_bytes);
  }

  std::mt19937_64 random_;
  AllocatorOptions options_;
  const std::shared_ptr<FakeSource> source_ = std::make_shared<FakeSource>();
  std::shared_ptr<FakeTimeline> timelines_[kTimelines];
  uint64_t last_ticket_[kTimelines] = {};
  std::shared_ptr<PinnedAllocator> allocator_;
  std::vector<Live> live_;
  std::multimap<uint64_t, Busy> busy_;  // by begin: released, perhaps still being copied
  uint64_t requested_bytes_ = 0;
};

TEST(PinnedAllocatorModelTest, RandomOperationsAgreeWithTheModel) {
  for (uint64_t seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Model(seed).Run(600);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace pinion
