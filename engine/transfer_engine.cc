#include "pinion/engine/transfer_engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/process_exit.h"
#include "pinion/engine/coalesce.h"
#include "pinion/engine/event_pool.h"
#include "pinion/engine/guarded_device.h"
#include "pinion/engine/stream_timeline.h"

namespace pinion {
namespace {

using internal::EventPool;
using internal::EventRef;
using internal::FifoTurn;
using internal::GuardedDevice;
using internal::StreamTimeline;

// A ring that is longer than this is polled by whoever adds to it, so that events are used again
// even if nobody ever asks how far a stream has come.
constexpr size_t kPollAbovePending = 16;

class TransferEngineImpl final : public TransferEngine {
 public:
  TransferEngineImpl(const EngineOptions& options, std::shared_ptr<Device> device,
                     std::shared_ptr<GuardedDevice> guarded, std::shared_ptr<StreamTimeline> h2d,
                     std::shared_ptr<StreamTimeline> d2h)
      : options_(options),
        device_(std::move(device)),
        guarded_(std::move(guarded)),
        events_(std::make_shared<EventPool>(guarded_)),
        h2d_(std::move(h2d)),
        d2h_(std::move(d2h)) {}
  ~TransferEngineImpl() override;

  absl::StatusOr<Transfer> Submit(CopyBatch batch, StreamHandle after) override;
  absl::StatusOr<FenceTicket> Mark(StreamHandle stream) override;
  absl::Status OrderStreams(StreamHandle earlier, StreamHandle later, WaitSite site) override;
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
    return guarded_->IsCapturing(stream);
  }
  void Poll() override;
  absl::Status Drain(absl::Duration timeout) override;
  absl::Status Shutdown(absl::Duration timeout) override;
  absl::Status health() const override { return guarded_->health(); }
  Device& device() const override { return *device_; }
  EngineStats GetStats() const override;

 private:
  absl::StatusOr<uint64_t> SubmitInTurn(const CopyBatch& batch, StreamHandle after,
                                        const std::shared_ptr<StreamTimeline>& timeline);
  absl::Status WaitForRoom(uint64_t size_bytes, StreamTimeline& timeline);
  absl::Status OrderAfterBuffers(const CopyBatch& batch,
                                 const std::shared_ptr<StreamTimeline>& timeline);
  absl::Status CheckOpen() const;
  absl::Status CheckUsable(StreamHandle stream);
  // OrderStreams of streams that are known not to capture.
  absl::Status OrderUsable(StreamHandle earlier, StreamHandle later, WaitSite site);
  std::shared_ptr<StreamTimeline> ForeignTimeline(StreamHandle stream);

  const EngineOptions options_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<GuardedDevice> guarded_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<StreamTimeline> h2d_;
  const std::shared_ptr<StreamTimeline> d2h_;

  std::atomic<bool> shut_down_{false};
  Mutex mu_;
  std::map<void*, std::shared_ptr<StreamTimeline>> foreign_ ABSL_GUARDED_BY(mu_);
};

TransferEngineImpl::~TransferEngineImpl() {
  if (!health().ok()) return;
  if (absl::Status ended = Shutdown(options_.drain_timeout); !ended.ok()) {
    PINION_LOG(kError) << "an engine was destroyed with copies in flight, which keep their host "
                          "memory for good: "
                       << ended.message();
  }
}

absl::StatusOr<Transfer> TransferEngineImpl::Submit(CopyBatch batch, StreamHandle after) {
  PINION_CHECK(!batch.empty()) << "Submit of an empty batch";
  const std::shared_ptr<StreamTimeline>& timeline =
      batch.direction() == CopyDirection::kHostToDevice ? h2d_ : d2h_;
  // Before any lock: a child of fork() may find the turn taken for ever.
  PINION_RETURN_IF_ERROR(health());
  FifoTurn::Scope turn(timeline->turn());
  PINION_RETURN_IF_ERROR(CheckOpen());
  const absl::StatusOr<uint64_t> value = SubmitInTurn(batch, after, timeline);
  if (!value.ok()) {
    timeline->CountFailedSubmit();
    return value.status();
  }
  return MakeTransfer(timeline, *value);
}

// The copy is the last step that can fail and leave nothing behind; everything that its ticket
// needs is acquired before it.
absl::StatusOr<uint64_t> TransferEngineImpl::SubmitInTurn(
    const CopyBatch& batch, StreamHandle after, const std::shared_ptr<StreamTimeline>& timeline) {
  PINION_RETURN_IF_ERROR(CheckUsable(after));
  PINION_RETURN_IF_ERROR(WaitForRoom(batch.size_bytes(), *timeline));
  PINION_ASSIGN_OR_RETURN(EventRef done, events_->Acquire());
  PINION_RETURN_IF_ERROR(OrderUsable(after, timeline->stream(), WaitSite::kCopyAfterCompute));
  PINION_RETURN_IF_ERROR(OrderAfterBuffers(batch, timeline));

  const std::vector<CopyPiece> merged = CoalescePieces(batch.pieces());
  absl::Span<const CopyPiece> pieces = merged;
  absl::Status copied = guarded_->CopyAsync(batch.direction(), pieces, timeline->stream());
  if (absl::IsInvalidArgument(copied) && merged.size() < batch.pieces().size()) {
    // Neighbours may belong to two allocations that happen to touch, which no device copies in one
    // piece.
    pieces = batch.pieces();
    copied = guarded_->CopyAsync(batch.direction(), pieces, timeline->stream());
  }

  uint64_t value = 0;
  if (copied.ok()) {
    value = timeline->NumberCopy(std::move(done), batch.size_bytes(), pieces.size());
  } else if (!health().ok()) {
    value = timeline->NumberLostCopy(batch.size_bytes(), pieces.size());
  } else {
    return copied;
  }
  for (const std::shared_ptr<HostBuffer>& buffer : batch.buffers()) {
    buffer->AddTicket({timeline, value});
  }
  if (timeline->Completed() < value) PINION_RETURN_IF_ERROR(health());
  return value;
}

absl::Status TransferEngineImpl::WaitForRoom(uint64_t size_bytes, StreamTimeline& timeline) {
  if (timeline.pending_count() > kPollAbovePending) timeline.Poll();
  const uint64_t allowed_bytes =
      options_.max_in_flight_bytes - std::min(size_bytes, options_.max_in_flight_bytes);
  if (timeline.NumberToWaitFor(allowed_bytes) == 0) return absl::OkStatus();
  timeline.Poll();
  const uint64_t value = timeline.NumberToWaitFor(allowed_bytes);
  if (value == 0 || !WaitSiteEnabled(WaitSite::kFlowControl)) return absl::OkStatus();
  timeline.CountFlowControlWait();
  return timeline.Wait(value, options_.drain_timeout);
}

// One wait per timeline that has touched any of the buffers, for its latest number.
absl::Status TransferEngineImpl::OrderAfterBuffers(
    const CopyBatch& batch, const std::shared_ptr<StreamTimeline>& timeline) {
  if (!WaitSiteEnabled(WaitSite::kCopyAfterHostBuffer)) return absl::OkStatus();
  std::vector<FenceTicket> latest;
  for (const std::shared_ptr<HostBuffer>& buffer : batch.buffers()) {
    for (const FenceTicket& ticket : buffer->tickets()) {
      if (ticket.timeline == timeline || ticket.IsDone()) continue;
      const auto known = std::find_if(latest.begin(), latest.end(), [&](const FenceTicket& other) {
        return other.timeline == ticket.timeline;
      });
      if (known == latest.end()) {
        latest.push_back(ticket);
      } else {
        known->value = std::max(known->value, ticket.value);
      }
    }
  }
  for (const FenceTicket& ticket : latest) {
    auto* other = dynamic_cast<StreamTimeline*>(ticket.timeline.get());
    PINION_CHECK(other != nullptr) << "a host buffer has a ticket that no engine has issued";
    PINION_RETURN_IF_ERROR(other->OrderAfter(ticket.value, *guarded_, timeline->stream()));
  }
  return absl::OkStatus();
}

absl::StatusOr<FenceTicket> TransferEngineImpl::Mark(StreamHandle stream) {
  PINION_RETURN_IF_ERROR(CheckOpen());
  PINION_RETURN_IF_ERROR(CheckUsable(stream));
  const std::shared_ptr<StreamTimeline> timeline = ForeignTimeline(stream);
  if (timeline->pending_count() > kPollAbovePending) timeline->Poll();
  PINION_ASSIGN_OR_RETURN(EventRef event, events_->Acquire());
  FifoTurn::Scope turn(timeline->turn());
  PINION_ASSIGN_OR_RETURN(const uint64_t value, timeline->Mark(std::move(event)));
  return FenceTicket{timeline, value};
}

absl::Status TransferEngineImpl::OrderStreams(StreamHandle earlier, StreamHandle later,
                                              WaitSite site) {
  PINION_RETURN_IF_ERROR(CheckOpen());
  if (earlier == later || !WaitSiteEnabled(site)) return absl::OkStatus();
  PINION_RETURN_IF_ERROR(CheckUsable(earlier));
  PINION_RETURN_IF_ERROR(CheckUsable(later));
  return OrderUsable(earlier, later, site);
}

absl::Status TransferEngineImpl::OrderUsable(StreamHandle earlier, StreamHandle later,
                                             WaitSite site) {
  if (earlier == later || !WaitSiteEnabled(site)) return absl::OkStatus();
  PINION_ASSIGN_OR_RETURN(const EventRef event, events_->Acquire());
  PINION_RETURN_IF_ERROR(guarded_->RecordEvent(event->handle(), earlier));
  return guarded_->StreamWaitEvent(later, event->handle());
}

void TransferEngineImpl::Poll() {
  h2d_->Poll();
  d2h_->Poll();
}

absl::Status TransferEngineImpl::Drain(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (StreamTimeline* timeline : {d2h_.get(), h2d_.get()}) {
    const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
    PINION_RETURN_IF_ERROR(timeline->Wait(timeline->last_number(), left));
  }
  return absl::OkStatus();
}

absl::Status TransferEngineImpl::Shutdown(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  shut_down_.store(true, std::memory_order_release);
  PINION_RETURN_IF_ERROR(Drain(timeout));
  // A submission that was under way has been let through by now, or it is refused.
  for (StreamTimeline* timeline : {d2h_.get(), h2d_.get()}) FifoTurn::Scope turn(timeline->turn());
  return Drain(std::max(deadline - absl::Now(), absl::ZeroDuration()));
}

absl::Status TransferEngineImpl::CheckOpen() const {
  if (!shut_down_.load(std::memory_order_acquire)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(device_->name(), ": the transfer engine was shut down; create another one"));
}

EngineStats TransferEngineImpl::GetStats() const {
  EngineStats stats;
  stats.h2d = h2d_->GetStats();
  stats.d2h = d2h_->GetStats();
  stats.transient_retries = guarded_->transient_retries();
  stats.event_waits = guarded_->event_waits();
  stats.event_waits_skipped = guarded_->event_waits_skipped();
  return stats;
}

// A copy stream that waited for a capturing stream would be drawn into the capture.
absl::Status TransferEngineImpl::CheckUsable(StreamHandle stream) {
  PINION_ASSIGN_OR_RETURN(const bool capturing, guarded_->IsCapturing(stream));
  if (!capturing) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(device_->name(), ": a stream captures a graph; transfers can follow it, and it ",
                   "can wait for other streams, only after the capture has ended"));
}

std::shared_ptr<StreamTimeline> TransferEngineImpl::ForeignTimeline(StreamHandle stream) {
  MutexLock lock(mu_);
  std::shared_ptr<StreamTimeline>& timeline = foreign_[stream.native()];
  if (timeline == nullptr) {
    timeline =
        std::make_shared<StreamTimeline>(guarded_, stream, StreamTimeline::Ownership::kForeign,
                                         absl::StrCat("a foreign stream on ", device_->name()));
  }
  return timeline;
}

absl::StatusOr<std::shared_ptr<StreamTimeline>> CreateTimeline(
    const std::shared_ptr<GuardedDevice>& device, CopyDirection direction) {
  const std::string direction_name = CopyDirectionName(direction);
  PINION_ASSIGN_OR_RETURN(const StreamHandle stream,
                          device->CreateStream(absl::StrCat("pinion ", direction_name)));
  return std::make_shared<StreamTimeline>(
      device, stream, StreamTimeline::Ownership::kOwned,
      absl::StrCat(direction_name, " on ", device->device().name()));
}

}  // namespace

absl::Status EngineOptions::Validate() const {
  if (max_in_flight_bytes == 0) {
    return absl::InvalidArgumentError(
        "EngineOptions::max_in_flight_bytes is 0; it must be positive, or nothing could be "
        "submitted");
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

absl::Status Transfer::WaitOn(StreamHandle stream, WaitSite site) const {
  if (timeline_ == nullptr || !WaitSiteEnabled(site)) return absl::OkStatus();
  return timeline_->OrderAfter(value_, stream);
}

absl::Status Transfer::Wait(absl::Duration timeout) const {
  return timeline_ == nullptr ? absl::OkStatus() : timeline_->Wait(value_, timeout);
}

absl::StatusOr<std::shared_ptr<TransferEngine>> TransferEngine::Create(
    const EngineOptions& options, std::shared_ptr<Device> device) {
  PINION_RETURN_IF_ERROR(options.Validate());
  WatchProcess();
  auto guarded = std::make_shared<GuardedDevice>(device, options.transient_retries);
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<StreamTimeline> h2d,
                          CreateTimeline(guarded, CopyDirection::kHostToDevice));
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<StreamTimeline> d2h,
                          CreateTimeline(guarded, CopyDirection::kDeviceToHost));
  return std::make_shared<TransferEngineImpl>(options, std::move(device), std::move(guarded),
                                              std::move(h2d), std::move(d2h));
}

Transfer TransferEngine::MakeTransfer(std::shared_ptr<StreamTimeline> timeline, uint64_t value) {
  Transfer transfer;
  transfer.timeline_ = std::move(timeline);
  transfer.value_ = value;
  return transfer;
}

}  // namespace pinion
