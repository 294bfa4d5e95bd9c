#include "pinion/examples/checkpoint.h"

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/examples/text_data.h"
#include "pinion/programs/output_file.h"

namespace pinion {
namespace {

constexpr char kSteps[] = "pinion.steps";
constexpr char kRun[] = "pinion.run";
constexpr char kChecksum[] = "pinion.checksum";

absl::Status NotACheckpoint(const std::string& path, const std::string& why) {
  return absl::DataLossError(
      absl::StrCat(path, " is not a whole checkpoint of this program: ", why));
}

// LibTorch's reader does not detect flipped bits in a tensor.
int64_t Checksum(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<at::Tensor> in_order;
  for (const auto& [name, tensor] : tensors) in_order.push_back(tensor);
  return static_cast<int64_t>(TensorFingerprint(in_order));
}

}  // namespace

// FNV-1a over words of eight bytes.
uint64_t TensorFingerprint(at::TensorList tensors) {
  uint64_t hash = 14695981039346656037u;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor on_host = tensor.cpu().contiguous();
    const char* data = static_cast<const char*>(on_host.const_data_ptr());
    for (size_t left = on_host.nbytes(); left > 0;) {
      uint64_t word = 0;
      const size_t size = std::min(left, sizeof(word));
      std::memcpy(&word, data, size);
      hash = (hash ^ word) * 1099511628211u;
      data += size;
      left -= size;
    }
  }
  return hash;
}

absl::Status WriteCheckpoint(const std::string& path, const Checkpoint& checkpoint) {
  std::map<std::string, at::Tensor> entries = checkpoint.tensors;
  entries.emplace(kSteps, at::scalar_tensor(checkpoint.steps, at::kLong));
  entries.emplace(
      kRun, at::tensor(at::ArrayRef<uint8_t>(
                reinterpret_cast<const uint8_t*>(checkpoint.run.data()), checkpoint.run.size())));
  entries.emplace(kChecksum, at::scalar_tensor(Checksum(entries), at::kLong));
  c10::Dict<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : entries) tensors.insert(name, tensor);
  const std::vector<char> bytes = torch::jit::pickle_save(tensors);
  return WriteAtomically(path, std::string(bytes.begin(), bytes.end()));
}

absl::StatusOr<Checkpoint> ReadCheckpoint(const std::string& path) {
  PINION_ASSIGN_OR_RETURN(const std::string bytes, ReadTextFile(path));
  Checkpoint checkpoint;
  try {
    const c10::IValue value =
        torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
    for (const auto& entry : value.toGenericDict()) {
      checkpoint.tensors.emplace(entry.key().toStringRef(), entry.value().toTensor());
    }
    const auto checksum = checkpoint.tensors.extract(kChecksum);
    if (checksum.empty()) return NotACheckpoint(path, "it has other contents");
    if (checksum.mapped().item<int64_t>() != Checksum(checkpoint.tensors)) {
      return NotACheckpoint(path, "its checksum does not fit its contents");
    }
    const auto steps = checkpoint.tensors.extract(kSteps);
    const auto run = checkpoint.tensors.extract(kRun);
    if (steps.empty() || run.empty()) return NotACheckpoint(path, "it has other contents");
    checkpoint.steps = steps.mapped().item<int64_t>();
    checkpoint.run.assign(reinterpret_cast<const char*>(run.mapped().const_data_ptr<uint8_t>()),
                          run.mapped().numel());
  } catch (const c10::Error& error) {
    // The first sentence is followed by LibTorch's advice and stack.
    const std::string what = error.what_without_backtrace();
    return NotACheckpoint(path, what.substr(0, what.find_first_of(".\n")));
  } catch (const std::exception& error) {
    return NotACheckpoint(path, error.what());
  }
  return checkpoint;
}

}  // namespace pinion
