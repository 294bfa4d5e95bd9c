// Early returns on absl::Status, and the status of any call's result.
//
//   PINION_RETURN_IF_ERROR(device.RecordEvent(event, stream));
//   PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator.Allocate(size_bytes));

#ifndef PINION_ALLOCATOR_BASE_STATUS_MACROS_H_
#define PINION_ALLOCATOR_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define PINION_RETURN_IF_ERROR(expression)                                                    \
  do {                                                                                        \
    if (absl::Status pinion_status = (expression); !pinion_status.ok()) return pinion_status; \
  } while (false)

#define PINION_ASSIGN_OR_RETURN(lhs, expression) \
  PINION_ASSIGN_OR_RETURN_IMPL(PINION_CONCAT(pinion_status_or_, __LINE__), lhs, expression)

#define PINION_ASSIGN_OR_RETURN_IMPL(result, lhs, expression) \
  auto result = (expression);                                 \
  if (!result.ok()) return std::move(result).status();        \
  lhs = *std::move(result)

#define PINION_CONCAT(a, b) PINION_CONCAT_IMPL(a, b)
#define PINION_CONCAT_IMPL(a, b) a##b

namespace pinion {

// For templates over calls that return an absl::Status or an absl::StatusOr.
inline const absl::Status& StatusOf(const absl::Status& status) { return status; }

template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_STATUS_MACROS_H_
