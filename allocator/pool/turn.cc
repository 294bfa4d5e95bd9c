#include "pinion/allocator/pool/turn.h"

namespace pinion::internal {

constinit thread_local int turns_of_this_thread = 0;

}  // namespace pinion::internal
