// Checks scopes that end out of order or on another thread: the log names each, scopes that are
// still open keep working, and no scope is left behind.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/autograd/memory_observer.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace scope_order_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Packer : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    ++packed;
    return KeepTensor(tensor);
  }
  int packed = 0;
};

class Watcher : public SavedTensorWatcher {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                    SavedTensorPacker* packer) override {
    ++watched;
    return packer == nullptr ? KeepTensor(tensor) : packer->Pack(tensor, place);
  }
  void OnSegmentKept(const SegmentBegin&, uint32_t) override {}
  void RunAside(absl::FunctionRef<void()> work) override { work(); }
  int watched = 0;
};

// One scope of each kind, on the heap.
struct HeapScope {
  std::shared_ptr<Packer> packer;
  std::shared_ptr<Watcher> watcher;
  std::unique_ptr<SavedTensorScope> packs;
  std::unique_ptr<WatchScope> watches;

  static HeapScope Packing() {
    HeapScope scope;
    scope.packer = std::make_shared<Packer>();
    scope.packs = std::make_unique<SavedTensorScope>(scope.packer, "packing scope");
    return scope;
  }
  static HeapScope SwitchingOff() {
    HeapScope scope;
    scope.packs = std::make_unique<SavedTensorScope>(nullptr, "scope that switches off");
    return scope;
  }
  static HeapScope Watching() {
    HeapScope scope;
    scope.watcher = std::make_shared<Watcher>();
    scope.watches = std::make_unique<WatchScope>(scope.watcher, "watching scope");
    return scope;
  }

  bool is_open() const { return packs != nullptr || watches != nullptr; }
  void End() {
    packs.reset();
    watches.reset();
  }
};

using OpenScope = HeapScope (*)();
constexpr std::array<OpenScope, 3> kKinds = {&HeapScope::Packing, &HeapScope::SwitchingOff,
                                             &HeapScope::Watching};

// Saves a tensor and checks that the innermost open scope of each role is called.
void ExpectTheInnermostOfThoseThatAreOpen(const std::vector<HeapScope>& scopes) {
  std::vector<int> before;
  const auto calls = [](const HeapScope& scope) {
    return scope.packer != nullptr    ? scope.packer->packed
           : scope.watcher != nullptr ? scope.watcher->watched
                                      : 0;
  };
  const HeapScope* packs = nullptr;
  const HeapScope* watches = nullptr;
  for (const HeapScope& scope : scopes) {
    before.push_back(calls(scope));
    if (scope.packs != nullptr) packs = &scope;
    if (scope.watches != nullptr) watches = &scope;
  }
  at::exp(at::ones({4}).requires_grad_(true));
  for (size_t i = 0; i < scopes.size(); ++i) {
    const bool is_asked = &scopes[i] == packs || &scopes[i] == watches;
    const bool tells = scopes[i].packer != nullptr || scopes[i].watcher != nullptr;
    EXPECT_EQ(calls(scopes[i]) - before[i], is_asked && tells ? 1 : 0) << "scope " << i;
  }
}

TEST(ScopeOrder, ScopesThatEndInAnyOrderLeaveTheInnermostOfThoseThatAreOpen) {
  for (const OpenScope first : kKinds) {
    for (const OpenScope second : kKinds) {
      for (const OpenScope third : kKinds) {
        std::array<size_t, 3> order = {0, 1, 2};
        do {
          SCOPED_TRACE(::testing::PrintToString(order));
          const CapturedLog log;
          std::vector<HeapScope> scopes;
          for (const OpenScope open : {first, second, third}) scopes.push_back(open());
          for (const size_t ended : order) {
            scopes[ended].End();
            ExpectTheInnermostOfThoseThatAreOpen(scopes);
          }
          EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr) << "nothing is left behind";
          const bool is_in_order = std::is_sorted(order.rbegin(), order.rend());
          EXPECT_EQ(log.text().empty(), is_in_order) << log.text();
        } while (std::next_permutation(order.begin(), order.end()));
      }
    }
  }
}

TEST(ScopeOrder, TheLogNamesTheScopeThatEndsTooEarlyAndTheInnermost) {
  HeapScope outer = HeapScope::Packing();
  HeapScope inner = HeapScope::Watching();
  const CapturedLog log;
  outer.End();
  EXPECT_THAT(log.text(), AllOf(HasSubstr("packing scope has ended out of order"),
                                HasSubstr("the innermost scope is watching scope")));
}

TEST(ScopeOrder, AScopeThatEndsOnAnotherThreadIsToldOfAndHasNoEffectFromThenOn) {
  for (const OpenScope open : kKinds) {
    std::vector<HeapScope> scopes;
    scopes.push_back(HeapScope::Packing());
    scopes.push_back(open());
    {
      const CapturedLog log;
      std::thread([&] { scopes[1].End(); }).join();
      EXPECT_THAT(log.text(), HasSubstr("scope"));
      EXPECT_THAT(log.text(), HasSubstr("has ended on another thread"));
    }
    ExpectTheInnermostOfThoseThatAreOpen(scopes);
    const CapturedLog log;
    scopes[0].End();
    ExpectTheInnermostOfThoseThatAreOpen(scopes);
    EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
    EXPECT_THAT(log.text(), IsEmpty());
  }
}

// The scope's own thread is not notified, so the next scope must discover the end.
TEST(ScopeOrder, ANewScopeInsideOfOneThatHasEndedElsewhereIsTheOnlyOne) {
  const CapturedLog log;
  std::vector<HeapScope> scopes;
  scopes.push_back(HeapScope::Watching());
  std::thread([&] { scopes[0].End(); }).join();
  scopes.push_back(HeapScope::Packing());
  ExpectTheInnermostOfThoseThatAreOpen(scopes);
  scopes[1].End();
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

// --- Observers of memory ---

class Counter : public MemoryObserver {
 public:
  void OnDeviceBytes(c10::Device, int64_t, int64_t, const void*) override { ++told; }
  int told = 0;
};

void Allocate() { c10::reportMemoryUsageToProfiler(nullptr, 8, 8, 8, c10::Device(c10::kCPU)); }

TEST(ScopeOrder, ObserversOfMemoryThatEndInAnyOrderHearOfItAsLongAsTheyAreOpen) {
  std::array<size_t, 3> order = {0, 1, 2};
  do {
    SCOPED_TRACE(::testing::PrintToString(order));
    std::array<std::shared_ptr<Counter>, 3> counters;
    std::array<std::unique_ptr<MemoryScope>, 3> scopes;
    for (size_t i = 0; i < 3; ++i) {
      counters[i] = std::make_shared<Counter>();
      scopes[i] = std::make_unique<MemoryScope>(counters[i]);
    }
    for (const size_t ended : order) {
      scopes[ended].reset();
      Allocate();
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(counters[order[i]]->told, static_cast<int>(i));
    EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(ScopeOrder, AnObserverOfMemoryThatEndsOnAnotherThreadHearsOfNothingAndLeavesThatThreadAlone) {
  const auto counter = std::make_shared<Counter>();
  const auto others = std::make_shared<Counter>();
  auto scope = std::make_unique<MemoryScope>(counter);
  std::thread([&] {
    const MemoryScope own(others);
    scope.reset();
    Allocate();
  }).join();
  EXPECT_EQ(others->told, 1);
  Allocate();
  EXPECT_EQ(counter->told, 0);
  { const MemoryScope next(others); }
  EXPECT_EQ(c10::ThreadLocalDebugInfo::current(), nullptr);
}

}  // namespace scope_order_test
}  // namespace pinion::testing
