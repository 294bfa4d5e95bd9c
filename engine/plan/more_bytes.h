// Bytes that are on the device in some stretches of a step, more or fewer than were recorded there.
//
//   MoreBytes more(step.stretches.size());
//   more.Add(3, 5, size_bytes);          // there in stretches 3, 4 and 5, and gone when 5 ends
//   more.Subtract(6, 7, size_bytes);     // counted elsewhere in 6 and 7
//
// Thread safety: none.

#ifndef PINION_ENGINE_PLAN_MORE_BYTES_H_
#define PINION_ENGINE_PLAN_MORE_BYTES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pinion {

inline int64_t Signed(uint64_t bytes) { return static_cast<int64_t>(bytes); }

class MoreBytes {
 public:
  explicit MoreBytes(size_t stretches)
      : changes_(stretches + 1), begins_(stretches + 1), ends_(stretches + 1) {}

  void Add(size_t first, size_t last, uint64_t size_bytes) {
    if (first > last) return;
    last = std::min(last, changes_.size() - 2);
    Change(first, last, Signed(size_bytes));
    begins_[first] += Signed(size_bytes);
    ends_[last] += Signed(size_bytes);
  }
  // What was one of the other bytes to the end of `last` is an object's.
  void Subtract(size_t first, size_t last, uint64_t size_bytes) {
    if (first <= last) Change(first, std::min(last, changes_.size() - 2), -Signed(size_bytes));
  }
  // How much more there is than in the stretch before.
  int64_t change(size_t stretch) const { return changes_[stretch]; }
  // Of what was added, that which the stretch makes.
  int64_t begins(size_t stretch) const { return begins_[stretch]; }
  // And that which has gone when it ends.
  int64_t ends(size_t stretch) const { return ends_[stretch]; }

 private:
  void Change(size_t first, size_t last, int64_t bytes) {
    changes_[first] += bytes;
    changes_[last + 1] -= bytes;
  }

  std::vector<int64_t> changes_;
  std::vector<int64_t> begins_;
  std::vector<int64_t> ends_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_MORE_BYTES_H_
