// The bytes that a peer has moved.

#ifndef PINION_BENCH_PEERS_PEER_STATS_H_
#define PINION_BENCH_PEERS_PEER_STATS_H_

#include <cstdint>

namespace pinion {

struct PeerStats {
  uint64_t offloaded_bytes = 0;
  uint64_t fetched_bytes = 0;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_PEER_STATS_H_
