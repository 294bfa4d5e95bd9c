#include "pinion/allocator/base/keep_for_ever.h"

#include <atomic>
#include <utility>

namespace pinion {
namespace {

struct Kept {
  std::shared_ptr<const void> object;
  Kept* next;
};

std::atomic<Kept*> first_kept{nullptr};

}  // namespace

void KeepForEver(std::shared_ptr<const void> object) {
  Kept* const kept = new Kept{std::move(object), first_kept.load()};
  while (!first_kept.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace pinion
