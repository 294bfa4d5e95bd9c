#include "pinion/bench/engine_cases.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

constexpr BenchFlow kOneWay[] = {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice};
constexpr BenchFlow kAllFlows[] = {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice,
                                   BenchFlow::kDuplex};
constexpr BenchMethod kRawAndEngine[] = {BenchMethod::kRaw, BenchMethod::kEngine};

constexpr uint64_t kCopyBytes[] = {4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB, kGiB};
// Submit blocks the host for more than half of the engine's window. One thread cannot keep both
// directions busy with such copies.
constexpr uint64_t kMostDuplexBytes = 64 * kMiB;
constexpr uint64_t kMostQuickBytes = 16 * kMiB;

constexpr uint64_t kPieceCounts[] = {16, 64, 256, 1024};
constexpr uint64_t kQuickPieceCounts[] = {64, 1024};
constexpr uint64_t kPieceBytes[] = {4 * kKiB, 16 * kKiB, 64 * kKiB, 256 * kKiB};
constexpr uint64_t kQuickPieceBytes[] = {4 * kKiB, 16 * kKiB, 64 * kKiB};

constexpr uint64_t kComputeTransfers = 4;
constexpr uint64_t kComputeBytes[] = {4 * kMiB, 16 * kMiB};
constexpr uint64_t kMostQuickComputeBytes = 4 * kMiB;

constexpr uint64_t kSubmitPieces[] = {1, 16, 256, 4096};
constexpr uint64_t kMostQuickSubmitPieces = 256;
constexpr uint64_t kSubmitPieceBytes = 256;

uint64_t BackToBack(uint64_t size_bytes) {
  return std::clamp(kGiB / size_bytes, uint64_t{4}, uint64_t{16});
}

void AddCopies(bool quick, std::vector<BenchCase>& cases) {
  for (const BenchFlow flow : kAllFlows) {
    for (const uint64_t size_bytes : kCopyBytes) {
      if (quick && size_bytes > kMostQuickBytes) continue;
      if (flow == BenchFlow::kDuplex && size_bytes > kMostDuplexBytes) continue;
      for (const uint64_t transfers : {uint64_t{1}, BackToBack(size_bytes)}) {
        for (const BenchMethod method : kRawAndEngine) {
          cases.push_back({.section = BenchSection::kCopies,
                           .flow = flow,
                           .method = method,
                           .transfers = transfers,
                           .piece_bytes = size_bytes});
        }
      }
    }
  }
}

void AddPieces(bool quick, std::vector<BenchCase>& cases) {
  const auto counts =
      quick ? absl::MakeConstSpan(kQuickPieceCounts) : absl::MakeConstSpan(kPieceCounts);
  const auto sizes =
      quick ? absl::MakeConstSpan(kQuickPieceBytes) : absl::MakeConstSpan(kPieceBytes);
  for (const BenchFlow flow : kOneWay) {
    for (const uint64_t size_bytes : sizes) {
      for (const uint64_t count : counts) {
        for (const BenchMethod method :
             {BenchMethod::kRaw, BenchMethod::kEngine, BenchMethod::kPacked}) {
          cases.push_back({.section = BenchSection::kPieces,
                           .flow = flow,
                           .method = method,
                           .pieces = count,
                           .piece_bytes = size_bytes});
        }
      }
    }
  }
}

void AddCompute(bool quick, std::vector<BenchCase>& cases) {
  for (const BenchSetting setting :
       {BenchSetting::kIdle, BenchSetting::kBesideCompute, BenchSetting::kAfterCompute}) {
    for (const BenchFlow flow : kAllFlows) {
      for (const uint64_t size_bytes : kComputeBytes) {
        if (quick && size_bytes > kMostQuickComputeBytes) continue;
        for (const BenchMethod method : kRawAndEngine) {
          cases.push_back({.section = BenchSection::kCompute,
                           .flow = flow,
                           .method = method,
                           .setting = setting,
                           .transfers = kComputeTransfers,
                           .piece_bytes = size_bytes});
        }
      }
    }
  }
}

void AddSubmit(bool quick, std::vector<BenchCase>& cases) {
  for (const BenchSetting setting : {BenchSetting::kEventsDone, BenchSetting::kEventsPending}) {
    for (const BenchFlow flow : kOneWay) {
      for (const BenchMethod method : {BenchMethod::kAdjacent, BenchMethod::kScattered}) {
        for (const uint64_t pieces : kSubmitPieces) {
          // One piece has no neighbours.
          if (pieces == 1 && method == BenchMethod::kScattered) continue;
          if (quick && pieces > kMostQuickSubmitPieces) continue;
          cases.push_back({.section = BenchSection::kSubmit,
                           .flow = flow,
                           .method = method,
                           .setting = setting,
                           .pieces = pieces,
                           .piece_bytes = kSubmitPieceBytes});
        }
      }
    }
  }
}

std::string SizeName(uint64_t size_bytes) {
  if (size_bytes % kGiB == 0) return absl::StrCat(size_bytes / kGiB, "GiB");
  if (size_bytes % kMiB == 0) return absl::StrCat(size_bytes / kMiB, "MiB");
  if (size_bytes % kKiB == 0) return absl::StrCat(size_bytes / kKiB, "KiB");
  return absl::StrCat(size_bytes, "B");
}

}  // namespace

const char* SectionName(BenchSection section) {
  switch (section) {
    case BenchSection::kCopies:
      return "copies";
    case BenchSection::kPieces:
      return "pieces";
    case BenchSection::kCompute:
      return "compute";
    case BenchSection::kSubmit:
      return "submit";
  }
  return "";
}

const char* FlowName(BenchFlow flow) {
  switch (flow) {
    case BenchFlow::kDeviceToHost:
      return "D2H";
    case BenchFlow::kHostToDevice:
      return "H2D";
    case BenchFlow::kDuplex:
      return "duplex";
  }
  return "";
}

const char* MethodName(const BenchCase& of) {
  switch (of.method) {
    case BenchMethod::kRaw:
      return of.pieces > 1 ? "loop" : "raw";
    case BenchMethod::kEngine:
      return of.pieces > 1 ? "batch" : "engine";
    case BenchMethod::kPacked:
      return "packed";
    case BenchMethod::kAdjacent:
      return "adjacent";
    case BenchMethod::kScattered:
      return "scattered";
  }
  return "";
}

const char* SettingName(BenchSetting setting) {
  switch (setting) {
    case BenchSetting::kIdle:
      return "idle";
    case BenchSetting::kBesideCompute:
      return "beside";
    case BenchSetting::kAfterCompute:
      return "after";
    case BenchSetting::kEventsDone:
      return "done";
    case BenchSetting::kEventsPending:
      return "pending";
  }
  return "";
}

std::string CaseName(const BenchCase& of) {
  const std::string start =
      absl::StrCat(SectionName(of.section), "/", FlowName(of.flow), "/", MethodName(of), "/");
  const std::string size = SizeName(of.piece_bytes);
  switch (of.section) {
    case BenchSection::kCopies:
      return absl::StrCat(start, of.transfers, "x", size);
    case BenchSection::kPieces:
      return absl::StrCat(start, of.pieces, "x", size);
    case BenchSection::kCompute:
      return absl::StrCat(start, of.transfers, "x", size, "/", SettingName(of.setting));
    case BenchSection::kSubmit:
      return absl::StrCat(start, of.pieces, "/", SettingName(of.setting));
  }
  return start;
}

uint64_t CaseBytes(const BenchCase& of) {
  return of.transfers * of.pieces * of.piece_bytes * (of.flow == BenchFlow::kDuplex ? 2 : 1);
}

double GbPerS(const BenchRow& row) {
  return static_cast<double>(CaseBytes(row.of)) / (row.time.ms * 1e6);
}

std::vector<BenchCase> EngineBenchCases(bool quick) {
  std::vector<BenchCase> cases;
  AddCopies(quick, cases);
  AddPieces(quick, cases);
  AddCompute(quick, cases);
  AddSubmit(quick, cases);
  return cases;
}

}  // namespace pinion
