#include "pinion/engine/copy_lane.h"

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/engine/copy_batch.h"

namespace pinion::internal {
namespace {

constexpr uint64_t kCutAlignmentBytes = 4 * kKiB;

bool ByDestination(const CopyPiece& a, const CopyPiece& b) {
  return std::less<const void*>()(a.dst, b.dst);
}

// Returns where to end a cut, in bytes from the beginning of its piece.
uint64_t AlignedCut(uint64_t end_bytes) { return end_bytes - end_bytes % kCutAlignmentBytes; }

const void* End(const void* data, uint64_t size_bytes) {
  return static_cast<const char*>(data) + size_bytes;
}

CopyPiece PartOf(const CopyPiece& piece, uint64_t begin_bytes, uint64_t size_bytes) {
  return {static_cast<char*>(piece.dst) + begin_bytes,
          static_cast<const char*>(piece.src) + begin_bytes, size_bytes};
}

CopyPieces PiecesOf(const CopyBatch& batch) {
  if (batch.pieces().size() == 1) return {batch.pieces().front()};
  HostBlocks blocks;
  for (const std::shared_ptr<HostBuffer>& buffer : batch.buffers()) {
    blocks.push_back(buffer->data());
  }
  return CoalescePieces(batch.pieces(), std::move(blocks));
}

}  // namespace

CopyPieces SortPieces(absl::Span<const CopyPiece> pieces) {
  CopyPieces sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(), ByDestination);
  return sorted;
}

CopyPieces CoalescePieces(absl::Span<const CopyPiece> pieces, HostBlocks host_blocks) {
  CopyPieces merged = SortPieces(pieces);
  std::sort(host_blocks.begin(), host_blocks.end(), std::less<>());
  const auto begins_block = [&host_blocks](const void* data) {
    return std::binary_search(host_blocks.begin(), host_blocks.end(), data, std::less<>());
  };
  size_t last = 0;
  for (size_t i = 1; i < merged.size(); ++i) {
    const CopyPiece piece = merged[i];
    if (End(merged[last].dst, merged[last].size_bytes) == piece.dst &&
        End(merged[last].src, merged[last].size_bytes) == piece.src && !begins_block(piece.dst) &&
        !begins_block(piece.src)) {
      merged[last].size_bytes += piece.size_bytes;
    } else {
      merged[++last] = piece;
    }
  }
  if (!merged.empty()) merged.resize(last + 1);
  return merged;
}

CopyPieces SlicePieces(absl::Span<const CopyPiece> pieces, uint64_t begin_bytes,
                       uint64_t max_bytes) {
  PINION_CHECK(begin_bytes < TotalBytes(pieces) && max_bytes > 0) << "an empty slice";
  CopyPieces slice;
  for (const CopyPiece& piece : pieces) {
    if (piece.size_bytes <= begin_bytes) {
      begin_bytes -= piece.size_bytes;
      continue;
    }
    const uint64_t size_bytes = piece.size_bytes - begin_bytes;
    if (size_bytes > max_bytes) {
      const uint64_t aligned_end = AlignedCut(begin_bytes + max_bytes);
      if (aligned_end > begin_bytes) {
        slice.push_back(PartOf(piece, begin_bytes, aligned_end - begin_bytes));
      } else if (slice.empty()) {
        slice.push_back(PartOf(piece, begin_bytes, max_bytes));
      }
      break;
    }
    slice.push_back(PartOf(piece, begin_bytes, size_bytes));
    max_bytes -= size_bytes;
    begin_bytes = 0;
  }
  return slice;
}

uint64_t TotalBytes(absl::Span<const CopyPiece> pieces) {
  uint64_t total = 0;
  for (const CopyPiece& piece : pieces) total += piece.size_bytes;
  return total;
}

struct CopyLane::Progress {
  Progress(const CopyBatch& the_batch, StreamHandle stream)
      : batch(the_batch), after(stream), pieces(PiecesOf(batch)) {}

  bool merged() const { return pieces.size() < batch.pieces().size(); }

  void AddSent(absl::Span<const CopyPiece> sent) {
    const uint64_t size_bytes = TotalBytes(sent);
    unnumbered.size_bytes += size_bytes;
    unnumbered.pieces += sent.size();
    ++unnumbered.chunks;
    sent_bytes += size_bytes;
  }

  // Returns the pieces of the next chunk, of at most `max_bytes` bytes.
  absl::Span<const CopyPiece> Next(uint64_t max_bytes) {
    if (sent_bytes == 0 && batch.size_bytes() <= max_bytes) return pieces;
    chunk = SlicePieces(pieces, sent_bytes, max_bytes);
    return chunk;
  }

  const CopyBatch& batch;
  const StreamHandle after;
  CopyPieces pieces;
  CopyPieces chunk;
  uint64_t sent_bytes = 0;
  SubmittedCopy unnumbered;  // chunks sent since `last_number`
  // kDone is recorded behind those chunks, kComputed before the first chunk, which waits for it.
  enum { kDone, kComputed };
  std::array<EventRef, 2> events;
  bool is_open = false;  // it counts in open_batches_
  uint64_t last_number = 0;
  // Tickets that the first chunk must follow and no stream can wait for. The host waits for them
  // before anything is sent.
  std::vector<FenceTicket> without_events;
};

absl::StatusOr<std::unique_ptr<CopyLane>> CopyLane::Create(uint64_t chunk_bytes,
                                                           CopyDirection direction,
                                                           std::shared_ptr<GuardedDevice> device,
                                                           std::shared_ptr<EventPool> events) {
  const std::string name = CopyDirectionName(direction);
  PINION_ASSIGN_OR_RETURN(const StreamHandle stream,
                          device->CreateStream(absl::StrCat("pinion ", name)));
  auto timeline =
      std::make_shared<StreamTimeline>(device, stream, StreamTimeline::Ownership::kOwned,
                                       absl::StrCat(name, " on ", device->device().name()));
  return std::unique_ptr<CopyLane>(new CopyLane(chunk_bytes, direction, std::move(device),
                                                std::move(events), std::move(timeline)));
}

CopyLane::CopyLane(uint64_t chunk_bytes, CopyDirection direction,
                   std::shared_ptr<GuardedDevice> device, std::shared_ptr<EventPool> events,
                   std::shared_ptr<StreamTimeline> timeline)
    : chunk_bytes_(chunk_bytes),
      direction_(direction),
      device_(std::move(device)),
      events_(std::move(events)),
      timeline_(std::move(timeline)) {
  // A reference count per group of threads, on its own cache line; it holds the timeline.
  struct alignas(64) Owner {
    std::shared_ptr<StreamTimeline> timeline;
  };
  for (std::shared_ptr<StreamTimeline>& counted : timeline_by_group_) {
    counted = {std::make_shared<Owner>(Owner{timeline_}), timeline_.get()};
  }
}

void CopyLane::SetTimer(std::shared_ptr<TransferTimer> timer) {
  timer_ = std::move(timer);
  timeline_->SetTimer(timer_, direction_);
}

absl::StatusOr<uint64_t> CopyLane::Submit(const CopyBatch& batch, StreamHandle after) {
  Progress progress(batch, after);
  absl::Status submitted;
  while (submitted.ok() && progress.sent_bytes < batch.size_bytes()) {
    submitted = SubmitChunk(progress);
    // Outside the turn, so that no other thread waits with this batch.
    for (const FenceTicket& ticket : std::exchange(progress.without_events, {})) {
      if (submitted.ok()) submitted = ticket.timeline->Wait(ticket.value, absl::InfiniteDuration());
    }
  }
  if (submitted.ok()) return progress.last_number;
  timeline_->CountFailedSubmit();
  return EndFailedBatch(progress, submitted);
}

// The copy is the last step that can fail without effect, so its ticket's needs are acquired first.
absl::Status CopyLane::SubmitChunk(Progress& progress) {
  const FifoTurn::Scope turn(timeline_->turn());
  PINION_RETURN_IF_ERROR(device_->accepting());
  absl::Span<const CopyPiece> pieces = progress.Next(chunk_bytes_);
  const uint64_t chunk_bytes = TotalBytes(pieces);
  timeline_->PollIfMany();
  if (progress.events[Progress::kDone] == nullptr) {
    const bool is_first = progress.sent_bytes == 0;
    PINION_RETURN_IF_ERROR(events_->Acquire({progress.events.data(), is_first ? 2u : 1u}));
  }
  if (progress.sent_bytes == 0) {
    // Within the turn: a capture may have begun while this thread waited for it.
    PINION_RETURN_IF_ERROR(device_->CheckNotCapturing(progress.after));
    PINION_ASSIGN_OR_RETURN(progress.unnumbered.after, OrderBatch(progress));
    if (!progress.without_events.empty()) {
      progress.events[Progress::kComputed] = std::move(progress.unnumbered.after.compute);
      return absl::OkStatus();
    }
  }

  TransferTimer::Start start;
  if (timer_ != nullptr) start = timer_->Begin(timeline_->stream());
  absl::Status copied = device_->CopyAsync(direction_, pieces, timeline_->stream());
  if (absl::IsInvalidArgument(copied) && progress.merged()) {
    // Merged neighbours may belong to two device allocations that happen to touch. The device
    // refuses to copy those in one piece.
    progress.pieces = SortPieces(progress.batch.pieces());
    pieces = progress.Next(chunk_bytes);
    copied = device_->CopyAsync(direction_, pieces, timeline_->stream());
  }
  // A device with a sticky error may still write, so its chunk counts as sent.
  if (!copied.ok() && device_->health().ok()) return copied;
  progress.AddSent(pieces);
  // The last chunk's number covers all chunks, except if each chunk is timed by itself.
  const bool is_last = progress.sent_bytes == progress.batch.size_bytes();
  if (is_last || timer_ != nullptr) {
    progress.unnumbered.ends_transfer = is_last;
    Number(progress);
  } else if (!std::exchange(progress.is_open, true)) {
    ++open_batches_;
  }
  if (timer_ != nullptr) {
    timer_->EndTransfer(std::move(start), timeline_->stream(),
                        {direction_, progress.last_number, TotalBytes(pieces), pieces.size()});
  }
  return device_->health();
}

void CopyLane::Number(Progress& progress) {
  progress.last_number = timeline_->NumberCopy(std::move(progress.events[Progress::kDone]),
                                               std::exchange(progress.unnumbered, {}));
  for (const std::shared_ptr<HostBuffer>& buffer : progress.batch.buffers()) {
    buffer->AddTicket({timeline_of_thread(), progress.last_number});
  }
  if (!std::exchange(progress.is_open, false)) return;
  --open_batches_;
  open_batches_.notify_all();
}

void CopyLane::FinishTurns() {
  { const FifoTurn::Scope turn(timeline_->turn()); }
  for (int open = open_batches_; open > 0; open = open_batches_) open_batches_.wait(open);
}

// Waits once for each timeline that has touched any of the buffers, up to its latest number.
absl::StatusOr<Prerequisites> CopyLane::OrderBatch(Progress& progress) {
  Prerequisites prerequisites;
  if (kCopyAfterCompute.enabled()) {
    prerequisites.compute = std::move(progress.events[Progress::kComputed]);
    PINION_RETURN_IF_ERROR(
        events_->Order(prerequisites.compute, progress.after, timeline_->stream()));
  }
  if (!kCopyAfterHostBuffer.enabled()) return prerequisites;
  std::vector<FenceTicket> latest;
  for (const std::shared_ptr<HostBuffer>& buffer : progress.batch.buffers()) {
    for (const FenceTicket& ticket : buffer->tickets()) {
      if (ticket.timeline == timeline_ || ticket.IsDone()) continue;
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
    uint64_t& waits_for = WaitsFor(ticket.timeline);
    if (waits_for < ticket.value) {
      const absl::Status ordered =
          device_->StreamWaitTicket(timeline_->stream(), *ticket.timeline, ticket.value);
      if (absl::IsUnimplemented(ordered)) {
        progress.without_events.push_back(ticket);
        continue;
      }
      PINION_RETURN_IF_ERROR(ordered);
      waits_for = ticket.value;
    }
    prerequisites.submissions.emplace_back(ticket.timeline, ticket.value);
  }
  return prerequisites;
}

uint64_t& CopyLane::WaitsFor(const std::shared_ptr<FenceTimeline>& other) {
  std::erase_if(waits_for_, [](const auto& known) { return known.first.expired(); });
  for (auto& [timeline, number] : waits_for_) {
    if (timeline.lock() == other) return number;
  }
  return waits_for_.emplace_back(other, 0).second;
}

absl::Status CopyLane::EndFailedBatch(Progress& progress, const absl::Status& error) {
  if (progress.unnumbered.chunks > 0) {
    const FifoTurn::Scope turn(timeline_->turn());
    progress.unnumbered.ends_transfer = false;
    Number(progress);
  }
  if (!kFailedBatch.enabled()) return error;
  const absl::Status waited = timeline_->WaitWhileHealthy(progress.last_number);
  if (waited.ok()) return error;
  device_->Poison("a batch that can be neither finished nor taken back",
                  absl::StrCat(error.message(), "; ", waited.message()));
  return device_->health();
}

}  // namespace pinion::internal
