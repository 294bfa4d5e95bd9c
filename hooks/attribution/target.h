// Selects the model output that an attribution explains, per example: Captum's `target`.
//
//   Target::Class(3)                        an int: output[:, 3]
//   Target::Index({2, 5})                   a tuple: output[:, 2, 5]
//   Target::PerExample({3, 0, 7})           a list of ints, or a 1-D tensor: output[n, c_n]
//   Target::IndexPerExample({{2, 5}, ...})  a list of tuples: output[n, i_n, j_n]
//   Target()                                none: the output has one number per example
//
// Thread safety: a value.
// Errors: c10::Error, from Select, if the target does not fit the output.

#ifndef PINION_HOOKS_ATTRIBUTION_TARGET_H_
#define PINION_HOOKS_ATTRIBUTION_TARGET_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pinion {

class Target {
 public:
  Target() = default;
  static Target Class(int64_t index);
  static Target Index(std::vector<int64_t> index);
  static Target PerExample(const std::vector<int64_t>& classes);
  static Target IndexPerExample(std::vector<std::vector<int64_t>> indices);
  // Reads an integer tensor on the host: one element is a class, N elements in one dimension are
  // the classes of N examples.
  static Target Of(const at::Tensor& classes);

  // Throws c10::Error unless the target applies to all examples or has one entry per example.
  void CheckExamples(int64_t examples) const;
  // Returns the targets of examples [begin, begin + count), concatenated `repeats` times.
  // Throws c10::Error for examples that have no target.
  Target OfRows(int64_t begin, int64_t count, int64_t repeats) const;

  // Returns one number per example. The first dimension of `output` counts the examples; a
  // dimension of 1 may stand for an aggregate of all of them.
  at::Tensor Select(const at::Tensor& output) const;

 private:
  enum class Kind { kNone, kSame, kClasses, kIndices };
  Target(Kind kind, std::vector<std::vector<int64_t>> indices);

  Kind kind_ = Kind::kNone;
  std::vector<std::vector<int64_t>> indices_;  // one for all, or one per example
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_TARGET_H_
