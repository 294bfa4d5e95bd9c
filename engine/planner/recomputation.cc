#include "pinion/engine/planner/recomputation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

int64_t Signed(uint64_t bytes) { return static_cast<int64_t>(bytes); }

// Change of the device memory of each interval against the trace.
class BytesDelta {
 public:
  explicit BytesDelta(size_t intervals)
      : changes_(intervals + 1), begins_(intervals + 1), ends_(intervals + 1) {}

  void Add(size_t first, size_t last, uint64_t size_bytes) {
    if (first > last) return;
    last = std::min(last, changes_.size() - 2);
    Change(first, last, Signed(size_bytes));
    begins_[first] += Signed(size_bytes);
    ends_[last] += Signed(size_bytes);
  }
  // These bytes belong to an object now: they are no other bytes until the end of `last`.
  void Subtract(size_t first, size_t last, uint64_t size_bytes) {
    if (first <= last) Change(first, std::min(last, changes_.size() - 2), -Signed(size_bytes));
  }
  // The change against the interval before.
  int64_t change(size_t interval) const { return changes_[interval]; }
  // Of the added bytes, those that the interval makes.
  int64_t begins(size_t interval) const { return begins_[interval]; }
  // Of the added bytes, those that are freed when it ends.
  int64_t ends(size_t interval) const { return ends_[interval]; }

 private:
  void Change(size_t first, size_t last, int64_t bytes) {
    changes_[first] += bytes;
    changes_[last + 1] -= bytes;
  }

  std::vector<int64_t> changes_;
  std::vector<int64_t> begins_;
  std::vector<int64_t> ends_;
};

constexpr uint32_t kNone = UINT32_MAX;

// Markers in place of an access of the original trace; those have lower numbers.
constexpr uint32_t kInputSaved = UINT32_MAX - 1;
constexpr uint32_t kInputRead = UINT32_MAX;

// The original trace, with its liveness.
struct Recorded {
  explicit Recorded(const StepTrace& record)
      : step(record), lives(LivenessOf(record)), operator_ends(OperatorEnds(record)) {}

  bool Saves(uint32_t access) const { return access <= lives[step.accesses[access]].last_save(); }
  // Of objects and unsaved inputs.
  size_t numbers() const { return step.objects.size() + step.unsaved_inputs.size(); }
  uint64_t size_bytes(uint32_t number) const { return step.ObjectOrInput(number).size_bytes; }

  // Whether an input of a segment that begins at or before that interval counts among its other
  // bytes.
  bool IsOtherIn(size_t interval, uint32_t input) const {
    const StepObject& object = step.ObjectOrInput(input);
    const bool is_unsaved = input >= step.objects.size();
    return object.frees &&
           (is_unsaved ? interval <= object.held_until : interval < lives[input].made());
  }

  const StepTrace& step;
  const std::vector<ObjectLiveness> lives;
  const std::vector<size_t> operator_ends;
};

// The second run of a segment.
struct SecondRun {
  const StepSegment* segment = nullptr;
  uint32_t read_at = kNone;  // the first read of a tensor that the segment saved
  double compute_us = 0;
  int64_t transient_bytes = 0;  // at its peak, beside the memory at its begin
};

// The access before which the segment begins: its first.
uint32_t BeginOf(const StepSegment& segment) { return segment.accesses.front(); }

// Adds tensors that are no longer saved, or saved later, as long as the program references them.
// Subtracts tensors that are saved earlier, as inputs, from the other bytes. `inputs_saved`, by
// number: the first access before which the tensor is saved as an input, or kNone.
void AddForward(const Recorded& old, const std::vector<bool>& is_removed,
                const std::vector<uint32_t>& inputs_saved, BytesDelta& more) {
  for (uint32_t object = 0; object < old.lives.size(); ++object) {
    if (!old.step.objects[object].frees) continue;
    const ObjectLiveness& life = old.lives[object];
    size_t saved = inputs_saved[object];
    for (const size_t access : life.accesses) {
      if (!is_removed[access]) saved = std::min(saved, access);
    }
    if (saved < life.made()) more.Subtract(saved, life.made() - 1, old.size_bytes(object));
    if (saved <= life.made()) continue;
    if (saved != kNone) {
      more.Add(life.made(), saved - 1, old.size_bytes(object));
      continue;
    }
    const size_t held_until = std::max<size_t>(old.operator_ends[life.last_save()] + 1,
                                               old.step.objects[object].held_until);
    more.Add(life.made(), held_until, old.size_bytes(object));
  }
  for (auto input = static_cast<uint32_t>(old.step.objects.size()); input < old.numbers();
       ++input) {
    const StepObject& unsaved = old.step.ObjectOrInput(input);
    if (inputs_saved[input] == kNone || !unsaved.frees) continue;
    more.Subtract(inputs_saved[input], unsaved.held_until, unsaved.size_bytes);
  }
}

SecondRun AddSecondRun(const Recorded& old, const StepSegment& segment, BytesDelta& more) {
  std::vector<uint32_t> saves;
  std::vector<size_t> needed_until(old.step.objects.size());  // last intervals, by object
  SecondRun run = {.segment = &segment};
  for (const uint32_t access : segment.accesses) {
    if (old.Saves(access)) {
      saves.push_back(access);
    } else {
      run.read_at = std::min(run.read_at, access);
      needed_until[old.step.accesses[access]] = old.operator_ends[access] + 1;
    }
  }
  std::vector<bool> is_made(old.numbers());
  std::vector<uint32_t> inputs;  // each once
  for (const uint32_t input : segment.inputs) {
    if (!is_made[input]) inputs.push_back(input);
    is_made[input] = true;  // the second run does not make it
  }
  const auto beside_inputs = [&](uint64_t other_bytes, size_t interval) {
    int64_t bytes = Signed(other_bytes);
    for (const uint32_t input : inputs) {
      if (old.IsOtherIn(interval, input)) bytes -= Signed(old.size_bytes(input));
    }
    return bytes;
  };
  const int64_t before_bytes = beside_inputs(segment.before->other_bytes, BeginOf(segment));
  int64_t made_bytes = 0;
  auto next_save = saves.begin();
  run.compute_us = -segment.before->compute_us;
  for (uint32_t access = BeginOf(segment); access <= saves.back(); ++access) {
    const uint32_t object = old.step.accesses[access];
    if (*next_save == access) {
      ++next_save;
      if (!is_made[object]) {
        is_made[object] = true;
        made_bytes += Signed(old.size_bytes(object));
        if (needed_until[object] == 0) {
          needed_until[object] =
              LastIntervalOf(old.step.objects[object], old.lives[object], old.operator_ends);
        }
        more.Add(run.read_at + size_t{1}, needed_until[object], old.size_bytes(object));
      }
    }
    const StepInterval& interval = old.step.intervals[access];
    run.compute_us += interval.compute_us;
    const int64_t beside_bytes = beside_inputs(interval.peak_other_bytes(), access) - before_bytes;
    run.transient_bytes =
        std::max(run.transient_bytes, made_bytes + std::max<int64_t>(0, beside_bytes));
  }
  return run;
}

// The new trace, while its objects still have their old numbers.
struct Rewritten {
  StepTrace step;
  std::vector<uint32_t> old_accesses;  // by new access; or kInputSaved, kInputRead
  std::vector<size_t> new_intervals;   // by old interval
};

class Writer {
 public:
  explicit Writer(const Recorded& old) : old_(old) {}

  // Accesses that are added next belong behind the old interval.
  void EndOldInterval() { written_.new_intervals.push_back(written_.step.intervals.size()); }
  // Adds all of an interval, or a part of it that takes `compute_us`. Of `more_bytes`, `ends_bytes`
  // are freed when it ends.
  void AddInterval(const StepInterval& interval, double compute_us, int64_t more_bytes,
                   int64_t ends_bytes) {
    compute_us_ += compute_us;
    end_bytes_ = Signed(interval.other_bytes) + more_bytes - ends_bytes;
    peak_bytes_ = std::max(peak_bytes_, Signed(interval.peak_other_bytes()) + more_bytes);
  }
  // One operator saves all inputs of a segment.
  void AddInputs(const StepSegment& segment) { AddInputs(segment, kInputSaved); }
  void AddRun(const SecondRun& run) {
    AddInputs(*run.segment, kInputRead);
    compute_us_ += run.compute_us;
    peak_bytes_ = std::max(peak_bytes_, end_bytes_ + run.transient_bytes);
  }
  void AddAccess(uint32_t object, uint32_t old_access) {
    const std::vector<uint32_t>& before = written_.old_accesses;
    AddAccess(object, old_access,
              /*goes_on=*/!before.empty() && before.back() < kInputSaved &&
                  old_.operator_ends[before.back()] == old_.operator_ends[old_access]);
  }
  Rewritten Finish() {
    EndInterval();
    return std::move(written_);
  }

 private:
  void AddInputs(const StepSegment& segment, uint32_t access) {
    for (size_t i = 0; i < segment.inputs.size(); ++i) {
      AddAccess(segment.inputs[i], access, /*goes_on=*/i > 0);
      peak_bytes_ = end_bytes_;
    }
  }
  void AddAccess(uint32_t object, uint32_t old_access, bool goes_on) {
    EndInterval();
    StepTrace& step = written_.step;
    step.operators.push_back(step.accesses.empty() ? 0 : step.operators.back() + (goes_on ? 0 : 1));
    step.accesses.push_back(object);
    written_.old_accesses.push_back(old_access);
  }
  void EndInterval() {
    const int64_t other_bytes = std::max<int64_t>(0, end_bytes_);
    const int64_t more_bytes = std::max<int64_t>(0, peak_bytes_) - other_bytes;
    written_.step.intervals.push_back(
        {.compute_us = std::exchange(compute_us_, 0),
         .other_bytes = static_cast<uint64_t>(other_bytes),
         .transient_bytes = static_cast<uint64_t>(std::max<int64_t>(0, more_bytes)),
         .released_bytes = static_cast<uint64_t>(std::max<int64_t>(0, -more_bytes))});
    peak_bytes_ = 0;
  }

  const Recorded& old_;
  Rewritten written_;
  double compute_us_ = 0;  // of the interval that has not ended
  int64_t end_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// A second run holds its inputs until their last read in the segment.
void AddHeldInputs(const Recorded& old, const SecondRun& run, Rewritten& written) {
  size_t counted_until = written.new_intervals[run.read_at];
  for (const uint32_t input : run.segment->inputs) {
    ++counted_until;  // the interval behind its read
    size_t needed_until = 0;
    for (const uint32_t access : run.segment->accesses) {
      if (old.step.accesses[access] == input && !old.Saves(access))
        needed_until = old.operator_ends[access] + 1;
    }
    if (needed_until == 0) continue;
    for (size_t i = counted_until + 1; i <= written.new_intervals[needed_until]; ++i) {
      written.step.intervals[i].other_bytes += old.size_bytes(input);
    }
  }
}

// Numbers objects in the order of their first accesses.
void NumberObjects(const Recorded& old, Rewritten& written) {
  std::vector<uint32_t> numbers(old.numbers(), kNone);
  StepTrace& step = written.step;
  for (uint32_t access = 0; access < step.accesses.size(); ++access) {
    const uint32_t object = step.accesses[access];
    const uint32_t old_access = written.old_accesses[access];
    if (numbers[object] == kNone) {
      numbers[object] = static_cast<uint32_t>(step.objects.size());
      StepObject numbered = old.step.ObjectOrInput(object);
      numbered.saved_until = 0;
      for (uint32_t* until : {&numbered.needed_until, &numbered.held_until}) {
        if (*until == 0) continue;  // the accesses decide
        const size_t last = written.new_intervals.size() - 1;
        *until = static_cast<uint32_t>(written.new_intervals[std::min<size_t>(*until, last)]);
      }
      step.objects.push_back(numbered);
    } else if (old_access == kInputSaved || (old_access != kInputRead && old.Saves(old_access))) {
      step.objects[numbers[object]].saved_until = access;
    }
    step.accesses[access] = numbers[object];
  }
}

}  // namespace

std::vector<uint32_t> RecomputableSegments(const StepTrace& step) {
  if (step.segments.empty()) return {};
  const Recorded old(step);
  std::vector<uint32_t> segments;
  std::vector<int> unread(step.objects.size());  // saves less reads, in one segment
  const std::vector<bool> is_kept = KeptWhole(step.segments);
  for (uint32_t i = 0; i < step.segments.size(); ++i) {
    const StepSegment& segment = step.segments[i];
    if (!is_kept[i] || !segment.before.has_value() || segment.accesses.empty()) continue;
    bool is_read_twice = false;
    bool saves_more = false;  // than its inputs
    for (const uint32_t access : segment.accesses) {
      const auto inputs_end = segment.inputs.end();
      saves_more = saves_more || std::find(segment.inputs.begin(), inputs_end,
                                           step.accesses[access]) == inputs_end;
      int& left = unread[step.accesses[access]];
      left += old.Saves(access) ? 1 : -1;
      is_read_twice = is_read_twice || left < 0;
    }
    for (const uint32_t access : segment.accesses) unread[step.accesses[access]] = 0;
    const bool is_read = !old.Saves(segment.accesses.back());
    if (is_read && saves_more && !is_read_twice && old.Saves(segment.accesses.front()))
      segments.push_back(i);
  }
  return segments;
}

StepTrace WithRecomputation(const StepTrace& step, absl::Span<const uint32_t> segments) {
  const Recorded old(step);
  std::vector<bool> is_removed(step.accesses.size());
  std::vector<uint32_t> inputs_saved(old.numbers(), kNone);
  std::vector<const StepSegment*> begins(
      step.accesses.size());  // by the access before which the segment begins
  for (const uint32_t index : segments) {
    const StepSegment& segment = step.segments[index];
    begins[BeginOf(segment)] = &segment;
    for (const uint32_t access : segment.accesses) is_removed[access] = true;
    for (const uint32_t input : segment.inputs) {
      inputs_saved[input] = std::min(inputs_saved[input], BeginOf(segment));
    }
  }
  BytesDelta more(step.intervals.size());
  AddForward(old, is_removed, inputs_saved, more);
  std::vector<SecondRun> runs;
  for (const uint32_t index : segments) {
    runs.push_back(AddSecondRun(old, step.segments[index], more));
  }
  std::sort(runs.begin(), runs.end(),
            [](const SecondRun& a, const SecondRun& b) { return a.read_at < b.read_at; });
  Writer writer(old);
  int64_t more_bytes = 0;
  auto run = runs.begin();
  for (uint32_t access = 0; access <= step.accesses.size(); ++access) {
    more_bytes += more.change(access);
    const StepInterval& interval = step.intervals[access];
    double compute_us = interval.compute_us;
    if (access < step.accesses.size() && begins[access] != nullptr) {
      const StepInterval& before = *begins[access]->before;
      // Tensors that the interval makes, and that are no longer saved, belong to the segment.
      writer.AddInterval(before, before.compute_us, more_bytes - more.begins(access),
                         /*ends_bytes=*/0);
      writer.AddInputs(*begins[access]);
      compute_us -= before.compute_us;
    }
    writer.AddInterval(interval, compute_us, more_bytes, more.ends(access));
    writer.EndOldInterval();
    if (access == step.accesses.size()) break;
    for (; run != runs.end() && run->read_at == access; ++run) writer.AddRun(*run);
    if (!is_removed[access]) writer.AddAccess(step.accesses[access], access);
  }
  Rewritten written = writer.Finish();
  for (const SecondRun& again : runs) AddHeldInputs(old, again, written);
  NumberObjects(old, written);
  written.step.timed_by_host = step.timed_by_host;
  return std::move(written.step);
}

}  // namespace pinion
