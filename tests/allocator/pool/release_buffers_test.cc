#include "pinion/allocator/pool/release_buffers.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/run_threads.h"

namespace pinion::internal {
namespace {

using ::pinion::testing::FakeTimeline;
using ::pinion::testing::RunThreads;
using ::testing::ElementsAre;

constexpr uint64_t kCapacity = ReleaseBatch::kCapacity;

// Tests identify releases by id; the block pointer is never used.
ReleaseBatch::Release Id(uint64_t id) { return {.block = nullptr, .id = id, .ticket = id}; }

std::vector<uint64_t> Ids(const ReleaseBatch& batch) {
  std::vector<uint64_t> ids;
  for (uint32_t i = 0; i < batch.size; ++i) ids.push_back(batch.releases[i].id);
  return ids;
}

// Removes all batches.
std::vector<uint64_t> TakeIds(BatchQueue& batches) {
  std::vector<uint64_t> ids;
  while (!batches.empty()) {
    const std::vector<uint64_t> next = Ids(*batches.pop_front());
    ids.insert(ids.end(), next.begin(), next.end());
  }
  return ids;
}

enum class Buffer { kSame, kAnother };

// Runs `body` on a new thread that has the same buffer as this thread, or another one. Threads get
// their buffers in rotation.
std::thread ThreadWith(Buffer wanted, const std::function<void()>& body) {
  while (true) {
    const auto probe = std::make_shared<ReleaseBuffers>();
    EXPECT_TRUE(probe->Add(Id(0), nullptr));
    std::promise<bool> promise;
    std::future<bool> is_wanted = promise.get_future();
    std::thread thread([promise = std::move(promise), probe, wanted, body]() mutable {
      const Buffer buffer = probe->TakeMine() != nullptr ? Buffer::kSame : Buffer::kAnother;
      promise.set_value(buffer == wanted);
      if (buffer == wanted) body();
    });
    if (is_wanted.get()) return thread;
    thread.join();
  }
}

void OnAnotherThread(const std::function<void()>& body) {
  ThreadWith(Buffer::kAnother, body).join();
}

std::unique_ptr<ReleaseBatch> BatchOf(uint64_t id) {
  auto batch = std::make_unique<ReleaseBatch>();
  batch->releases[batch->size++] = Id(id);
  return batch;
}

TEST(BatchQueueTest, BatchesComeOutInTheirOrderAlsoAfterTheQueueWasEmpty) {
  BatchQueue queue;
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(queue.empty());
    queue.push_front(BatchOf(1));
    queue.push_back(BatchOf(2));
    EXPECT_THAT(TakeIds(queue), ElementsAre(1, 2));
    queue.push_back(BatchOf(2));
    queue.push_front(BatchOf(1));
    queue.push_back(BatchOf(3));
    EXPECT_EQ(queue.size(), 3u);
    EXPECT_THAT(Ids(queue.front()), ElementsAre(1));
    EXPECT_THAT(TakeIds(queue), ElementsAre(1, 2, 3));
    EXPECT_EQ(queue.size(), 0u);
  }
}

TEST(BatchQueueTest, WhatNobodyTookGoesWithIt) {
  auto timeline = std::make_shared<FakeTimeline>();
  const std::weak_ptr<FakeTimeline> watch = timeline;
  {
    BatchQueue queue;
    queue.push_back(BatchOf(1));
    queue.push_back(BatchOf(2));
    queue.front().timeline = std::move(timeline);
  }
  EXPECT_TRUE(watch.expired());
}

class ReleaseBuffersTest : public ::testing::Test {
 protected:
  void Add(uint64_t first, uint64_t count, std::shared_ptr<FenceTimeline> timeline = nullptr) {
    for (uint64_t id = first; id < first + count; ++id) {
      ASSERT_TRUE(buffers_.Add(Id(id), timeline));
    }
  }
  std::vector<uint64_t> Incoming() {
    BatchQueue batches;
    buffers_.TakeIncoming(&batches);
    return TakeIds(batches);
  }
  std::vector<uint64_t> Mine() {
    const std::unique_ptr<ReleaseBatch> mine = buffers_.TakeMine();
    return mine == nullptr ? std::vector<uint64_t>() : Ids(*mine);
  }
  std::vector<uint64_t> All() {
    BatchQueue batches;
    buffers_.TakeAll(&batches);
    return TakeIds(batches);
  }

  const std::shared_ptr<FakeTimeline> timeline_ = std::make_shared<FakeTimeline>();
  ReleaseBuffers buffers_;
};

TEST_F(ReleaseBuffersTest, OnlyAFullBatchIsHandedOver) {
  Add(0, kCapacity - 1);
  EXPECT_THAT(Incoming(), ElementsAre());
  Add(kCapacity - 1, 1);
  EXPECT_EQ(Incoming().size(), kCapacity);
  EXPECT_THAT(Incoming(), ElementsAre());
  EXPECT_THAT(Mine(), ElementsAre());
}

TEST_F(ReleaseBuffersTest, AThreadTakesItsOwnReleasesInTheirOrder) {
  Add(1, 2);
  OnAnotherThread([&] { EXPECT_THAT(Mine(), ElementsAre()); });
  EXPECT_THAT(Mine(), ElementsAre(1, 2));
  EXPECT_THAT(Mine(), ElementsAre());
}

TEST_F(ReleaseBuffersTest, TicketsOfAnotherTimelineBeginABatch) {
  Add(1, 1);  // without a ticket: joins any batch
  Add(2, 1, timeline_);
  Add(3, 1);
  Add(4, 1, std::make_shared<FakeTimeline>());
  EXPECT_THAT(Incoming(), ElementsAre(1, 2, 3));
  EXPECT_THAT(Mine(), ElementsAre(4));
}

TEST_F(ReleaseBuffersTest, ABatchKnowsHowFarItsTimelineWasWhenItWasTaken) {
  Add(1, 1, timeline_);
  timeline_->CompleteVisibly(7);
  const std::unique_ptr<ReleaseBatch> mine = buffers_.TakeMine();
  ASSERT_NE(mine, nullptr);
  EXPECT_EQ(mine->timeline, timeline_);
  EXPECT_EQ(mine->completed, 7u);
}

TEST_F(ReleaseBuffersTest, AllIsWhatEveryThreadReleasedHandedOverOrNot) {
  OnAnotherThread([&] { Add(0, kCapacity + 1); });
  Add(100, 1);
  EXPECT_EQ(All().size(), kCapacity + 2);
  EXPECT_THAT(All(), ElementsAre());
}

TEST_F(ReleaseBuffersTest, WhatIsClosedGivesAllAndTakesNoMore) {
  Add(1, 1);
  BatchQueue batches;
  buffers_.TakeAll(&batches, /*close=*/true);
  EXPECT_THAT(TakeIds(batches), ElementsAre(1));
  EXPECT_FALSE(buffers_.Add(Id(2), timeline_));
  OnAnotherThread([&] { EXPECT_FALSE(buffers_.Add(Id(3), timeline_)); });
  EXPECT_THAT(All(), ElementsAre());
}

TEST_F(ReleaseBuffersTest, BatchesThatNobodyTookGoWithThem) {
  auto timeline = std::make_shared<FakeTimeline>();
  const std::weak_ptr<FakeTimeline> watch = timeline;
  {
    ReleaseBuffers buffers;
    for (uint64_t id = 0; id < 2 * kCapacity + 1; ++id) ASSERT_TRUE(buffers.Add(Id(id), timeline));
    timeline.reset();
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

// Runs an action once during a hand-over, when a batch asks for the completed value.
class ActingTimeline final : public FenceTimeline {
 public:
  explicit ActingTimeline(std::function<void()> act) : act_(std::move(act)) {}
  uint64_t Completed() const noexcept override {
    if (const std::function<void()> act = std::exchange(act_, nullptr); act != nullptr) act();
    return 0;
  }
  void Poll() override {}
  absl::Status Wait(uint64_t value, absl::Duration timeout) override { return absl::OkStatus(); }

 private:
  mutable std::function<void()> act_;
};

TEST_F(ReleaseBuffersTest, ABatchThatIsHandedOverDuringAnotherHandOverIsNotLost) {
  const auto timeline = std::make_shared<ActingTimeline>(
      [this] { OnAnotherThread([this] { Add(100, kCapacity); }); });
  Add(0, kCapacity, timeline);
  EXPECT_EQ(Incoming().size(), 2 * kCapacity);
}

TEST_F(ReleaseBuffersTest, BatchesThatAreTakenDuringAHandOverAreTakenOnce) {
  std::vector<uint64_t> taken;
  const auto timeline = std::make_shared<ActingTimeline>([&] { taken = Incoming(); });
  OnAnotherThread([this] { Add(100, kCapacity); });
  Add(0, kCapacity, timeline);
  EXPECT_EQ(taken.size(), kCapacity);
  EXPECT_EQ(Incoming().size(), kCapacity);
}

// Adds to a buffer while its thread hands a full batch over; such an add must wait.
class TakenBufferTest : public ReleaseBuffersTest {
 protected:
  // Fills this thread's buffer and runs `body` on a thread with `buffer` meanwhile. `body` starts
  // during the hand-over and must return after it.
  void WhileABatchIsHandedOver(Buffer buffer, const std::function<void()>& body) {
    std::thread other;
    std::atomic<bool> begun = false;
    std::atomic<bool> returned = false;
    const auto timeline = std::make_shared<ActingTimeline>([&] {
      other = ThreadWith(buffer, [&] {
        begun = true;
        body();
        returned = true;
      });
      while (!begun) std::this_thread::yield();
      absl::SleepFor(absl::Milliseconds(20));  // until the thread waits, including its sleeps
      EXPECT_FALSE(returned);
    });
    Add(0, kCapacity, timeline);
    other.join();
  }
};

TEST_F(TakenBufferTest, WhoTakesAllWaitsForIt) {
  std::vector<uint64_t> taken;
  WhileABatchIsHandedOver(Buffer::kAnother, [&] { taken = All(); });
  EXPECT_EQ(taken.size(), kCapacity);
}

TEST_F(TakenBufferTest, WhoClosesWaitsForIt) {
  BatchQueue batches;
  WhileABatchIsHandedOver(Buffer::kAnother, [&] { buffers_.TakeAll(&batches, /*close=*/true); });
  EXPECT_EQ(TakeIds(batches).size(), kCapacity);
  EXPECT_FALSE(buffers_.Add(Id(1), nullptr));
}

TEST_F(TakenBufferTest, AnotherThreadThatAddsToItWaits) {
  WhileABatchIsHandedOver(Buffer::kSame, [this] { Add(100, 1); });
  EXPECT_THAT(Mine(), ElementsAre(100));
  EXPECT_EQ(Incoming().size(), kCapacity);
}

TEST_F(TakenBufferTest, AnotherThreadThatTakesItWaits) {
  std::vector<uint64_t> taken;
  OnAnotherThread([this] { Add(100, 2); });
  WhileABatchIsHandedOver(Buffer::kSame, [&] { taken = Mine(); });
  EXPECT_THAT(taken, ElementsAre());
  EXPECT_EQ(All().size(), kCapacity + 2);
}

TEST_F(ReleaseBuffersTest, WhatIsAddedWhileTheyAreClosedIsTakenByThenOrRefused) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 200;
  for (int round = 0; round < kRounds; ++round) {
    ReleaseBuffers buffers;
    std::atomic<uint64_t> added = 0;
    BatchQueue batches;
    RunThreads(kThreads, [&](int thread) {
      if (thread == 0) {
        while (added.load() < kCapacity) std::this_thread::yield();
        return buffers.TakeAll(&batches, /*close=*/true);
      }
      while (buffers.Add(Id(1), nullptr)) ++added;
    });
    // All releases that were accepted are in the list.
    buffers.TakeIncoming(&batches);
    EXPECT_EQ(TakeIds(batches).size(), added.load());
  }
}

// More threads than buffers, so some threads share one.
TEST_F(ReleaseBuffersTest, ThreadsThatReleaseAndTakeAtOnceLoseNothing) {
  constexpr int kThreads = 40;
  constexpr uint64_t kReleases = 2'000;
  std::vector<std::vector<uint64_t>> taken(kThreads);
  RunThreads(kThreads, [&](int thread) {
    for (uint64_t i = 0; i < kReleases; ++i) {
      ASSERT_TRUE(buffers_.Add(Id(thread * kReleases + i), i % 3 == 0 ? nullptr : timeline_));
      if (i % 97 != 0) continue;
      BatchQueue batches;
      if (i % 2 == 0) {
        buffers_.TakeAll(&batches);
      } else {
        buffers_.TakeIncoming(&batches);
        if (std::unique_ptr<ReleaseBatch> mine = buffers_.TakeMine(); mine != nullptr) {
          batches.push_front(std::move(mine));
        }
      }
      for (const uint64_t id : TakeIds(batches)) taken[thread].push_back(id);
    }
  });
  std::vector<uint64_t> ids = All();
  for (const std::vector<uint64_t>& some : taken) ids.insert(ids.end(), some.begin(), some.end());
  EXPECT_EQ(ids.size(), kThreads * kReleases);
  EXPECT_EQ(std::set<uint64_t>(ids.begin(), ids.end()).size(), ids.size());
}

}  // namespace
}  // namespace pinion::internal
