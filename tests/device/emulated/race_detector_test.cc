#include "pinion/device/emulated/race_detector.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

constexpr int kHost = RaceDetector::kHost;

// The detector only compares addresses, so no memory is needed behind them.
const void* At(uintptr_t address) { return reinterpret_cast<const void*>(address); }
constexpr uintptr_t kBase = 0x10000;

class RaceDetectorTest : public ::testing::Test {
 protected:
  RaceDetectorTest() {
    compute_ = detector_.AddContext("compute");
    out_ = detector_.AddContext("out");
    in_ = detector_.AddContext("in");
    detector_.AddMemory(At(kBase), 1000, compute_, "the allocation");
    detector_.AddMemory(At(2 * kBase), 1000, kHost, "the pinning");
  }

  void Read(int context, uintptr_t begin = kBase, uint64_t size_bytes = 1000,
            const std::string& name = "reader") {
    detector_.Begin(context, name);
    detector_.Read(At(begin), size_bytes);
  }
  void Write(int context, uintptr_t begin = kBase, uint64_t size_bytes = 1000,
             const std::string& name = "writer") {
    detector_.Begin(context, name);
    detector_.Write(At(begin), size_bytes);
  }
  // Makes so many accesses that the detector merges spans.
  void StartCleanup(uintptr_t memory) {
    for (uintptr_t offset = 100; offset < 1000; offset += 10) Write(compute_, memory + offset, 5);
  }
  void Order(int earlier, int later) { detector_.Join(later, detector_.Clock(earlier)); }
  std::vector<std::string> Reports() { return detector_.TakeReports(); }

  RaceDetector detector_;
  int compute_, out_, in_;
};

TEST_F(RaceDetectorTest, ReadAfterAnUnorderedWriteNamesBothAndTheMissingEdge) {
  Write(compute_);
  Read(out_, kBase + 100, 50);
  EXPECT_THAT(Reports(),
              ElementsAre(::testing::AllOf(
                  HasSubstr("bytes [100, 150) of 1000"), HasSubstr("reader #4 on out reads"),
                  HasSubstr("writer #3 on compute writes"),
                  HasSubstr("out must wait for an event recorded after writer #3 on compute"))));
}

TEST_F(RaceDetectorTest, WriteAfterAnUnorderedReadIsARace) {
  Order(compute_, out_);
  Read(out_);
  EXPECT_THAT(Reports(), IsEmpty());
  Write(compute_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("compute must wait for an event recorded after "
                                               "reader")));
}

TEST_F(RaceDetectorTest, WriteAfterAnUnorderedWriteIsARace) {
  Order(compute_, in_);
  Write(in_);
  Write(compute_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("on in writes")));
}

TEST_F(RaceDetectorTest, EveryUnorderedReaderIsReported) {
  Order(compute_, out_);
  Order(compute_, in_);
  Read(out_);
  Read(in_);
  Write(compute_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("on out reads"), HasSubstr("on in reads")));
}

TEST_F(RaceDetectorTest, AWriteOfWhatIsCopiedOutNamesTheLikelyCauseFirst) {
  Order(compute_, out_);
  Order(compute_, in_);
  Read(out_, kBase, 1000, "copy D2H");
  Read(in_);
  Write(compute_);
  EXPECT_THAT(Reports(), UnorderedElementsAre(StartsWith("memory is written before its copy"),
                                              StartsWith("race on bytes")));
}

TEST_F(RaceDetectorTest, ACopyThatWritesWhatIsCopiedOutIsNoChangeInPlace) {
  Order(compute_, out_);
  Order(compute_, in_);
  Read(out_, kBase, 1000, "copy D2H");
  Write(in_, kBase, 1000, "copy H2D");
  EXPECT_THAT(Reports(), ElementsAre(StartsWith("race on bytes")));
}

TEST_F(RaceDetectorTest, AWriteTakesThePlaceOfTheReadsThatItWaitedFor) {
  Order(compute_, out_);
  Read(out_);
  Order(out_, compute_);
  Write(compute_);
  Write(in_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("on compute writes")));
}

TEST_F(RaceDetectorTest, OnlyOverlappingBytesRace) {
  Order(compute_, out_);
  Write(compute_, kBase, 500);
  Read(out_, kBase + 500, 500);
  EXPECT_THAT(Reports(), IsEmpty());
  Read(out_, kBase + 499, 1);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("bytes [499, 500)")));
}

TEST_F(RaceDetectorTest, UseBeforeTheAllocationIsOrderedIsARace) {
  Write(in_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("the allocation #1 on compute")));
}

TEST_F(RaceDetectorTest, FreeThatDoesNotWaitForACopyIsARace) {
  Order(compute_, out_);
  Read(out_);
  detector_.RemoveMemory(At(kBase), compute_, {}, "the free");
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("compute must wait for an event recorded after "
                                               "reader")));
}

TEST_F(RaceDetectorTest, RecordedStreamIsOrderedBeforeTheFreeAndNothingElse) {
  Order(compute_, out_);
  Read(out_);
  detector_.RemoveMemory(At(kBase), compute_, {out_}, "the free");
  EXPECT_THAT(Reports(), IsEmpty());
  // Recording a stream orders only the freed memory, not the stream's other accesses.
  Write(out_, 2 * kBase);
  Write(compute_, 2 * kBase);
  EXPECT_EQ(Reports().size(), 1u);
}

TEST_F(RaceDetectorTest, RecycledAddressRemembersNothingOfItsFormerUse) {
  Write(compute_);
  detector_.RemoveMemory(At(kBase), compute_, {}, "the free");
  detector_.AddMemory(At(kBase), 500, in_, "the allocation");
  Write(in_, kBase, 500);
  EXPECT_THAT(Reports(), IsEmpty());
}

TEST_F(RaceDetectorTest, HostMustObserveBeforeItReads) {
  Write(out_, 2 * kBase);
  Read(kHost, 2 * kBase);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("the host must wait for an event")));
  Order(out_, kHost);
  Read(kHost, 2 * kBase);
  EXPECT_THAT(Reports(), IsEmpty());
}

TEST_F(RaceDetectorTest, SubmissionIsOrderedAfterWhatTheHostDidAndSaw) {
  Write(kHost, 2 * kBase);
  Write(out_, 2 * kBase);
  Order(out_, kHost);
  Read(in_, 2 * kBase);
  EXPECT_THAT(Reports(), IsEmpty());
}

TEST_F(RaceDetectorTest, PairOfOperationsIsReportedOnceHoweverManyPiecesItHas) {
  for (uintptr_t offset = 0; offset < 1000; offset += 100) Write(compute_, kBase + offset, 100);
  Reports();
  detector_.Begin(out_, "reader");
  for (uintptr_t offset = 0; offset < 100; offset += 10) detector_.Read(At(kBase + offset), 10);
  EXPECT_EQ(Reports().size(), 1u);
}

TEST_F(RaceDetectorTest, OfAStreamsReadsTheLastCounts) {
  Order(compute_, out_);
  Order(compute_, in_);
  Read(out_);
  Read(out_);
  Write(in_);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("reader #4 on out reads")));
}

TEST_F(RaceDetectorTest, TheFreeIsOfEveryByteFromTheFirstToTheLast) {
  for (const uintptr_t offset : {0, 999}) {
    Order(compute_, out_);
    Read(out_, kBase + offset, 1);
    detector_.RemoveMemory(At(kBase), compute_, {}, "the free");
    EXPECT_EQ(Reports().size(), 1u) << offset;
    detector_.AddMemory(At(kBase), 1000, compute_, "the allocation");
  }
}

TEST_F(RaceDetectorTest, WhatIsOutsideOfKnownMemoryOrEmptyIsNoAccess) {
  Write(in_, kBase - 10, 10);
  Write(in_, kBase + 1000, 10);
  Write(in_, kBase + 500, 0);
  EXPECT_THAT(Reports(), IsEmpty());
  EXPECT_EQ(detector_.span_count(), 2u) << "one of each memory";
  Write(in_, kBase + 990, 100);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("bytes [990, 1000) of 1000")));
  EXPECT_EQ(detector_.span_count(), 3u) << "and none beyond the end";
}

TEST_F(RaceDetectorTest, MemoryIsKnownOnce) {
  EXPECT_DEATH(detector_.AddMemory(At(kBase), 1, kHost, "again"), "known already");
  EXPECT_DEATH(detector_.RemoveMemory(At(kBase + 1), kHost, {}, "the free"), "no memory at");
}

// At 64 spans the detector discards accesses that the host has seen, and merges equal neighbours.
TEST_F(RaceDetectorTest, SpansAreFewWhenTheHostHasSeenThem) {
  for (const bool write : {true, false}) {
    SCOPED_TRACE(write ? "writes" : "reads");
    RaceDetector detector;
    const int stream = detector.AddContext("stream");
    detector.AddMemory(At(kBase), 1000, kHost, "the pinning");
    size_t most = 0;
    for (uintptr_t offset = 0; offset < 500; ++offset) {
      detector.Begin(stream, "operation");
      write ? detector.Write(At(kBase + offset), 1) : detector.Read(At(kBase + offset), 1);
      detector.Join(kHost, detector.Clock(stream));
      most = std::max(most, detector.span_count());
    }
    EXPECT_EQ(most, 63u);
  }
}

TEST_F(RaceDetectorTest, SpansThatNobodyHasSeenAreLookedAtAgainWhenThereAreTwiceAsMany) {
  for (uintptr_t offset = 0; offset < 254; ++offset) {
    Write(out_, 2 * kBase + offset, 1);
    if (offset == 149) Order(out_, kHost);
  }
  EXPECT_EQ(detector_.span_count(), 1 + 255u) << "the other memory's, a byte's each, the rest's";
  Write(out_, 2 * kBase + 254, 1);
  EXPECT_EQ(detector_.span_count(), 1 + 1 + 105 + 1u) << "the first 150 are one";
}

TEST_F(RaceDetectorTest, SpansThatAreOneAgainAreReportedAsOne) {
  Write(out_, 2 * kBase, 30);
  Read(in_, 2 * kBase + 10, 10);
  EXPECT_EQ(Reports().size(), 1u);
  Order(in_, kHost);
  StartCleanup(2 * kBase);
  Write(compute_, 2 * kBase, 30);
  EXPECT_THAT(Reports(), ElementsAre(HasSubstr("bytes [0, 30)")));
}

TEST_F(RaceDetectorTest, SpansOfTwoStreamsAreNotOneThoughBothAreOfTheirFirstOperation) {
  for (const bool write : {true, false}) {
    SCOPED_TRACE(write ? "writes" : "reads");
    RaceDetector detector;
    const int compute = detector.AddContext("compute");
    const int streams[] = {detector.AddContext("out"), detector.AddContext("in")};
    detector.AddMemory(At(kBase), 1000, kHost, "the pinning");
    for (const int i : {0, 1}) {
      detector.Begin(streams[i], "operation");
      write ? detector.Write(At(kBase + i * 10), 10) : detector.Read(At(kBase + i * 10), 10);
    }
    detector.Begin(compute, "writer");
    for (uintptr_t offset = 100; offset < 1000; offset += 10) {
      detector.Write(At(kBase + offset), 5);  // enough accesses to start a cleanup
    }
    detector.Begin(streams[0], "writer");
    detector.Write(At(kBase), 20);
    EXPECT_THAT(detector.TakeReports(), ElementsAre(HasSubstr("bytes [10, 20)")));
  }
}

TEST_F(RaceDetectorTest, JoinedSpansForgetNoAccess) {
  for (const bool write : {true, false}) {
    SCOPED_TRACE(write ? "writes" : "reads");
    const auto access = [&](uintptr_t offset) {
      write ? Write(out_, 2 * kBase + offset, 10) : Read(out_, 2 * kBase + offset, 10);
    };
    access(0);
    Order(out_, in_);  // in_ has seen only the first access
    access(10);
    access(20);
    StartCleanup(2 * kBase);
    EXPECT_THAT(Reports(), IsEmpty());
    Write(in_, 2 * kBase, 10);
    EXPECT_THAT(Reports(), IsEmpty());
    Write(in_, 2 * kBase + 10, 10);
    EXPECT_THAT(Reports(), ElementsAre(HasSubstr("bytes [10, 20)")));
    Order(out_, kHost);
    Order(in_, kHost);
    Order(compute_, kHost);
  }
}

}  // namespace
}  // namespace pinion
