// torch's TCPStore for the ranks of one World, given up at once when the World is.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace baguarun::backend {

// What waits for a rank that may be dead, be it the store's own host, ends with c10::DistStoreError once
// LiveGroups is interrupted: all calls of the TCPStore are made on a thread of its own, which is left behind
// where it hangs. Threads: any; calls are made one after the other.
class WorldStore final : public ::c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;

  // Joins the store at `host`. With `listener` (a listening socket, taken over) this process hosts it.
  // `timeout` bounds this and every wait.
  WorldStore(const std::string& host, uint16_t port, std::optional<int> listener,
             std::chrono::milliseconds timeout);
  ~WorldStore() override;

  using Store::set;
  c10::intrusive_ptr<Store> clone() override;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }
  void setTimeout(const std::chrono::milliseconds& timeout) override;

 private:
  struct Caller;
  explicit WorldStore(std::shared_ptr<Caller> caller, const std::chrono::milliseconds& timeout);

  template <typename Result>
  Result call(std::function<Result(::c10d::TCPStore&)> ask);

  std::shared_ptr<Caller> caller_;
};

}  // namespace baguarun::backend
