#include "pinion/bench/engine_cases.h"

#include <algorithm>
#include <functional>
#include <optional>

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
      for (const BenchMethod method : kRawAndEngine) {
        cases.push_back({BenchSection::kCopies, flow, method, BenchSetting::kNone,
                         BackToBack(size_bytes), /*pieces=*/1, size_bytes});
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
          cases.push_back({BenchSection::kPieces, flow, method, BenchSetting::kNone,
                           /*transfers=*/1, count, size_bytes});
        }
      }
    }
  }
}

void AddCompute(bool quick, std::vector<BenchCase>& cases) {
  for (const BenchSetting setting : {BenchSetting::kBesideCompute, BenchSetting::kAfterCompute}) {
    for (const BenchFlow flow : kAllFlows) {
      for (const uint64_t size_bytes : kComputeBytes) {
        if (quick && size_bytes > kMostQuickComputeBytes) continue;
        for (const BenchMethod method : kRawAndEngine) {
          cases.push_back({BenchSection::kCompute, flow, method, setting, kComputeTransfers,
                           /*pieces=*/1, size_bytes});
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
          cases.push_back({BenchSection::kSubmit, flow, method, setting, /*transfers=*/1, pieces,
                           kSubmitPieceBytes});
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

using Rows = std::vector<BenchRow>;
using Wanted = std::function<bool(const BenchCase&)>;
using Value = std::function<double(const BenchRow& row, const BenchRow& raw)>;

// Returns the worst value of the wanted rows of `method` and the rows that differ from them by the
// method kRaw alone; nullopt if one of those is missing.
std::optional<double> WorstOverRaw(Bound bound, const Rows& rows, BenchMethod method,
                                   const Wanted& wanted, const Value& value) {
  bool is_complete = true;
  const auto worst = Worst(bound, rows, [&](const BenchRow& row) -> std::optional<double> {
    if (row.of.method != method || !wanted(row.of)) return std::nullopt;
    BenchCase of_raw = row.of;
    of_raw.method = BenchMethod::kRaw;
    const auto raw = std::find_if(rows.begin(), rows.end(),
                                  [&](const BenchRow& other) { return other.of == of_raw; });
    if (raw != rows.end()) return value(row, *raw);
    is_complete = false;
    return std::nullopt;
  });
  return is_complete ? worst : std::nullopt;
}

double Speedup(const BenchRow& row, const BenchRow& raw) { return raw.time.ms / row.time.ms; }
double Slowdown(const BenchRow& row) { return row.time.compute_ms / row.time.compute_alone_ms; }

void AddCopyGoals(const Rows& rows, BenchReport& report) {
  for (const BenchFlow flow : kAllFlows) {
    const Bound bound = AtLeast(flow == BenchFlow::kDuplex ? 0.97 : 0.98);
    const auto wanted = [flow](const BenchCase& of) {
      return of.section == BenchSection::kCopies && of.flow == flow;
    };
    report.AddGoal(absl::StrCat("copies ", FlowName(flow), ", back to back: engine over raw"),
                   bound, WorstOverRaw(bound, rows, BenchMethod::kEngine, wanted, Speedup));
  }
}

void AddPieceGoals(const Rows& rows, const LinkCalibration& link, BenchReport& report) {
  uint64_t most_pieces = 0;
  for (const BenchRow& row : rows) {
    if (row.of.section == BenchSection::kPieces) most_pieces = std::max(most_pieces, row.of.pieces);
  }
  for (const BenchFlow flow : kOneWay) {
    const auto add = [&](const std::string& what, Bound bound, const Wanted& wanted,
                         const Value& value) {
      const auto of_flow = [&](const BenchCase& of) {
        return of.section == BenchSection::kPieces && of.flow == flow && wanted(of);
      };
      report.AddGoal(absl::StrCat("pieces ", FlowName(flow), ", ", what), bound,
                     WorstOverRaw(bound, rows, BenchMethod::kPacked, of_flow, value));
    };
    add(
        absl::StrCat(kManyPieces, " and more of 4 to 16 KiB: packed over loop"), AtLeast(5),
        [](const BenchCase& of) { return of.pieces >= kManyPieces && of.piece_bytes <= 16 * kKiB; },
        Speedup);
    const LinkCurve& curve = flow == BenchFlow::kDeviceToHost ? link.d2h : link.h2d;
    add(
        absl::StrCat(most_pieces, " of 64 KiB: gain of packing over the gain that the link allows"),
        AtLeast(0.85),
        [&](const BenchCase& of) {
          return of.pieces == most_pieces && of.piece_bytes == 64 * kKiB;
        },
        [&](const BenchRow& row, const BenchRow& raw) {
          // Of one copy over many on a link without other costs: (t0 + s / bw) / (s / bw).
          const double link_gain =
              1 + curve.HalfPerformanceBytes() / static_cast<double>(row.of.piece_bytes);
          return Speedup(row, raw) / link_gain;
        });
  }
}

void AddComputeGoals(const Rows& rows, BenchReport& report) {
  const auto wanted = [](const BenchCase& of) { return of.section == BenchSection::kCompute; };
  report.AddGoal("copies with compute: engine over raw", AtLeast(0.98),
                 WorstOverRaw(AtLeast(0.98), rows, BenchMethod::kEngine, wanted, Speedup));
  report.AddGoal(
      "compute with copies: its slowdown by the engine's over that by raw ones", AtMost(1.02),
      WorstOverRaw(
          AtMost(1.02), rows, BenchMethod::kEngine, wanted,
          [](const BenchRow& row, const BenchRow& raw) { return Slowdown(row) / Slowdown(raw); }));
}

void AddSubmitGoal(const Rows& rows, BenchReport& report) {
  constexpr double kBatchMs = 2e-3;
  constexpr double kPieceMs = 100e-6;
  const auto over_allowed = [](const BenchRow& row) -> std::optional<double> {
    if (row.of.section != BenchSection::kSubmit) return std::nullopt;
    return row.time.ms / (kBatchMs + kPieceMs * static_cast<double>(row.of.pieces));
  };
  report.AddGoal("Submit: wall time over 2 us per batch and 100 ns per piece", AtMost(1), rows,
                 over_allowed);
}

}  // namespace

std::string FlowName(BenchFlow flow) {
  const char* const names[] = {"D2H", "H2D", "duplex"};
  return names[static_cast<int>(flow)];
}

std::string MethodName(const BenchCase& of) {
  const char* const names[] = {"raw", "engine", "packed", "adjacent", "scattered"};
  const char* const of_pieces[] = {"loop", "batch", "packed", "adjacent", "scattered"};
  return (of.pieces > 1 ? of_pieces : names)[static_cast<int>(of.method)];
}

std::string CaseName(const BenchCase& of) {
  const char* const sections[] = {"copies", "pieces", "compute", "submit"};
  const char* const settings[] = {"", "/beside", "/after", "/done", "/pending"};
  const bool of_pieces = of.section == BenchSection::kPieces || of.section == BenchSection::kSubmit;
  std::string name = absl::StrCat(sections[static_cast<int>(of.section)], "/", FlowName(of.flow),
                                  "/", MethodName(of), "/", of_pieces ? of.pieces : of.transfers);
  if (of.section != BenchSection::kSubmit) absl::StrAppend(&name, "x", SizeName(of.piece_bytes));
  return name + settings[static_cast<int>(of.setting)];
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

void AddEngineGoals(const std::vector<BenchRow>& rows, const LinkCalibration& link,
                    BenchReport& report) {
  const auto measured = [&rows](BenchSection section) {
    return std::any_of(rows.begin(), rows.end(),
                       [section](const BenchRow& row) { return row.of.section == section; });
  };
  if (measured(BenchSection::kCopies)) AddCopyGoals(rows, report);
  if (measured(BenchSection::kPieces)) AddPieceGoals(rows, link, report);
  if (measured(BenchSection::kCompute)) AddComputeGoals(rows, report);
  if (measured(BenchSection::kSubmit)) AddSubmitGoal(rows, report);
}

}  // namespace pinion
