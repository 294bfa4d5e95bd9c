#include "pinion/tests/allocator/allocator_operations.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/config/build_config.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/fake_timeline.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/worker.h"

namespace pinion::testing {
namespace {

constexpr size_t kHeaderBytes = 3;
constexpr size_t kOperationBytes = 3;
constexpr int kTimelines = 3;
// Worker threads that a list runs on, besides the thread that called Run.
constexpr int kWorkers = 3;
// Only the ends of a block are stamped, so that large blocks are as quick to check as small ones.
constexpr uint64_t kStampBytes = 16;
// An operand that requests a block far larger than the list's other blocks.
constexpr uint8_t kHugeOperand = 200;
constexpr int kHugeLog2 = 18;

absl::Status Wrong(const std::string& what) { return absl::InternalError(what); }

// State that all lists share: the allocator, its source and the host.
class World {
 public:
  // With a single list (`alone`) the model can predict what the allocator must answer.
  World(OperationList header, bool alone) : alone_(alone) {
    header.resize(kHeaderBytes);
    const uint8_t choices = header[0];
    source_ = std::make_shared<FakeSource>((choices & 1) != 0 ? 16 * kKiB : 4 * kKiB);
    options_.alignment_bytes = source_->granularity_bytes();
    options_.pageable_fallback = (choices & 192) == 192;
    options_.segment_bytes = (choices & 4) != 0 ? 64 * kKiB : 256 * kKiB;
    blocks_outlive_allocator_ = (choices & 8) != 0;
    if ((choices & 48) == 48) options_.max_wait_for_deferred = absl::Microseconds(1);
    options_.warn_percent = options_.high_percent;
    options_.max_locked_bytes = (1 + header[1] % 4) * 512 * kKiB;
    most_log2_ = 8 + header[2] % 10;
    FillHost(false);
    allocator_ = PinnedAllocator::Create(options_, source_, host_.Probe()).value();
  }

  PinnedAllocator& allocator() const { return *allocator_; }
  const AllocatorOptions& options() const { return options_; }
  int most_log2() const { return most_log2_; }
  bool alone() const { return alone_; }
  bool blocks_outlive_allocator() const { return blocks_outlive_allocator_; }
  uint64_t locked_bytes() const { return source_->outstanding_bytes(); }

  void FillHost(bool full) {
    MutexLock lock(mu_);
    host_.SetMeminfo(100 * kGiB, (full ? 5 : 99) * kGiB);
    host_full_ = full;
  }

  void FailNextCall(absl::StatusCode code) {
    const uint64_t call = source_->calls();
    source_->FailCall(call, code);
    calls_to_failure_ = call + 1;
    if (code == absl::StatusCode::kUnavailable) told_to_break_ = true;
  }

  // Returns whether the allocator may refuse a request with `status` while blocks are held.
  bool MayRefuse(const absl::Status& status) const {
    return absl::IsResourceExhausted(status) || (told_to_break_ && absl::IsUnavailable(status));
  }

  // Returns whether `size_bytes` must be served when no block is held.
  bool MustServe(uint64_t size_bytes) const {
    return alone_ && !host_full_ && source_->calls() >= calls_to_failure_ && size_bytes > 0 &&
           2 * size_bytes <= options_.max_locked_bytes;
  }

  void DropAllocator() { allocator_.reset(); }

 private:
  const bool alone_;
  AllocatorOptions options_;
  bool blocks_outlive_allocator_ = false;
  int most_log2_ = 0;
  Mutex mu_;  // FakeHost allows one writer at a time
  FakeHost host_;
  std::shared_ptr<FakeSource> source_;
  std::atomic<bool> host_full_{false};
  std::atomic<bool> told_to_break_{false};
  std::atomic<uint64_t> calls_to_failure_{0};
  std::shared_ptr<PinnedAllocator> allocator_;
};

// One list's blocks. Only this list may write to them.
class Model {
 public:
  explicit Model(World* world) : world_(*world) {
    for (Timeline& timeline : timelines_) timeline.fence = std::make_shared<FakeTimeline>();
  }

  // Sets the list that receives the blocks this list hands over.
  void set_next(Model* next) { next_ = next; }

  const OperationsResult& result() const { return result_; }

  void Run(const OperationList& list);

  // Releases all blocks, including those that other lists handed over.
  absl::Status ReleaseAll() {
    PINION_RETURN_IF_ERROR(TakeHandedOver());
    while (!live_.empty()) PINION_RETURN_IF_ERROR(LetGo(live_.size() - 1, {}));
    return absl::OkStatus();
  }

 private:
  struct Operation {
    int below;  // cumulative probability, of 256
    const char* name;
    absl::Status (Model::*run)(uint8_t a, uint8_t b);
  };
  static const Operation kOperations[];

  // Does not keep the timeline alive: the allocator drops a timeline once its tickets are done.
  struct Until {
    std::weak_ptr<FakeTimeline> fence;
    uint64_t value = 0;

    bool IsDone() const {
      const std::shared_ptr<FakeTimeline> timeline = fence.lock();
      return timeline == nullptr || timeline->Completed() >= value;
    }
  };

  // Bytes that no other block may overlap: a live block, or a released one with pending tickets.
  struct Held {
    uint64_t end = 0;
    bool live = false;
    uint64_t size_bytes = 0;
    unsigned char fill = 0;
    std::vector<Until> until;

    bool IsDone() const {
      return !live && std::all_of(until.begin(), until.end(),
                                  [](const Until& ticket) { return ticket.IsDone(); });
    }
  };

  struct Block {
    PinnedBlock block;
    std::thread::id allocated_on;
  };

  struct HandedOver {
    Block block;
    Held held;
  };

  struct Timeline {
    std::shared_ptr<FakeTimeline> fence;
    uint64_t last = 0;  // the last ticket that was issued
    uint64_t on_device = 0;
    // Begin of each released block that the device still uses, by ticket.
    std::multimap<uint64_t, uint64_t> pending;
  };

  absl::Status Allocate(uint8_t a, uint8_t b);
  absl::Status Release(uint8_t a, uint8_t) { return LetGo(Pick(a), {}); }
  absl::Status ReleaseAfter(uint8_t a, uint8_t b);
  absl::Status CompleteOnDevice(uint8_t a, uint8_t b);
  absl::Status CompleteVisibly(uint8_t a, uint8_t b);
  absl::Status ReplaceTimeline(uint8_t a, uint8_t b);
  absl::Status Look(uint8_t, uint8_t);
  absl::Status GoOver(uint8_t a, uint8_t b);
  absl::Status Trim(uint8_t a, uint8_t);
  absl::Status Reserve(uint8_t a, uint8_t);
  absl::Status FailNextCall(uint8_t a, uint8_t);
  absl::Status FillHost(uint8_t a, uint8_t);

  uint64_t Size(uint8_t a, uint8_t b) const;
  size_t Pick(uint8_t a) const { return a * live_.size() / 256; }
  Timeline& TimelineOf(uint8_t a) { return timelines_[a % kTimelines]; }
  bool DeviceIsDone() const {
    return std::all_of(std::begin(timelines_), std::end(timelines_),
                       [](const Timeline& timeline) { return timeline.pending.empty(); });
  }
  static uint64_t NextOf(const Timeline& timeline, uint8_t b) {
    return timeline.on_device + ((timeline.last - timeline.on_device) * (b + 1) + 255) / 256;
  }
  // Runs operations on the current thread until the list ends or changes threads.
  void RunSome(const OperationList& list);
  absl::Status Admit(const PinnedBlock& block, uint64_t size_bytes);
  absl::Status TakeHandedOver();
  // Adds the bytes to this list's held bytes; fails if others hold them.
  absl::Status Hold(uint64_t begin, Held held);
  absl::Status LetGo(size_t index, const std::vector<FenceTicket>& tickets);
  absl::Status RunDevice(Timeline& timeline, uint64_t value);
  absl::Status CheckStamps(uint64_t begin, const Held& held) const;

  World& world_;
  OperationsResult result_;
  size_t at_ = kHeaderBytes;  // position in the list
  int thread_ = 0;            // current worker; 0 is the thread that called Run
  bool ends_ = false;         // whether the previous worker thread ends
  std::unique_ptr<Worker> workers_[kWorkers];
  Model* next_ = nullptr;
  Mutex mu_;
  std::vector<HandedOver> handed_over_ ABSL_GUARDED_BY(mu_);
  Timeline timelines_[kTimelines];
  std::vector<Block> live_;
  std::map<uint64_t, Held> held_;  // by begin; disjoint
  std::unordered_set<uint64_t> ids_;
  uint64_t requested_bytes_ = 0;  // of live pinned blocks
};

const Model::Operation Model::kOperations[] = {
    {108, "Allocate", &Model::Allocate},
    {150, "Release", &Model::Release},
    {206, "ReleaseAfter", &Model::ReleaseAfter},
    {226, "CompleteOnDevice", &Model::CompleteOnDevice},
    {246, "CompleteVisibly", &Model::CompleteVisibly},
    {248, "ReplaceTimeline", &Model::ReplaceTimeline},
    {249, "Look", &Model::Look},
    {252, "GoOver", &Model::GoOver},
    {253, "Trim", &Model::Trim},
    {254, "Reserve", &Model::Reserve},
    {255, "FailNextCall", &Model::FailNextCall},
    {256, "FillHost", &Model::FillHost},
};

void Model::Run(const OperationList& list) {
  while (at_ + kOperationBytes <= list.size()) {
    if (thread_ == 0) {
      RunSome(list);
    } else {
      std::unique_ptr<Worker>& worker = workers_[thread_ - 1];
      if (worker == nullptr) worker = std::make_unique<Worker>();
      worker->Run([&] { RunSome(list); });
      if (ends_) worker = nullptr;
    }
    if (!result_.failure.empty()) return;
  }
  absl::Status end = Look(0, 0);
  for (Timeline& timeline : timelines_) end.Update(RunDevice(timeline, timeline.last));
  if (!world_.blocks_outlive_allocator()) end.Update(ReleaseAll());
  if (!end.ok()) result_.failure = absl::StrCat("at the end: ", end.message());
}

void Model::RunSome(const OperationList& list) {
  const int thread = thread_;
  while (at_ + kOperationBytes <= list.size() && thread_ == thread) {
    const uint8_t* const bytes = &list[at_];
    at_ += kOperationBytes;
    const Operation* const operation =
        std::find_if(std::begin(kOperations), std::end(kOperations),
                     [&](const Operation& candidate) { return bytes[0] < candidate.below; });
    const absl::Status status = (this->*operation->run)(bytes[1], bytes[2]);
    if (!status.ok()) {
      result_.failure = absl::StrCat("operation ", result_.operations, ", ", operation->name, "(",
                                     bytes[1], ", ", bytes[2], "): ", status.message());
      return;
    }
    ++result_.operations;
  }
}

// Sizes are spread over the doublings; sizes around a power of two are more frequent.
uint64_t Model::Size(uint8_t a, uint8_t b) const {
  const int log2 = a == kHugeOperand ? kHugeLog2 : a % (world_.most_log2() + 1);
  const uint64_t size_bytes = (uint64_t{1} << log2) + ((uint64_t{b} << log2) >> 8);
  return b == 0 && a % 2 == 1 ? size_bytes - 1 : size_bytes;
}

absl::Status Model::Allocate(uint8_t a, uint8_t b) {
  const uint64_t size_bytes = Size(a, b);
  const bool must_serve = live_.empty() && world_.MustServe(size_bytes) && DeviceIsDone();
  absl::StatusOr<PinnedBlock> block = world_.allocator().Allocate(size_bytes);
  if (block.ok()) {
    PINION_RETURN_IF_ERROR(Admit(*block, size_bytes));
    const auto fill = static_cast<unsigned char>(result_.operations);
    const uint64_t stamp_bytes = std::min(kStampBytes, size_bytes);
    char* const data = static_cast<char*>(block->data());
    const auto begin = reinterpret_cast<uint64_t>(data);
    PINION_RETURN_IF_ERROR(Hold(begin, {.end = begin + block->capacity_bytes(),
                                        .live = true,
                                        .size_bytes = size_bytes,
                                        .fill = fill,
                                        .until = {}}));
    std::memset(data, fill, stamp_bytes);
    std::memset(data + size_bytes - stamp_bytes, fill, stamp_bytes);
    if (block->pinned()) requested_bytes_ += size_bytes;
    live_.push_back({*std::move(block), std::this_thread::get_id()});
    ++result_.allocations;
    return absl::OkStatus();
  }
  ++result_.refusals;
  if (size_bytes == 0) {
    return absl::IsInvalidArgument(block.status()) ? absl::OkStatus() : block.status();
  }
  if (!world_.MayRefuse(block.status())) return block.status();
  if (must_serve) return Wrong(absl::StrCat("nothing is held, but: ", block.status().message()));
  return absl::OkStatus();
}

absl::Status Model::Admit(const PinnedBlock& block, uint64_t size_bytes) {
  const auto begin = reinterpret_cast<uint64_t>(block.data());
  if (block.size_bytes() != size_bytes || block.capacity_bytes() < size_bytes) {
    return Wrong(absl::StrCat(size_bytes, " bytes were asked for, the block has ",
                              block.size_bytes(), " of ", block.capacity_bytes()));
  }
  const uint64_t alignment =
      size_bytes < 32 * kKiB ? config::kMinBlockBytes : world_.options().alignment_bytes;
  if (begin % alignment != 0) return Wrong(absl::StrCat("not aligned to ", alignment));
  if (!block.pinned() && !world_.options().pageable_fallback) return Wrong("not pinned");
  if (!ids_.insert(block.id()).second) return Wrong(absl::StrCat("id ", block.id(), " again"));
  return absl::OkStatus();
}

absl::Status Model::Hold(uint64_t begin, Held held) {
  auto known = held_.upper_bound(begin);
  if (known != held_.begin() && std::prev(known)->second.end > begin) --known;
  while (known != held_.end() && known->first < held.end) {
    if (known->second.live) return Wrong("the bytes of a live block");
    if (!known->second.IsDone()) return Wrong("bytes that wait for a ticket");
    ++result_.reuses;
    known = held_.erase(known);
  }
  held_[begin] = std::move(held);
  return absl::OkStatus();
}

// A single list moves to another thread, and the previous thread may end. One of several lists
// hands some blocks to the next list, which checks their bytes on arrival.
absl::Status Model::GoOver(uint8_t a, uint8_t b) {
  if (world_.alone()) {
    thread_ = a % (kWorkers + 1);
    ends_ = b % 8 == 0;
    return absl::OkStatus();
  }
  for (int blocks = 1 + a % 8; blocks > 0 && !live_.empty(); --blocks) {
    Block block = std::move(live_.back());
    live_.pop_back();
    const auto held = held_.find(reinterpret_cast<uint64_t>(block.block.data()));
    PINION_RETURN_IF_ERROR(CheckStamps(held->first, held->second));
    MutexLock lock(next_->mu_);
    next_->handed_over_.push_back({std::move(block), std::move(held->second)});
    held_.erase(held);
  }
  return TakeHandedOver();
}

absl::Status Model::TakeHandedOver() {
  std::vector<HandedOver> taken;
  {
    MutexLock lock(mu_);
    taken = std::exchange(handed_over_, {});
  }
  for (HandedOver& over : taken) {
    const auto begin = reinterpret_cast<uint64_t>(over.block.block.data());
    PINION_RETURN_IF_ERROR(Hold(begin, std::move(over.held)));
    live_.push_back(std::move(over.block));
  }
  return absl::OkStatus();
}

absl::Status Model::ReleaseAfter(uint8_t a, uint8_t b) {
  std::vector<FenceTicket> tickets;
  for (int t = 0; t < kTimelines; ++t) {
    Timeline& timeline = timelines_[t];
    if ((b >> t & 1) == 0) continue;
    timeline.last += b >> (t + 3) & 1;
    tickets.push_back(timeline.fence->Ticket(timeline.last));
  }
  if ((b & 64) != 0) tickets.push_back(FenceTicket());
  if ((b & 128) != 0) tickets.push_back(timelines_[0].fence->Ticket(timelines_[0].last / 2));
  return LetGo(Pick(a), tickets);
}

absl::Status Model::LetGo(size_t index, const std::vector<FenceTicket>& tickets) {
  if (live_.empty()) return absl::OkStatus();
  std::swap(live_[index], live_.back());
  if (live_.back().allocated_on != std::this_thread::get_id()) ++result_.crossings;
  PinnedBlock block = std::move(live_.back().block);
  live_.pop_back();
  const auto begin = reinterpret_cast<uint64_t>(block.data());
  const auto held = held_.find(begin);
  PINION_RETURN_IF_ERROR(CheckStamps(begin, held->second));
  if (block.pinned()) requested_bytes_ -= block.size_bytes();
  held->second.live = false;
  for (const FenceTicket& ticket : tickets) {
    if (ticket.IsDone()) continue;
    Timeline& timeline = *std::find_if(
        std::begin(timelines_), std::end(timelines_),
        [&](const Timeline& candidate) { return candidate.fence == ticket.timeline; });
    held->second.until.push_back({timeline.fence, ticket.value});
    if (ticket.value > timeline.on_device) timeline.pending.insert({ticket.value, begin});
  }
  if (held->second.until.empty()) {
    held_.erase(held);
  } else {
    ++result_.deferred_releases;
  }
  if (tickets.empty()) return absl::OkStatus();  // released by the block's destructor
  std::move(block).ReleaseAfter(tickets);
  return absl::OkStatus();
}

absl::Status Model::CheckStamps(uint64_t begin, const Held& held) const {
  const uint64_t stamp_bytes = std::min(kStampBytes, held.size_bytes);
  const auto* const first = reinterpret_cast<const unsigned char*>(begin);
  const unsigned char* const last = first + held.size_bytes - stamp_bytes;
  const auto is_ours = [&](unsigned char byte) { return byte == held.fill; };
  if (std::all_of(first, first + stamp_bytes, is_ours) &&
      std::all_of(last, last + stamp_bytes, is_ours)) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("somebody else wrote to a block of ", held.size_bytes,
                            held.live ? " bytes" : " bytes that waits for a ticket"));
}

absl::Status Model::RunDevice(Timeline& timeline, uint64_t value) {
  // The device uses these blocks up to `value`. A changed stamp means that two blocks overlapped.
  const auto end = timeline.pending.upper_bound(value);
  for (auto pending = timeline.pending.begin(); pending != end; ++pending) {
    PINION_RETURN_IF_ERROR(CheckStamps(pending->second, held_.at(pending->second)));
  }
  timeline.pending.erase(timeline.pending.begin(), end);
  timeline.on_device = value;
  timeline.fence->CompleteOnDevice(value);
  return absl::OkStatus();
}

absl::Status Model::CompleteOnDevice(uint8_t a, uint8_t b) {
  return RunDevice(TimelineOf(a), NextOf(TimelineOf(a), b));
}

absl::Status Model::CompleteVisibly(uint8_t a, uint8_t b) {
  Timeline& timeline = TimelineOf(a);
  PINION_RETURN_IF_ERROR(RunDevice(timeline, NextOf(timeline, b)));
  timeline.fence->CompleteVisibly(timeline.on_device);
  return absl::OkStatus();
}

absl::Status Model::ReplaceTimeline(uint8_t a, uint8_t) {
  Timeline& timeline = TimelineOf(a);
  PINION_RETURN_IF_ERROR(RunDevice(timeline, timeline.last));
  timeline = {.fence = std::make_shared<FakeTimeline>(), .pending = {}};
  return absl::OkStatus();
}

absl::Status Model::Look(uint8_t, uint8_t) {
  const AllocatorStats stats = world_.allocator().GetStats();
  PINION_RETURN_IF_ERROR(CheckInvariants(stats));
  if (stats.locked_bytes.peak > world_.options().max_locked_bytes) {
    return Wrong(absl::StrCat(stats.locked_bytes.peak, " bytes were locked"));
  }
  if (!world_.alone()) return absl::OkStatus();
  if (stats.requested_bytes.current != requested_bytes_ ||
      stats.allocations != result_.allocations || stats.failures < result_.refusals ||
      stats.locked_bytes.current != world_.locked_bytes()) {
    return Wrong(absl::StrCat("statistics: ", stats.ToString(), "; live are ", requested_bytes_,
                              " bytes, locked are ", world_.locked_bytes()));
  }
  return absl::OkStatus();
}

absl::Status Model::Trim(uint8_t a, uint8_t) {
  const uint64_t keep_bytes = world_.options().max_locked_bytes * a / 255;
  PINION_RETURN_IF_ERROR(world_.allocator().Trim(keep_bytes).status());
  if (!world_.alone() || !live_.empty()) return absl::OkStatus();
  const bool free = std::all_of(held_.begin(), held_.end(),
                                [](const auto& held) { return held.second.IsDone(); });
  if (free && world_.locked_bytes() > keep_bytes) {
    return Wrong(absl::StrCat("nothing is held, but ", world_.locked_bytes(), " are locked"));
  }
  return absl::OkStatus();
}

absl::Status Model::Reserve(uint8_t a, uint8_t) {
  const uint64_t size_bytes = world_.options().max_locked_bytes * a / 255;
  const absl::Status status = world_.allocator().Reserve(size_bytes);
  if (!status.ok()) return world_.MayRefuse(status) ? absl::OkStatus() : status;
  const uint64_t cached_bytes = world_.allocator().GetStats().cached_bytes.current;
  if (world_.alone() && cached_bytes < size_bytes) {
    return Wrong(absl::StrCat(size_bytes, " were reserved, ", cached_bytes, " are free"));
  }
  return absl::OkStatus();
}

absl::Status Model::FailNextCall(uint8_t a, uint8_t) {
  world_.FailNextCall(a % 4 == 0 ? absl::StatusCode::kUnavailable
                                 : absl::StatusCode::kResourceExhausted);
  return absl::OkStatus();
}

absl::Status Model::FillHost(uint8_t a, uint8_t) {
  world_.FillHost(a % 4 == 0);
  return absl::OkStatus();
}

}  // namespace

void OperationsResult::Add(const OperationsResult& other) {
  if (failure.empty()) failure = other.failure;
  operations += other.operations;
  allocations += other.allocations;
  refusals += other.refusals;
  deferred_releases += other.deferred_releases;
  reuses += other.reuses;
  crossings += other.crossings;
}

OperationList RandomOperations(uint64_t seed, uint64_t count) {
  std::mt19937_64 random(seed);
  OperationList list(kHeaderBytes + count * kOperationBytes);
  for (uint8_t& byte : list) byte = static_cast<uint8_t>(random() >> 56);
  return list;
}

OperationsResult RunOperations(const std::vector<OperationList>& lists) {
  World world(lists.front(), lists.size() == 1);
  std::deque<Model> models;
  for (size_t i = 0; i < lists.size(); ++i) models.emplace_back(&world);
  for (size_t i = 0; i < lists.size(); ++i) models[i].set_next(&models[(i + 1) % lists.size()]);
  if (world.alone()) {
    models.front().Run(lists.front());
  } else {
    RunThreads(static_cast<int>(lists.size()), [&](int i) { models[i].Run(lists[i]); });
  }
  OperationsResult sum;
  for (const Model& model : models) sum.Add(model.result());
  if (!sum.failure.empty()) return sum;
  absl::Status end;
  if (world.blocks_outlive_allocator()) world.DropAllocator();
  // Releases blocks that a list received after it had ended.
  for (Model& model : models) end.Update(model.ReleaseAll());
  if (!world.blocks_outlive_allocator()) {
    end.Update(world.allocator().Trim(0).status());
  }
  if (end.ok() && world.locked_bytes() != 0) {
    end = Wrong(absl::StrCat(world.locked_bytes(), " bytes stay locked"));
  }
  if (!end.ok()) sum.failure = absl::StrCat("at the end: ", end.message());
  return sum;
}

}  // namespace pinion::testing
