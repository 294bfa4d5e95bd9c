// Plans which tensors GraphOffload offloads, and when, by the rules of torchtitan's pass. Plain
// data.
//
// Thread safety: functions of their arguments.

#ifndef PINION_BENCH_PEERS_GRAPH_PLAN_H_
#define PINION_BENCH_PEERS_GRAPH_PLAN_H_

#include <cstdint>
#include <map>
#include <vector>

namespace pinion {

inline constexpr int kNotInLayers = -1;
inline constexpr int kNoObject = -1;

// The saves and reads of one step. A region of forward is consecutive work of one layer, or of no
// layer. Regions are numbered from 0.
struct GraphTrace {
  // A tensor that saved tensors are views of.
  struct Object {
    uint64_t size_bytes = 0;
    // The region and layer that made the object.
    int layer = kNotInLayers;
    int region = 0;
    bool is_contiguous = true;
  };
  // The region and layer that save the object.
  struct Save {
    int object = kNoObject;  // kNoObject: an input or parameter
    int layer = kNotInLayers;
    int region = 0;
  };
  std::vector<Object> objects;
  std::vector<Save> saves;
  std::vector<int> reads;  // indices of `saves`, in backward's order
};

struct GraphLimits {
  uint64_t host_budget_bytes = uint64_t{100} << 30;  // 0: no limit
  int defer_n_layers = 1;                            // 0: at the end of the saving region
  int prefetch_n_layers = 1;                         // 0: at the read
};

struct GraphPlan {
  static constexpr int kStays = -1;
  // By object: the region after which its device memory is freed; kStays if it stays resident.
  std::vector<int> leaves_after;
  // Objects to fetch when backward begins, and when it reaches a layer, in this order.
  std::vector<int> fetched_first;
  std::map<int, std::vector<int>> fetched_at;
};

// Smaller objects stay resident.
inline constexpr uint64_t kGraphMinOffloadBytes = 4096;

// Offloads the largest objects that fit in the budget, equal ones in the order of saves. Objects of
// no layer stay resident. So do those of the last layer if there are several.
GraphPlan PlanGraph(const GraphTrace& trace, const GraphLimits& limits);

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_PLAN_H_
