#include "pinion/bench/copy_method.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/bench/test_pattern.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/programs/pool_options.h"

namespace pinion {
namespace {

// Sent is what the source has; Stale is what the destination has before a copy.
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

constexpr absl::Duration kTimeout = absl::Minutes(1);

// Source and destination of one direction: pieces `device_stride_bytes` apart on the device and
// adjacent on the host.
struct CopyLane {
  CopyDirection direction = CopyDirection::kDeviceToHost;
  uint64_t pieces = 1;
  uint64_t piece_bytes = 0;
  uint64_t device_stride_bytes = 0;  // at least piece_bytes
  std::shared_ptr<HostBuffer> host;
  std::shared_ptr<void> device;

  uint64_t size_bytes() const { return pieces * piece_bytes; }

  std::vector<CopyPiece> Pieces() const { return PiecesFor(direction); }

  CopyBatch Batch() const {
    CopyBatch batch(direction);
    for (uint64_t i = 0; i < pieces; ++i) {
      batch.Add(host, i * piece_bytes, DevicePiece(i), piece_bytes);
    }
    return batch;
  }

  // Writes a pattern to the source and other bytes to the destination, and waits for both.
  absl::Status Prepare(CopyWorld& world) const {
    const bool out = direction == CopyDirection::kDeviceToHost;
    Fill(out ? Sent() : Stale());
    PINION_RETURN_IF_ERROR(CopyNow(world, CopyDirection::kHostToDevice));
    Fill(out ? Stale() : Sent());
    return absl::OkStatus();
  }

  // Returns DataLoss unless the destination has the pattern. Call it when no copy is in flight.
  // Overwrites the host's bytes.
  absl::Status Verify(CopyWorld& world) const {
    if (direction == CopyDirection::kHostToDevice) {
      Fill(Stale());
      PINION_RETURN_IF_ERROR(CopyNow(world, CopyDirection::kDeviceToHost));
    }
    for (uint64_t i = 0; i < pieces; ++i) {
      const std::optional<uint64_t> wrong =
          Sent().FirstDifference(HostPiece(i), PatternOffset(i), piece_bytes);
      if (!wrong.has_value()) continue;
      return absl::DataLossError(absl::StrCat(CopyDirectionName(direction),
                                              " left a wrong byte at ", i * piece_bytes + *wrong,
                                              " of ", size_bytes()));
    }
    return absl::OkStatus();
  }

 private:
  char* HostPiece(uint64_t i) const { return static_cast<char*>(host->data()) + i * piece_bytes; }
  char* DevicePiece(uint64_t i) const {
    return static_cast<char*>(device.get()) + i * device_stride_bytes;
  }
  // Each piece begins with unique bytes.
  uint64_t PatternOffset(uint64_t i) const { return i * AlignUp(piece_bytes, 64 * kKiB); }

  void Fill(const TestPattern& pattern) const {
    for (uint64_t i = 0; i < pieces; ++i) pattern.Fill(HostPiece(i), PatternOffset(i), piece_bytes);
  }

  std::vector<CopyPiece> PiecesFor(CopyDirection to) const {
    std::vector<CopyPiece> result;
    for (uint64_t i = 0; i < pieces; ++i) {
      const bool in = to == CopyDirection::kHostToDevice;
      result.push_back(
          {in ? DevicePiece(i) : HostPiece(i), in ? HostPiece(i) : DevicePiece(i), piece_bytes});
    }
    return result;
  }

  absl::Status CopyNow(CopyWorld& world, CopyDirection to) const {
    PINION_RETURN_IF_ERROR(world.SynchronizeAll());
    PINION_RETURN_IF_ERROR(world.device().CopyAsync(to, PiecesFor(to), world.raw(to)));
    return world.SynchronizeAll();
  }
};

// Returns a lane with its own memory. Device pieces are not adjacent, so that none are merged.
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

class LaneCopies : public CopyMethod {
 public:
  LaneCopies(CopyWorld& world, std::vector<CopyLane> lanes)
      : world_(world), lanes_(std::move(lanes)) {}

  absl::Status Verify() override {
    for (const CopyLane& lane : lanes_) PINION_RETURN_IF_ERROR(lane.Verify(world_));
    return absl::OkStatus();
  }

 protected:
  CopyWorld& world_;
  const std::vector<CopyLane> lanes_;
};

class RawCopies final : public LaneCopies {
 public:
  RawCopies(CopyWorld& world, std::vector<CopyLane> lanes, EventHandle order)
      : LaneCopies(world, std::move(lanes)), order_(order) {
    for (const CopyLane& lane : lanes_) pieces_.push_back(lane.Pieces());
  }
  ~RawCopies() override { WarnOfLeak("an event", world_.device().DestroyEvent(order_)); }

  absl::Status Submit(StreamHandle after) override {
    Device& device = world_.device();
    const bool ordered = after != world_.idle();
    if (ordered) PINION_RETURN_IF_ERROR(device.RecordEvent(order_, after));
    for (size_t i = 0; i < lanes_.size(); ++i) {
      const StreamHandle stream = world_.raw(lanes_[i].direction);
      if (ordered) PINION_RETURN_IF_ERROR(device.StreamWaitEvent(stream, order_));
      for (const CopyPiece& piece : pieces_[i]) {
        PINION_RETURN_IF_ERROR(device.CopyAsync(lanes_[i].direction, {&piece, 1}, stream));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Wait() override {
    for (const CopyLane& lane : lanes_) {
      PINION_RETURN_IF_ERROR(world_.device().SynchronizeStream(world_.raw(lane.direction)));
    }
    return absl::OkStatus();
  }

 private:
  const EventHandle order_;
  std::vector<std::vector<CopyPiece>> pieces_;
};

class EngineCopies final : public LaneCopies {
 public:
  EngineCopies(CopyWorld& world, std::vector<CopyLane> lanes)
      : LaneCopies(world, std::move(lanes)), last_(lanes_.size()) {}

  absl::Status Submit(StreamHandle after) override {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      PINION_ASSIGN_OR_RETURN(last_[i], world_.engine().Submit(lanes_[i].Batch(), after));
    }
    return absl::OkStatus();
  }

  absl::Status Wait() override {
    for (const Transfer& transfer : last_) PINION_RETURN_IF_ERROR(transfer.Wait(kTimeout));
    return absl::OkStatus();
  }

 private:
  std::vector<Transfer> last_;
};

// Returns prepared lanes, each with its own memory.
absl::StatusOr<std::vector<CopyLane>> NewLanes(CopyWorld& world, const BenchCase& of) {
  std::vector<CopyLane> lanes;
  for (const BenchFlow flow : {BenchFlow::kDeviceToHost, BenchFlow::kHostToDevice}) {
    if (of.flow != flow && of.flow != BenchFlow::kDuplex) continue;
    PINION_ASSIGN_OR_RETURN(CopyLane lane,
                            NewLane(world, DirectionOf(flow), of.pieces, of.piece_bytes));
    PINION_RETURN_IF_ERROR(lane.Prepare(world));
    lanes.push_back(std::move(lane));
  }
  return lanes;
}

at::Tensor NewBytes(c10::Device device, uint64_t size_bytes) {
  return at::empty({static_cast<int64_t>(size_bytes)}, at::device(device).dtype(at::kByte));
}

// Makes the tensor's memory the lane's device memory.
void UseMemoryOf(const at::Tensor& tensor, CopyLane& lane) {
  lane.device = std::shared_ptr<void>(tensor.data_ptr(), [tensor](void*) {});
}

// One piece for many, which are views of it.
class PackedCopies final : public CopyMethod {
 public:
  // `pieces` are those to send, which always come from the compute stream.
  PackedCopies(CopyWorld& world, CopyLane lane, c10::Device device, std::vector<at::Tensor> pieces)
      : world_(world), lane_(std::move(lane)), device_(device), pieces_(std::move(pieces)) {}

  // The measured time of a fetch includes allocating the pieces and making their views; a loop's
  // pieces exist.
  absl::Status Submit(StreamHandle after) override {
    const bool out = lane_.direction == CopyDirection::kDeviceToHost;
    packed_ = out ? at::cat(pieces_) : NewBytes(device_, lane_.size_bytes());
    if (!out) UseMemoryOf(packed_, lane_);
    CopyBatch batch(lane_.direction);
    batch.Add(lane_.host, 0, packed_.data_ptr(), lane_.size_bytes());
    PINION_ASSIGN_OR_RETURN(transfer_, world_.engine().Submit(batch, world_.compute()));
    if (!out) pieces_ = packed_.view({static_cast<int64_t>(lane_.pieces), -1}).unbind();
    return absl::OkStatus();
  }
  absl::Status Wait() override { return transfer_.Wait(kTimeout); }
  absl::Status Verify() override { return lane_.Verify(world_); }

 private:
  CopyWorld& world_;
  CopyLane lane_;
  const c10::Device device_;
  std::vector<at::Tensor> pieces_;
  at::Tensor packed_;
  Transfer transfer_;
};

}  // namespace

void WarnOfLeak(const char* what, const absl::Status& freed) {
  if (!freed.ok()) PINION_LOG(kWarning) << what << " was leaked: " << freed.message();
}

absl::StatusOr<std::unique_ptr<CopyWorld>> CopyWorld::Create(std::shared_ptr<Device> device,
                                                             StreamHandle compute,
                                                             std::function<double()> now_ms) {
  std::unique_ptr<CopyWorld> world(new CopyWorld(device, compute, std::move(now_ms)));
  PINION_ASSIGN_OR_RETURN(
      world->allocator_, PinnedAllocator::Create(PoolWithoutWatermarks(), device->pinned_source()));
  PINION_ASSIGN_OR_RETURN(world->engine_, TransferEngine::Create({}, device));
  PINION_ASSIGN_OR_RETURN(world->raw_h2d_, device->CreateStream("raw H2D"));
  PINION_ASSIGN_OR_RETURN(world->raw_d2h_, device->CreateStream("raw D2H"));
  PINION_ASSIGN_OR_RETURN(world->idle_, device->CreateStream("idle"));
  return world;
}

CopyWorld::~CopyWorld() {
  for (const StreamHandle stream : {raw_h2d_, raw_d2h_, idle_}) {
    if (!stream.valid()) continue;
    WarnOfLeak("a stream", device_->DestroyStream(stream));
  }
}

absl::StatusOr<std::shared_ptr<HostBuffer>> CopyWorld::NewHostMemory(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(PinnedBlock block, allocator_->Allocate(size_bytes));
  return std::make_shared<HostBuffer>(std::move(block));
}

absl::StatusOr<std::shared_ptr<void>> CopyWorld::NewDeviceMemory(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(void* const data, device_->Allocate(size_bytes, compute_));
  return std::shared_ptr<void>(data, [device = device_, stream = compute_](void* memory) {
    WarnOfLeak("device memory", device->Free(memory, stream));
  });
}

absl::Status CopyWorld::SynchronizeAll() {
  PINION_RETURN_IF_ERROR(engine_->Drain(kTimeout));
  for (const StreamHandle stream : {compute_, raw_h2d_, raw_d2h_}) {
    PINION_RETURN_IF_ERROR(device_->SynchronizeStream(stream));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CopyMethod>> NewCopies(CopyWorld& world, const BenchCase& of) {
  PINION_ASSIGN_OR_RETURN(std::vector<CopyLane> lanes, NewLanes(world, of));
  if (of.method != BenchMethod::kRaw) {
    return std::make_unique<EngineCopies>(world, std::move(lanes));
  }
  PINION_ASSIGN_OR_RETURN(const EventHandle order, world.device().CreateEvent());
  return std::make_unique<RawCopies>(world, std::move(lanes), order);
}

absl::StatusOr<BenchTime> TimeCopies(CopyWorld& world, CopyMethod& method, uint64_t transfers) {
  BenchTime time;
  const double start_ms = world.now_ms();
  for (uint64_t i = 0; i < transfers; ++i) {
    PINION_RETURN_IF_ERROR(method.Submit(world.idle()));
  }
  time.host_ms = world.now_ms() - start_ms;
  PINION_RETURN_IF_ERROR(method.Wait());
  time.ms = world.now_ms() - start_ms;
  return time;
}

absl::StatusOr<std::unique_ptr<CopyMethod>> NewPackedCopies(CopyWorld& world, c10::Device device,
                                                            const BenchCase& of) {
  PINION_ASSIGN_OR_RETURN(CopyLane lane,
                          NewLane(world, DirectionOf(of.flow), of.pieces, of.piece_bytes));
  std::vector<at::Tensor> pieces;
  if (of.flow == BenchFlow::kDeviceToHost) {
    const at::Tensor memory = NewBytes(device, lane.pieces * lane.device_stride_bytes);
    UseMemoryOf(memory, lane);
    PINION_RETURN_IF_ERROR(lane.Prepare(world));
    pieces = memory.view({static_cast<int64_t>(lane.pieces), -1})
                 .narrow(1, 0, static_cast<int64_t>(lane.piece_bytes))
                 .unbind();
  } else {
    lane.device_stride_bytes = lane.piece_bytes;
    PINION_RETURN_IF_ERROR(lane.Prepare(world));
    lane.device = nullptr;
  }
  return std::make_unique<PackedCopies>(world, std::move(lane), device, std::move(pieces));
}

}  // namespace pinion
