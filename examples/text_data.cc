#include "pinion/examples/text_data.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/programs/shared_data.h"

namespace pinion {
namespace {

constexpr char kBibleCommand[] = "echo 'gen1:1-rev22:21' | bible -f 2>/dev/null";
constexpr char kBibleRemedy[] =
    "install it (apt-get install bible-kjv bible-kjv-text) or name a text with --text=FILE";
constexpr size_t kBibleLeastBytes = 4'000'000;

// Returns "And God said, ..." of "Ge1:3 And God said, ..."; empty for the banner and the prompt.
absl::string_view Verse(absl::string_view line) {
  const size_t space = line.find(' ');
  if (space == absl::string_view::npos) return "";
  const absl::string_view reference = line.substr(0, space);
  const size_t colon = reference.find(':');
  if (colon == absl::string_view::npos || colon == 0 || colon + 1 == reference.size()) return "";
  if (reference.find_first_not_of("0123456789", colon + 1) != absl::string_view::npos) return "";
  return line.substr(space + 1);
}

}  // namespace

absl::StatusOr<TextData> TextData::Create(std::string text) {
  std::array<bool, 256> occurs{};
  for (const char c : text) occurs[static_cast<uint8_t>(c)] = true;
  TextData data;
  std::array<uint8_t, 256> token{};
  for (int byte = 0; byte < 256; ++byte) {
    if (!occurs[byte]) continue;
    token[byte] = static_cast<uint8_t>(data.vocabulary_.size());
    data.vocabulary_.push_back(static_cast<char>(byte));
  }
  if (data.vocabulary_.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text has ", text.size(), " bytes and ", data.vocabulary_.size(),
                     " different ones; there is nothing to learn from fewer than 2"));
  }
  data.tokens_.reserve(text.size());
  for (const char c : text) data.tokens_.push_back(token[static_cast<uint8_t>(c)]);
  return data;
}

absl::Status TextData::CheckSequence(int64_t sequence) const {
  if (size() > sequence) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the text has ", size(), " bytes; --sequence=", sequence, " needs at least ", sequence + 1));
}

TokenBatch TextData::Sample(int64_t batch, int64_t sequence, uint64_t seed, int64_t step) const {
  // Words instead of a sum: neighbouring seeds must not share batches.
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)};
  std::mt19937_64 random(words);
  TokenBatch result;
  result.inputs.reserve(batch * sequence);
  result.targets.reserve(batch * sequence);
  for (int64_t row = 0; row < batch; ++row) {
    // Distributions of the standard library differ between libraries.
    const int64_t start = static_cast<int64_t>(random() % (tokens_.size() - sequence));
    for (int64_t i = start; i < start + sequence; ++i) {
      result.inputs.push_back(tokens_[i]);
      result.targets.push_back(tokens_[i + 1]);
    }
  }
  return result;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a directory, not a text"));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("cannot read ", path, ": ", std::strerror(errno)));
  }
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) return absl::DataLossError(absl::StrCat("reading ", path, " failed"));
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " is empty"));
  return text;
}

namespace {

// Returns the output of `bible`: from the program's data file, else from the command.
absl::StatusOr<std::string> PrintedBible() {
  const std::string path = SharedDataPath("king_james_bible.txt");
  if (!path.empty()) return ReadTextFile(path);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(kBibleCommand, "r"), pclose);
  if (pipe == nullptr) {
    return absl::InternalError(absl::StrCat("cannot start a shell: ", std::strerror(errno)));
  }
  std::string printed;
  std::vector<char> buffer(1 << 16);
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe.get())) {
    printed.append(buffer.data(), count);
  }
  return printed;
}

}  // namespace

absl::StatusOr<std::string> ReadDefaultText() {
  PINION_ASSIGN_OR_RETURN(const std::string printed, PrintedBible());
  std::string text;
  text.reserve(printed.size());
  for (const absl::string_view line : absl::StrSplit(printed, '\n')) {
    const absl::string_view verse = Verse(line);
    if (!verse.empty()) absl::StrAppend(&text, verse, "\n");
  }
  if (text.size() < kBibleLeastBytes) {
    return absl::NotFoundError(
        absl::StrCat("the command `bible` printed ", text.size(),
                     " bytes of text instead of 4.1 million: ", kBibleRemedy));
  }
  return text;
}

}  // namespace pinion
