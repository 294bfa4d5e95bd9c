#include "pinion/bench/engine_goals.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

using Rows = std::vector<BenchRow>;
using Wanted = std::function<bool(const BenchCase&)>;

// Two rows that differ only by the method.
struct Pair {
  const BenchRow* better;
  const BenchRow* baseline;

  double Speedup() const { return baseline->time.ms / better->time.ms; }
};

// Returns nullopt if a row has no counterpart.
std::optional<std::vector<Pair>> PairsOf(const Rows& rows, BenchMethod better, BenchMethod baseline,
                                         const Wanted& wanted) {
  std::vector<Pair> pairs;
  for (const BenchRow& row : rows) {
    if (row.of.method != better || !wanted(row.of)) continue;
    BenchCase counterpart = row.of;
    counterpart.method = baseline;
    const auto found = std::find_if(rows.begin(), rows.end(),
                                    [&](const BenchRow& other) { return other.of == counterpart; });
    if (found == rows.end()) return std::nullopt;
    pairs.push_back({&row, &*found});
  }
  return pairs;
}

std::optional<double> Worst(Bound::Kind kind, const std::optional<std::vector<Pair>>& pairs,
                            const std::function<double(const Pair&)>& value) {
  if (!pairs.has_value() || pairs->empty()) return std::nullopt;
  std::vector<double> values;
  for (const Pair& pair : *pairs) values.push_back(value(pair));
  return kind == Bound::Kind::kAtLeast ? *std::min_element(values.begin(), values.end())
                                       : *std::max_element(values.begin(), values.end());
}

Goal WorstSpeedup(std::string name, Bound bound, const Rows& rows, BenchMethod better,
                  const Wanted& wanted) {
  return {std::move(name), bound,
          Worst(bound.kind, PairsOf(rows, better, BenchMethod::kRaw, wanted),
                [](const Pair& pair) { return pair.Speedup(); })};
}

void AddCopyGoals(const Rows& rows, std::vector<Goal>& goals) {
  for (const BenchFlow flow :
       {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice, BenchFlow::kDuplex}) {
    const Bound bound = AtLeast(flow == BenchFlow::kDuplex ? 0.97 : 0.98);
    goals.push_back(WorstSpeedup(
        absl::StrCat("copies ", FlowName(flow), ", back to back: engine over raw"), bound, rows,
        BenchMethod::kEngine, [flow](const BenchCase& of) {
          return of.section == BenchSection::kCopies && of.flow == flow && of.transfers > 1;
        }));
  }
}

// Returns the gain of one copy over many on a link without other costs: (t0 + s / bw) / (s / bw).
double LinkGain(const LinkCurve& link, uint64_t piece_bytes) {
  return 1 + link.HalfPerformanceBytes() / static_cast<double>(piece_bytes);
}

void AddPieceGoals(const Rows& rows, const LinkCurves& link, std::vector<Goal>& goals) {
  uint64_t most_pieces = 0;
  for (const BenchRow& row : rows) {
    if (row.of.section == BenchSection::kPieces) most_pieces = std::max(most_pieces, row.of.pieces);
  }
  for (const BenchFlow flow : {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice}) {
    goals.push_back(WorstSpeedup(absl::StrCat("pieces ", FlowName(flow), ", ", kManyPieces,
                                              " and more of 4 to 16 KiB: packed over loop"),
                                 AtLeast(5), rows, BenchMethod::kPacked,
                                 [flow](const BenchCase& of) {
                                   return of.section == BenchSection::kPieces && of.flow == flow &&
                                          of.pieces >= kManyPieces && of.piece_bytes <= 16 * kKiB;
                                 }));
    const LinkCurve& curve = flow == BenchFlow::kDeviceToHost ? link.d2h : link.h2d;
    const auto pairs = PairsOf(rows, BenchMethod::kPacked, BenchMethod::kRaw,
                               [flow, most_pieces](const BenchCase& of) {
                                 return of.section == BenchSection::kPieces && of.flow == flow &&
                                        of.pieces == most_pieces && of.piece_bytes == 64 * kKiB;
                               });
    const Bound bound = AtLeast(0.85);
    goals.push_back({absl::StrCat("pieces ", FlowName(flow), ", ", most_pieces,
                                  " of 64 KiB: gain of packing over the gain that the link allows"),
                     bound, Worst(bound.kind, pairs, [&curve](const Pair& pair) {
                       return pair.Speedup() / LinkGain(curve, pair.better->of.piece_bytes);
                     })});
  }
}

double Slowdown(const BenchRow& row) { return row.time.compute_ms / row.time.compute_alone_ms; }

void AddComputeGoals(const Rows& rows, std::vector<Goal>& goals) {
  goals.push_back(WorstSpeedup("copies with compute: engine over raw", AtLeast(0.98), rows,
                               BenchMethod::kEngine, [](const BenchCase& of) {
                                 return of.section == BenchSection::kCompute &&
                                        of.setting != BenchSetting::kIdle;
                               }));
  const auto pairs =
      PairsOf(rows, BenchMethod::kEngine, BenchMethod::kRaw, [](const BenchCase& of) {
        return of.section == BenchSection::kCompute && of.setting != BenchSetting::kIdle;
      });
  const Bound bound = AtMost(1.02);
  goals.push_back({"compute with copies: its slowdown by the engine's over that by raw ones", bound,
                   Worst(bound.kind, pairs, [](const Pair& pair) {
                     return Slowdown(*pair.better) / Slowdown(*pair.baseline);
                   })});
}

void AddSubmitGoal(const Rows& rows, std::vector<Goal>& goals) {
  constexpr double kBatchMs = 2e-3;
  constexpr double kPieceMs = 100e-6;
  std::optional<double> worst;
  for (const BenchRow& row : rows) {
    if (row.of.section != BenchSection::kSubmit) continue;
    const double allowed_ms = kBatchMs + kPieceMs * static_cast<double>(row.of.pieces);
    worst = std::max(worst.value_or(0), row.time.ms / allowed_ms);
  }
  goals.push_back({"Submit: wall time over 2 us per batch and 100 ns per piece", AtMost(1), worst});
}

}  // namespace

std::vector<Goal> EngineGoals(const std::vector<BenchRow>& rows, const LinkCurves& link) {
  const auto measured = [&rows](BenchSection section) {
    return std::any_of(rows.begin(), rows.end(),
                       [section](const BenchRow& row) { return row.of.section == section; });
  };
  std::vector<Goal> goals;
  if (measured(BenchSection::kCopies)) AddCopyGoals(rows, goals);
  if (measured(BenchSection::kPieces)) AddPieceGoals(rows, link, goals);
  if (measured(BenchSection::kCompute)) AddComputeGoals(rows, goals);
  if (measured(BenchSection::kSubmit)) AddSubmitGoal(rows, goals);
  return goals;
}

}  // namespace pinion
