#include "pinion/hooks/attribution/target.h"

#include <ATen/ops/gather.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <cstddef>
#include <string>
#include <utility>

namespace pinion {
namespace {

// A row takes some 60 bytes of host memory.
constexpr int64_t kMostTargetRows = int64_t{1} << 28;

// Selects `index` in the dimensions behind the first. LibTorch would count a negative index from
// the end. `whose` is "" or " of row 3".
at::Tensor SelectIndex(const at::Tensor& output, const std::vector<int64_t>& index,
                       const std::string& whose) {
  TORCH_CHECK(static_cast<int64_t>(index.size()) < output.dim(), "a target of ", index.size(),
              " indices selects no column of an output of ", output.sizes(),
              ": its first dimension counts the examples");
  at::Tensor selected = output;
  for (size_t i = 0; i < index.size(); ++i) {
    const auto dimension = static_cast<int64_t>(i) + 1;
    const int64_t size = output.size(dimension);
    TORCH_CHECK(0 <= index[i] && index[i] < size, "the target", whose, " is index ", index[i],
                " in dimension ", dimension, ", and the output of ", output.sizes(), " has 0 to ",
                size - 1, " there: give an index that the output has");
    selected = selected.select(1, index[i]);
  }
  return selected;
}

}  // namespace

Target::Target(Kind kind, std::vector<std::vector<int64_t>> indices)
    : kind_(kind), indices_(std::move(indices)) {}

Target Target::Class(int64_t index) { return Index({index}); }

Target Target::Index(std::vector<int64_t> index) { return Target(Kind::kSame, {std::move(index)}); }

Target Target::PerExample(const std::vector<int64_t>& classes) {
  std::vector<std::vector<int64_t>> indices;
  for (const int64_t index : classes) indices.push_back({index});
  return Target(Kind::kClasses, std::move(indices));
}

Target Target::IndexPerExample(std::vector<std::vector<int64_t>> indices) {
  return Target(Kind::kIndices, std::move(indices));
}

Target Target::Of(const at::Tensor& classes) {
  TORCH_CHECK(c10::isIntegralType(classes.scalar_type(), /*includeBool=*/false) &&
                  (classes.numel() == 1 || classes.dim() == 1),
              "a target is one integer, or one per example in one dimension, and not ",
              classes.sizes(), " of ", classes.scalar_type());
  const at::Tensor host = classes.to(at::kCPU, at::kLong).contiguous().flatten();
  const int64_t* const begin = host.const_data_ptr<int64_t>();
  if (host.numel() == 1) return Class(*begin);
  return PerExample({begin, begin + host.numel()});
}

void Target::CheckExamples(int64_t examples) const {
  const bool is_for_one = kind_ == Kind::kNone || kind_ == Kind::kSame;
  TORCH_CHECK(is_for_one || indices_.size() == static_cast<size_t>(examples), "there are ",
              indices_.size(), " targets, and ", examples,
              " examples: give one target per example");
}

Target Target::OfRows(int64_t begin, int64_t count, int64_t repeats) const {
  if (kind_ == Kind::kNone || kind_ == Kind::kSame) return *this;
  const auto examples = static_cast<int64_t>(indices_.size());
  int64_t rows_count = 0;
  TORCH_CHECK(0 <= begin && begin <= examples && 0 <= count && count <= examples - begin,
              "targets of examples [", begin, ", +", count, "), and there are ", examples,
              " targets: give examples that have one");
  TORCH_CHECK(repeats >= 0 && !c10::mul_overflows(repeats, count, &rows_count) &&
                  rows_count <= kMostTargetRows,
              "targets of ", count, " examples ", repeats,
              " times: repeats is at least 0, and there are at most 2^28 rows");
  Target rows(kind_, {});
  for (int64_t i = 0; i < rows_count; ++i) {
    rows.indices_.push_back(indices_[static_cast<size_t>(begin + i % count)]);
  }
  return rows;
}

at::Tensor Target::Select(const at::Tensor& output) const {
  TORCH_CHECK(output.defined() && output.dim() > 0,
              "the output of the forward function has no dimension that counts examples: return "
              "one number per example, or unsqueeze(0) an aggregate");
  at::Tensor selected = output;
  CheckExamples(output.size(0));
  const auto examples = static_cast<size_t>(output.size(0));
  switch (kind_) {
    case Kind::kNone:
      break;
    case Kind::kSame:
      selected = SelectIndex(output, indices_.front(), "");
      break;
    case Kind::kClasses: {
      TORCH_CHECK(output.dim() == 2, "a class per example needs an output of two dimensions, not ",
                  output.sizes(), ": use Target::IndexPerExample");
      std::vector<int64_t> classes;
      for (const std::vector<int64_t>& index : indices_) {
        // On CUDA an out-of-range class trips a device assertion, which fails every later call.
        TORCH_CHECK(0 <= index.front() && index.front() < output.size(1), "the target of row ",
                    classes.size(), " is class ", index.front(), ", and the output of ",
                    output.sizes(), " has classes 0 to ", output.size(1) - 1,
                    ": give a class that the output has");
        classes.push_back(index.front());
      }
      const at::Tensor column = at::tensor(classes, at::kLong).unsqueeze(1);
      selected = at::gather(output, 1, column.to(output.device())).squeeze(-1);
      break;
    }
    case Kind::kIndices: {
      TORCH_CHECK(examples > 0, "an output of ", output.sizes(),
                  " has no example: give at least one to Target::IndexPerExample");
      std::vector<at::Tensor> picked;
      for (size_t n = 0; n < examples; ++n) {
        const at::Tensor selected_of_all =
            SelectIndex(output, indices_[n], " of row " + std::to_string(n));
        picked.push_back(selected_of_all.select(0, static_cast<int64_t>(n)));
      }
      selected = at::stack(picked);
      break;
    }
  }
  TORCH_CHECK(selected.numel() == selected.size(0), "the target leaves ", selected.sizes(),
              " of an output of ", output.sizes(),
              ": attribution is of one number per example, so give a target that selects one");
  return selected;
}

}  // namespace pinion
