// The steps that are planned, in the order in which they are likely to come: what came after the
// last one the time before, then what ran last.
//
// Thread safety: none.

#ifndef PINION_ENGINE_PLAN_KNOWN_STEPS_H_
#define PINION_ENGINE_PLAN_KNOWN_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "pinion/engine/plan/explain_plan.h"
#include "pinion/engine/plan/known_step.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

class KnownSteps {
 public:
  static constexpr size_t kMax = 32;

  // Instead of what was known of a step that saves and reads the same.
  void Learn(std::shared_ptr<const KnownStep> known);
  // What is known of a step that saves and reads the same; null without one.
  std::shared_ptr<const KnownStep> FindLike(const StepRecord& step) const;
  void Forget(const KnownStep& known);

  // The step that begins next has gradients to add to, or none. Find and Likeliest look among known
  // ones that do. Where none is known to add to gradients, those that make them are looked at: they
  // take more.
  void set_begins_with_gradients(bool begins) { begins_with_gradients_ = begins; }
  bool begins_with_gradients() const { return begins_with_gradients_; }
  bool IsOfKind(const KnownStep& known) const {
    return known.step().begins_with_gradients == begins_with_gradients_;
  }
  bool MayBe(const KnownStep& known) const;
  // A step begins: the one that came after the last step the time before is looked at first.
  void OnBegin();
  // A step has ended, which went on as `ran`; null: as none of them.
  void OnEnd(const KnownStep* ran);

  // The first one that fits, which comes first from now on; null without one.
  std::shared_ptr<const KnownStep> Find(absl::FunctionRef<bool(const KnownStep&)> fits);

  const std::list<std::shared_ptr<const KnownStep>>& all() const { return all_; }
  // Of those whose plan keeps to the target, the one that ran last; null without one.
  std::shared_ptr<const KnownStep> Likeliest() const;
  // No other one begins like that step: which of them runs would be known too late for a mix.
  bool MayMix(const StepRecord& step) const;
  bool AnyWantsMix() const;

 private:
  // Who is gone comes after nobody.
  void ForgetOrder();

  std::list<std::shared_ptr<const KnownStep>> all_;
  bool begins_with_gradients_ = false;  // the step that runs, or begins next
  const KnownStep* last_ = nullptr;     // that has ended; null if it was not known
  absl::flat_hash_map<const KnownStep*, const KnownStep*> after_;  // what came after each
};

// For people: the plans of all of them in words, or of the first in another format. `limit_bytes`
// is what they were to keep to; none: each its own peak.
std::string ExplainSteps(const std::list<std::shared_ptr<const KnownStep>>& known,
                         const LinkCalibration& link, std::optional<uint64_t> limit_bytes,
                         PlanFormat format);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_KNOWN_STEPS_H_
