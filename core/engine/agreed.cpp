// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/agreed.hpp"

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "core/engine/requests.hpp"

namespace m2n {
namespace {

/// Values by key, each kept while somebody holds it.
template <class Value>
class Shared {
 public:
  template <class Make>
  std::shared_ptr<const Value> get(const std::string& key, Make make) {
    const std::shared_ptr<Slot> slot = slot_of(key);
    const std::lock_guard making(slot->making);
    if (!slot->value) {
      slot->value.emplace(make());
    }
    return {slot, &*slot->value};
  }

 private:
  struct Slot {
    std::mutex making;
    std::optional<const Value> value;
  };

  std::shared_ptr<Slot> slot_of(const std::string& key) {
    const std::lock_guard lock(mutex_);
    if (std::shared_ptr<Slot> known = slots_[key].lock()) {
      return known;
    }
    std::erase_if(slots_, [](const auto& entry) { return entry.second.expired(); });
    auto fresh = std::make_shared<Slot>();
    slots_[key] = fresh;
    return fresh;
  }

  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Slot>> slots_;
};

}  // namespace

std::shared_ptr<const AgreedParams> agreed_params(std::string text) {
  static Shared<AgreedParams> shared;
  const std::string digest = sha256_hex(text);
  return shared.get(digest, [&] {
    AgreedParams agreed{std::move(text), digest, {}};
    agreed.params = params_from_text(agreed.text);
    return agreed;
  });
}

std::shared_ptr<const std::vector<Resolution>> agreed_resolutions(const AgreedParams& params,
                                                                  const std::string& digest,
                                                                  std::string_view text) {
  static Shared<std::vector<Resolution>> shared;
  return shared.get(params.digest + digest,
                    [&] { return resolutions_from_text(text, params.params); });
}

std::shared_ptr<const AgreedPlan> agreed_plan(const std::string& key,
                                              const std::function<AgreedPlan()>& make) {
  static Shared<AgreedPlan> shared;
  return shared.get(key, make);
}

}  // namespace m2n
