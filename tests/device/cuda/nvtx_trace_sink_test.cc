// The test acts as the profiler: it attaches to NVTX through a statically linked injection library,
// as Nsight Systems does with a dynamic one (nvtxInit.h: static injection).

#include "pinion/device/cuda/nvtx_trace_sink.h"

#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/device/trace/trace_sink.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Data that the profiler recorded.
struct Seen {
  Mutex mu;
  std::vector<std::string> domains ABSL_GUARDED_BY(mu);
  std::vector<std::string> events ABSL_GUARDED_BY(mu);  // "push NAME BYTES", "pop"
  std::map<std::thread::id, int> depths ABSL_GUARDED_BY(mu);
};

Seen& TheSeen() {
  static Seen seen;
  return seen;
}

int a_domain;

nvtxDomainHandle_t CreateDomain(const char* name) {
  MutexLock lock(TheSeen().mu);
  TheSeen().domains.push_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(&a_domain);
}

int Push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  EXPECT_EQ(domain, reinterpret_cast<nvtxDomainHandle_t>(&a_domain));
  EXPECT_EQ(attributes->version, NVTX_VERSION);
  EXPECT_EQ(attributes->size, NVTX_EVENT_ATTRIB_STRUCT_SIZE);
  EXPECT_EQ(attributes->messageType, NVTX_MESSAGE_TYPE_ASCII);
  std::string event = std::string("push ") + attributes->message.ascii;
  if (attributes->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64) {
    event += " " + std::to_string(attributes->payload.ullValue);
  }
  MutexLock lock(TheSeen().mu);
  TheSeen().events.push_back(std::move(event));
  return TheSeen().depths[std::this_thread::get_id()]++;
}

int Pop(nvtxDomainHandle_t domain) {
  EXPECT_EQ(domain, reinterpret_cast<nvtxDomainHandle_t>(&a_domain));
  MutexLock lock(TheSeen().mu);
  TheSeen().events.push_back("pop");
  return --TheSeen().depths[std::this_thread::get_id()];
}

int Attach(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(CreateDomain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(Push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(Pop);
  return 1;
}

// Set before the first NVTX call, which looks for a profiler.
[[maybe_unused]] const bool attached = (InitializeInjectionNvtx2_fnptr = Attach, true);

class NvtxTraceSinkTest : public ::testing::Test {
 protected:
  NvtxTraceSinkTest() {
    MutexLock lock(TheSeen().mu);
    TheSeen().events.clear();
  }

  static std::vector<std::string> Events() {
    MutexLock lock(TheSeen().mu);
    return TheSeen().events;
  }

  NvtxTraceSink sink_;
};

TEST_F(NvtxTraceSinkTest, RangesArePushedAndPoppedWithTheirBytesInPinionsDomain) {
  {
    const ScopedRange outer(&sink_, "pinion.pack", 4096);
    const ScopedRange inner(&sink_, "pinion.evict");
  }
  EXPECT_THAT(Events(), ElementsAre("push pinion.pack 4096", "push pinion.evict", "pop", "pop"));
  MutexLock lock(TheSeen().mu);
  EXPECT_THAT(TheSeen().domains, ElementsAre("pinion"));
}

TEST_F(NvtxTraceSinkTest, ARangeThatHasNoNameCannotBeEntered) {
  EXPECT_DEATH(sink_.BeginRange(nullptr, 0), "a range has a name");
}

TEST_F(NvtxTraceSinkTest, EveryThreadPopsWhatItPushed) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        const ScopedRange outer(&sink_, "outer");
        const ScopedRange inner(&sink_, "inner");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Events().size(), 4 * 50 * 4);
  MutexLock lock(TheSeen().mu);
  for (const auto& [thread, depth] : TheSeen().depths) EXPECT_EQ(depth, 0);
}

TEST_F(NvtxTraceSinkTest, TransfersAreLeftToTheTool) {
  EXPECT_FALSE(sink_.WantsTransfers());
  sink_.OnTransfer({});
  sink_.OnStall({});
  EXPECT_THAT(Events(), IsEmpty());
}

}  // namespace
}  // namespace pinion
