// Copies batches of many shapes for a while, and compares every byte that comes back.
//
//   batch_soak --device=cuda --seconds=120      batches, alone and concurrent with other work
//   batch_soak --device=cuda --loop             the same pieces, one call each
//   batch_soak --device=emu --seconds=2         batches on the fake runtime
//
// Drivers have hung and crashed in cudaMemcpyBatchAsync for some numbers of pieces, after many
// calls. Each shape is printed before its batches run, so that the last line names the fatal one.
// `--least_bytes`, `--most_pieces` and `--hint=false` narrow the cause down.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/device/cuda/cuda_device.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/cuda/memcpy_batch.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/device/cuda/fake_cuda.h"

ABSL_FLAG(std::string, device, "cuda", "cuda, or emu: the fake runtime on the emulated device");
ABSL_FLAG(int, seconds, 120, "for how long");
ABSL_FLAG(uint64_t, seed, 1, "of the shapes");
ABSL_FLAG(uint64_t, least_bytes, 1, "of a piece");
ABSL_FLAG(size_t, most_pieces, 16384, "of a batch");
ABSL_FLAG(bool, hint, true, "ask the driver for copy engines");
ABSL_FLAG(bool, loop, false, "one call for each piece instead of one for all");

namespace pinion {
namespace {

constexpr uint64_t kBufferBytes = 64 * kMiB;
constexpr uint64_t kOtherWorkBytes = 256 * kMiB;
constexpr int kBatchesOfAShape = 20;
constexpr absl::Duration kStuck = absl::Seconds(60);

// A batch as CudaDevice makes it: several pieces of less than 1 MiB.
struct Shape {
  size_t pieces = 2;
  uint64_t least_bytes = 1;  // of the smallest piece
  uint64_t most_bytes = 1;   // of the largest piece
  bool beside_work = false;
};

// Successful batch calls. A driver without the call refuses only the first one.
std::atomic<uint64_t> batches{0};
decltype(CudaApi::MemcpyBatchAsync) memcpy_batch = nullptr;

cudaError_t MemcpyBatchWithoutHint(void* const* dsts, const void* const* srcs, const size_t* sizes,
                                   size_t count, cudaStream_t stream) {
  return MemcpyBatchInStreamOrder(&cudaMemcpyBatchAsync, dsts, srcs, sizes, count, stream,
                                  /*hint=*/0);
}

cudaError_t MemcpyBatchWithHint(void* const* dsts, const void* const* srcs, const size_t* sizes,
                                size_t count, cudaStream_t stream) {
  return MemcpyBatchInStreamOrder(&cudaMemcpyBatchAsync, dsts, srcs, sizes, count, stream);
}

CudaApi CountingBatches(CudaApi api, bool on_gpu) {
  if (on_gpu) {
    // Ignores PINION_COPY_BATCH.
    api.MemcpyBatchAsync =
        absl::GetFlag(FLAGS_hint) ? &MemcpyBatchWithHint : &MemcpyBatchWithoutHint;
  }
  if (absl::GetFlag(FLAGS_loop)) api.MemcpyBatchAsync = nullptr;
  memcpy_batch = api.MemcpyBatchAsync;
  if (memcpy_batch == nullptr) return api;
  api.MemcpyBatchAsync = [](void* const* dsts, const void* const* srcs, const size_t* sizes,
                            size_t count, cudaStream_t stream) {
    const cudaError_t error = memcpy_batch(dsts, srcs, sizes, count, stream);
    if (error == cudaSuccess) ++batches;
    return error;
  };
  return api;
}

Shape DrawShape(std::mt19937_64& random, bool can_work) {
  Shape shape;
  shape.least_bytes = absl::GetFlag(FLAGS_least_bytes);
  shape.pieces = size_t{2} << random() % 13;
  shape.pieces += random() % shape.pieces;
  shape.pieces = std::min({shape.pieces, absl::GetFlag(FLAGS_most_pieces),
                           static_cast<size_t>(kBufferBytes / shape.least_bytes)});
  shape.most_bytes = std::max(shape.least_bytes,
                              std::min(kBufferBytes / shape.pieces, uint64_t{1} << random() % 20));
  shape.beside_work = can_work && random() % 2 == 0;
  return shape;
}

// Shuffled pieces that cover the beginning of the buffers.
std::vector<CopyPiece> DrawPieces(std::mt19937_64& random, const Shape& shape, char* dst,
                                  const char* src) {
  std::vector<CopyPiece> pieces;
  uint64_t begin = 0;
  for (size_t i = 0; i < shape.pieces; ++i) {
    const uint64_t size_bytes =
        shape.least_bytes + random() % (shape.most_bytes - shape.least_bytes + 1);
    pieces.push_back({dst + begin, src + begin, size_bytes});
    begin += size_bytes;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

class Soak {
 public:
  explicit Soak(Device& device) : device_(device) {}

  absl::Status Prepare(bool can_work) {
    PINION_ASSIGN_OR_RETURN(stream_, device_.CreateStream("soak"));
    PINION_ASSIGN_OR_RETURN(done_, device_.CreateEvent());
    PINION_ASSIGN_OR_RETURN(void* const data, device_.Allocate(kBufferBytes, stream_));
    device_data_ = static_cast<char*>(data);
    const std::shared_ptr<HostMemorySource> source = device_.pinned_source();
    PINION_ASSIGN_OR_RETURN(const HostSegment from, source->Allocate(kBufferBytes));
    PINION_ASSIGN_OR_RETURN(const HostSegment to, source->Allocate(kBufferBytes));
    from_ = static_cast<char*>(from.data);
    to_ = static_cast<char*>(to.data);
    if (can_work) {
      PINION_ASSIGN_OR_RETURN(work_stream_, device_.CreateStream("other work"));
      PINION_ASSIGN_OR_RETURN(work_data_, device_.Allocate(kOtherWorkBytes, work_stream_));
    }
    return absl::OkStatus();
  }

  // Copies in and out again, each in one batch of `shape`.
  absl::Status RoundTrip(std::mt19937_64& random, const Shape& shape) {
    if (shape.beside_work) {
      PINION_RETURN_IF_ERROR(
          CudaStatus(RealCudaApi(),
                     cudaMemsetAsync(work_data_, 0, kOtherWorkBytes,
                                     static_cast<cudaStream_t>(work_stream_.native())),
                     "cudaMemsetAsync"));
    }
    const std::mt19937_64 same_pieces = random;
    std::vector<CopyPiece> in = DrawPieces(random, shape, device_data_, from_);
    random = same_pieces;
    std::vector<CopyPiece> out = DrawPieces(random, shape, to_, device_data_);
    uint64_t size_bytes = 0;
    for (const CopyPiece& piece : in) size_bytes += piece.size_bytes;
    std::memset(from_, static_cast<int>(random() % 256), size_bytes);
    for (uint64_t i = 0; i < size_bytes; i += 1 + random() % 97) from_[i] = static_cast<char>(i);
    std::memset(to_, 0, size_bytes);

    PINION_RETURN_IF_ERROR(device_.CopyAsync(CopyDirection::kHostToDevice, in, stream_));
    PINION_RETURN_IF_ERROR(device_.CopyAsync(CopyDirection::kDeviceToHost, out, stream_));
    PINION_RETURN_IF_ERROR(device_.RecordEvent(done_, stream_));
    PINION_RETURN_IF_ERROR(device_.WaitEvent(done_, kStuck));
    if (std::memcmp(from_, to_, size_bytes) == 0) return absl::OkStatus();
    const auto wrong = std::mismatch(from_, from_ + size_bytes, to_).first - from_;
    return absl::DataLossError(absl::StrCat("byte ", wrong, " of ", size_bytes, " came back as ",
                                            int{to_[wrong]}, " instead of ", int{from_[wrong]}));
  }

 private:
  Device& device_;
  StreamHandle stream_;
  StreamHandle work_stream_;
  EventHandle done_;
  char* device_data_ = nullptr;
  void* work_data_ = nullptr;
  char* from_ = nullptr;
  char* to_ = nullptr;
};

absl::Status Run() {
  const std::string kind = absl::GetFlag(FLAGS_device);
  if (kind != "cuda" && kind != "emu") {
    return absl::InvalidArgumentError(absl::StrCat("--device=", kind, " is neither cuda nor emu"));
  }
  if (absl::GetFlag(FLAGS_least_bytes) == 0 || absl::GetFlag(FLAGS_most_pieces) == 0) {
    return absl::InvalidArgumentError("--least_bytes and --most_pieces must be at least 1");
  }
  const bool on_gpu = kind == "cuda";
  std::optional<testing::FakeCuda> fake;
  if (on_gpu) {
    PINION_RETURN_IF_ERROR(CudaDeviceCount().status());
  } else {
    fake.emplace(EmulatedOptions{});
  }
  const CudaApi api = CountingBatches(on_gpu ? RealCudaApi() : testing::FakeCuda::Api(), on_gpu);
  CudaDevice device(api, 0);
  Soak soak(device);
  PINION_RETURN_IF_ERROR(soak.Prepare(on_gpu));

  const absl::Time end = absl::Now() + absl::Seconds(absl::GetFlag(FLAGS_seconds));
  for (uint64_t seed = absl::GetFlag(FLAGS_seed); absl::Now() < end; ++seed) {
    std::mt19937_64 random(seed);
    const Shape shape = DrawShape(random, on_gpu);
    std::printf("seed %llu: %zu pieces of %llu to %llu bytes%s\n",
                static_cast<unsigned long long>(seed), shape.pieces,
                static_cast<unsigned long long>(shape.least_bytes),
                static_cast<unsigned long long>(shape.most_bytes),
                shape.beside_work ? ", beside other work" : "");
    std::fflush(stdout);
    for (int i = 0; i < kBatchesOfAShape && absl::Now() < end; ++i) {
      PINION_RETURN_IF_ERROR(soak.RoundTrip(random, shape));
    }
  }
  if (batches == 0) {
    std::printf("no batch call: the pieces were copied one by one, all bytes right\n");
  } else {
    std::printf("%llu batches, all bytes right\n", static_cast<unsigned long long>(batches));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = pinion::Run();
  if (status.ok()) return 0;
  std::fflush(stdout);
  std::fprintf(stderr, "batch_soak: error: %s\n", std::string(status.message()).c_str());
  return 1;
}
