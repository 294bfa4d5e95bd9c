#include "pinion/device/emulated/engines.h"

#include <algorithm>
#include <utility>

namespace pinion {
namespace {

constexpr double kBytesPerMsOfGbPerS = 1e6;

}  // namespace

void ComputeEngine::Add(int stream, double duration_ms, double now_ms) {
  if (kernels_.empty()) start_ms_ = now_ms;
  kernels_.push_back({stream, duration_ms});
}

double ComputeEngine::NextEndMs() const {
  return idle() ? kForever : start_ms_ + kernels_.front().duration_ms;
}

FinishedWork ComputeEngine::Finish(double now_ms) {
  const FinishedWork finished = {kernels_.front().stream, std::exchange(start_ms_, now_ms)};
  kernels_.pop_front();
  return finished;
}

size_t CopyEngines::IndexOf(int device, CopyDirection direction) {
  return 2 * static_cast<size_t>(device) + static_cast<size_t>(direction);
}

void CopyEngines::Add(int stream, const CopyCost& cost, double now_ms) {
  Engine& engine = engines_[IndexOf(cost)];
  if (link_.one_copy_at_a_time && engine.copying > 0) {
    engine.waiting.push_back({.stream = stream, .cost = cost});
  } else {
    Start({.stream = stream, .cost = cost}, now_ms);
  }
}

void CopyEngines::Start(Copy copy, double now_ms) {
  copy.start_ms = now_ms;
  copy.end_ms = now_ms + copy.cost.latency_ms;
  copy.remaining_bytes = static_cast<double>(copy.cost.size_bytes);
  ++engines_[IndexOf(copy.cost)].copying;
  copies_.push_back(copy);
}

bool CopyEngines::IsBusy(int device, CopyDirection direction) const {
  return engines_[IndexOf(device, direction)].copying > 0;
}

double CopyEngines::NextEndMs() const {
  double next = kForever;
  for (const Copy& copy : copies_) next = std::min(next, copy.end_ms);
  return next;
}

std::vector<FinishedWork> CopyEngines::FinishDue(double now_ms) {
  std::vector<FinishedWork> finished;
  for (Copy& copy : copies_) {
    if (copy.end_ms > now_ms) continue;
    Engine& engine = engines_[IndexOf(copy.cost)];
    links_changed_ = true;
    if (!std::exchange(copy.is_moving, true)) {
      ++engine.moving;
    } else {
      --engine.copying;
      --engine.moving;
      finished.push_back({copy.stream, copy.start_ms});
    }
  }
  for (const FinishedWork& work : finished) {
    const auto copy = std::find_if(copies_.begin(), copies_.end(),
                                   [&](const Copy& other) { return other.stream == work.stream; });
    Engine& engine = engines_[IndexOf(copy->cost)];
    copies_.erase(copy);
    if (engine.waiting.empty()) continue;
    Start(engine.waiting.front(), now_ms);
    engine.waiting.pop_front();
  }
  return finished;
}

// Settles moved bytes only when the rate changes: times must not depend on how often time advances.
void CopyEngines::ShareLinks(double now_ms) {
  if (!links_changed_) return;
  links_changed_ = false;
  const std::vector<double> capacities = Capacities();
  for (Copy& copy : copies_) {
    if (!copy.is_moving) continue;
    const size_t i = IndexOf(copy.cost);
    const double rate = std::min(capacities[i] / engines_[i].moving, copy.cost.rate_limit);
    if (rate == copy.rate) continue;
    copy.remaining_bytes =
        std::max(0.0, copy.remaining_bytes - copy.rate * (now_ms - copy.since_ms));
    copy.since_ms = now_ms;
    copy.rate = rate;
    copy.end_ms = now_ms + copy.remaining_bytes / rate;
  }
}

std::vector<double> CopyEngines::Capacities() const {
  std::vector<double> capacities(engines_.size());
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    const bool h2d = direction == CopyDirection::kHostToDevice;
    std::vector<double*> in_use;
    for (size_t i = IndexOf(0, direction); i < engines_.size(); i += 2) {
      if (engines_[i].moving == 0) continue;
      const bool duplex = engines_[i ^ 1].moving > 0;
      capacities[i] = kBytesPerMsOfGbPerS *
                      (duplex ? (h2d ? link_.h2d_duplex_gb_per_s : link_.d2h_duplex_gb_per_s)
                              : (h2d ? link_.h2d_gb_per_s : link_.d2h_gb_per_s));
      in_use.push_back(&capacities[i]);
    }
    if (link_.host_gb_per_s == 0) continue;
    // Max-min fairness: the slowest first; each gets at most an equal part of the rest.
    std::sort(in_use.begin(), in_use.end(), [](double* a, double* b) { return *a < *b; });
    double left = kBytesPerMsOfGbPerS * link_.host_gb_per_s;
    for (size_t i = 0; i < in_use.size(); ++i) {
      *in_use[i] = std::min(*in_use[i], left / static_cast<double>(in_use.size() - i));
      left -= *in_use[i];
    }
  }
  return capacities;
}

CopyEngines::Holder CopyEngines::HolderOf(int stream, const CopyCost& cost) const {
  auto holder = std::find_if(copies_.begin(), copies_.end(),
                             [&](const Copy& copy) { return copy.stream == stream; });
  if (holder == copies_.end()) {
    holder = std::find_if(copies_.begin(), copies_.end(),
                          [&](const Copy& copy) { return IndexOf(copy.cost) == IndexOf(cost); });
  }
  return {holder->stream, holder->end_ms == kForever};
}

}  // namespace pinion
