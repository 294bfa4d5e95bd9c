// Random programs, checked against a reference that stores every access and every dependency.

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/race_detector.h"

namespace pinion {
namespace {

constexpr int kHost = RaceDetector::kHost;

// The detector only compares addresses, so no memory is needed behind them.
const void* At(uintptr_t address) { return reinterpret_cast<const void*>(address); }
constexpr uintptr_t kBase = 0x10000;

// Uses no clocks: two operations are ordered if a path of dependencies connects them.
class Reference {
 public:
  struct Operation {
    int context;
    std::vector<int> after;  // direct predecessors
    struct Range {
      uint64_t begin, end;
      bool write;
    };
    std::vector<Range> ranges;
  };

  int Add(const Operation& operation) {
    reaches_.push_back(Reached(operation));
    operations_.push_back(operation);
    return static_cast<int>(operations_.size()) - 1;
  }

  // Returns the contexts whose earlier operations would race with `operation`.
  std::vector<int> Conflicts(const Operation& operation) const {
    const std::vector<bool> reached = Reached(operation);
    std::set<int> contexts;
    for (size_t earlier = 0; earlier < operations_.size(); ++earlier) {
      if (reached[earlier]) continue;
      for (const auto& a : operations_[earlier].ranges) {
        for (const auto& b : operation.ranges) {
          if ((a.write || b.write) && a.begin < b.end && b.begin < a.end) {
            contexts.insert(operations_[earlier].context);
          }
        }
      }
    }
    return {contexts.begin(), contexts.end()};
  }

 private:
  std::vector<bool> Reached(const Operation& operation) const {
    std::vector<bool> reached(operations_.size(), false);
    for (int before : operation.after) {
      reached[before] = true;
      for (size_t i = 0; i < reaches_[before].size(); ++i) {
        if (reaches_[before][i]) reached[i] = true;
      }
    }
    return reached;
  }

  std::vector<Operation> operations_;
  std::vector<std::vector<bool>> reaches_;
};

// The host and four streams access `kBytes` bytes.
class RandomProgramTest : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kContexts = 5;
  static constexpr uint64_t kBytes = 256;

  RandomProgramTest() {
    for (int i = 1; i < kContexts; ++i) detector_.AddContext("stream " + std::to_string(i));
    detector_.AddMemory(At(kBase), kBytes, kHost, "memory");
  }

  uint32_t UpTo(uint32_t n) { return random_() % n; }
  Reference::Operation NextOperation(int context) {
    Reference::Operation operation = {context, seen_[context], {}};
    operation.after.insert(operation.after.end(), seen_[kHost].begin(), seen_[kHost].end());
    const int ranges = 1 + static_cast<int>(UpTo(2));
    for (int i = 0; i < ranges; ++i) {
      const uint64_t begin = UpTo(kBytes);
      operation.ranges.push_back({begin, begin + 1 + UpTo(kBytes - begin), UpTo(3) == 0});
    }
    return operation;
  }
  // Returns whether the detector reports a race.
  bool Perform(const Reference::Operation& operation) {
    detector_.Begin(operation.context, "operation");
    for (const auto& [begin, end, write] : operation.ranges) {
      const void* const data = At(kBase + begin);
      write ? detector_.Write(data, end - begin) : detector_.Read(data, end - begin);
    }
    seen_[operation.context] = {reference_.Add(operation)};
    return !detector_.TakeReports().empty();
  }
  void Order(int earlier, int later) {
    detector_.Join(later, detector_.Clock(earlier));
    if (earlier == later) return;
    seen_[later].insert(seen_[later].end(), seen_[earlier].begin(), seen_[earlier].end());
  }

  std::mt19937 random_{static_cast<uint32_t>(GetParam())};
  RaceDetector detector_;
  Reference reference_;
  // The predecessors of each context's next operation.
  std::vector<std::vector<int>> seen_ = std::vector<std::vector<int>>(kContexts);
};

TEST_P(RandomProgramTest, FirstRaceIsFoundExactlyWhereTheReferenceSeesIt) {
  // Each run ends at the first race: after a race, detector and reference need not agree.
  const bool few_edges = GetParam() % 2 == 0;
  for (int step = 0; step < 400; ++step) {
    const int context = static_cast<int>(UpTo(kContexts));
    if (UpTo(few_edges ? 8 : 2) == 0) {
      Order(context, static_cast<int>(UpTo(kContexts)));
      continue;
    }
    const Reference::Operation operation = NextOperation(context);
    const bool expected = !reference_.Conflicts(operation).empty();
    ASSERT_EQ(Perform(operation), expected) << "seed " << GetParam() << ", step " << step;
    if (expected) return;
  }
}

TEST_P(RandomProgramTest, LegalProgramIsSilentAndALostEdgeIsSeen) {
  // Each access waits for all conflicting ones, until one of these waits is omitted at the end.
  for (int step = 0;; ++step) {
    SCOPED_TRACE(step);
    const int context = static_cast<int>(UpTo(kContexts));
    Reference::Operation operation = NextOperation(context);
    const std::vector<int> conflicts = reference_.Conflicts(operation);
    if (step >= 300 && !conflicts.empty()) {
      EXPECT_TRUE(Perform(operation)) << "seed " << GetParam();
      return;
    }
    for (int other : conflicts) Order(other, context);
    operation.after.insert(operation.after.end(), seen_[context].begin(), seen_[context].end());
    ASSERT_FALSE(Perform(operation)) << "seed " << GetParam();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomProgramTest, ::testing::Range(1, 401));

}  // namespace
}  // namespace pinion
