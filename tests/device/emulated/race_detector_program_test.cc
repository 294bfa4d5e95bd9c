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

class RandomProgramTest : public ::testing::TestWithParam<int> {};

TEST_P(RandomProgramTest, FirstRaceIsFoundExactlyWhereTheReferenceSeesIt) {
  // Each run ends at the first race: after a race, detector and reference need not agree.
  std::mt19937 random(GetParam());
  const auto upto = [&random](uint32_t n) { return random() % n; };
  const bool few_edges = GetParam() % 2 == 0;
  RaceDetector detector;
  Reference reference;
  constexpr int kContexts = 5;  // the host and four streams
  for (int i = 1; i < kContexts; ++i) detector.AddContext("stream " + std::to_string(i));
  detector.AddMemory(At(kBase), 64, kHost, "memory");
  std::vector<std::vector<int>> seen(kContexts);  // predecessors of each context's next operation
  for (int step = 0; step < 400; ++step) {
    const int context = static_cast<int>(upto(kContexts));
    if (upto(few_edges ? 8 : 2) != 0) {
      Reference::Operation operation;
      operation.context = context;
      operation.after = seen[context];
      operation.after.insert(operation.after.end(), seen[kHost].begin(), seen[kHost].end());
      const uint64_t number = detector.Begin(context, "operation");
      for (uint32_t i = 0; i < 1 + upto(2); ++i) {
        const uint64_t begin = upto(64);
        const uint64_t end = begin + 1 + upto(64 - begin);
        const bool write = upto(3) == 0;
        operation.ranges.push_back({begin, end, write});
        if (write) {
          detector.Write(At(kBase + begin), end - begin);
        } else {
          detector.Read(At(kBase + begin), end - begin);
        }
      }
      const bool raced = !detector.TakeReports().empty();
      ASSERT_EQ(raced, !reference.Conflicts(operation).empty())
          << "seed " << GetParam() << ", step " << step << ", operation #" << number;
      if (raced) return;
      seen[context] = {reference.Add(operation)};
    } else {
      const int later = static_cast<int>(upto(kContexts));
      if (later == context) continue;
      detector.Join(later, detector.Clock(context));
      seen[later].insert(seen[later].end(), seen[context].begin(), seen[context].end());
    }
  }
}

TEST_P(RandomProgramTest, LegalProgramIsSilentAndALostEdgeIsSeen) {
  // Each access waits for all conflicting ones, until one of these waits is omitted at the end.
  std::mt19937 random(GetParam());
  const auto upto = [&random](uint32_t n) { return random() % n; };
  RaceDetector detector;
  Reference reference;
  constexpr int kContexts = 5;
  for (int i = 1; i < kContexts; ++i) detector.AddContext("stream " + std::to_string(i));
  detector.AddMemory(At(kBase), 1000, kHost, "memory");
  std::vector<std::vector<int>> seen(kContexts);
  const auto order = [&](int earlier, int later) {
    detector.Join(later, detector.Clock(earlier));
    seen[later].insert(seen[later].end(), seen[earlier].begin(), seen[earlier].end());
  };
  const auto perform = [&](int context, const Reference::Operation::Range& range) {
    detector.Begin(context, "operation");
    const void* const data = At(kBase + range.begin);
    range.write ? detector.Write(data, range.end - range.begin)
                : detector.Read(data, range.end - range.begin);
    return !detector.TakeReports().empty();
  };
  const auto planned = [&](int context, const Reference::Operation::Range& range) {
    Reference::Operation operation = {context, seen[context], {range}};
    operation.after.insert(operation.after.end(), seen[kHost].begin(), seen[kHost].end());
    return operation;
  };
  for (int step = 0;; ++step) {
    const int context = static_cast<int>(upto(kContexts));
    const uint64_t begin = upto(1000);
    const Reference::Operation::Range range = {begin, begin + 1 + upto(1000 - begin), upto(3) == 0};
    const std::vector<int> conflicts = reference.Conflicts(planned(context, range));
    if (step >= 300 && !conflicts.empty()) {
      EXPECT_TRUE(perform(context, range)) << "seed " << GetParam() << ", step " << step;
      return;
    }
    for (int other : conflicts) order(other, context);
    ASSERT_FALSE(perform(context, range)) << "seed " << GetParam() << ", step " << step;
    seen[context] = {reference.Add(planned(context, range))};
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomProgramTest, ::testing::Range(1, 401));

}  // namespace
}  // namespace pinion
