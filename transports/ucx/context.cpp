// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/context.hpp"

#include <ucs/debug/debug.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <string_view>
#include <system_error>

namespace m2n::ucx {
namespace {

/// UCX reports crashes when it is loaded; that is the program's business.
void leave_signals_alone() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) {
      struct sigaction now = {};
      if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_DFL) {
        ucs_debug_disable_signal(signal);  // which newer versions complain of where nothing is set
      }
    }
  });
}

/// UCX's settings as it will use them, one "NAME=value" a line.
std::string print(const ucp_config_t* config) {
  char* text = nullptr;
  std::size_t bytes = 0;
  std::FILE* const out = ::open_memstream(&text, &bytes);
  if (out == nullptr) {
    throw std::bad_alloc();
  }
  ucp_config_print(config, out, nullptr, UCS_CONFIG_PRINT_CONFIG);
  std::fclose(out);
  std::string all(text, bytes);
  std::free(text);
  return all;
}

std::string value_of(const std::string& config, const std::string& name) {
  std::istringstream lines(config);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + "=")) {
      return line.substr(name.size() + 1);
    }
  }
  return {};
}

void set(ucp_config_t* config, const char* name, const std::string& value) {
  check(ucp_config_modify(config, name, value.c_str()),
        "set UCX_" + std::string(name) + "=" + value);
}

/// Whether TCP is all that can leave this machine.
bool only_tcp(const std::string& tls) {
  std::error_code none;
  if (std::filesystem::directory_iterator("/sys/class/infiniband", none) ==
      std::filesystem::directory_iterator()) {
    return true;
  }
  constexpr std::array<std::string_view, 9> kOthers = {"tcp",   "self", "sm",  "shm",  "mm",
                                                       "posix", "sysv", "cma", "xpmem"};
  std::istringstream words(tls);
  for (std::string word; std::getline(words, word, ',');) {
    if (std::find(kOthers.begin(), kOthers.end(), word) == kOthers.end()) {
      return false;
    }
  }
  return true;
}

bool names_shared_memory(const std::string& tls) {
  if (tls.starts_with('^')) {
    return false;
  }
  for (const char* const name : {"all", "sysv", "posix", "sm", "shm", "mm"}) {
    std::istringstream words(tls);
    for (std::string word; std::getline(words, word, ',');) {
      if (word == name) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

Errc to_errc(ucs_status_t status) noexcept {
  switch (status) {
    case UCS_ERR_TIMED_OUT:
      return Errc::timed_out;
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_INVALID_ADDR:
      return Errc::bad_argument;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED:
    case UCS_ERR_CANCELED:
    case UCS_ERR_IO_ERROR:
      return Errc::peer_lost;
    default:
      return Errc::unavailable;
  }
}

Context::Context(const UcxOptions& options) {
  leave_signals_alone();
  ucp_config_t* config = nullptr;
  check(ucp_config_read(nullptr, nullptr, &config), "read UCX's settings");
  const std::unique_ptr<ucp_config_t, void (*)(ucp_config_t*)> owner(config, ucp_config_release);
  if (!options.tls.empty()) {
    set(config, "TLS", options.tls);
  }
  if (!options.net_devices.empty()) {
    set(config, "NET_DEVICES", options.net_devices);
  }
  if (options.rails > 0) {
    const std::string rails = std::to_string(options.rails);
    set(config, "MAX_EAGER_RAILS", rails);
    set(config, "MAX_RNDV_RAILS", rails);
    if (handles_errors_on_direct_lanes()) {
      set(config, "MAX_RMA_RAILS", rails);
    }
  }
  if (const std::string given = print(config);
      value_of(given, "UCX_ZCOPY_THRESH") == "auto" && only_tcp(value_of(given, "UCX_TLS"))) {
    // Over TCP UCX 1.13 ends the process (comp->count > 0) when a peer is lost that data is on its
    // way to without a copy.
    set(config, "ZCOPY_THRESH", "inf");
  }
  set(config, "KEEPALIVE_INTERVAL", std::to_string(options.keepalive.count()) + "ms");

  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "m2n";
  check(ucp_init(&params, config, &raw_), "start UCX");

  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  const std::string all = print(config);
  const std::string tls = value_of(all, "UCX_TLS");
  settings_ = "UCX " + std::to_string(major) + "." + std::to_string(minor) + " UCX_TLS=" + tls +
              " UCX_PROTO_ENABLE=" + value_of(all, "UCX_PROTO_ENABLE");
  may_share_memory_ = names_shared_memory(tls);
  ucp_context_attr_t attributes = {};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  check(ucp_context_query(raw_, &attributes), "ask UCX for its kinds of memory");
  knows_devices_ = (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
}

Context::~Context() {
  if (raw_ != nullptr) {
    ucp_cleanup(raw_);
  }
}

bool Context::handles_errors_on_direct_lanes() noexcept {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  return major > 1 || minor >= 16;
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<const Context> context, std::byte* data,
                                   std::uint64_t bytes, MemorySpace space)
    : context_(std::move(context)), data_(data), bytes_(bytes), space_(space) {
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = data;
  params.length = bytes;
  params.memory_type = type();  // never guessed
  check(ucp_mem_map(context_->get(), &params, &raw_),
        "register " + std::to_string(bytes) + " bytes of weights");
}

RegisteredMemory::RegisteredMemory(std::shared_ptr<const Context> context, std::uint64_t bytes)
    : context_(std::move(context)), bytes_(bytes) {
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.length = bytes;
  params.flags = UCP_MEM_MAP_ALLOCATE;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  const std::string what = "allocate " + std::to_string(bytes) + " bytes of staging";
  check(ucp_mem_map(context_->get(), &params, &raw_), what);
  ucp_mem_attr_t attributes = {};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  check(ucp_mem_query(raw_, &attributes), what);
  data_ = static_cast<std::byte*>(attributes.address);
}

RegisteredMemory::~RegisteredMemory() {
  if (raw_ != nullptr) {
    (void)ucp_mem_unmap(context_->get(), raw_);
  }
}

std::string RegisteredMemory::key() const {
  void* packed = nullptr;
  std::size_t bytes = 0;
  check(ucp_rkey_pack(context_->get(), raw_, &packed, &bytes), "pack a key of registered memory");
  std::string key(static_cast<const char*>(packed), bytes);
  ucp_rkey_buffer_release(packed);
  return key;
}

RemoteKey::RemoteKey(ucp_ep_h endpoint, const std::string& key) {
  check(ucp_ep_rkey_unpack(endpoint, key.data(), &raw_), "unpack a key of a peer's memory");
}

RemoteKey::~RemoteKey() {
  if (raw_ != nullptr) {
    ucp_rkey_destroy(raw_);
  }
}

std::byte* RemoteKey::map(std::uint64_t address) const {
  void* here = nullptr;
  check(ucp_rkey_ptr(raw_, address, &here), "map a peer's memory");
  return static_cast<std::byte*>(here);
}

}  // namespace m2n::ucx
