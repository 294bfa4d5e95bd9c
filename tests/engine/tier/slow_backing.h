// A Backing that moves bytes on, like one that writes files. After the copy out its thread moves
// the bytes to the heap and frees the pinned memory. On request it restores them into new pinned
// memory. Its jobs are numbered on a timeline without events, whose tickets are on the buffers.
//
//   auto slow = std::make_shared<SlowBacking>(world.machine());
//   slow->Pause();                              // the thread starts no more jobs
//   ... parcel->ToRead() ...                    // a buffer that is not filled yet
//   slow->Resume();
//
// Thread safety: thread-safe.

#ifndef PINION_TESTS_ENGINE_TIER_SLOW_BACKING_H_
#define PINION_TESTS_ENGINE_TIER_SLOW_BACKING_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/tier/backing.h"
#include "pinion/engine/transfer_engine.h"

namespace pinion::testing {

// Runs one job after the other; a job's number completes with the job.
class NumberedWork final : public FenceTimeline {
 public:
  NumberedWork() : thread_([this] { Work(); }) {}
  // Finishes all jobs.
  ~NumberedWork() override {
    Update([this] { ending_ = true, paused_ = false; });
    thread_.join();
  }

  uint64_t Add(std::function<void()> job) {
    uint64_t number = 0;
    Update([&] {
      jobs_.push_back(std::move(job));
      number = ++last_;
    });
    return number;
  }
  void Pause() {
    Update([this] { paused_ = true; });
  }
  void Resume() {
    Update([this] { paused_ = false; });
  }
  uint64_t waits() const { return waits_; }

  uint64_t Completed() const noexcept override { return completed_; }
  void Poll() override {}
  absl::Status Wait(uint64_t number, absl::Duration timeout) override {
    ++waits_;
    const auto done = [&] { return completed_ >= number; };
    std::unique_lock lock(mu_);
    if (timeout == absl::InfiniteDuration()) {
      changed_.wait(lock, done);
    } else if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), done)) {
      return absl::DeadlineExceededError("the slow backing's thread has not come to it");
    }
    return absl::OkStatus();
  }

 private:
  void Update(const std::function<void()>& change) {
    const std::unique_lock lock(mu_);
    change();
    changed_.notify_all();
  }
  void Work() {
    while (true) {
      std::function<void()> job;
      {
        std::unique_lock lock(mu_);
        changed_.wait(lock, [this] { return !paused_ && (ending_ || !jobs_.empty()); });
        if (jobs_.empty()) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job();
      job = nullptr;  // frees what the job holds
      Update([this] { ++completed_; });
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  uint64_t last_ = 0;
  bool paused_ = false;
  bool ending_ = false;
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> waits_{0};
  std::thread thread_;
};

class SlowBacking final : public Backing {
 public:
  explicit SlowBacking(EmulatedMachine& machine) : machine_(machine) {}
  // Places may outlive the backing; its jobs do not.
  ~SlowBacking() override { Drain(); }

  void Pause() { work_->Pause(); }
  void Resume() { work_->Resume(); }
  // Blocks until all jobs added so far are done.
  void Drain() {
    Resume();
    const uint64_t last = work_->Add([] {});
    PINION_CHECK(work_->Wait(last, absl::InfiniteDuration()).ok());
  }
  // Returns how often a caller blocked until the thread was done.
  uint64_t waits() const { return work_->waits(); }

  absl::StatusOr<std::shared_ptr<ParcelPlace>> Reserve(const std::shared_ptr<PinnedAllocator>& pool,
                                                       uint64_t size_bytes) override {
    PINION_ASSIGN_OR_RETURN(PinnedBlock block, pool->Allocate(size_bytes));
    return std::make_unique<Place>(*this, pool, std::move(block));
  }

 private:
  // On the heap; jobs share it, because the place may be destroyed first.
  using Bytes = std::vector<uint8_t>;

  class Place final : public ParcelPlace {
   public:
    Place(SlowBacking& backing, std::shared_ptr<PinnedAllocator> pool, PinnedBlock block)
        : machine_(backing.machine_),
          pool_(std::move(pool)),
          work_(backing.work_),
          size_bytes_(block.size_bytes()),
          to_write_(std::make_shared<HostBuffer>(std::move(block))) {}

    std::shared_ptr<HostBuffer> ToWrite() override {
      PINION_CHECK(to_write_ != nullptr) << "asked for once";
      return to_write_;
    }

    void Written(const Transfer& copy_out) override {
      work_->Add([&machine = machine_, stored = stored_, copy_out,
                  from = std::exchange(to_write_, nullptr)] {
        PINION_CHECK(copy_out.Wait(absl::InfiniteDuration()).ok());
        PINION_CHECK(machine.HostAccess(from->data(), from->size_bytes(), /*write=*/false).ok());
        stored->resize(from->size_bytes());
        std::memcpy(stored->data(), from->data(), from->size_bytes());
      });
    }

    absl::StatusOr<std::shared_ptr<HostBuffer>> ToRead() override {
      PINION_CHECK(to_write_ == nullptr) << "only after Written";
      PINION_ASSIGN_OR_RETURN(PinnedBlock block, pool_->Allocate(size_bytes_));
      auto to = std::make_shared<HostBuffer>(std::move(block));
      const uint64_t number = work_->Add([&machine = machine_, stored = stored_, to] {
        PINION_CHECK(machine.HostAccess(to->data(), to->size_bytes(), /*write=*/true).ok());
        std::memcpy(to->data(), stored->data(), to->size_bytes());
      });
      to->AddTicket({work_, number});
      return to;
    }

   private:
    EmulatedMachine& machine_;
    const std::shared_ptr<PinnedAllocator> pool_;
    const std::shared_ptr<NumberedWork> work_;
    const uint64_t size_bytes_;
    const std::shared_ptr<Bytes> stored_ = std::make_shared<Bytes>();
    std::shared_ptr<HostBuffer> to_write_;
  };

  EmulatedMachine& machine_;
  const std::shared_ptr<NumberedWork> work_ = std::make_shared<NumberedWork>();
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_SLOW_BACKING_H_
