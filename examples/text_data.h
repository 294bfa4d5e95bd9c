// A text as a sequence of tokens, one per byte. The vocabulary is the bytes that occur.
//
// Batches depend on (seed, step) alone, so that a resumed run draws the same batches.
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
  // InvalidArgument if the text has fewer than two different bytes.
  static absl::StatusOr<TextData> Create(std::string text);

  int64_t vocabulary() const { return static_cast<int64_t>(vocabulary_.size()); }
  // Returns the occurring bytes in ascending order: the i-th is token i.
  const std::string& vocabulary_bytes() const { return vocabulary_; }
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

  // InvalidArgument if the text is not longer than `sequence`.
  absl::Status CheckSequence(int64_t sequence) const;
  TokenBatch Sample(int64_t batch, int64_t sequence, uint64_t seed, int64_t step) const;

 private:
  std::string vocabulary_;
  std::vector<uint8_t> tokens_;
};

// Reads a file. NotFound, PermissionDenied or InvalidArgument (empty) name it.
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// Returns the King James Bible, a verse a line, as Debian's package bible-kjv prints it: public
// domain, 4.1 MB. Portable folders contain it. Elsewhere NotFound names the package if the command
// `bible` is missing.
absl::StatusOr<std::string> ReadDefaultText();

}  // namespace pinion

#endif  // PINION_EXAMPLES_TEXT_DATA_H_
