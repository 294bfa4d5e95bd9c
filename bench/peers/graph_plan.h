// Which tensors leave the device in GraphOffload, and when: the rules of torchtitan's pass, data in
// and data out.
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

// What one step saves and reads. Forward is cut into regions, numbered from 0: a region is work of
// one layer, or of none, that nothing of another layer comes between.
struct GraphTrace {
  // What saved tensors are views of, or are themselves.
  struct Object {
    uint64_t size_bytes = 0;
    // Of the work that made it.
    int layer = kNotInLayers;
    int region = 0;
    bool is_contiguous = true;
  };
  // Of the work that saves.
  struct Save {
    int object = kNoObject;  // kNoObject is given to the step, a parameter for example
    int layer = kNotInLayers;
    int region = 0;
  };
  std::vector<Object> objects;
  std::vector<Save> saves;
  std::vector<int> reads;  // places in `saves`, in the order of backward
};

struct GraphLimits {
  uint64_t host_budget_bytes = uint64_t{100} << 30;  // 0: no limit
  int defer_n_layers = 1;                            // 0: at the end of the work that saves
  int prefetch_n_layers = 1;                         // 0: when it is read
};

struct GraphPlan {
  static constexpr int kStays = -1;
  // By object, the region at whose end its device memory goes; kStays where it stays.
  std::vector<int> leaves_after;
  // The objects that are copied back when backward begins, and when it reaches a layer, in this
  // order.
  std::vector<int> fetched_first;
  std::map<int, std::vector<int>> fetched_at;
};

// Objects smaller than this stay.
inline constexpr uint64_t kGraphMinOffloadBytes = 4096;

// The largest objects leave, of equal ones the first that were saved, as long as the budget has
// room for each; those of the last layer stay, unless it is the only one, and so do those of no
// layer.
GraphPlan PlanGraph(const GraphTrace& trace, const GraphLimits& limits);

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_GRAPH_PLAN_H_
