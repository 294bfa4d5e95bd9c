// State of the fake runtime. Its functions are in fake_cuda_api.cc.

#include "pinion/tests/device/cuda/fake_cuda.h"

#include <atomic>
#include <utility>

#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/sources/mmap_source.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kPage = 4 * kKiB;

std::atomic<FakeCuda*> the_fake{nullptr};

bool IsLegacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

}  // namespace

FakeCuda::FakeCuda(const EmulatedOptions& options)
    : FakeCuda(EmulatedMachine::Create(options).value()) {}

FakeCuda::FakeCuda(std::shared_ptr<EmulatedMachine> machine)
    : machine_(std::move(machine)), pageable_(MmapSource::Create({}).value()) {
  PINION_CHECK(the_fake.exchange(this) == nullptr) << "two FakeCuda at a time";
  thread() = ThreadState();
}

FakeCuda::~FakeCuda() { the_fake = nullptr; }

FakeCuda::ThreadState& FakeCuda::thread() {
  thread_local ThreadState state;
  return state;
}

FakeCuda& FakeCuda::Get() {
  FakeCuda* const fake = the_fake;
  PINION_CHECK(fake != nullptr) << "the runtime was called after it was unloaded";
  return *fake;
}

bool FakeCuda::IsSticky(cudaError_t error) {
  return error == cudaErrorIllegalAddress || error == cudaErrorECCUncorrectable ||
         error == cudaErrorLaunchFailure;
}

// --- Faults ---

void FakeCuda::FailNext(const std::string& function, cudaError_t error) {
  MutexLock lock(mu_);
  fail_next_[function] = error;
}

void FakeCuda::FailCall(uint64_t k, cudaError_t error) {
  MutexLock lock(mu_);
  fail_call_in_ = k;
  fail_call_with_ = error;
}

void FakeCuda::FaultCopy(uint64_t k, int unnoticed_calls) {
  MutexLock lock(mu_);
  fault_copy_in_ = k;
  unnoticed_calls_ = unnoticed_calls;
}

void FakeCuda::SetCapturing(StreamHandle stream, bool capturing) {
  PINION_CHECK(
      machine_->SetCapturing(Stream(static_cast<cudaStream_t>(stream.native())), capturing).ok());
  MutexLock lock(mu_);
  capturing_ += capturing ? 1 : -1;
}

void FakeCuda::Unload() {
  MutexLock lock(mu_);
  unloaded_ = true;
}

// --- Observations ---

bool FakeCuda::capture_spoiled() const {
  MutexLock lock(mu_);
  return capture_spoiled_;
}

int FakeCuda::calls(const std::string& function) const {
  MutexLock lock(mu_);
  const auto it = calls_.find(function);
  return it == calls_.end() ? 0 : it->second;
}

uint64_t FakeCuda::all_calls() const {
  MutexLock lock(mu_);
  return all_calls_;
}

uint64_t FakeCuda::calls_after_unload() const {
  MutexLock lock(mu_);
  return calls_after_unload_;
}

std::string FakeCuda::failed_function() const {
  MutexLock lock(mu_);
  return failed_function_;
}

bool FakeCuda::has_context(int device) const {
  MutexLock lock(mu_);
  return contexts_.count(device) > 0;
}

size_t FakeCuda::green_streams() const {
  MutexLock lock(mu_);
  return green_streams_.size();
}

size_t FakeCuda::live_handles() const {
  MutexLock lock(mu_);
  return handles_.size();
}

size_t FakeCuda::live_segments() const {
  MutexLock lock(mu_);
  return pinned_.size();
}

// --- Calls ---

Device& FakeCuda::current() { return *machine_->device(thread().device()); }

StreamHandle FakeCuda::Stream(cudaStream_t stream) {
  PINION_CHECK(stream != cudaStreamPerThread) << "another stream on each thread";
  if (IsLegacy(stream)) return machine_->default_stream(thread().device());
  MutexLock lock(mu_);
  PINION_CHECK(!destroyed_.contains(stream)) << "a stream was used after it was destroyed";
  const auto it = recycled_.find(stream);
  return it == recycled_.end() ? StreamHandle(stream) : it->second;
}

EventHandle FakeCuda::Event(cudaEvent_t event) {
  MutexLock lock(mu_);
  PINION_CHECK(!destroyed_.contains(event)) << "an event was used after it was destroyed";
  return EventHandle(event);
}

absl::StatusOr<cudaStream_t> FakeCuda::CreateStream() {
  const absl::StatusOr<StreamHandle> created = current().CreateStream("fake cuda");
  if (!created.ok()) return created.status();
  MutexLock lock(mu_);
  auto handle = static_cast<cudaStream_t>(created->native());
  if (!free_handles_.empty()) {
    handle = free_handles_.back();
    free_handles_.pop_back();
    recycled_[handle] = *created;
  }
  handles_.insert(handle);
  destroyed_.erase(handle);
  if (green_is_current()) green_streams_.insert(handle);
  return handle;
}

absl::Status FakeCuda::DestroyStream(cudaStream_t stream) {
  const StreamHandle ours = Stream(stream);
  {
    MutexLock lock(mu_);
    handles_.erase(stream);
    destroyed_.insert(stream);
    green_streams_.erase(stream);
    recycled_.erase(stream);
    if (recycles_handles_) free_handles_.push_back(stream);
  }
  return current().DestroyStream(ours);
}

cudaError_t FakeCuda::AddContext(int device) {
  MutexLock lock(mu_);
  if (contexts_.contains(device)) return cudaSuccess;
  if (SpoilsCapture()) return cudaErrorStreamCaptureUnsupported;
  contexts_.insert(device);
  return cudaSuccess;
}

bool FakeCuda::SpoilsCapture() {
  if (capturing_ == 0 || thread().capture_mode == cudaStreamCaptureModeRelaxed) return false;
  capture_spoiled_ = true;
  return true;
}

void FakeCuda::Count(const char* function) {
  const auto it = calls_.find(function);
  ++(it == calls_.end() ? calls_[function] : it->second);
  ++all_calls_;
  if (unloaded_) ++calls_after_unload_;
}

cudaError_t FakeCuda::Next(const char* function) {
  const auto it = fail_next_.find(function);
  return it == fail_next_.end() ? cudaSuccess : fail_next_.extract(it).mapped();
}

cudaError_t FakeCuda::Injected(const char* function) {
  if (unloaded_) return cudaErrorCudartUnloading;
  if (const cudaError_t next = Next(function); next != cudaSuccess) return next;
  if (fail_call_in_ == 0 || --fail_call_in_ > 0) return cudaSuccess;
  failed_function_ = function;
  return fail_call_with_;
}

cudaError_t FakeCuda::EnterThread(const char* function) {
  cudaError_t error;
  {
    MutexLock lock(mu_);
    Count(function);
    error = Injected(function);
  }
  return Latch(error);
}

cudaError_t FakeCuda::EnterDriver(const char* function) {
  MutexLock lock(mu_);
  Count(function);
  return Injected(function);
}

cudaError_t FakeCuda::TakeNext(const char* function) {
  MutexLock lock(mu_);
  return Next(function);
}

cudaError_t FakeCuda::CheckLegacy(cudaStream_t stream) const {
  return blocking_stream_captures_ && IsLegacy(stream) ? cudaErrorStreamCaptureImplicit
                                                       : cudaSuccess;
}

cudaError_t FakeCuda::UseLegacy(cudaStream_t stream) {
  const cudaError_t error = CheckLegacy(stream);
  if (error == cudaSuccess) return error;
  {
    MutexLock lock(mu_);
    capture_spoiled_ = true;
  }
  return Latch(error);
}

cudaError_t FakeCuda::Enter(const char* function, bool uses_device) {
  const cudaError_t refused = uses_device ? AddContext(thread().device()) : cudaSuccess;
  cudaError_t error;
  {
    MutexLock lock(mu_);
    Count(function);
    error = faulted_ ? cudaErrorIllegalAddress : sticky_;
    if (error == cudaSuccess) error = Injected(function);
    if (error == cudaSuccess) error = refused;
  }
  return Latch(error);
}

cudaError_t FakeCuda::EnterUnsafe(const char* function) {
  {
    MutexLock lock(mu_);
    if (SpoilsCapture()) {
      thread().last_error = cudaErrorStreamCaptureUnsupported;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return Enter(function);
}

cudaError_t FakeCuda::EnterSubmission(const char* function, bool* lost) {
  {
    MutexLock lock(mu_);
    *lost = faulted_ && sticky_ == cudaSuccess && unnoticed_calls_ > 0;
    if (*lost) {
      Count(function);
      --unnoticed_calls_;
      return cudaSuccess;
    }
  }
  return Enter(function);
}

cudaError_t FakeCuda::EnterCopy(const char* function, bool* lost) {
  const cudaError_t error = EnterSubmission(function, lost);
  if (error != cudaSuccess || *lost) return error;
  {
    MutexLock lock(mu_);
    if (fault_copy_in_ == 0 || --fault_copy_in_ > 0) return cudaSuccess;
    failed_function_ = function;
    faulted_ = true;
  }
  for (int device = 0; device < machine_->device_count(); ++device) {
    machine_->BreakDevice(device, "a copy faulted while it ran");
  }
  *lost = true;
  return cudaSuccess;
}

cudaError_t FakeCuda::Latch(cudaError_t error) {
  if (error == cudaSuccess) return error;
  thread().last_error = error;
  if (IsSticky(error)) {
    MutexLock lock(mu_);
    sticky_ = error;
  }
  return error;
}

cudaError_t FakeCuda::Latch(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return cudaSuccess;
    case absl::StatusCode::kResourceExhausted:
      return Latch(cudaErrorMemoryAllocation);
    case absl::StatusCode::kUnavailable:
      return Latch(cudaErrorDevicesUnavailable);
    case absl::StatusCode::kFailedPrecondition:
      return Latch(cudaErrorCapturedEvent);
    case absl::StatusCode::kInternal:
      return Latch(cudaErrorIllegalAddress);
    default:
      return Latch(cudaErrorInvalidValue);
  }
}

void FakeCuda::AddEvent(cudaEvent_t event) {
  MutexLock lock(mu_);
  handles_.insert(event);
  if (green_is_current()) green_events_.insert(event);
}

absl::Status FakeCuda::DestroyEvent(cudaEvent_t event) {
  const EventHandle ours = Event(event);
  {
    MutexLock lock(mu_);
    handles_.erase(event);
    destroyed_.insert(event);
    green_events_.erase(event);
  }
  return current().DestroyEvent(ours);
}

bool FakeCuda::HaveOneContext(cudaEvent_t event, cudaStream_t stream) const {
  MutexLock lock(mu_);
  return green_events_.contains(event) == green_streams_.contains(stream);
}

// --- Pinned memory ---

absl::Status FakeCuda::HostAlloc(void** data, size_t size_bytes) {
  const std::shared_ptr<HostMemorySource> source =
      ReadsHostPageTables(thread().device()) ? pageable_ : current().pinned_source();
  sched_getaffinity(0, sizeof(pinning_cpus_), &pinning_cpus_);
  // CUDA has returned this alignment so far. Some kernels map memory with a smaller one.
  constexpr uint64_t kBoundaryBytes = 2 * kMiB;
  const uint64_t slack_bytes = pages_only_ ? kPage : kBoundaryBytes;
  const absl::StatusOr<HostSegment> segment =
      source->Allocate(AlignUp(size_bytes + slack_bytes, source->granularity_bytes()));
  if (!segment.ok()) return segment.status();
  const auto mapped = reinterpret_cast<uintptr_t>(segment->data);
  const uintptr_t paged = mapped % (2 * kPage) == 0 ? mapped + kPage : mapped;
  *data = reinterpret_cast<void*>(pages_only_ ? paged : AlignUp(mapped, kBoundaryBytes));
  MutexLock lock(mu_);
  pinned_[*data] = *segment;
  return absl::OkStatus();
}

absl::Status FakeCuda::FreeHost(void* data) {
  HostSegment segment;
  {
    MutexLock lock(mu_);
    const auto node = pinned_.extract(data);
    if (node.empty()) return absl::InvalidArgumentError("cudaHostAlloc did not return this");
    segment = node.mapped();
  }
  return ReadsHostPageTables(thread().device()) ? pageable_->Free(segment)
                                                : current().pinned_source()->Free(segment);
}

bool FakeCuda::ReadsHostPageTables(int device) {
  return machine_->device(device)->info().link == LinkKind::kNvlinkC2c;
}

}  // namespace pinion::testing
