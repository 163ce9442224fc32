// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "sinks/host_sink.hpp"

#include <charconv>
#include <chrono>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"
#include "core/tensor/copy.hpp"
#include "sinks/fail.hpp"
#include "sinks/store.hpp"

namespace m2n::sinks {
namespace {

std::uint64_t bytes_of_shape(const Shape& shape, DType dtype) {
  return checked_mul_bytes(static_cast<std::uint64_t>(element_count(shape)), bytes_of(dtype));
}

class HostSink final : public WeightSink {
 public:
  HostSink(HostSinkKind kind, const SinkContext& context)
      : kind_(std::move(kind)),
        rank_(context.rank),
        first_worker_(context.first_worker),
        models_(context.models),
        declared_(context.declared),
        place_(context.place),
        store_(kind_.shadow, context.place) {
    read_options(context.options);
    if (models_) {
      keep_parameters();
    } else {
      keep_declared();
    }
  }

  std::string_view name() const noexcept override { return kind_.name; }

  MemoryPlace place() const noexcept override { return place_; }

  void derive(DerivedTensor tensor) override { store_.derive(std::move(tensor)); }

  std::vector<Resolution> resolve(std::span<const ParamSpec> offered) override {
    if (resolved_) {
      fail("sink '" + kind_.name + "' resolves once");
    }
    const std::vector<ParamSpec> params = arriving(offered, models_ ? nullptr : &declared_);
    auto destinations =
        models_ ? destinations_of_models(*models_, first_worker_, params, dtypes_, kind_.route)
                : destinations_of_declared(declared_, params, dtypes_, kind_.route);
    for (const ParamSpec& param : params) {
      number_of_.emplace(param.name, params_.size());
      params_.push_back({param.name, param.dtype, param.shape});
    }
    places_ = std::move(destinations.places);
    for (const Resolution& resolution : destinations.resolutions) {
      modes_.push_back(resolution.mode);
      falls_back_ += resolution.mode == Mode::fallback ? 1 : 0;
    }
    for (const Side& side : places_) {
      store_.order(side.buffers);
    }
    resolved_ = true;
    return std::move(destinations.resolutions);
  }

  void begin(std::uint64_t version) override {
    require_resolved("begin");
    if (version <= newest_) {
      fail("version " + std::to_string(version) + " cannot begin after version " +
           std::to_string(newest_) + " was committed; versions only grow");
    }
    if (!kind_.shadow) {
      close_readers();
      {
        const std::lock_guard lock(version_mutex_);
        version_.reset();
      }
      readers_->open();  // to be told that there are no weights
    }
    writing_ = version;
    loaded_ = false;
    accepted_ = false;
    store_.begin();
  }

  std::vector<ParamLoan> lend() override {
    require_resolved("lend");
    std::vector<ParamLoan> loans;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const bool direct = modes_[i] == Mode::direct;
      ParamLoan loan{params_[i].name,
                     direct ? places_[i].layout->dtype() : params_[i].dtype,
                     params_[i].shape,
                     {}};
      if (direct) {
        for (const std::string& buffer : places_[i].buffers) {
          loan.slots.push_back(store_.target(buffer));
        }
      }
      loans.push_back(std::move(loan));
    }
    return loans;
  }

  void load_weights(TensorStream& stream) override {
    require_resolved("load");
    if (!writing_) {
      fail("sink '" + kind_.name + "' loads weights inside a round only");
    }
    std::vector<bool> seen(params_.size(), false);
    std::size_t count = 0;
    while (const auto tensor = stream.next()) {
      const auto found = number_of_.find(std::string(tensor->name));
      if (found == number_of_.end() || modes_[found->second] != Mode::fallback) {
        fail("tensor '" + std::string(tensor->name) + "' did not fall back, and cannot be loaded");
      }
      const std::size_t i = found->second;
      if (seen[i]) {
        fail("tensor '" + params_[i].name + "' came twice in one round");
      }
      if (tensor->shape != params_[i].shape || tensor->dtype != params_[i].dtype) {
        fail("tensor '" + params_[i].name + "' came as " + std::string(to_string(tensor->dtype)) +
             " " + to_string(tensor->shape) + ", and was declared as " +
             std::string(to_string(params_[i].dtype)) + " " + to_string(params_[i].shape));
      }
      load(i, *tensor);
      seen[i] = true;
      ++count;
    }
    if (count != falls_back_) {
      for (std::size_t i = 0; i < params_.size(); ++i) {
        if (modes_[i] == Mode::fallback && !seen[i]) {
          fail(std::to_string(falls_back_ - count) + " of " + std::to_string(falls_back_) +
               " tensors did not come in this round, the first is '" + params_[i].name + "'");
        }
      }
    }
    loaded_ = true;
  }

  void accept(std::uint64_t version) override {
    if (writing_ != version) {
      fail("version " + std::to_string(version) + " cannot be committed; " +
           (writing_ ? "version " + std::to_string(*writing_) + " is being written"
                     : "no round has begun"));
    }
    if (falls_back_ > 0 && !loaded_) {
      fail("version " + std::to_string(version) +
           " cannot be committed: " + std::to_string(falls_back_) + " tensors were not loaded");
    }
    store_.complete();
    accepted_ = true;
  }

  void commit(std::uint64_t version) override {
    if (!accepted_ || writing_ != version) {
      accept(version);
    }
    close_readers();
    try {
      store_.publish();
    } catch (...) {  // neither version any more
      roll_back_to_nothing();
      throw;
    }
    {
      const std::lock_guard lock(version_mutex_);
      version_ = version;
    }
    newest_ = version;
    writing_.reset();
    readers_->open();
  }

  void roll_back() noexcept override {
    if (!kind_.shadow) {
      const std::lock_guard lock(version_mutex_);
      version_.reset();
    }
    writing_.reset();
  }

  std::optional<std::uint64_t> version() const noexcept override {
    const std::lock_guard lock(version_mutex_);
    return version_;
  }

  ServedWeights serve() override {
    if (!kind_.keeps) {
      return WeightSink::serve();
    }
    // First a reader, then a look: from here on the version stays.
    ServedWeights served{0, {}, Readers::enter(readers_)};
    const auto now = version();
    if (!now) {
      throw Error(Errc::unavailable, "sink '" + kind_.name +
                                         "' has no valid weights to serve; a complete round would "
                                         "bring some");
    }
    served.version = *now;
    served.parameters = store_.live(true);
    return served;
  }

  std::vector<LiveParameter> live() override {
    return kind_.keeps ? store_.live(true) : std::vector<LiveParameter>{};
  }

 private:
  void roll_back_to_nothing() noexcept {
    {
      const std::lock_guard lock(version_mutex_);
      version_.reset();
    }
    writing_.reset();
    readers_->open();  // to be told that there are no weights
  }

  void read_options(const Options& options) {
    const auto refuse = [&](const std::string& key, const std::string& value,
                            const std::string& choices) {
      throw Error(Errc::usage, "option '" + key + "' of sink '" + kind_.name + "' is '" + value +
                                   "'; the choices are " + choices);
    };
    for (const auto& [key, value] : options) {
      if (key == "cast") {
        if (value != "exact" && value != "nearest_even") {
          refuse(key, value, "exact, nearest_even");
        }
        dtypes_.cast = value == "nearest_even";
      } else if (key == "drain") {
        drain_ = std::chrono::seconds(seconds_of(value));
      } else if (key == "dtypes" && models_) {
        dtypes_.set_rules(value);
      } else if (key == "dtype" && models_) {
        const DType dtype = dtype_from_string(value);
        if (!can_cast(dtype, DType::f32)) {
          refuse(key, value, "bf16, f16, f32");
        }
        dtypes_.worker = dtype;
      } else if (key == "direct" && kind_.may_choose_route) {
        if (value != "fused" && value != "strict") {
          refuse(key, value, "fused, strict");
        }
        kind_.route = value == "strict" ? Route::strict : Route::fused;
      } else {
        throw Error(Errc::usage, "sink '" + kind_.name + "' has no option '" + key +
                                     "'; the choices are cast, drain" +
                                     (models_ ? ", dtype, dtypes" : "") +
                                     (kind_.may_choose_route ? ", direct" : ""));
      }
    }
    if (!models_ && kind_.route == Route::strict) {
      throw Error(Errc::usage, "sink '" + kind_.name +
                                   "' needs a model for direct=strict; a problem file has none");
    }
  }

  std::int64_t seconds_of(const std::string& value) const {
    std::int64_t seconds = 0;
    const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), seconds);
    constexpr std::int64_t kMost = 1'000'000;
    if (failure != std::errc{} || end != value.data() + value.size() || seconds < 0 ||
        seconds > kMost) {
      throw Error(Errc::usage, "option 'drain' of sink '" + kind_.name + "' is '" + value +
                                   "'; it must be 0 to 1000000 seconds");
    }
    return seconds;
  }

  void keep_parameters() {
    const auto worker = static_cast<std::int64_t>(rank_) - first_worker_;
    if (worker < 0 || worker >= static_cast<std::int64_t>(models_->size())) {
      fail("rank " + std::to_string(rank_) + " is no worker; workers are " +
           std::to_string(models_->size()) + " ranks from " + std::to_string(first_worker_));
    }
    const WorkerModel& model = *(*models_)[static_cast<std::size_t>(worker)];
    for (const WorkerParameter& parameter : model.parameters) {
      Kept kept;
      kept.name = parameter.name;
      kept.dtype = dtypes_.of(parameter);
      kept.shape = parameter.shape;
      kept.bytes = bytes_of_shape(kept.shape, kept.dtype);
      kept.padding = parameter.padding;
      kept.same_as = parameter.same_as;
      if (!parameter.kernel_form.empty()) {
        kept.to_kernel_form = parameter.to_kernel_form;
        for (const Section& section : parameter.sections) {
          kept.fed_elements += static_cast<std::uint64_t>(section.box.volume());
        }
      }
      store_.keep(std::move(kept));
    }
    for (const Rewrite& rewrite : model.rewrites) {
      store_.rewrite(rewrite);
    }
    for (const DerivedTensor& derived : model.derived) {
      if (derived.refresh) {  // the others are refused when the sink resolves
        store_.derive(derived);
      }
    }
  }

  /// One buffer a name, as long as the views of this rank reach.
  void keep_declared() {
    struct Use {
      std::uint64_t bytes = 0;
      std::uint64_t fed_bytes = 0;
      std::optional<DType> dtype;
      std::optional<Shape> shape;
      bool mixed = false;
    };
    std::vector<std::string> order;
    std::unordered_map<std::string, Use> uses;
    for (const Resolution& resolution : declared_) {
      const Layout& layout = *resolution.side.layout;
      const std::uint64_t item = bytes_of(layout.dtype());
      const auto pieces = layout.pieces_of(rank_);
      for (const RankPiece& held : pieces) {
        const std::string& name = resolution.side.buffers.at(held.piece.view.buffer);
        const auto [found, fresh] = uses.try_emplace(name);
        Use& use = found->second;
        if (fresh) {
          order.push_back(name);
        }
        const ByteSpan span = byte_span(held.piece.box.extents(), held.piece.view, item);
        use.bytes = std::max(use.bytes, span.end);
        use.fed_bytes = checked_add_bytes(
            use.fed_bytes, static_cast<std::uint64_t>(held.piece.box.volume()) * item);
        use.mixed = use.mixed || (use.dtype && *use.dtype != layout.dtype());
        use.dtype = layout.dtype();
      }
    }
    for (const std::string& name : order) {
      const Use& use = uses.at(name);
      Kept kept;
      kept.name = name;
      kept.bytes = use.bytes;
      kept.dtype = use.mixed || use.bytes % bytes_of(*use.dtype) != 0 ? DType::u8 : *use.dtype;
      kept.shape = {static_cast<Index>(use.bytes / bytes_of(kept.dtype))};
      kept.zero_all = use.fed_bytes != use.bytes;
      store_.keep(std::move(kept));
    }
  }

  void load(std::size_t i, const FullTensor& tensor) {
    const Layout& layout = *places_[i].layout;
    const Strides strides = row_major(tensor.shape);
    for (const RankPiece& held : layout.pieces_of(rank_)) {
      const Box& box = held.piece.box;
      Index first = 0;
      for (std::size_t d = 0; d < box.rank(); ++d) {
        first += box.lo[d] * strides[d];
      }
      const StridedCopy copy{box.extents(), strides, held.piece.view.strides, tensor.dtype,
                             layout.dtype()};
      const std::string& name = places_[i].buffers[held.piece.view.buffer];
      copy_region(copy,
                  tensor.buffer().from(static_cast<std::uint64_t>(first) * bytes_of(tensor.dtype)),
                  store_.loading(name).from(held.piece.view.offset_bytes));
      store_.loaded(name, static_cast<std::uint64_t>(box.volume()));
    }
  }

  /// @throws Error{timed_out} when somebody goes on reading.
  void close_readers() {
    if (const std::size_t inside = readers_->close(deadline_in(drain_)); inside > 0) {
      throw Error(Errc::timed_out,
                  std::to_string(inside) + " readers of the weights of sink '" + kind_.name +
                      "' did not leave in " + std::to_string(drain_.count()) +
                      " seconds; they must let go for a round, or option 'drain' be longer");
    }
  }

  void require_resolved(const char* action) const {
    if (!resolved_) {
      fail("sink '" + kind_.name + "' cannot " + action + " before it has resolved");
    }
  }

  HostSinkKind kind_;
  Rank rank_;
  Rank first_worker_;
  std::shared_ptr<const WorkerModels> models_;
  std::vector<Resolution> declared_;
  DtypePolicy dtypes_;
  MemoryPlace place_;

  std::chrono::seconds drain_{60};
  Store store_;

  bool resolved_ = false;
  Catalogue params_;
  std::unordered_map<std::string, std::size_t> number_of_;
  std::vector<Mode> modes_;
  std::vector<Side> places_;
  std::size_t falls_back_ = 0;

  std::shared_ptr<Readers> readers_ = std::make_shared<Readers>();
  mutable std::mutex version_mutex_;  ///< serve() asks from other threads.
  std::optional<std::uint64_t> version_;
  std::uint64_t newest_ = 0;  ///< Ever committed.
  std::optional<std::uint64_t> writing_;
  bool loaded_ = false;
  bool accepted_ = false;
};

}  // namespace

std::unique_ptr<WeightSink> make_host_sink(HostSinkKind kind, const SinkContext& context) {
  return std::make_unique<HostSink>(std::move(kind), context);
}

}  // namespace m2n::sinks
