#include "pinion/hooks/plan/noted_step.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "pinion/device/allocation_bytes.h"
#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

// A plan counts an object in whole intervals, but objects come and go within them. This is what to
// add to the other bytes of each entry's peak, so that the plan's sum is what was on the device. It
// is negative where a counted object has gone, and positive where an uncounted one is still there.
std::vector<int64_t> CorrectionsOf(absl::Span<const NotedEntry> entries,
                                   absl::Span<const NotedObject> objects) {
  std::vector<int64_t> corrections(entries.size());
  std::vector<int64_t> more(entries.size() + 1);    // change against the previous entry
  std::vector<int64_t> let_go(entries.size() + 1);  // bytes that the program freed by that entry
  for (const NotedObject& object : objects) {
    let_go[object.gone_by] += static_cast<int64_t>(object.planned.size_bytes);
  }
  size_t first = 1;                      // entry of the interval
  absl::flat_hash_set<uint32_t> in_use;  // by the operator of the last use
  int64_t released_bytes = 0;            // of these, in this interval
  int64_t gone_bytes = 0;                // of them, what was really let go of
  for (size_t i = 1; i < entries.size(); ++i) {
    const NotedEntry& entry = entries[i];
    corrections[i] -= gone_bytes;
    // These do not count in this interval (HeldUntil).
    more[first] += let_go[i];
    more[i + 1] -= let_go[i];
    if (entry.released.has_value()) {
      const StepObject& object = objects[*entry.released].planned;
      const auto size_bytes = static_cast<int64_t>(object.size_bytes);
      if (!object.frees) {
        // It is among the other bytes up to the interval before, and from its release on.
        more[first] += size_bytes;
        more[i + 1] -= size_bytes;
      } else if (in_use.contains(*entry.released)) {
        released_bytes += size_bytes;
        const int64_t fewer_bytes = entries[first - 1].object_bytes - entry.object_bytes;
        gone_bytes = std::clamp<int64_t>(fewer_bytes, 0, released_bytes);
      }
    }
    if (!entry.used.has_value()) continue;
    if (entry.by != entries[first - 1].by) in_use.clear();
    in_use.insert(*entry.used);
    first = i + 1;
    released_bytes = gone_bytes = 0;
  }
  int64_t sum = 0;
  for (size_t i = 0; i < entries.size(); ++i) corrections[i] += sum += more[i];
  return corrections;
}

// Returns the last interval in which the program references the object. If the object was offloaded
// and the program freed its memory, later allocations of that interval may have reused the memory.
// A resident object would need memory of its own there, so that interval does not count.
size_t HeldUntil(const NotedObject& object) {
  return object.gone_by > 0 ? object.let_go - 1 : object.let_go;
}

// Adds to the other bytes of each interval what the objects of one storage do not count. While an
// object that frees nothing is needed, that is the whole storage. Otherwise it is the rest of the
// storage, until its last object is saved.
void AddStorage(absl::Span<const NotedObject* const> objects, StepTrace& step) {
  if (objects.size() == 1 && objects.front()->planned.frees) return;
  const uint64_t storage_bytes = objects.front()->storage_bytes;
  size_t last_save = 0;
  for (const NotedObject* object : objects) last_save = std::max(last_save, object->first_use);
  std::vector<uint64_t> more_bytes(step.intervals.size());
  for (size_t s = objects.front()->first_use; s < step.intervals.size(); ++s) {
    bool is_needed = false, is_kept = false;
    uint64_t counted_bytes = 0;
    for (const NotedObject* object : objects) {
      const bool is_over = object->handles == 0 && object->uses_at_release <= s;
      if (s < object->first_use || is_over) continue;
      is_needed = true;
      is_kept = is_kept || !object->planned.frees;
      counted_bytes += object->planned.frees ? object->planned.size_bytes : 0;
    }
    if (is_kept) {
      more_bytes[s] = storage_bytes;
    } else if (is_needed && s < last_save) {
      more_bytes[s] = storage_bytes - std::min(storage_bytes, counted_bytes);
    }
    step.intervals[s].other_bytes += more_bytes[s];
  }
  for (StepSegment& segment : step.segments) {
    if (segment.before.has_value()) {
      segment.before->other_bytes += more_bytes[segment.accesses.front()];
    }
  }
}

// A cast reads twice the bytes that it writes, at 1 TB/s or more.
constexpr double kLikelyUsPerByte = 3e-6;

// Of objects that nobody has computed in this step, though their readers could have, it takes as
// long as of those that were, in proportion to their bytes.
void SetRecast(absl::Span<const NotedObject> objects,
               absl::Span<const std::optional<double>> recast_us, StepTrace& step) {
  std::optional<double> us_per_byte;
  for (size_t i = 0; i < objects.size(); ++i) {
    if (!recast_us[i].has_value()) continue;
    const double each_us = *recast_us[i] / static_cast<double>(step.objects[i].size_bytes);
    us_per_byte = std::max(each_us, us_per_byte.value_or(0));
  }
  for (size_t i = 0; i < objects.size(); ++i) {
    if (!objects[i].is_computed_again) continue;
    const double likely_us =
        us_per_byte.value_or(kLikelyUsPerByte) * static_cast<double>(step.objects[i].size_bytes);
    step.objects[i].recast_us = recast_us[i].value_or(likely_us);
  }
}

// The recorded data between two accesses.
struct Between {
  double compute_us = 0;
  int64_t peak_other_bytes = 0;     // without corrections
  int64_t counted_other_bytes = 0;  // with corrections

  void Add(int64_t bytes) {
    peak_other_bytes += bytes;
    counted_other_bytes += bytes;
  }
  StepInterval Interval(int64_t other_bytes) const {
    const int64_t end_bytes = std::max<int64_t>(0, other_bytes);
    const int64_t peak_bytes = std::max({end_bytes, peak_other_bytes, counted_other_bytes});
    return {.compute_us = compute_us,
            .other_bytes = static_cast<uint64_t>(end_bytes),
            .transient_bytes = static_cast<uint64_t>(peak_bytes - end_bytes),
            .released_bytes = static_cast<uint64_t>(peak_bytes - counted_other_bytes)};
  }
};

// Collects the segments of a step in the order of entries.
class NotedSegments {
 public:
  void Begin(const NotedEntry& entry, const Between& before, size_t interval) {
    Noted& noted = At(*entry.begins);
    // The ordinal was given twice: the accesses cannot be told apart.
    noted.is_seen = noted.uses.empty();
    noted.before = before;
    noted.other_bytes = entry.other_bytes;
    noted.interval = interval;
    // Packers number segments in ascending order. For other segments the nesting is unknown.
    const bool is_inside =
        noted.is_seen && entry.part.has_value() && entry.part->ordinal < *entry.begins;
    noted.outer = is_inside ? std::optional(entry.part->ordinal) : std::nullopt;
  }
  void AddUse(const NotedEntry& entry, uint32_t use) {
    if (!entry.part.has_value()) return;
    for (std::optional<uint32_t> in = entry.part->ordinal; in.has_value(); in = At(*in).outer) {
      Noted& noted = At(*in);
      // Another thread may have saved something since it began.
      if (noted.uses.empty() && noted.interval != use) noted.is_seen = false;
      noted.uses.push_back(use);
    }
  }
  size_t size() const { return segments_.size(); }
  // With their inputs, of the uses and objects of `step`.
  void AddTo(std::vector<std::vector<uint32_t>> inputs, StepTrace& step) {
    for (uint32_t i = 0; i < segments_.size(); ++i) {
      Noted& noted = segments_[i];
      StepSegment& segment = step.segments.emplace_back();
      segment.accesses = std::move(noted.uses);
      segment.inputs = std::move(inputs[i]);
      segment.outer = noted.outer;
      if (!noted.is_seen || segment.accesses.empty()) continue;
      // The object of the first access was subtracted for the whole interval. A recomputed segment
      // saves it only as an input.
      const uint32_t object = step.accesses[noted.interval];
      const bool is_input =
          std::find(segment.inputs.begin(), segment.inputs.end(), object) != segment.inputs.end();
      if (IsFirstUse(step, noted.interval) && step.objects[object].frees && !is_input) {
        noted.before.Add(static_cast<int64_t>(step.objects[object].size_bytes));
        noted.other_bytes += static_cast<int64_t>(step.objects[object].size_bytes);
      }
      segment.before = noted.before.Interval(noted.other_bytes);
    }
  }

 private:
  struct Noted {
    std::vector<uint32_t> uses = {};
    bool is_seen = false;  // whether its begin was recorded
    Between before = {};
    int64_t other_bytes = 0;
    size_t interval = 0;  // in which it began
    std::optional<uint32_t> outer = std::nullopt;
  };

  static bool IsFirstUse(const StepTrace& step, size_t use) {
    const auto at = step.accesses.begin() + static_cast<ptrdiff_t>(use);
    return std::find(step.accesses.begin(), at, *at) == at;
  }
  Noted& At(uint32_t ordinal) {
    if (ordinal >= segments_.size()) segments_.resize(ordinal + size_t{1});
    return segments_[ordinal];
  }

  std::vector<Noted> segments_;
};

// Whether `other`, an object or an input, contains all bytes of the input.
template <typename Noted>
bool HasBytesOf(const NotedInput& input, const Noted& other) {
  return other.storage == input.storage && other.version == input.version &&
         other.extent.Contains(input.extent);
}

// Returns the object with the input's bytes: one that exists when the segment begins, else the
// first one saved later.
std::optional<uint32_t> ObjectWith(const NotedInput& input, absl::Span<const NotedObject> objects) {
  std::optional<uint32_t> found;
  for (uint32_t i = 0; i < objects.size(); ++i) {
    const NotedObject& object = objects[i];
    if (!HasBytesOf(input, object)) continue;
    if (object.first_use >= input.begin) return found.has_value() ? found : i;
    if (object.handles > 0 || object.uses_at_release > input.begin) found = i;
  }
  return found;
}

// Returns each segment's inputs. Inputs that are no objects become unsaved inputs of the step.
std::vector<std::vector<uint32_t>> InputsOf(size_t segments, absl::Span<const NotedInput> inputs,
                                            absl::Span<const NotedObject> objects,
                                            StepTrace& step) {
  std::vector<std::vector<uint32_t>> by_segment(segments);
  std::vector<const NotedInput*> unsaved;
  for (const NotedInput& input : inputs) {
    if (input.segment >= segments) continue;
    std::optional<uint32_t> number = ObjectWith(input, objects);
    for (uint32_t i = 0; i < unsaved.size() && !number.has_value(); ++i) {
      if (HasBytesOf(input, *unsaved[i])) number = static_cast<uint32_t>(objects.size() + i);
    }
    if (!number.has_value()) {
      number = static_cast<uint32_t>(objects.size() + unsaved.size());
      unsaved.push_back(&input);
      const size_t held_until = std::max<size_t>(input.let_go, 1) - 1;
      // A leaf that outlives the step is the program's own: a batch, for example.
      const bool is_kept = input.is_leaf && input.let_go >= step.accesses.size();
      step.unsaved_inputs.push_back({.size_bytes = AllocationBytes(input.extent.size_bytes()),
                                     .frees = !is_kept,
                                     .held_until = static_cast<uint32_t>(held_until)});
    }
    by_segment[input.segment].push_back(*number);
  }
  return by_segment;
}

}  // namespace

void NoteGone(const DevicePeaks::Since& since, absl::Span<NotedObject* const> gone, size_t entry) {
  for (NotedObject* object : gone) object->gone_by = entry;
  // The peak from here on, if the objects that count as held had stayed. Backwards, so that later
  // ones are included.
  int64_t later_peak_bytes = 0;
  for (auto freed = since.freed.rbegin(); freed != since.freed.rend(); ++freed) {
    later_peak_bytes = std::max(later_peak_bytes, freed->later_peak_bytes);
    const auto is_in_it = [&](const auto* object) { return object->data == freed->data; };
    const auto first = std::find_if(gone.begin(), gone.end(), is_in_it);
    if (first == gone.end()) continue;
    const auto size_bytes = static_cast<int64_t>((*first)->storage_bytes);
    const bool is_held = later_peak_bytes + size_bytes <= since.peak_bytes;
    if (is_held) later_peak_bytes += size_bytes;
    for (NotedObject* object : gone) {
      if (is_in_it(object)) object->gone_by = is_held ? 0 : entry;
    }
  }
}

StepTrace StepOf(absl::Span<const NotedEntry> entries, absl::Span<const NotedObject> objects,
                 absl::Span<const NotedInput> inputs, const StreamClock::Times& times) {
  StepTrace step;
  step.timed_by_host = times.by_host;
  const std::vector<int64_t> corrections = CorrectionsOf(entries, objects);
  Between between;
  uint64_t last_by = 0;
  NotedSegments segments;
  // What reads took of the stream's time that computed an object again: the shortest, since some
  // wait for other things as well.
  std::vector<std::optional<double>> recast_us(objects.size());
  for (size_t i = 1; i < entries.size(); ++i) {
    const NotedEntry& entry = entries[i];
    // Streams of one device may overtake each other.
    between.compute_us += std::max(0.0, times.us[2 * i] - times.us[2 * i - 1]);
    if (entry.computed_again) {
      std::optional<double>& shortest_us = recast_us[*entry.used];
      const double us = std::max(0.0, times.us[2 * i + 1] - times.us[2 * i]);
      shortest_us = std::min(us, shortest_us.value_or(us));
    }
    between.peak_other_bytes = std::max(between.peak_other_bytes, entry.peak_other_bytes);
    between.counted_other_bytes =
        std::max(between.counted_other_bytes, entry.peak_other_bytes + corrections[i]);
    if (entry.begins.has_value()) {
      segments.Begin(entry, between, step.accesses.size());
    }
    if (!entry.used.has_value() && i + 1 < entries.size()) continue;
    if (entry.used.has_value()) {
      const bool goes_on = !step.accesses.empty() && entry.by == last_by;
      step.operators.push_back(step.accesses.empty() ? 0
                                                     : step.operators.back() + (goes_on ? 0 : 1));
      segments.AddUse(entry, static_cast<uint32_t>(step.accesses.size()));
      if (entry.into_graph) step.graph_reads.push_back(static_cast<uint32_t>(step.accesses.size()));
      step.accesses.push_back(*entry.used);
      last_by = entry.by;
    }
    between.counted_other_bytes =
        std::max(between.counted_other_bytes, entry.other_bytes + corrections[i]);
    step.intervals.push_back(std::exchange(between, {}).Interval(entry.other_bytes));
  }
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::map<KnownStorages::Id, std::vector<const NotedObject*>> by_storage;
  for (const NotedObject& object : objects) {
    step.objects.push_back(object.planned);
    if (object.last_save > object.first_use) {
      step.objects.back().saved_until = static_cast<uint32_t>(object.last_save);
    }
    // Until its saving operator returns, the object is resident anyway.
    if (HeldUntil(object) > operator_ends[object.last_save] + 1) {
      step.objects.back().held_until = static_cast<uint32_t>(HeldUntil(object));
    }
    step.objects.back().needed_until = static_cast<uint32_t>(
        object.handles > 0 ? step.intervals.size() - 1 : object.uses_at_release);
    by_storage[object.storage].push_back(&object);
  }
  SetRecast(objects, recast_us, step);
  segments.AddTo(InputsOf(segments.size(), inputs, objects, step), step);
  for (const auto& [storage, in_it] : by_storage) AddStorage(in_it, step);
  return step;
}

}  // namespace pinion
