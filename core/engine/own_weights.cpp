// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#include "core/engine/own_weights.hpp"

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/error.hpp"
#include "core/tensor/cast.hpp"

namespace m2n {
namespace {

ParamLoan loan_of(const OwnParameter& parameter) {
  return {parameter.spec.name, parameter.spec.dtype, parameter.spec.shape, parameter.slots};
}

class OwnSource final : public WeightSource {
 public:
  explicit OwnSource(const std::vector<OwnParameter>& parameters) {
    for (const OwnParameter& parameter : parameters) {
      params_.push_back(parameter.spec);
      loans_.push_back(loan_of(parameter));
    }
  }

  std::string_view name() const noexcept override { return "own"; }
  const std::vector<ParamSpec>& params() const override { return params_; }
  std::vector<ParamLoan> borrow(std::uint64_t /*version*/) override { return loans_; }

 private:
  std::vector<ParamSpec> params_;
  std::vector<ParamLoan> loans_;
};

class OwnSink final : public WeightSink {
 public:
  explicit OwnSink(std::vector<OwnParameter> parameters) : parameters_(std::move(parameters)) {}

  std::string_view name() const noexcept override { return "own"; }

  std::vector<Resolution> resolve(std::span<const ParamSpec> params) override {
    std::unordered_map<std::string_view, const OwnParameter*> by_name;
    for (const OwnParameter& own : parameters_) {
      by_name.emplace(own.spec.name, &own);
    }
    std::vector<Resolution> resolutions;
    for (const ParamSpec& param : params) {
      const auto found = by_name.find(param.name);
      if (found == by_name.end()) {
        throw Error(Errc::bad_argument,
                    "the worker has no parameter '" + param.name + "', which the trainers declare");
      }
      const ParamSpec& own = found->second->spec;
      if (own.shape != param.shape) {
        throw Error(Errc::bad_argument, "the worker has parameter '" + param.name + "' of shape " +
                                            to_string(own.shape) + ", and the trainers of shape " +
                                            to_string(param.shape));
      }
      const bool cast = own.dtype != param.dtype && can_cast(param.dtype, own.dtype);
      resolutions.push_back({Mode::direct, own.side, cast, "the caller's buffers"});
      loans_.push_back(loan_of(*found->second));
    }
    return resolutions;
  }

  void begin(std::uint64_t /*version*/) override { version_.reset(); }
  std::vector<ParamLoan> lend() override { return loans_; }
  void load_weights(TensorStream& /*stream*/) override {}  // nothing falls back
  void commit(std::uint64_t version) override { version_ = version; }
  void roll_back() noexcept override { version_.reset(); }
  std::optional<std::uint64_t> version() const noexcept override { return version_; }
  std::vector<LiveParameter> live() override { return {}; }

 private:
  std::vector<OwnParameter> parameters_;
  std::vector<ParamLoan> loans_;
  std::optional<std::uint64_t> version_;
};

}  // namespace

std::unique_ptr<WeightSource> make_own_source(std::vector<OwnParameter> parameters) {
  return std::make_unique<OwnSource>(parameters);
}

std::unique_ptr<WeightSink> make_own_sink(std::vector<OwnParameter> parameters) {
  return std::make_unique<OwnSink>(std::move(parameters));
}

}  // namespace m2n
