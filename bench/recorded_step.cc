#include "pinion/bench/recorded_step.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/null_device.h"
#include "pinion/bench/statistics.h"

namespace pinion {
namespace {

constexpr double kQuantile = 0.25;

// Alternates two kinds of steps: a large one, and a small one whose begin pays for reading and
// planning the large one's record.
class TurnTaker {
 public:
  TurnTaker(const SavingStep& step, std::shared_ptr<OffloadSession> session)
      : large_(step),
        small_({.tensors = 1, .tensor_bytes = step.tensor_bytes}),
        session_(std::move(session)) {}

  double LargeUs() const { return large_.RunUs(Scope()); }
  double SmallUs() const { return small_.RunUs(Scope()); }
  // Afterwards both are known. The next large step is the last recorded one.
  void BeginToKnow() const {
    LargeUs();
    SmallUs();
  }
  // Afterwards neither step is recorded.
  void KnowWell() const {
    for (int i = 0; i < 3; ++i) BeginToKnow();
  }

 private:
  SavingStep::MakeScope Scope() const {
    return [this] { return std::make_shared<OffloadScope>(session_); };
  }

  const SavingStep large_;
  const SavingStep small_;
  const std::shared_ptr<OffloadSession> session_;
};

absl::StatusOr<TurnTaker> NewTurnTaker(const SavingStep& step, const NewTargetSession& new_session,
                                       std::shared_ptr<Device> device) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<OffloadSession> session,
                          new_session(std::move(device), step.tensors * step.tensor_bytes / 2));
  return TurnTaker(step, std::move(session));
}

// Counts the events of one step in a separate run, since counting takes time.
template <typename Run>
double EventsOf(const SavingStep& step, const CountingNullDevice& device, Run run) {
  const uint64_t before = device.calls().events;
  run();
  return static_cast<double>(device.calls().events - before) / step.tensors;
}

double LowerQuartile(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return Quantile(values, kQuantile);
}

}  // namespace

nlohmann::ordered_json RecordedStepCost::ToRow() const {
  return {{"case", absl::StrCat("recorded/", step.tensors, "/", step.tensor_bytes)},
          {"tensors", step.tensors},
          {"tensor_bytes", step.tensor_bytes},
          {"recorded_us", recorded_us / step.tensors},
          {"planned_us", planned_us / step.tensors},
          {"ratio", ratio()},
          {"planning_us", planning_us},
          {"recorded_events", recorded_events},
          {"planned_events", planned_events}};
}

absl::StatusOr<RecordedStepCost> MeasureRecordedStep(const SavingStep& step,
                                                     const NewTargetSession& new_session,
                                                     int repeats) {
  RecordedStepCost cost;
  cost.step = step;
  const auto device = std::make_shared<CountingNullDevice>();
  PINION_ASSIGN_OR_RETURN(const TurnTaker counted, NewTurnTaker(step, new_session, device));
  counted.BeginToKnow();
  cost.recorded_events = EventsOf(step, *device, [&] { counted.LargeUs(); });
  counted.KnowWell();
  cost.planned_events = EventsOf(step, *device, [&] { counted.LargeUs(); });
  // Each save and each read lies between two events.
  if (cost.recorded_events < cost.planned_events + 4) {
    return absl::InternalError(
        absl::StrCat("a step was to be recorded, and then another one not: ", cost.recorded_events,
                     " events a tensor, then ", cost.planned_events));
  }
  std::vector<double> recorded_us, planned_us, planning_us;
  for (int i = 0; i < repeats; ++i) {
    const auto null = [] { return std::make_shared<NullDevice>(NullDevice::Events::kDone); };
    PINION_ASSIGN_OR_RETURN(const TurnTaker knows, NewTurnTaker(step, new_session, null()));
    PINION_ASSIGN_OR_RETURN(const TurnTaker learns, NewTurnTaker(step, new_session, null()));
    knows.KnowWell();
    learns.BeginToKnow();
    recorded_us.push_back(learns.LargeUs());
    planned_us.push_back(knows.LargeUs());
    planning_us.push_back(learns.SmallUs() - knows.SmallUs());
  }
  cost.recorded_us = LowerQuartile(std::move(recorded_us));
  cost.planned_us = LowerQuartile(std::move(planned_us));
  cost.planning_us = LowerQuartile(std::move(planning_us));
  return cost;
}

}  // namespace pinion
