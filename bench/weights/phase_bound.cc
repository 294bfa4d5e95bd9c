#include "pinion/bench/weights/phase_bound.h"

#include <algorithm>

#include "pinion/engine/link/link_calibration.h"

namespace pinion {
namespace {

LinkRates RatesOf(const LinkModel& link) {
  constexpr double kBytesPerUs = 1e3;  // of one GB/s
  return {.out = link.d2h_gb_per_s * kBytesPerUs,
          .in = link.h2d_gb_per_s * kBytesPerUs,
          .duplex_out = link.d2h_duplex_gb_per_s * kBytesPerUs,
          .duplex_in = link.h2d_duplex_gb_per_s * kBytesPerUs};
}

}  // namespace

PhaseBound TrainingBound(const LinkModel& link, uint64_t layer_bytes, int layers, int window_layers,
                         const ComputeTimes& compute) {
  const LinkRates rates = RatesOf(link);
  const auto bytes = [&](int count) { return static_cast<double>(layer_bytes) * count; };
  const double forward_us = std::max(compute.forward_us, LinkUs(0, bytes(layers - 1), rates));
  const int fetched_backward = std::max(layers - 1 - window_layers, 0);
  const double backward_us =
      std::max(compute.backward_us, LinkUs(bytes(layers - 1), bytes(fetched_backward), rates));
  return {.ends_us = LinkUs(0, bytes(1), rates) + LinkUs(bytes(1), 0, rates),
          .overlapped_us = forward_us + backward_us};
}

PhaseBound SharedBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                       uint64_t saved_bytes, uint64_t memory_bytes, const ComputeTimes& compute) {
  const LinkRates rates = RatesOf(link);
  const auto layer = static_cast<double>(layer_bytes);
  const auto saved = static_cast<double>(saved_bytes);
  const auto memory = static_cast<double>(memory_bytes);
  const double others = layer * (layers - 1);
  const double leave = std::max(0.0, saved + layer - memory);
  const double come_back = std::max(0.0, saved + others - memory);
  return {.ends_us = LinkUs(0, layer, rates) + LinkUs(layer, 0, rates),
          .overlapped_us = std::max(compute.forward_us, LinkUs(leave, others, rates)) +
                           std::max(compute.backward_us, LinkUs(others, come_back, rates))};
}

PhaseBound InferenceBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                          int window_layers, double compute_us) {
  const int room = window_layers < layers ? window_layers - 1 : layers;
  const double fetched_layers = static_cast<double>(layers) * (layers - room) / (layers - 1);
  return {
      .ends_us = 0,
      .overlapped_us = std::max(
          compute_us, LinkUs(0, fetched_layers * static_cast<double>(layer_bytes), RatesOf(link)))};
}

}  // namespace pinion
