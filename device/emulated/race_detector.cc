#include "pinion/device/emulated/race_detector.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "pinion/allocator/base/check.h"

namespace pinion {

void VectorClock::Set(int context, uint64_t epoch) {
  if (context >= static_cast<int>(epochs_.size())) epochs_.resize(context + 1, 0);
  epochs_[context] = epoch;
}

void VectorClock::Join(const VectorClock& other) {
  if (other.epochs_.size() > epochs_.size()) epochs_.resize(other.epochs_.size(), 0);
  for (size_t i = 0; i < other.epochs_.size(); ++i) {
    epochs_[i] = std::max(epochs_[i], other.epochs_[i]);
  }
}

RaceDetector::RaceDetector() { AddContext("the host"); }

int RaceDetector::AddContext(std::string name) {
  contexts_.push_back({std::move(name), {}, 0});
  return static_cast<int>(contexts_.size()) - 1;
}

int RaceDetector::Intern(std::string name) {
  const auto [it, added] = name_ids_.try_emplace(std::move(name), static_cast<int>(names_.size()));
  if (added) names_.push_back(it->first);
  return it->second;
}

uint64_t RaceDetector::Begin(int context, std::string name) {
  Context& state = contexts_[context];
  if (context != kHost) state.clock.Join(contexts_[kHost].clock);
  state.clock.Set(context, ++state.epoch);
  current_ = {context, state.epoch, next_number_++, Intern(std::move(name))};
  clock_ = state.clock;
  reported_.clear();
  return current_.number;
}

void RaceDetector::AddMemory(const void* data, uint64_t size_bytes, int context, std::string name) {
  Begin(context, std::move(name));
  Memory memory;
  memory.size_bytes = size_bytes;
  memory.spans[0] = {size_bytes, current_, {}};
  const bool added = memories_.emplace(reinterpret_cast<uintptr_t>(data), std::move(memory)).second;
  PINION_CHECK(added) << "memory at " << data << " is known already";
}

void RaceDetector::RemoveMemory(const void* data, int context, const std::vector<int>& recorded,
                                std::string name) {
  const auto it = memories_.find(reinterpret_cast<uintptr_t>(data));
  PINION_CHECK(it != memories_.end()) << "no memory at " << data;
  Begin(context, std::move(name));
  for (int other : recorded) clock_.Join(contexts_[other].clock);
  AccessMemory(it->second, 0, it->second.size_bytes, /*write=*/true);
  memories_.erase(it);
}

void RaceDetector::Access(const void* data, uint64_t size_bytes, bool write) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  auto it = memories_.upper_bound(begin);
  if (it == memories_.begin()) return;
  --it;
  const uint64_t offset = begin - it->first;
  if (offset >= it->second.size_bytes) return;
  AccessMemory(it->second, offset, offset + std::min(size_bytes, it->second.size_bytes - offset),
               write);
}

std::map<uint64_t, RaceDetector::Span>::iterator RaceDetector::SplitAt(Memory& memory,
                                                                       uint64_t offset) {
  auto it = std::prev(memory.spans.upper_bound(offset));
  if (it->first == offset || offset == memory.size_bytes) return it;
  Span second = it->second;
  it->second.end = offset;
  return memory.spans.emplace_hint(std::next(it), offset, std::move(second));
}

void RaceDetector::AccessMemory(Memory& memory, uint64_t begin, uint64_t end, bool write) {
  if (begin == end) return;
  SplitAt(memory, end);
  const auto first = SplitAt(memory, begin);
  auto it = first;
  for (; it != memory.spans.end() && it->first < end; ++it) {
    Span& span = it->second;
    if (!Ordered(span.write)) Report(memory, it->first, span.end, span.write, true, write);
    if (!write) {
      auto mine = std::find_if(span.reads.begin(), span.reads.end(), [this](const Epoch& read) {
        return read.context == current_.context;
      });
      if (mine != span.reads.end()) {
        *mine = current_;
      } else {
        span.reads.push_back(current_);
      }
      continue;
    }
    for (const Epoch& read : span.reads) {
      if (!Ordered(read)) Report(memory, it->first, span.end, read, false, write);
    }
  }
  if (write) {
    first->second.end = end;
    first->second.write = current_;
    first->second.reads.clear();
    memory.spans.erase(std::next(first), it);
  }
  if (memory.spans.size() >= memory.compact_at) Compact(memory);
}

void RaceDetector::Compact(Memory& memory) {
  const VectorClock& host = contexts_[kHost].clock;
  const auto seen = [&host](const Epoch& epoch) { return host.Get(epoch.context) >= epoch.epoch; };
  const auto same = [](const Epoch& a, const Epoch& b) {
    return a.context == b.context && a.epoch == b.epoch;
  };
  auto previous = memory.spans.end();
  for (auto it = memory.spans.begin(); it != memory.spans.end();) {
    Span& span = it->second;
    if (seen(span.write)) span.write = Epoch();
    span.reads.erase(std::remove_if(span.reads.begin(), span.reads.end(), seen), span.reads.end());
    if (previous != memory.spans.end() && same(previous->second.write, span.write) &&
        std::equal(previous->second.reads.begin(), previous->second.reads.end(), span.reads.begin(),
                   span.reads.end(), same)) {
      previous->second.end = span.end;
      it = memory.spans.erase(it);
    } else {
      previous = it++;
    }
  }
  memory.compact_at = std::max<size_t>(64, 2 * memory.spans.size());
}

size_t RaceDetector::span_count() const {
  size_t count = 0;
  for (const auto& [base, memory] : memories_) count += memory.spans.size();
  return count;
}

void RaceDetector::Report(const Memory& memory, uint64_t begin, uint64_t end, const Epoch& earlier,
                          bool earlier_writes, bool write) {
  if (std::find(reported_.begin(), reported_.end(), earlier.number) != reported_.end()) return;
  reported_.push_back(earlier.number);
  const auto describe = [this](const Epoch& epoch, bool writes) {
    std::ostringstream text;
    text << names_[epoch.name] << " #" << epoch.number << " on " << contexts_[epoch.context].name
         << (writes ? " writes" : " reads");
    return text.str();
  };
  // `earlier` is never the host: its accesses precede everything submitted later.
  std::ostringstream report;
  const bool is_copy = names_[current_.name].rfind("copy ", 0) == 0;
  if (write && !is_copy && !earlier_writes && names_[earlier.name] == "copy D2H") {
    report << "memory is written before its copy to the host is done. If the program changes a "
              "saved tensor in place, that is its error, which backward reports where detect_races "
              "is off; otherwise: ";
  }
  report << "race on bytes [" << begin << ", " << end << ") of " << memory.size_bytes << ": "
         << describe(current_, write) << " them, and " << describe(earlier, earlier_writes)
         << " them; nothing orders the two. Missing edge: " << contexts_[current_.context].name
         << " must wait for an event recorded after " << names_[earlier.name] << " #"
         << earlier.number << " on " << contexts_[earlier.context].name;
  reports_.push_back(report.str());
}

}  // namespace pinion
