#include "pinion/engine/planner/recomputation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

// Bytes that are on the device in some stretches of a step, more or fewer than were recorded there.
//
//   MoreBytes more(step.stretches.size());
//   more.Add(3, 5, size_bytes);          // there in stretches 3, 4 and 5, and gone when 5 ends
//   more.Subtract(6, 7, size_bytes);     // counted elsewhere in 6 and 7
//
// Thread safety: none.
inline int64_t Signed(uint64_t bytes) { return static_cast<int64_t>(bytes); }

class MoreBytes {
 public:
  explicit MoreBytes(size_t stretches)
      : changes_(stretches + 1), begins_(stretches + 1), ends_(stretches + 1) {}

  void Add(size_t first, size_t last, uint64_t size_bytes) {
    if (first > last) return;
    last = std::min(last, changes_.size() - 2);
    Change(first, last, Signed(size_bytes));
    begins_[first] += Signed(size_bytes);
    ends_[last] += Signed(size_bytes);
  }
  // What was one of the other bytes to the end of `last` is an object's.
  void Subtract(size_t first, size_t last, uint64_t size_bytes) {
    if (first <= last) Change(first, std::min(last, changes_.size() - 2), -Signed(size_bytes));
  }
  // How much more there is than in the stretch before.
  int64_t change(size_t stretch) const { return changes_[stretch]; }
  // Of what was added, that which the stretch makes.
  int64_t begins(size_t stretch) const { return begins_[stretch]; }
  // And that which has gone when it ends.
  int64_t ends(size_t stretch) const { return ends_[stretch]; }

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

// In the place of a use of the step as it was recorded, all of which have lower numbers.
constexpr uint32_t kInputSaved = UINT32_MAX - 1;
constexpr uint32_t kInputRead = UINT32_MAX;

// The step as it was recorded.
struct Recorded {
  explicit Recorded(const StepRecord& record)
      : step(record), lives(LivesOf(record)), operator_ends(OperatorEnds(record)) {}

  bool Saves(uint32_t use) const {
    const uint32_t object = step.uses[use];
    return use == lives[object].uses.front() || use <= step.objects[object].saved_until;
  }
  bool IsUnsaved(uint32_t object) const { return object >= step.objects.size(); }
  const UnsavedInput& Unsaved(uint32_t object) const {
    return step.unsaved_inputs[object - step.objects.size()];
  }
  size_t numbers() const { return step.objects.size() + step.unsaved_inputs.size(); }
  // Of what has a number: objects, and then the unsaved inputs.
  uint64_t size_bytes(uint32_t object) const {
    return IsUnsaved(object) ? Unsaved(object).size_bytes : step.objects[object].size_bytes;
  }

  // Whether an input of a segment that begins at or before that stretch is among its other bytes.
  bool IsOtherIn(size_t stretch, uint32_t input) const {
    if (IsUnsaved(input)) return Unsaved(input).frees && stretch <= Unsaved(input).held_until;
    return step.objects[input].frees && stretch < lives[input].made;
  }

  const StepRecord& step;
  const std::vector<ObjectLife> lives;
  const std::vector<size_t> operator_ends;
};

// The second run of a segment.
struct SecondRun {
  const StepSegment* segment = nullptr;
  uint32_t read_at = kNone;  // the first read of what it saved
  double compute_us = 0;
  int64_t transient_bytes = 0;  // at its peak, beside what there was
};

// The use before which the segment begins: its first.
uint32_t BeginOf(const StepSegment& segment) { return segment.uses.front(); }

// What is not saved any more, or only later, is there as long as the program has it. What is saved
// earlier, as an input, is no other byte any more from there on. `inputs_saved`: by number, the
// first use before which it is saved as an input; kNone: before none.
void AddForward(const Recorded& old, const std::vector<bool>& is_removed,
                const std::vector<uint32_t>& inputs_saved, MoreBytes& more) {
  for (uint32_t object = 0; object < old.lives.size(); ++object) {
    if (!old.step.objects[object].frees) continue;
    const ObjectLife& life = old.lives[object];
    size_t saved = inputs_saved[object];
    for (const size_t use : life.uses) {
      if (!is_removed[use]) saved = std::min(saved, use);
    }
    if (saved < life.uses.front()) more.Subtract(saved, life.made - 1, old.size_bytes(object));
    if (saved <= life.uses.front()) continue;
    if (saved != kNone) {
      more.Add(life.made, saved - 1, old.size_bytes(object));
      continue;
    }
    size_t last_save = life.uses.front();
    for (const size_t use : life.uses) {
      if (old.Saves(static_cast<uint32_t>(use))) last_save = use;
    }
    const size_t held_until =
        std::max<size_t>(old.operator_ends[last_save] + 1, old.step.objects[object].held_until);
    more.Add(life.made, held_until, old.size_bytes(object));
  }
  for (auto input = static_cast<uint32_t>(old.step.objects.size()); input < old.numbers();
       ++input) {
    if (inputs_saved[input] == kNone || !old.Unsaved(input).frees) continue;
    more.Subtract(inputs_saved[input], old.Unsaved(input).held_until, old.size_bytes(input));
  }
}

SecondRun AddSecondRun(const Recorded& old, const StepSegment& segment, MoreBytes& more) {
  std::vector<uint32_t> saves;
  std::vector<size_t> needed_until(old.step.objects.size());  // stretches, by object
  SecondRun run = {.segment = &segment};
  for (const uint32_t use : segment.uses) {
    if (old.Saves(use)) {
      saves.push_back(use);
    } else {
      run.read_at = std::min(run.read_at, use);
      needed_until[old.step.uses[use]] = old.operator_ends[use] + 1;
    }
  }
  std::vector<bool> is_made(old.numbers());
  std::vector<uint32_t> inputs;  // each once
  for (const uint32_t input : segment.inputs) {
    if (!is_made[input]) inputs.push_back(input);
    is_made[input] = true;  // it is not made again
  }
  const auto beside_inputs = [&](uint64_t other_bytes, size_t stretch) {
    int64_t bytes = Signed(other_bytes);
    for (const uint32_t input : inputs) {
      if (old.IsOtherIn(stretch, input)) bytes -= Signed(old.size_bytes(input));
    }
    return bytes;
  };
  const int64_t before_bytes = beside_inputs(segment.before->other_bytes, BeginOf(segment));
  int64_t made_bytes = 0;
  auto next_save = saves.begin();
  run.compute_us = -segment.before->compute_us;
  for (uint32_t use = BeginOf(segment); use <= saves.back(); ++use) {
    const uint32_t object = old.step.uses[use];
    if (*next_save == use) {
      ++next_save;
      if (!is_made[object]) {
        is_made[object] = true;
        made_bytes += Signed(old.size_bytes(object));
        if (needed_until[object] == 0) {
          needed_until[object] =
              LastStretchOf(old.step.objects[object], old.lives[object], old.operator_ends);
        }
        more.Add(run.read_at + size_t{1}, needed_until[object], old.size_bytes(object));
      }
    }
    const StepStretch& stretch = old.step.stretches[use];
    run.compute_us += stretch.compute_us;
    const int64_t beside_bytes = beside_inputs(stretch.peak_other_bytes(), use) - before_bytes;
    run.transient_bytes =
        std::max(run.transient_bytes, made_bytes + std::max<int64_t>(0, beside_bytes));
  }
  return run;
}

// The new step, with the old one's objects by their old numbers.
struct Rewritten {
  StepRecord step;
  std::vector<uint32_t> old_uses;     // by use; or kInputSaved, kInputRead
  std::vector<size_t> new_stretches;  // by old stretch
};

class Writer {
 public:
  explicit Writer(const Recorded& old) : old_(old) {}

  // Uses that are added next come behind the old stretch.
  void EndOldStretch() { written_.new_stretches.push_back(written_.step.stretches.size()); }
  // All of a stretch, or a part of it, `compute_us` long. Of `more_bytes`, `ends_bytes` are gone
  // when it ends.
  void AddStretch(const StepStretch& stretch, double compute_us, int64_t more_bytes,
                  int64_t ends_bytes) {
    compute_us_ += compute_us;
    end_bytes_ = Signed(stretch.other_bytes) + more_bytes - ends_bytes;
    peak_bytes_ = std::max(peak_bytes_, Signed(stretch.peak_other_bytes()) + more_bytes);
  }
  // One operator of each segment saves all of its inputs.
  void AddInputs(const StepSegment& segment) { AddInputs(segment, kInputSaved); }
  void AddRun(const SecondRun& run) {
    AddInputs(*run.segment, kInputRead);
    compute_us_ += run.compute_us;
    peak_bytes_ = std::max(peak_bytes_, end_bytes_ + run.transient_bytes);
  }
  void AddUse(uint32_t object, uint32_t old_use) {
    const std::vector<uint32_t>& before = written_.old_uses;
    AddUse(object, old_use,
           /*goes_on=*/!before.empty() && before.back() < kInputSaved &&
               old_.operator_ends[before.back()] == old_.operator_ends[old_use]);
  }
  Rewritten Finish() {
    EndStretch();
    return std::move(written_);
  }

 private:
  void AddInputs(const StepSegment& segment, uint32_t use) {
    for (size_t i = 0; i < segment.inputs.size(); ++i) {
      AddUse(segment.inputs[i], use, /*goes_on=*/i > 0);
      peak_bytes_ = end_bytes_;
    }
  }
  void AddUse(uint32_t object, uint32_t old_use, bool goes_on) {
    EndStretch();
    StepRecord& step = written_.step;
    step.operators.push_back(step.uses.empty() ? 0 : step.operators.back() + (goes_on ? 0 : 1));
    step.uses.push_back(object);
    written_.old_uses.push_back(old_use);
  }
  void EndStretch() {
    const int64_t other_bytes = std::max<int64_t>(0, end_bytes_);
    const int64_t more_bytes = std::max<int64_t>(0, peak_bytes_) - other_bytes;
    written_.step.stretches.push_back(
        {.compute_us = std::exchange(compute_us_, 0),
         .other_bytes = static_cast<uint64_t>(other_bytes),
         .transient_bytes = static_cast<uint64_t>(std::max<int64_t>(0, more_bytes)),
         .released_bytes = static_cast<uint64_t>(std::max<int64_t>(0, -more_bytes))});
    peak_bytes_ = 0;
  }

  const Recorded& old_;
  Rewritten written_;
  double compute_us_ = 0;  // of the stretch that has not ended
  int64_t end_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// A second run holds its inputs until they are read for the last time in the segment.
void AddHeldInputs(const Recorded& old, const SecondRun& run, Rewritten& written) {
  size_t counted_until = written.new_stretches[run.read_at];
  for (const uint32_t input : run.segment->inputs) {
    ++counted_until;  // the stretch behind its read
    size_t needed_until = 0;
    for (const uint32_t use : run.segment->uses) {
      if (old.step.uses[use] == input && !old.Saves(use)) needed_until = old.operator_ends[use] + 1;
    }
    if (needed_until == 0) continue;
    for (size_t i = counted_until + 1; i <= written.new_stretches[needed_until]; ++i) {
      written.step.stretches[i].other_bytes += old.size_bytes(input);
    }
  }
}

// By new numbers, in the order of first uses.
void NumberObjects(const Recorded& old, Rewritten& written) {
  std::vector<uint32_t> numbers(old.numbers(), kNone);
  StepRecord& step = written.step;
  for (uint32_t use = 0; use < step.uses.size(); ++use) {
    const uint32_t object = step.uses[use];
    const uint32_t old_use = written.old_uses[use];
    if (numbers[object] == kNone) {
      numbers[object] = static_cast<uint32_t>(step.objects.size());
      StepObject numbered;
      if (old.IsUnsaved(object)) {
        const UnsavedInput& input = old.Unsaved(object);
        numbered.size_bytes = input.size_bytes;
        numbered.frees = input.frees;
        numbered.held_until = input.held_until;
      } else {
        numbered = old.step.objects[object];
      }
      numbered.saved_until = 0;
      for (uint32_t* until : {&numbered.needed_until, &numbered.held_until}) {
        if (*until == 0) continue;  // its uses say it all
        const size_t last = written.new_stretches.size() - 1;
        *until = static_cast<uint32_t>(written.new_stretches[std::min<size_t>(*until, last)]);
      }
      step.objects.push_back(numbered);
    } else if (old_use == kInputSaved || (old_use != kInputRead && old.Saves(old_use))) {
      step.objects[numbers[object]].saved_until = use;
    }
    step.uses[use] = numbers[object];
  }
}

}  // namespace

std::vector<uint32_t> ThatCanBeComputedAgain(const StepRecord& step) {
  if (step.segments.empty()) return {};
  const Recorded old(step);
  std::vector<uint32_t> segments;
  std::vector<int> unread(step.objects.size());  // saves less reads, in one segment
  const std::vector<bool> is_kept = KeptWhole(step.segments);
  for (uint32_t i = 0; i < step.segments.size(); ++i) {
    const StepSegment& segment = step.segments[i];
    if (!is_kept[i] || !segment.before.has_value() || segment.uses.empty()) continue;
    bool is_read_twice = false;
    bool saves_more = false;  // than its inputs
    for (const uint32_t use : segment.uses) {
      const auto inputs_end = segment.inputs.end();
      saves_more =
          saves_more || std::find(segment.inputs.begin(), inputs_end, step.uses[use]) == inputs_end;
      int& left = unread[step.uses[use]];
      left += old.Saves(use) ? 1 : -1;
      is_read_twice = is_read_twice || left < 0;
    }
    for (const uint32_t use : segment.uses) unread[step.uses[use]] = 0;
    const bool is_read = !old.Saves(segment.uses.back());
    if (is_read && saves_more && !is_read_twice && old.Saves(segment.uses.front()))
      segments.push_back(i);
  }
  return segments;
}

StepRecord WithComputedAgain(const StepRecord& step, absl::Span<const uint32_t> segments) {
  const Recorded old(step);
  std::vector<bool> is_removed(step.uses.size());
  std::vector<uint32_t> inputs_saved(old.numbers(), kNone);
  std::vector<const StepSegment*> begins(step.uses.size());  // by the use before which it does
  for (const uint32_t index : segments) {
    const StepSegment& segment = step.segments[index];
    begins[BeginOf(segment)] = &segment;
    for (const uint32_t use : segment.uses) is_removed[use] = true;
    for (const uint32_t input : segment.inputs) {
      inputs_saved[input] = std::min(inputs_saved[input], BeginOf(segment));
    }
  }
  MoreBytes more(step.stretches.size());
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
  for (uint32_t use = 0; use <= step.uses.size(); ++use) {
    more_bytes += more.change(use);
    const StepStretch& stretch = step.stretches[use];
    double compute_us = stretch.compute_us;
    if (use < step.uses.size() && begins[use] != nullptr) {
      const StepStretch& before = *begins[use]->before;
      // What the stretch makes that is not saved any more is the segment's.
      writer.AddStretch(before, before.compute_us, more_bytes - more.begins(use), /*ends_bytes=*/0);
      writer.AddInputs(*begins[use]);
      compute_us -= before.compute_us;
    }
    writer.AddStretch(stretch, compute_us, more_bytes, more.ends(use));
    writer.EndOldStretch();
    if (use == step.uses.size()) break;
    for (; run != runs.end() && run->read_at == use; ++run) writer.AddRun(*run);
    if (!is_removed[use]) writer.AddUse(step.uses[use], use);
  }
  Rewritten written = writer.Finish();
  for (const SecondRun& again : runs) AddHeldInputs(old, again, written);
  NumberObjects(old, written);
  written.step.timed_by_host = step.timed_by_host;
  return std::move(written.step);
}

}  // namespace pinion
