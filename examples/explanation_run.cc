#include "pinion/examples/explanation_run.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/explanation.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

DigitNet CopyOn(c10::Device device, const DigitNet& net) {
  const AllocationLabel label("parameters");
  return DigitNet(std::static_pointer_cast<DigitNetImpl>(net->clone(device)));
}

absl::StatusOr<Explanation> Explain(const ExplanationOptions& options,
                                    const Accelerator& accelerator, const DigitNet& net,
                                    const at::Tensor& pictures, const std::vector<int64_t>& classes,
                                    uint64_t held_bytes) {
  DigitNet copy = CopyOn(accelerator.device(), net);
  const ExplainedPictures explained = {pictures.to(accelerator.device()), classes};
  if (!options.with_pinion) return ExplainByHand(copy, explained, options.steps);
  PINION_ASSIGN_OR_RETURN(
      const std::shared_ptr<AttributionSession> session,
      AttributionSession::Create(accelerator.tier_options(), accelerator.backend()));
  const uint64_t limit_bytes = options.memory_limit_bytes;
  return ExplainWithPinion(*session, copy, explained, options.steps,
                           limit_bytes == UINT64_MAX ? 0 : held_bytes + limit_bytes);
}

}  // namespace

absl::StatusOr<ExplanationRun> RunExplanation(const ExplanationOptions& options, DigitNet& net,
                                              const at::Tensor& pictures,
                                              const std::vector<int64_t>& classes) {
  RunOptions run;
  run.device = options.device;
  run.device_memory_bytes = options.memory_limit_bytes;
  try {
    PINION_ASSIGN_OR_RETURN(const Accelerator accelerator, Accelerator::Open(run));
    // The GPU already holds cuBLAS's workspace from training. The limit applies to the rest.
    const uint64_t held_bytes = accelerator.peak_bytes();
    ExplanationRun result;
    PINION_ASSIGN_OR_RETURN(result.explanation,
                            Explain(options, accelerator, net, pictures, classes, held_bytes));
    result.peak_bytes = accelerator.peak_bytes() - held_bytes;
    return result;
  } catch (const StoppedBySignal&) {
    return absl::CancelledError("stopped by a signal");
  } catch (const c10::OutOfMemoryError& error) {
    return absl::ResourceExhaustedError(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace pinion
