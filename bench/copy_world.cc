#include "pinion/bench/copy_world.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_block.h"

namespace pinion {
namespace {

const TestPattern& Sent() {
  static const auto* const pattern = new TestPattern(1);
  return *pattern;
}

const TestPattern& Stale() {
  static const auto* const pattern = new TestPattern(2);
  return *pattern;
}

// Keeps the alignment of allocators, with which copy kernels are fastest.
constexpr uint64_t kGapBytes = 512;

}  // namespace

absl::StatusOr<std::unique_ptr<CopyWorld>> CopyWorld::Create(std::shared_ptr<Device> device,
                                                             StreamHandle compute,
                                                             std::function<double()> now_ms) {
  std::unique_ptr<CopyWorld> world(new CopyWorld(device, compute, std::move(now_ms)));
  PINION_ASSIGN_OR_RETURN(world->allocator_, PinnedAllocator::Create({}, device->pinned_source()));
  PINION_ASSIGN_OR_RETURN(world->engine_, TransferEngine::Create({}, device));
  PINION_ASSIGN_OR_RETURN(world->raw_h2d_, device->CreateStream("raw H2D"));
  PINION_ASSIGN_OR_RETURN(world->raw_d2h_, device->CreateStream("raw D2H"));
  PINION_ASSIGN_OR_RETURN(world->idle_, device->CreateStream("idle"));
  return world;
}

CopyWorld::~CopyWorld() {
  for (const StreamHandle stream : {raw_h2d_, raw_d2h_, idle_}) {
    if (!stream.valid()) continue;
    if (absl::Status destroyed = device_->DestroyStream(stream); !destroyed.ok()) {
      PINION_LOG(kWarning) << "a stream was leaked: " << destroyed.message();
    }
  }
}

absl::StatusOr<std::shared_ptr<HostBuffer>> CopyWorld::NewHostMemory(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator_->Allocate(size_bytes));
  return std::make_shared<HostBuffer>(std::move(block));
}

absl::StatusOr<std::shared_ptr<void>> CopyWorld::NewDeviceMemory(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(void* const data, device_->Allocate(size_bytes, compute_));
  return std::shared_ptr<void>(data, [device = device_, stream = compute_](void* memory) {
    if (absl::Status freed = device->Free(memory, stream); !freed.ok()) {
      PINION_LOG(kWarning) << "device memory was leaked: " << freed.message();
    }
  });
}

absl::Status CopyWorld::SynchronizeAll() {
  PINION_RETURN_IF_ERROR(engine_->Drain(absl::Minutes(1)));
  for (const StreamHandle stream : {compute_, raw_h2d_, raw_d2h_}) {
    PINION_RETURN_IF_ERROR(device_->SynchronizeStream(stream));
  }
  return absl::OkStatus();
}

std::vector<CopyPiece> CopyLane::PiecesFor(CopyDirection to) const {
  std::vector<CopyPiece> result;
  result.reserve(pieces);
  for (uint64_t i = 0; i < pieces; ++i) {
    char* const on_device = static_cast<char*>(device.get()) + i * device_stride_bytes;
    char* const on_host = HostPiece(i);
    if (to == CopyDirection::kHostToDevice) {
      result.push_back({on_device, on_host, piece_bytes});
    } else {
      result.push_back({on_host, on_device, piece_bytes});
    }
  }
  return result;
}

CopyBatch CopyLane::Batch() const {
  CopyBatch batch(direction);
  for (uint64_t i = 0; i < pieces; ++i) {
    batch.Add(host, i * piece_bytes, static_cast<char*>(device.get()) + i * device_stride_bytes,
              piece_bytes);
  }
  return batch;
}

absl::Status CopyLane::CopyNow(CopyWorld& world, CopyDirection to) const {
  PINION_RETURN_IF_ERROR(world.SynchronizeAll());
  PINION_RETURN_IF_ERROR(world.device().CopyAsync(to, PiecesFor(to), world.raw(to)));
  return world.SynchronizeAll();
}

void CopyLane::Fill(const TestPattern& pattern) const {
  for (uint64_t i = 0; i < pieces; ++i) pattern.Fill(HostPiece(i), PatternOffset(i), piece_bytes);
}

absl::Status CopyLane::Prepare(CopyWorld& world) const {
  const bool out = direction == CopyDirection::kDeviceToHost;
  Fill(out ? Sent() : Stale());
  PINION_RETURN_IF_ERROR(CopyNow(world, CopyDirection::kHostToDevice));
  Fill(out ? Stale() : Sent());
  return absl::OkStatus();
}

absl::Status CopyLane::Verify(CopyWorld& world) const {
  if (direction == CopyDirection::kHostToDevice) {
    Fill(Stale());
    PINION_RETURN_IF_ERROR(CopyNow(world, CopyDirection::kDeviceToHost));
  }
  for (uint64_t i = 0; i < pieces; ++i) {
    const std::optional<uint64_t> wrong =
        Sent().FirstDifference(HostPiece(i), PatternOffset(i), piece_bytes);
    if (!wrong.has_value()) continue;
    return absl::DataLossError(absl::StrCat(CopyDirectionName(direction), " left a wrong byte at ",
                                            i * piece_bytes + *wrong, " of ", size_bytes()));
  }
  return absl::OkStatus();
}

absl::StatusOr<CopyLane> NewLane(CopyWorld& world, CopyDirection direction, uint64_t pieces,
                                 uint64_t piece_bytes) {
  CopyLane lane;
  lane.direction = direction;
  lane.pieces = pieces;
  lane.piece_bytes = piece_bytes;
  lane.device_stride_bytes = piece_bytes + kGapBytes;
  PINION_ASSIGN_OR_RETURN(lane.host, world.NewHostMemory(lane.size_bytes()));
  PINION_ASSIGN_OR_RETURN(lane.device, world.NewDeviceMemory(pieces * lane.device_stride_bytes));
  return lane;
}

}  // namespace pinion
