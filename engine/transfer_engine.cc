#include "pinion/engine/transfer_engine.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/process_exit.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/copy_lane.h"
#include "pinion/engine/link/calibrate_link.h"
#include "pinion/engine/stream/event_pool.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/engine/stream/stream_timeline.h"
#include "pinion/engine/stream/transfer_timer.h"

namespace pinion {
namespace {

using internal::CopyLane;
using internal::Deadline;
using internal::EventPool;
using internal::EventRef;
using internal::FifoTurn;
using internal::GuardedDevice;
using internal::StreamTimeline;
using internal::TransferTimer;

// A copy engine serves one copy at a time, so other copies (the bytes of an .item(), the next
// inputs) queue behind a chunk. Half a millisecond delays them little, and dwarfs a copy's fixed 3
// us.
constexpr double kChunkMs = 0.5;
constexpr uint64_t kLeastChunkBytes = 16 * kMiB;
constexpr uint64_t kChunkBytesOfUnknownLink = 64 * kMiB;

// A program may keep creating and destroying streams: a data loader has some for each epoch.
constexpr size_t kManyForeignStreams = 64;

uint64_t ChunkBytes(const DeviceInfo& device, uint64_t max_chunk_bytes) {
  const uint64_t chunk_bytes = device.rated_gb_per_s > 0
                                   ? static_cast<uint64_t>(device.rated_gb_per_s * 1e6 * kChunkMs)
                                   : kChunkBytesOfUnknownLink;
  return std::min(max_chunk_bytes, std::max(kLeastChunkBytes, chunk_bytes));
}

class TransferEngineImpl final : public TransferEngine {
 public:
  TransferEngineImpl(const EngineOptions& options, std::shared_ptr<GuardedDevice> device,
                     std::shared_ptr<EventPool> events, std::unique_ptr<CopyLane> h2d,
                     std::unique_ptr<CopyLane> d2h, std::shared_ptr<TransferTimer> timer)
      : options_(options),
        device_(std::move(device)),
        events_(std::move(events)),
        h2d_(std::move(h2d)),
        d2h_(std::move(d2h)),
        timer_(std::move(timer)) {}
  ~TransferEngineImpl() override;

  absl::StatusOr<Transfer> Submit(const CopyBatch& batch, StreamHandle after) override;
  absl::StatusOr<FenceTicket> Mark(StreamHandle stream) override;
  absl::Status OrderStreams(StreamHandle earlier, StreamHandle later,
                            const WaitSite& site) override;
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    return device_->IsCapturing(stream);
  }
  absl::StatusOr<LinkCalibration> Calibrate(PinnedAllocator& allocator) override;
  void Poll() override;
  absl::Status Drain(absl::Duration timeout) override;
  absl::Status Shutdown(absl::Duration timeout) override;
  absl::Status health() const override { return device_->health(); }
  Device& device() const override { return device_->device(); }
  EngineStats GetStats() const override;

 private:
  std::shared_ptr<StreamTimeline> ForeignTimeline(StreamHandle stream);
  // Drops the timelines of foreign streams that have no pending work and no other owner.
  void ForgetIdleStreams();

  const EngineOptions options_;
  const std::shared_ptr<GuardedDevice> device_;
  const std::shared_ptr<EventPool> events_;
  const std::unique_ptr<CopyLane> h2d_;
  const std::unique_ptr<CopyLane> d2h_;
  const std::shared_ptr<TransferTimer> timer_;  // null: nothing is timed

  FifoTurn calibrating_;
  std::optional<LinkCalibration> link_;  // used within a turn of calibrating_

  Mutex mu_;
  std::map<void*, std::shared_ptr<StreamTimeline>> foreign_ ABSL_GUARDED_BY(mu_);
};

TransferEngineImpl::~TransferEngineImpl() {
  if (!health().ok()) return;
  if (absl::Status ended = Shutdown(options_.drain_timeout); !ended.ok()) {
    PINION_LOG(kError) << "an engine was destroyed with copies in flight; their host memory is "
                          "leaked: "
                       << ended.message();
  }
}

absl::StatusOr<Transfer> TransferEngineImpl::Submit(const CopyBatch& batch, StreamHandle after) {
  if (batch.empty()) {
    return absl::InvalidArgumentError("Submit of an empty batch: add a piece, or do not submit it");
  }
  // Before a sink's lock: a child of fork() may find it taken for ever.
  PINION_RETURN_IF_ERROR(health());
  const ScopedRange range(options_.trace.get(), "pinion.submit", batch.size_bytes());
  CopyLane& lane = batch.direction() == CopyDirection::kHostToDevice ? *h2d_ : *d2h_;
  PINION_ASSIGN_OR_RETURN(const uint64_t value, lane.Submit(batch, after));
  if (timer_ != nullptr) timer_->CollectIfMany();
  return Transfer(lane.timeline_of_thread(), value);
}

absl::StatusOr<FenceTicket> TransferEngineImpl::Mark(StreamHandle stream) {
  PINION_RETURN_IF_ERROR(device_->accepting());
  PINION_RETURN_IF_ERROR(device_->CheckNotCapturing(stream));
  const std::shared_ptr<StreamTimeline> timeline = ForeignTimeline(stream);
  timeline->PollIfMany();
  PINION_ASSIGN_OR_RETURN(EventRef event, events_->Acquire());
  FifoTurn::Scope turn(timeline->turn());
  PINION_ASSIGN_OR_RETURN(const uint64_t value, timeline->Mark(std::move(event)));
  return FenceTicket{timeline, value};
}

absl::Status TransferEngineImpl::OrderStreams(StreamHandle earlier, StreamHandle later,
                                              const WaitSite& site) {
  PINION_RETURN_IF_ERROR(device_->accepting());
  // An empty handle is left for the device to refuse.
  if ((earlier == later && earlier.valid()) || !site.enabled()) return absl::OkStatus();
  PINION_RETURN_IF_ERROR(device_->CheckNotCapturing(earlier));
  PINION_RETURN_IF_ERROR(device_->CheckNotCapturing(later));
  PINION_ASSIGN_OR_RETURN(const EventRef event, events_->Acquire());
  return events_->Order(event, earlier, later);
}

absl::StatusOr<LinkCalibration> TransferEngineImpl::Calibrate(PinnedAllocator& allocator) {
  // Before the turn: a child of fork() may find it taken for ever.
  PINION_RETURN_IF_ERROR(health());
  const FifoTurn::Scope turn(calibrating_);
  if (link_.has_value()) return *link_;
  PINION_RETURN_IF_ERROR(device_->accepting());
  absl::StatusOr<LinkCalibration> link = CalibrateLink(device(), allocator);
  PINION_RETURN_IF_ERROR(device_->PoisonIfSticky("calibration", link.status()));
  if (link.ok()) link_ = *link;
  return link;
}

void TransferEngineImpl::Poll() {
  h2d_->timeline()->Poll();
  d2h_->timeline()->Poll();
  if (timer_ != nullptr) timer_->Collect();
}

absl::Status TransferEngineImpl::Drain(absl::Duration timeout) {
  const Deadline deadline(timeout);
  for (const CopyLane* lane : {d2h_.get(), h2d_.get()}) {
    StreamTimeline& timeline = *lane->timeline();
    PINION_RETURN_IF_ERROR(timeline.Wait(timeline.last_number(), deadline.Left()));
  }
  if (timer_ != nullptr) timer_->Collect();
  return absl::OkStatus();
}

absl::Status TransferEngineImpl::Shutdown(absl::Duration timeout) {
  const Deadline deadline(timeout);
  device_->StopAccepting();
  PINION_RETURN_IF_ERROR(Drain(timeout));
  // With nothing in flight, no device call within a turn blocks.
  d2h_->FinishTurns();
  h2d_->FinishTurns();
  return Drain(deadline.Left());
}

EngineStats TransferEngineImpl::GetStats() const {
  EngineStats stats;
  stats.h2d = h2d_->timeline()->GetStats();
  stats.d2h = d2h_->timeline()->GetStats();
  stats.transient_retries = device_->transient_retries();
  stats.event_waits = device_->event_waits();
  stats.event_waits_skipped = device_->event_waits_skipped();
  if (timer_ != nullptr) {
    timer_->AddTo(CopyDirection::kHostToDevice, stats.h2d);
    timer_->AddTo(CopyDirection::kDeviceToHost, stats.d2h);
  }
  return stats;
}

std::shared_ptr<StreamTimeline> TransferEngineImpl::ForeignTimeline(StreamHandle stream) {
  bool is_one_of_many = false;
  {
    MutexLock lock(mu_);
    const auto known = foreign_.find(stream.native());
    if (known != foreign_.end()) return known->second;
    is_one_of_many = foreign_.size() >= kManyForeignStreams;
  }
  if (is_one_of_many) ForgetIdleStreams();
  MutexLock lock(mu_);
  std::shared_ptr<StreamTimeline>& timeline = foreign_[stream.native()];
  if (timeline == nullptr) {
    timeline =
        std::make_shared<StreamTimeline>(device_, stream, StreamTimeline::Ownership::kForeign,
                                         absl::StrCat("a foreign stream on ", device().name()));
  }
  return timeline;
}

void TransferEngineImpl::ForgetIdleStreams() {
  std::map<void*, std::shared_ptr<StreamTimeline>> all;  // released after the lock
  {
    MutexLock lock(mu_);
    all = foreign_;
  }
  for (const auto& [stream, timeline] : all) timeline->Poll();
  MutexLock lock(mu_);
  for (const auto& [stream, timeline] : all) {
    // Only the two maps own it.
    if (timeline.use_count() == 2 && timeline->pending_count() == 0) foreign_.erase(stream);
  }
}

}  // namespace

absl::Status EngineOptions::Validate() const {
  if (max_chunk_bytes == 0) {
    return absl::InvalidArgumentError(
        "EngineOptions::max_chunk_bytes is 0; it must be positive, or nothing could be copied");
  }
  if (drain_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat("EngineOptions::drain_timeout is ",
                                                   absl::FormatDuration(drain_timeout),
                                                   "; it must be positive"));
  }
  if (transient_retries < 0) {
    return absl::InvalidArgumentError(absl::StrCat("EngineOptions::transient_retries is ",
                                                   transient_retries, "; it must be at least 0"));
  }
  return absl::OkStatus();
}

FenceTicket Transfer::ticket() const { return {timeline_, value_}; }

bool Transfer::IsDone() const { return timeline_ == nullptr || timeline_->Completed() >= value_; }

absl::Status Transfer::WaitOn(StreamHandle stream, const WaitSite& site) const {
  if (timeline_ == nullptr || !site.enabled()) return absl::OkStatus();
  return timeline_->OrderAfter(value_, stream, site);
}

absl::Status Transfer::Wait(absl::Duration timeout) const {
  return timeline_ == nullptr ? absl::OkStatus() : timeline_->Wait(value_, timeout);
}

absl::StatusOr<std::shared_ptr<TransferEngine>> TransferEngine::Create(
    const EngineOptions& options, std::shared_ptr<Device> device) {
  PINION_RETURN_IF_ERROR(options.Validate());
  if (device == nullptr)
    return absl::InvalidArgumentError(
        "TransferEngine::Create: device is null; pass one that DeviceBackend::Open returned");
  WatchProcess();
  auto guarded = std::make_shared<GuardedDevice>(std::move(device), options.transient_retries);
  auto events = std::make_shared<EventPool>(guarded);
  const uint64_t chunk_bytes = ChunkBytes(guarded->device().info(), options.max_chunk_bytes);
  PINION_ASSIGN_OR_RETURN(
      std::unique_ptr<CopyLane> h2d,
      CopyLane::Create(chunk_bytes, CopyDirection::kHostToDevice, guarded, events));
  PINION_ASSIGN_OR_RETURN(
      std::unique_ptr<CopyLane> d2h,
      CopyLane::Create(chunk_bytes, CopyDirection::kDeviceToHost, guarded, events));
  std::shared_ptr<TransferTimer> timer;
  if (options.time_transfers || (options.trace != nullptr && options.trace->WantsTransfers())) {
    PINION_ASSIGN_OR_RETURN(
        timer, TransferTimer::Create(guarded, h2d->timeline()->stream(), options.trace));
    h2d->SetTimer(timer);
    d2h->SetTimer(timer);
  }
  return std::make_shared<TransferEngineImpl>(options, std::move(guarded), std::move(events),
                                              std::move(h2d), std::move(d2h), std::move(timer));
}

}  // namespace pinion
