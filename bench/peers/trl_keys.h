// The addresses that TRL tracks: a saved tensor whose address and type are tracked is not copied.
//
// Thread safety: as TrlOffload.

#ifndef PINION_BENCH_PEERS_TRL_KEYS_H_
#define PINION_BENCH_PEERS_TRL_KEYS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <utility>

namespace pinion {

// TRL adds an offset in elements to the storage's address in bytes, so that two views of one
// storage may share a key by chance.
using TrlKey = std::pair<uintptr_t, c10::ScalarType>;

inline TrlKey TrlKeyOf(const at::Tensor& tensor) {
  return {reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset(),
          tensor.scalar_type()};
}

class TrlKeys {
 public:
  bool Contains(const TrlKey& key) const { return id_of_key_.contains(key); }

  // Ties the key to the saved tensor `id` instead of an earlier one.
  void Track(const TrlKey& key, int64_t id) {
    id_of_key_[key] = id;
    key_of_id_.insert_or_assign(id, key);
  }

  void Release(int64_t id) {
    const auto key = key_of_id_.find(id);
    if (key == key_of_id_.end()) return;
    const auto tracked = id_of_key_.find(key->second);
    if (tracked != id_of_key_.end() && tracked->second == id) id_of_key_.erase(tracked);
    key_of_id_.erase(key);
  }

  void Clear() {
    id_of_key_.clear();
    key_of_id_.clear();
  }

 private:
  std::map<TrlKey, int64_t> id_of_key_;
  std::map<int64_t, TrlKey> key_of_id_;
};

}  // namespace pinion

#endif  // PINION_BENCH_PEERS_TRL_KEYS_H_
