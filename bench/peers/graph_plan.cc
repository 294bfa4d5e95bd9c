#include "pinion/bench/peers/graph_plan.h"

#include <algorithm>
#include <set>

namespace pinion {
namespace {

std::vector<int> ObjectsThatLeave(const GraphTrace& trace, uint64_t budget_bytes) {
  std::set<int> layers;
  for (const GraphTrace::Save& save : trace.saves) layers.insert(save.layer);
  for (const GraphTrace::Object& object : trace.objects) layers.insert(object.layer);
  layers.erase(kNotInLayers);
  const int last_layer = layers.size() > 1 ? *layers.rbegin() : kNotInLayers;

  std::vector<int> candidates;
  for (size_t i = 0; i < trace.objects.size(); ++i) {
    const GraphTrace::Object& object = trace.objects[i];
    if (object.layer == kNotInLayers || object.layer == last_layer) continue;
    if (!object.is_contiguous || object.size_bytes < kGraphMinOffloadBytes) continue;
    candidates.push_back(static_cast<int>(i));
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](int a, int b) {
    return trace.objects[a].size_bytes > trace.objects[b].size_bytes;
  });

  std::vector<int> chosen;
  uint64_t chosen_bytes = 0;
  for (const int object : candidates) {
    const uint64_t size_bytes = trace.objects[object].size_bytes;
    if (budget_bytes > 0 && chosen_bytes + size_bytes > budget_bytes) continue;
    chosen.push_back(object);
    chosen_bytes += size_bytes;
  }
  return chosen;
}

// Returns layers in backward's order.
std::vector<int> LayersOfBackward(const GraphTrace& trace) {
  std::vector<int> layers;
  for (const int read : trace.reads) {
    const int layer = trace.saves[read].layer;
    if (layer == kNotInLayers) continue;
    if (std::find(layers.begin(), layers.end(), layer) == layers.end()) layers.push_back(layer);
  }
  return layers;
}

}  // namespace

GraphPlan PlanGraph(const GraphTrace& trace, const GraphLimits& limits) {
  GraphPlan plan;
  plan.leaves_after.assign(trace.objects.size(), GraphPlan::kStays);
  for (const int object : ObjectsThatLeave(trace, limits.host_budget_bytes)) {
    plan.leaves_after[object] = trace.objects[object].region + limits.defer_n_layers;
  }
  for (const GraphTrace::Save& save : trace.saves) {
    if (save.object == kNoObject || plan.leaves_after[save.object] == GraphPlan::kStays) continue;
    plan.leaves_after[save.object] = std::max(plan.leaves_after[save.object], save.region);
  }
  if (limits.prefetch_n_layers == 0) return plan;

  const std::vector<int> layers = LayersOfBackward(trace);
  std::set<int> planned;
  for (const int read : trace.reads) {
    const int object = trace.saves[read].object;
    if (object == kNoObject || plan.leaves_after[object] == GraphPlan::kStays) continue;
    if (!planned.insert(object).second) continue;
    const auto layer = std::find(layers.begin(), layers.end(), trace.objects[object].layer);
    if (layer == layers.end()) continue;
    if (layer - layers.begin() < limits.prefetch_n_layers) {
      plan.fetched_first.push_back(object);
    } else {
      plan.fetched_at[*(layer - limits.prefetch_n_layers)].push_back(object);
    }
  }
  return plan;
}

}  // namespace pinion
