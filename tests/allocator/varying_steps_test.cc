// A thousand training steps with varying batch and sequence sizes. Checks when the allocator pins,
// how much pinned memory is useless, and how much RAM it takes. To run and print more seeds:
//
//   --test_env=PINION_STEPS_SEEDS=40 --test_output=all

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/source_adaptor.h"
#include "pinion/tests/support/worker.h"

namespace pinion {
namespace {

using ::pinion::testing::FakeHost;
using ::pinion::testing::FakeSource;
using ::pinion::testing::FakeTimeline;
using ::pinion::testing::SourceAdaptor;
using ::pinion::testing::Worker;

constexpr int kSteps = 1000;

uint64_t Seeds() {
  const char* const seeds = std::getenv("PINION_STEPS_SEEDS");
  return seeds == nullptr ? 1 : std::strtoull(seeds, nullptr, 10);
}

// Counts the bytes it has handed out.
class WatchedSource final : public SourceAdaptor {
 public:
  using SourceAdaptor::SourceAdaptor;
  uint64_t taken_bytes() const { return taken_bytes_; }

  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    absl::StatusOr<HostSegment> segment = SourceAdaptor::Allocate(size_bytes);
    if (segment.ok()) taken_bytes_ += size_bytes;
    return segment;
  }
  absl::Status Free(const HostSegment& segment) override {
    taken_bytes_ -= segment.size_bytes;
    return SourceAdaptor::Free(segment);
  }

 private:
  uint64_t taken_bytes_ = 0;
};

// Allocates the tensors that a transformer's layers and loss save, and releases them in reverse
// order after late copies. Backward runs on the same thread, or on its own thread as in LibTorch,
// and allocates one buffer per layer.
class Training {
 public:
  enum class Backward { kOnSameThread, kOnAnother };

  struct Model {  // GPT-2 XL
    uint64_t layers = 48;
    uint64_t hidden = 1600;
    uint64_t heads = 25;
    uint64_t vocabulary = 50257;
  };

  Training(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options, HostRam ram,
           const Model& model, size_t late_copies, uint64_t seed, Backward backward)
      : source_(std::make_shared<WatchedSource>(std::move(source))),
        allocator_(PinnedAllocator::Create(options, source_, std::move(ram)).value()),
        model_(model),
        late_copies_(late_copies),
        random_(seed),
        backward_(backward == Backward::kOnAnother ? std::make_unique<Worker>() : nullptr) {}
  ~Training() { timeline_->CompleteOnDevice(ticket_); }

  void Step() {
    const uint64_t batch = 1 + random_() % 8;
    const uint64_t sequence = 64 + random_() % 961;
    const uint64_t hidden_bytes = batch * sequence * model_.hidden * 2;
    for (uint64_t layer = 0; layer < model_.layers; ++layer) {
      for (const uint64_t times : {1, 3, 1}) Save(times * hidden_bytes);
      Save(batch * model_.heads * sequence * 4);
      for (const uint64_t times : {1, 1, 4, 4, 1}) Save(times * hidden_bytes);
    }
    Save(batch * sequence * model_.vocabulary * 2);
    if (backward_ == nullptr) {
      while (!saved_.empty()) ReleaseLast();
    } else {
      backward_->Run([&] { BackwardWithBuffers(hidden_bytes); });
    }
    ++steps_;
  }

  uint64_t pinned_bytes() const { return source_->taken_bytes(); }
  // Peak bytes of blocks that are live or wait for copies.
  uint64_t peak_demand_bytes() const { return peak_demand_bytes_; }
  int step_of_last_rise() const { return step_of_last_rise_; }
  int step_of_last_pin() const { return step_of_last_pin_; }
  // At the last growth: share of locked bytes that were free but could not serve the block.
  double last_fragmentation() const { return last_fragmentation_; }

  void Print() const {
    std::printf(
        "peak demand %.2f GiB, %.3f of it pinned, last rise at step %d, last pin at %d, which "
        "found "
        "%.1f %% free but useless\n",
        static_cast<double>(peak_demand_bytes_) / static_cast<double>(kGiB),
        static_cast<double>(pinned_bytes()) / static_cast<double>(peak_demand_bytes_),
        step_of_last_rise_, step_of_last_pin_, 100 * last_fragmentation_);
  }

 private:
  static constexpr uint64_t kSavedByALayer = 9;

  void ReleaseLast() {
    late_.push_back(saved_.back().capacity_bytes());
    std::move(saved_.back()).ReleaseAfter({timeline_->Ticket(++ticket_)});
    saved_.pop_back();
    if (late_.size() <= late_copies_) return;
    timeline_->CompleteVisibly(ticket_ - late_copies_);
    demand_bytes_ -= late_.front();
    late_.pop_front();
  }

  void BackwardWithBuffers(uint64_t buffer_bytes) {
    ReleaseLast();  // the loss's tensor
    while (!saved_.empty()) {
      const PinnedBlock buffer = Take(buffer_bytes);
      for (uint64_t i = 0; i < kSavedByALayer; ++i) ReleaseLast();
      demand_bytes_ -= buffer.capacity_bytes();
    }
  }

  void Save(uint64_t size_bytes) { saved_.push_back(Take(size_bytes)); }

  PinnedBlock Take(uint64_t size_bytes) {
    const uint64_t locked_bytes = source_->taken_bytes();
    absl::StatusOr<PinnedBlock> block = allocator_->Allocate(size_bytes);
    PINION_CHECK(block.ok()) << block.status();
    if (source_->taken_bytes() != locked_bytes) {
      step_of_last_pin_ = steps_;
      last_fragmentation_ = static_cast<double>(locked_bytes - demand_bytes_) /
                            static_cast<double>(source_->taken_bytes());
    }
    demand_bytes_ += block->capacity_bytes();
    if (demand_bytes_ > peak_demand_bytes_) {
      peak_demand_bytes_ = demand_bytes_;
      step_of_last_rise_ = steps_;
    }
    return *std::move(block);
  }

  const std::shared_ptr<WatchedSource> source_;
  const std::shared_ptr<PinnedAllocator> allocator_;
  const Model model_;
  const size_t late_copies_;
  std::mt19937_64 random_;
  const std::shared_ptr<FakeTimeline> timeline_ = std::make_shared<FakeTimeline>();
  uint64_t ticket_ = 0;
  std::vector<PinnedBlock> saved_;
  std::deque<uint64_t> late_;
  uint64_t demand_bytes_ = 0;
  uint64_t peak_demand_bytes_ = 0;
  int steps_ = 0;
  double last_fragmentation_ = 0;
  int step_of_last_pin_ = -1;
  int step_of_last_rise_ = -1;
  const std::unique_ptr<Worker> backward_;
};

using Backward = Training::Backward;

class VaryingStepsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (config::kHardened) GTEST_SKIP() << "hardened builds fill and check gigabytes at each step";
    host_.SetMeminfo(1000 * kGiB, 999 * kGiB);
  }

  // Runs a thousand steps for each number of late copies, and calls `expect` after each run.
  void Run(const std::function<std::shared_ptr<HostMemorySource>()>& make_source, Backward backward,
           const std::function<void(const Training&)>& expect) {
    AllocatorOptions options;
    options.segment_bytes = kGiB;
    for (const size_t late_copies : {0, 8, 60}) {
      for (uint64_t seed = 1; seed <= Seeds(); ++seed) {
        SCOPED_TRACE(::testing::Message()
                     << "seed " << seed << ", " << late_copies << " late copies");
        Training training(make_source(), options, host_.Probe(), {}, late_copies, seed, backward);
        for (int step = 0; step < kSteps; ++step) training.Step();
        expect(training);
        training.Print();
      }
    }
  }

  FakeHost host_;
};

void ExpectNoWaste(const Training& training) {
  EXPECT_LE(training.step_of_last_pin(), training.step_of_last_rise());
  EXPECT_LT(training.last_fragmentation(), 0.1);
  EXPECT_LT(100 * training.pinned_bytes(), 112 * training.peak_demand_bytes());
}

std::shared_ptr<HostMemorySource> MappedMemory() {
  return MmapSource::Create({.touch_threads = 0}).value();
}

std::shared_ptr<HostMemorySource> SeparateSegments() { return std::make_shared<FakeSource>(); }

// verl pinned anew for each offload, and RAM doubled for a moment (verl#6193).
// Mapped segments lie side by side, and blocks may cross from one into the next.
TEST_F(VaryingStepsTest, MappedMemoryIsPinnedOnlyWhileDemandRises) {
  Run(MappedMemory, Backward::kOnSameThread, ExpectNoWaste);
}

// Each thread's free memory lies in its own arena.
TEST_F(VaryingStepsTest, MappedMemoryIsPinnedOnlyWhileDemandRisesWhereBackwardHasAThreadOfItsOwn) {
  Run(MappedMemory, Backward::kOnAnother, ExpectNoWaste);
}

// As with cudaHostAlloc.
TEST_F(VaryingStepsTest, MemoryThatDoesNotJoinIsPinnedOnlyWhileDemandRises) {
  Run(SeparateSegments, Backward::kOnSameThread, ExpectNoWaste);
}

TEST_F(VaryingStepsTest, MemoryThatDoesNotJoinIsPinnedOnlyWhileDemandRisesWhereBackwardHasAThread) {
  Run(SeparateSegments, Backward::kOnAnother, ExpectNoWaste);
}

// Returns the process's memory in RAM and in swap, where a full host may have moved it.
uint64_t CommittedBytes() {
  uint64_t kib = 0;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    uint64_t part_kib = 0;
    if ((word == "VmRSS:" || word == "VmSwap:") && status >> part_kib) kib += part_kib;
  }
  return kib * kKiB;
}

TEST_F(VaryingStepsTest, CommittedMemoryStaysWhereItIs) {
  AllocatorOptions options;
  options.segment_bytes = 64 * kMiB;
  Training training(MmapSource::Create().value(), options, host_.Probe(),
                    {.layers = 12, .hidden = 128, .heads = 2, .vocabulary = 4096},
                    /*late_copies=*/8, /*seed=*/1, Backward::kOnSameThread);
  uint64_t committed_bytes = 0;
  for (int step = 1; step <= kSteps; ++step) {
    training.Step();
    if (step == 200) committed_bytes = CommittedBytes();
  }
  EXPECT_GT(committed_bytes, training.peak_demand_bytes());  // the pages are really present
  EXPECT_LE(CommittedBytes(), committed_bytes + 64 * kMiB);
}

}  // namespace
}  // namespace pinion
