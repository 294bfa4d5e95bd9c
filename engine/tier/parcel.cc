#include "pinion/engine/tier/parcel.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"

namespace pinion {

// ------------------------------------------------------------------------------------ FetchClaim

void FetchClaim::Fail() {
  if (std::exchange(has_ended_, true)) return;
  {
    MutexLock lock(parcel_->mu_);
    parcel_->Become(Parcel::State::kAway);
  }
  parcel_->fetch_ended_.NotifyAll();
}

GuardedMemory FetchClaim::EndFetch(GuardedMemory fetched) {
  has_ended_ = true;
  GuardedMemory unneeded;
  {
    MutexLock lock(parcel_->mu_);
    parcel_->Become(Parcel::State::kFetched);
    parcel_->fetched_ = std::move(fetched);  // was empty: nothing is released under the lock
    if (parcel_->readers_.count == 0) unneeded = parcel_->EndEpoch();
  }
  parcel_->fetch_ended_.NotifyAll();
  return unneeded;
}

// --------------------------------------------------------------------------------------- offload

Parcel::Parcel(uint64_t size, StreamHandle computed_on, std::shared_ptr<ParcelPlace> place)
    : size_bytes(size), stream(computed_on), place_(std::move(place)) {}

// The copy out may still read the device memory.
Parcel::~Parcel() { const GuardedMemory held = Evict(); }

std::shared_ptr<HostBuffer> Parcel::ToWrite() {
  std::shared_ptr<HostBuffer> buffer = place_->ToWrite();
  PINION_CHECK(buffer != nullptr)
      << "ParcelPlace::ToWrite returned null for " << size_bytes
      << " bytes: return pinned memory, or ResourceExhausted from Backing::Reserve";
  return buffer;
}

void Parcel::Leave(const Transfer& copy_out, HeldMemory&& held) {
  place_->Written(copy_out);
  MutexLock lock(mu_);
  PINION_CHECK(state() == State::kNew) << "a parcel leaves once";
  Become(State::kHeld);
  copy_out_ = copy_out;
  held_ = std::move(held);
}

void Parcel::FillOnHost() {
  place_->Written(Transfer());
  MutexLock lock(mu_);
  PINION_CHECK(state() == State::kNew) << "a parcel is filled once";
  Become(State::kAway);
}

Transfer Parcel::copy_out() const {
  MutexLock lock(mu_);
  return copy_out_;
}

// A parcel never becomes kHeld again, so other states need no lock here and below.
bool Parcel::Holds(size_t piece) const {
  if (state() != State::kHeld) return false;
  MutexLock lock(mu_);
  return state() == State::kHeld && held_[piece];
}

DeviceMemory Parcel::ShareHeld(size_t piece) const {
  if (state() != State::kHeld) return DeviceMemory();
  MutexLock lock(mu_);
  if (state() != State::kHeld || !held_[piece]) return DeviceMemory();
  return held_[piece].Share();
}

GuardedMemory Parcel::TakeHeld(size_t piece) {
  if (state() != State::kHeld) return GuardedMemory();
  MutexLock lock(mu_);
  if (state() != State::kHeld || !held_[piece]) return GuardedMemory();
  return GuardedMemory(std::move(held_[piece]), stream, copy_out_, kFreeAfterCopy);
}

GuardedMemory Parcel::Evict(uint64_t* not_freed) {
  if (state() != State::kHeld) return GuardedMemory();
  MutexLock lock(mu_);
  if (state() != State::kHeld) return GuardedMemory();
  Become(State::kAway);
  GuardedMemory evicted(stream, copy_out_, kEvictAfterCopyOut);
  for (DeviceMemory& memory : held_) {
    if (!memory) continue;
    // Another owner frees the memory later than this wait, so releasing it is safe.
    if (not_freed != nullptr && memory.IsShared()) ++*not_freed;
    evicted.Add(std::move(memory));
  }
  held_.clear();  // all empty: nothing is released under the lock
  return evicted;
}

// -------------------------------------------------------------------------------------- readers

void Parcel::AddReaders(int count) {
  MutexLock lock(mu_);
  readers_.count += count;
}

GuardedMemory Parcel::RemoveReader(const Reader& reader) {
  MutexLock lock(mu_);
  --readers_.count;
  if (reader.read_in_ == readers_.epoch) --readers_.have_read;
  return EndEpochIfAllHaveRead(Afterwards::kLetGo);
}

GuardedMemory Parcel::MarkRead(Reader& reader) {
  MutexLock lock(mu_);
  return MarkReadLocked(reader, Afterwards::kLetGo);
}

GuardedMemory Parcel::MarkReadLocked(Reader& reader, Afterwards afterwards) {
  if (reader.read_in_ == readers_.epoch) return GuardedMemory();
  reader.read_in_ = readers_.epoch;
  ++readers_.have_read;
  return EndEpochIfAllHaveRead(afterwards);
}

GuardedMemory Parcel::EndEpochIfAllHaveRead(Afterwards afterwards) {
  // Also during a fetch: the fetched bytes are for all readers anew.
  if (readers_.have_read != readers_.count) return GuardedMemory();
  if (afterwards == Afterwards::kLetGo) return EndEpoch();
  ++readers_.epoch;
  readers_.have_read = 0;
  return GuardedMemory();
}

GuardedMemory Parcel::EndEpoch() {
  ++readers_.epoch;
  readers_.have_read = 0;
  if (state() == State::kFetched) Become(State::kAway);
  return std::move(fetched_);
}

// ----------------------------------------------------------------------------------------- fetch

Parcel::Read Parcel::ReadOrClaim(Reader& reader, Afterwards afterwards) {
  MutexLock lock(mu_);
  while (state() == State::kFetching) fetch_ended_.Wait(mu_);
  PINION_CHECK(state() == State::kAway || state() == State::kFetched)
      << "the bytes are read on the device as long as it holds them";
  if (state() == State::kAway) {
    Become(State::kFetching);
    Read read;
    read.claim.emplace(FetchClaim(shared_from_this()));
    return read;
  }
  return ReadLocked(reader, afterwards);
}

bool Parcel::ReadIfFetched(Reader& reader, std::optional<Read>& read, Afterwards afterwards) {
  if (state() != State::kFetched) return false;
  MutexLock lock(mu_);
  if (state() != State::kFetched) return false;
  read.emplace(ReadLocked(reader, afterwards));
  return true;
}

Parcel::Read Parcel::ReadLocked(Reader& reader, Afterwards afterwards) {
  Read read;
  read.fetched = MarkReadLocked(reader, afterwards);
  if (!read.fetched) {
    read.fetched = GuardedMemory(fetched_.memory().Share(), fetched_.stream(), fetched_.copy(),
                                 kFreeAfterCopy);
  }
  return read;
}

std::optional<FetchClaim> Parcel::ClaimIfAway() {
  if (state() != State::kAway) return std::nullopt;
  MutexLock lock(mu_);
  if (state() != State::kAway) return std::nullopt;
  Become(State::kFetching);
  return FetchClaim(shared_from_this());
}

absl::StatusOr<std::shared_ptr<HostBuffer>> Parcel::ToRead() {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostBuffer> buffer, place_->ToRead());
  if (buffer != nullptr) return buffer;
  return absl::InvalidArgumentError(
      absl::StrCat("ParcelPlace::ToRead returned null for ", size_bytes,
                   " bytes: return pinned memory that holds them, or an error"));
}

GuardedMemory Parcel::TakeFetched() {
  if (state() != State::kFetched) return GuardedMemory();
  MutexLock lock(mu_);
  if (state() != State::kFetched) return GuardedMemory();
  return EndEpoch();
}

absl::StatusOr<std::shared_ptr<HostBuffer>> Parcel::ViewOnHost(absl::Duration timeout) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<HostBuffer> buffer, ToRead());
  const internal::Deadline deadline(timeout);
  for (const FenceTicket& ticket : buffer->tickets()) {
    PINION_RETURN_IF_ERROR(ticket.Wait(deadline.Left()));
  }
  return buffer;
}

}  // namespace pinion
