// The work half of MachineCore: kernels and copies.

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/machine_core.h"

namespace pinion {

// --- Kernels ---

absl::Status MachineCore::PrepareKernel(int device, StreamHandle stream) {
  MutexLock lock(mu_);
  // The operator runs between this call and Launch, so a fault must hit here; Launch pays.
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kKernel, /*cost_us=*/0));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  const StreamPoint tail = time_.Tail(slot);
  if (effects_.Force(tail)) return absl::OkStatus();
  return absl::UnavailableError("a kernel on " + streams_[slot].name +
                                " can never run: it is behind " + time_.WhyPending(tail));
}

absl::Status MachineCore::Launch(int device, StreamHandle stream, const Kernel& kernel) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(CheckUsable(device));
  time_.Spend(options_.preset.host_call_us * 1e-3);
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  double memory_bytes = 0;
  for (const std::vector<ByteRange>* ranges : {&kernel.reads, &kernel.writes}) {
    for (const ByteRange& range : *ranges) {
      memory_bytes += static_cast<double>(range.size_bytes);
      if (const auto place = Locate(range.data, range.size_bytes); !place.ok()) {
        return absl::InvalidArgumentError("kernel " + kernel.name + ": " +
                                          std::string(place.status().message()));
      }
    }
  }
  if (kernel.memory_bytes > 0) memory_bytes = kernel.memory_bytes;

  const uint64_t number = detector_.Begin(ContextOf(slot), kernel.name);
  for (const ByteRange& range : kernel.reads) detector_.Read(range.data, range.size_bytes);
  for (const ByteRange& range : kernel.writes) detector_.Write(range.data, range.size_bytes);
  DeliverRaces();
  if (trace_ != nullptr) trace_->WillRun(number, static_cast<uint64_t>(memory_bytes));
  time_.AddKernel(slot, kernel.name, number,
                  KernelMs(options_.preset, kernel.flops, memory_bytes, kernel.type));
  return absl::OkStatus();
}

// --- Copies ---

absl::Status MachineCore::CopyAsync(int device, CopyDirection direction,
                                    absl::Span<const CopyPiece> pieces, StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kCopy, options_.preset.host_call_us));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  if (pieces.empty()) return absl::InvalidArgumentError("CopyAsync: no pieces");
  TimeModel::CopyCost cost;
  cost.device = device;
  cost.direction = direction;
  bool pageable = false;
  for (const CopyPiece& piece : pieces) {
    if (piece.size_bytes == 0) {
      return absl::InvalidArgumentError("CopyAsync: a piece has size_bytes 0");
    }
    const bool h2d = direction == CopyDirection::kHostToDevice;
    PINION_ASSIGN_OR_RETURN(const Place on_device,
                            Locate(h2d ? piece.dst : piece.src, piece.size_bytes));
    PINION_ASSIGN_OR_RETURN(const Place on_host,
                            Locate(h2d ? piece.src : piece.dst, piece.size_bytes));
    if (on_device.device != device || on_host.kind == Place::kDevice) {
      return absl::InvalidArgumentError(
          std::string("CopyAsync ") + CopyDirectionName(direction) + " on " + DeviceName(device) +
          ": one end of each piece must be its memory and the other the host's");
    }
    pageable |= on_host.kind == Place::kPageable;
    cost.size_bytes += piece.size_bytes;
  }
  cost.latency_ms = (options_.preset.link.fixed_us +
                     static_cast<double>(pieces.size() - 1) * options_.preset.link.piece_us) *
                    1e-3;
  return SubmitCopy(slot, std::string("copy ") + CopyDirectionName(direction),
                    {pieces.begin(), pieces.end()}, cost, pageable);
}

absl::Status MachineCore::Copy(int device, void* dst, const void* src, uint64_t size_bytes,
                               StreamHandle stream) {
  MutexLock lock(mu_);
  PINION_RETURN_IF_ERROR(Enter(device, DeviceCall::kCopy, options_.preset.host_call_us));
  PINION_ASSIGN_OR_RETURN(const int slot, FindSlot(device, stream));
  if (size_bytes == 0) return absl::OkStatus();
  PINION_ASSIGN_OR_RETURN(const Place to, Locate(dst, size_bytes));
  PINION_ASSIGN_OR_RETURN(const Place from, Locate(src, size_bytes));
  const CopyPiece piece = {dst, src, size_bytes};
  if (to.kind != Place::kDevice && from.kind != Place::kDevice) {
    return absl::InvalidArgumentError("Copy: neither pointer is device memory");
  }
  if (to.device == from.device) return SubmitCopyInside(slot, piece);
  TimeModel::CopyCost cost;
  cost.size_bytes = size_bytes;
  cost.latency_ms = options_.preset.link.fixed_us * 1e-3;
  const bool h2d = from.kind != Place::kDevice;
  cost.direction = h2d ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost;
  cost.device = h2d ? to.device : from.device;
  const char* name = to.kind != Place::kDevice ? "copy D2H" : h2d ? "copy H2D" : "copy P2P";
  const bool pageable = to.kind == Place::kPageable || from.kind == Place::kPageable;
  return SubmitCopy(slot, name, {piece}, cost, pageable);
}

absl::Status MachineCore::SubmitCopy(int slot, std::string name, std::vector<CopyPiece> pieces,
                                     TimeModel::CopyCost cost, bool pageable) {
  const int context = ContextOf(slot);
  const uint64_t number = detector_.Begin(context, name);
  for (const CopyPiece& piece : pieces) {
    detector_.Read(piece.src, piece.size_bytes);
    detector_.Write(piece.dst, piece.size_bytes);
  }
  DeliverRaces();
  if (trace_ != nullptr && cost.direction == CopyDirection::kDeviceToHost) {
    trace_->WillCopyOut(number, pieces);
  } else if (trace_ != nullptr) {
    trace_->WillCopyIn(number, pieces);
  }
  if (protection_ != nullptr) {
    const HostProtection::Moment moment = {context, detector_.Clock(context).Get(context)};
    const std::string what = name + " #" + std::to_string(number) + " on " + streams_[slot].name;
    for (CopyPiece& piece : pieces) piece = protection_->Close(piece, moment, what);
  }
  // Their order among each other is undefined: not the one that a careless caller expects.
  std::reverse(pieces.begin(), pieces.end());
  if (pageable) cost.rate_limit = options_.preset.link.pageable_gb_per_s * 1e6;
  const double stall_ms = faults_.StallMs();
  cost.latency_ms += stall_ms;
  const StreamPoint point = time_.AddCopy(slot, std::move(name), number, cost);
  if (stall_ms == TimeModel::kForever) {
    effects_.AddObstacle(point);
  } else {
    effects_.AddCopy(point, std::move(pieces));
  }
  AfterSubmission(point);
  return pageable ? Synchronize(slot) : absl::OkStatus();
}

absl::Status MachineCore::SubmitCopyInside(int slot, const CopyPiece& piece) {
  const uint64_t number = detector_.Begin(ContextOf(slot), "copy D2D");
  detector_.Read(piece.src, piece.size_bytes);
  detector_.Write(piece.dst, piece.size_bytes);
  DeliverRaces();
  const double traffic = 2 * static_cast<double>(piece.size_bytes);
  if (trace_ != nullptr) trace_->WillRun(number, 2 * piece.size_bytes);
  const StreamPoint point =
      time_.AddKernel(slot, "copy D2D", number,
                      KernelMs(options_.preset, /*flops=*/0, traffic, ComputeType::kFloat32));
  effects_.AddCopy(point, {piece});
  AfterSubmission(point);
  return absl::OkStatus();
}

void MachineCore::AfterSubmission(StreamPoint point) {
  if (options_.schedule == EffectSchedule::kEarly) effects_.Force(point);
}

}  // namespace pinion
