// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "transports/ucx/worker.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>

#include "core/api/memory.hpp"

namespace m2n::ucx {
namespace {

constexpr unsigned kMessageId = 1;
/// How long closing endpoints by force may take.
constexpr std::chrono::seconds kCloseLimit{2};

/// " am am_bw#0" of " seg 4294967295 am am_bw#0", as newer versions write.
std::string without_segment(const std::string& uses) {
  constexpr std::string_view kSegment = " seg ";
  return uses.starts_with(kSegment)
             ? uses.substr(std::min(uses.size(), uses.find(' ', kSegment.size())))
             : uses;
}

std::shared_ptr<Context> make_context(const UcxOptions& options, std::optional<int> device) {
  const CurrentDevice current(device);
  return std::make_shared<Context>(options);
}

}  // namespace

struct Worker::Operation {
  Worker* worker = nullptr;
  Pending* pending = nullptr;
  std::uint64_t bytes = 0;
  Header header;
  std::string payload;
};

struct Worker::Estate {
  std::shared_ptr<Context> context;
  std::vector<std::unique_ptr<Operation>> operations;
  std::vector<std::shared_ptr<void>> kept;
};

void Worker::keep(std::shared_ptr<void> resource) { estate_->kept.push_back(std::move(resource)); }

bool Peer::is_gone() const noexcept {
  return failure != UCS_OK || (presence.get() >= 0 && !is_byte_held(presence, 0));
}

std::string Peer::lanes() const {
  char* text = nullptr;
  std::size_t bytes = 0;
  std::FILE* const out = ::open_memstream(&text, &bytes);
  if (out == nullptr) {
    return {};
  }
  ucp_ep_print_info(endpoint, out);
  std::fclose(out);
  std::istringstream lines(std::string(text, bytes));
  std::free(text);
  std::string lanes;
  for (std::string line; std::getline(lines, line);) {
    // "# lane[0]:  3:sysv/memory.0 md[2]   -> md[2]/sysv/sysdev[255] am am_bw#0"
    const auto lane = line.find("lane[");
    const auto arrow = line.find("->");
    const auto device = line.find('/');
    if (lane == std::string::npos || arrow == std::string::npos || device > arrow) {
      continue;
    }
    const auto name = line.find_last_of(": ", device) + 1;
    lanes += (lanes.empty() ? "" : ", ") + line.substr(name, device - name);
    const auto uses = line.find(' ', arrow + 3);
    if (uses != std::string::npos) {
      lanes += without_segment(line.substr(uses));
    }
    lanes.erase(lanes.find_last_not_of(' ') + 1);
  }
  return lanes;
}

bool Peer::has_device_lane() const {
  return (", " + lanes()).find(", cuda_ipc") != std::string::npos;
}

bool Peer::has_fast_lane() const {
  const std::string names = ", " + lanes();
  for (const char* const fast : {", rc", ", dc", ", ud", ", srd", ", cuda_ipc"}) {
    if (names.find(fast) != std::string::npos) {
      return true;
    }
  }
  return false;
}

std::string Contact::text() const {
  return machine + ' ' + std::to_string(process) + ' ' + std::to_string(presence) + ' ' +
         std::to_string(world) + ' ' + std::to_string(probe_address) + ' ' +
         std::to_string(probe_key.size()) + ' ' + probe_key + address;
}

Contact Contact::parse(const std::string& text) {
  std::istringstream in(text);
  Contact out;
  std::size_t key_bytes = 0;
  in >> out.machine >> out.process >> out.presence >> out.world >> out.probe_address >> key_bytes;
  const auto keys = static_cast<std::size_t>(in.tellg()) + 1;
  out.probe_key = text.substr(keys, key_bytes);
  out.address = text.substr(keys + key_bytes);
  return out;
}

Worker::Worker(const UcxOptions& options, Rank rank, std::optional<int> device)
    : device_(device),
      estate_(std::make_unique<Estate>()),
      context_(make_context(options, device)),
      errors_(options.errors),
      rank_(rank) {
  const CurrentDevice current(device_);
  estate_->context = context_;
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = options.threads ? UCS_THREAD_MODE_MULTI : UCS_THREAD_MODE_SERIALIZED;
  check(ucp_worker_create(context_->get(), &params, &raw_), "create a worker");
  check(ucp_worker_get_efd(raw_, &event_fd_), "get the worker's event descriptor");
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.cb = on_message;
  handler.arg = this;
  check(ucp_worker_set_am_recv_handler(raw_, &handler), "listen to messages");
  presence_ = create_segment(1);
  presence_hold_ = open_segment(::getpid(), presence_.get());
  hold_byte(presence_hold_, 0);
  if (!options.put_bytes && options.puts != PutChoice::off) {
    probe_ = std::make_shared<PutProbe>(context_);
  }
}

Worker::~Worker() {
  const CurrentDevice current(device_);
  const std::lock_guard lock(mutex_);
  close_endpoints();
  if (under_way_ == 0) {
    estate_->kept.clear();  // keys go before the worker
    ucp_worker_destroy(raw_);
    return;
  }
  // UCX aborts the process when a worker goes before its operations, and nobody completes those on
  // memory shared with a rank that is gone. So the worker stays, with all that they may use.
  (void)estate_.release();
}

Contact Worker::contact() const {
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  check(ucp_worker_get_address(raw_, &address, &bytes), "get the worker's address");
  std::random_device random;
  Contact contact{machine_id(),
                  ::getpid(),
                  presence_.get(),
                  (std::uint64_t{random()} << 32) | random(),
                  probe_ ? probe_->address() : 0,
                  probe_ ? probe_->key() : "",
                  std::string(reinterpret_cast<const char*>(address), bytes)};
  ucp_worker_release_address(raw_, address);
  return contact;
}

bool Worker::shares_memory_with(Rank rank) const {
  const bool one_machine = contacts_[static_cast<std::size_t>(rank)].machine ==
                           contacts_[static_cast<std::size_t>(rank_)].machine;
  return one_machine && context_->may_share_memory() &&
         (errors_ != ErrorChoice::peer || Context::handles_errors_on_direct_lanes());
}

Peer& Worker::peer(Rank rank) {
  std::unique_ptr<Peer>& peer = peers_[rank];
  if (peer) {
    return *peer;
  }
  const Contact& contact = contacts_[static_cast<std::size_t>(rank)];
  peer = std::make_unique<Peer>();
  peer->rank = rank;
  peer->shares_memory = shares_memory_with(rank);
  // Newer versions handle errors on direct lanes, but then reach a rank of this machine over TCP.
  peer->kernel_tells = peer->shares_memory && errors_ != ErrorChoice::peer;
  if (peer->shares_memory) {
    peer->presence = open_segment(contact.process, contact.presence);
  }
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(contact.address.data());
  params.err_mode = peer->kernel_tells ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_error, peer.get()};
  check(ucp_ep_create(raw_, &params, &peer->endpoint),
        "reach rank " + std::to_string(rank) + " from rank " + std::to_string(rank_));
  return *peer;
}

Worker::Operation& Worker::take_operation(const Header& header) {
  if (free_operations_.empty()) {
    estate_->operations.push_back(std::make_unique<Operation>());
    estate_->operations.back()->worker = this;
    free_operations_.push_back(estate_->operations.back().get());
  }
  Operation& operation = *free_operations_.back();
  free_operations_.pop_back();
  operation.header = header;
  operation.header.world = contacts_[0].world;
  return operation;
}

void Worker::finish(Operation& operation, ucs_status_t status) {
  --under_way_;
  --operation.pending->operations;
  operation.pending->bytes -= operation.bytes;
  if (status != UCS_OK && operation.pending->status == UCS_OK) {
    operation.pending->status = status;
  }
  free_operations_.push_back(&operation);
}

void Worker::complete(void* request, ucs_status_t status, void* user_data) {
  auto& operation = *static_cast<Operation*>(user_data);
  operation.worker->finish(operation, status);
  ucp_request_free(request);
}

template <class Call>
void Worker::post(Operation& operation, Pending& pending, std::uint64_t bytes, const Call& call) {
  operation.pending = &pending;
  operation.bytes = bytes;
  pending.bytes += bytes;
  ++pending.operations;
  ++under_way_;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = complete;
  param.user_data = &operation;
  const ucs_status_ptr_t request = call(param);
  if (request == nullptr) {
    finish(operation, UCS_OK);
  } else if (UCS_PTR_IS_ERR(request)) {
    finish(operation, UCS_PTR_STATUS(request));
  }
}

void Worker::send(Peer& peer, const Header& header, std::string_view payload) {
  if (peer.failure != UCS_OK) {
    return;  // whoever waits for this peer finds out
  }
  Operation& operation = take_operation(header);
  operation.payload = payload;
  post(operation, unsent_, 0, [&](ucp_request_param_t& param) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    return ucp_am_send_nbx(peer.endpoint, kMessageId, &operation.header, sizeof(Header),
                           operation.payload.data(), operation.payload.size(), &param);
  });
}

void Worker::send_data(Peer& peer, const Header& header, std::span<const std::byte> payload,
                       const RegisteredMemory& memory, Pending& pending) {
  if (peer.failure != UCS_OK) {
    pending.status = peer.failure;
    return;
  }
  Operation& operation = take_operation(header);
  post(operation, pending, payload.size(), [&](ucp_request_param_t& param) {
    param.op_attr_mask |=
        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.memh = memory.get();
    return ucp_am_send_nbx(peer.endpoint, kMessageId, &operation.header, sizeof(Header),
                           payload.data(), payload.size(), &param);
  });
}

void Worker::put(Peer& peer, std::span<const std::byte> bytes, const RegisteredMemory& memory,
                 std::uint64_t address, const RemoteKey& key, Pending& pending) {
  if (peer.failure != UCS_OK) {
    pending.status = peer.failure;
    return;
  }
  post(take_operation(), pending, bytes.size(), [&](ucp_request_param_t& param) {
    param.op_attr_mask |=
        UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
    param.memory_type = memory.type();
    param.memh = memory.get();
    return ucp_put_nbx(peer.endpoint, bytes.data(), bytes.size(), address, key.get(), &param);
  });
}

void Worker::flush(Peer& peer, Pending& pending) {
  if (peer.failure != UCS_OK) {
    pending.status = peer.failure;
    return;
  }
  post(take_operation(), pending, 0,
       [&](const ucp_request_param_t& param) { return ucp_ep_flush_nbx(peer.endpoint, &param); });
}

std::uint64_t Worker::measured_put_bytes(Peer& peer, std::uint64_t chunk_bytes,
                                         const std::function<bool()>& stop) {
  const auto [entry, added] = put_lengths_.try_emplace(peer.lanes(), kUnmeasuredPut);
  const Contact& contact = contacts_[static_cast<std::size_t>(peer.rank)];
  if (added && probe_ && !contact.probe_key.empty()) {
    keep(probe_);
    entry->second =
        probe_->measure(*this, peer, contact.probe_address, contact.probe_key, chunk_bytes, stop);
  }
  return entry->second;
}

bool Worker::progress() {
  bool any = false;
  while (ucp_worker_progress(raw_) != 0) {
    any = true;
  }
  return any;
}

bool Worker::arm() {
  const ucs_status_t status = ucp_worker_arm(raw_);
  if (status == UCS_ERR_BUSY) {
    return false;
  }
  check(status, "arm the worker");
  return true;
}

bool Worker::sleep(std::chrono::nanoseconds limit) const {
  struct pollfd event = {event_fd_, POLLIN, 0};
  const auto whole = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  return ::poll(&event, 1, static_cast<int>(std::max<std::int64_t>(0, whole))) != 0;
}

void Worker::signal() const noexcept { (void)ucp_worker_signal(raw_); }

ucs_status_t Worker::on_message(void* arg, const void* header, std::size_t header_bytes, void* data,
                                std::size_t bytes, const ucp_am_recv_param_t* param) {
  auto& worker = *static_cast<Worker*>(arg);
  if (header_bytes != sizeof(Header) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    return UCS_OK;  // no message of ours
  }
  Header message;
  std::memcpy(&message, header, sizeof(Header));
  const auto found = worker.receivers_.find(message.session);
  if (message.world == worker.contacts_[0].world && found != worker.receivers_.end()) {
    found->second->receive(message, {static_cast<const std::byte*>(data), bytes});
  }
  return UCS_OK;
}

void Worker::on_error(void* arg, ucp_ep_h, ucs_status_t status) {
  static_cast<Peer*>(arg)->failure = status;
}

/// By force: what has to arrive has arrived, and peers may be gone.
void Worker::close_endpoints() noexcept {
  std::vector<ucs_status_ptr_t> closing;
  for (const auto& [rank, peer] : peers_) {
    if (peer->endpoint == nullptr || peer->kernel_tells) {
      continue;  // goes with the worker
    }
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(peer->endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) {
      closing.push_back(request);
    }
  }
  const Deadline limit = std::chrono::steady_clock::now() + kCloseLimit;
  for (const ucs_status_ptr_t request : closing) {
    while (ucp_request_check_status(request) == UCS_INPROGRESS &&
           std::chrono::steady_clock::now() < limit) {
      ucp_worker_progress(raw_);
    }
    ucp_request_free(request);
  }
}

}  // namespace m2n::ucx
