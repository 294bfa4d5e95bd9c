// The cases, results and goals of engine_bench: plain data.
//
// Pure.

#ifndef PINION_BENCH_ENGINE_CASES_H_
#define PINION_BENCH_ENGINE_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/bench/goals.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

enum class BenchSection {
  kCopies,   // large copies back to back: the link hides the engine's events and waits
  kPieces,   // many small pieces
  kCompute,  // copies beside matrix products
  kSubmit,   // the host's cost of TransferEngine::Submit, on a device that does nothing
};

enum class BenchFlow { kDeviceToHost, kHostToDevice, kDuplex };

// The direction of a flow that is not duplex.
inline CopyDirection DirectionOf(BenchFlow flow) {
  return flow == BenchFlow::kDeviceToHost ? CopyDirection::kDeviceToHost
                                          : CopyDirection::kHostToDevice;
}

enum class BenchMethod {
  kRaw,        // one device call per piece, without an engine
  kEngine,     // one Submit per transfer
  kPacked,     // gathered into one piece; fetched as one piece with views
  kAdjacent,   // kSubmit: pieces that the engine can merge
  kScattered,  // kSubmit: pieces that the engine cannot merge
};

// Other work during the copies.
enum class BenchSetting {
  kNone,
  kBesideCompute,  // products without an order to the copies
  kAfterCompute,   // each transfer follows products
  kEventsDone,     // kSubmit: submissions complete at once
  kEventsPending,  // kSubmit: submissions queue up, as on a busy device
};

struct BenchCase {
  BenchSection section = BenchSection::kCopies;
  BenchFlow flow = BenchFlow::kDeviceToHost;
  BenchMethod method = BenchMethod::kRaw;
  BenchSetting setting = BenchSetting::kNone;
  uint64_t transfers = 1;  // back to back; per direction
  uint64_t pieces = 1;     // of each transfer
  uint64_t piece_bytes = 0;

  friend bool operator==(const BenchCase&, const BenchCase&) = default;
};

// Names in reports. Several pieces by kRaw are a loop, by kEngine a batch.
std::string FlowName(BenchFlow flow);
std::string MethodName(const BenchCase& of);

// "copies/D2H/engine/16x4MiB", "pieces/H2D/packed/256x4KiB", "submit/D2H/scattered/256/pending".
std::string CaseName(const BenchCase& of);

// Returns the bytes of all transfers in both directions.
uint64_t CaseBytes(const BenchCase& of);

// Medians over the runs of a case: virtual milliseconds on an emulated device, else wall time.
struct BenchTime {
  double ms = 0;                // from the first call to the last byte; kSubmit: of one Submit
  double host_ms = 0;           // until the last call returned
  double compute_ms = 0;        // of the products, beside the copies
  double compute_alone_ms = 0;  // of the products alone
};

struct BenchRow {
  BenchCase of;
  BenchTime time;
};

double GbPerS(const BenchRow& row);  // 1e9 bytes per second

// Returns every case in the order of a run. `quick` has fewer sizes; all goals can be judged.
std::vector<BenchCase> EngineBenchCases(bool quick);

// The least number of "many small pieces": with fewer, one transfer's fixed costs dominate.
inline constexpr uint64_t kManyPieces = 64;

// Adds the goals of sections with rows. A value is the worst of its rows, or nullopt if rows are
// missing.
void AddEngineGoals(const std::vector<BenchRow>& rows, const LinkCalibration& link,
                    BenchReport& report);

}  // namespace pinion

#endif  // PINION_BENCH_ENGINE_CASES_H_
