// A text as a sequence of tokens, one per byte, over the bytes that occur in it.
//
// Batches are drawn at random from (seed, step) alone, so a resumed run sees the batches that the
// uninterrupted one would have seen.
//
// Thread safety: immutable after creation.

#ifndef PINION_EXAMPLES_TEXT_DATA_H_
#define PINION_EXAMPLES_TEXT_DATA_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pinion {

struct TokenBatch {
  std::vector<int64_t> inputs;   // batch x sequence, row by row
  std::vector<int64_t> targets;  // the token after each input
};

class TextData {
 public:
  // InvalidArgument when the text has fewer than two different bytes.
  static absl::StatusOr<TextData> Create(std::string text);

  int64_t vocabulary() const { return static_cast<int64_t>(vocabulary_.size()); }
  // The bytes that occur, in ascending order: the i-th is token i.
  const std::string& vocabulary_bytes() const { return vocabulary_; }
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

  // InvalidArgument when the text is not longer than `sequence`.
  absl::Status CheckSequence(int64_t sequence) const;
  TokenBatch Sample(int64_t batch, int64_t sequence, uint64_t seed, int64_t step) const;

 private:
  std::string vocabulary_;
  std::vector<uint8_t> tokens_;
};

// The whole file. NotFound, PermissionDenied or InvalidArgument (empty) name it.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// The King James Bible, a verse a line, as Debian's package bible-kjv prints it: public domain,
// 4.1 MB. A program in a portable folder brings it along. Elsewhere NotFound names the package when
// the command `bible` is missing.
absl::StatusOr<std::string> ReadDefaultText();

}  // namespace pinion

#endif  // PINION_EXAMPLES_TEXT_DATA_H_
