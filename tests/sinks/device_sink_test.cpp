// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

/// @file
/// Sinks whose weights live on a device: the host never touches a byte there (a touch crashes, see
/// paged_memory.hpp), and every byte is the one that the same sink has in host memory.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <ostream>

#include "core/api/memory.hpp"
#include "core/tensor/blocks.hpp"
#include "tests/sinks/fixtures.hpp"
#include "tests/sinks/small_models.hpp"
#include "tests/support/paged_memory.hpp"

namespace m2n {
namespace {

namespace bdata = boost::unit_test::data;
using testing::Checkpoint;
using testing::fallback_names;
using testing::make_checkpoint;
using testing::make_model;
using testing::Models;
using testing::models_of;
using testing::specs_of;
using testing::thrown_by;

constexpr Rank kFirstWorker = 3;
constexpr MemoryPlace kDevice{MemorySpace::device, 1};

struct Paged {
  Paged() { provide_device_memory(testing::make_paged_memory()); }
};
const Paged kPaged;

LocalBuffer at_element(const LocalBuffer& buffer, Index element, DType dtype) {
  return buffer.from(static_cast<std::uint64_t>(element) * bytes_of(dtype));
}

/// Full tensors in memory of @p place.
class PlacedStream final : public TensorStream {
 public:
  PlacedStream(const Checkpoint& checkpoint, std::vector<std::string> names, MemoryPlace place)
      : checkpoint_(checkpoint), names_(std::move(names)), place_(place) {}

  std::optional<FullTensor> next() override {
    if (at_ == names_.size()) {
      return {};
    }
    const TensorInfo& tensor = checkpoint_.info(names_[at_++]);
    const auto& bytes = checkpoint_.bytes.at(tensor.name);
    std::shared_ptr<Arena> arena = memory_of(place_.space).reserve(bytes.size() + 64, 1);
    const LocalBuffer buffer = arena->take(bytes.size());
    memory_of(buffer).write(buffer, bytes);
    held_ = arena;
    return FullTensor{tensor.name, tensor.dtype, tensor.shape, buffer.data, {}, place_};
  }

 private:
  const Checkpoint& checkpoint_;
  std::vector<std::string> names_;
  MemoryPlace place_;
  std::shared_ptr<Arena> held_;
  std::size_t at_ = 0;
};

/// A sink in memory of some place, and its rounds.
struct PlacedSink {
  PlacedSink(const std::string& kind, const std::shared_ptr<const Models>& models, Rank worker,
             const Catalogue& catalogue, MemoryPlace memory, const Options& options = {})
      : place(memory), rank(kFirstWorker + worker) {
    SinkContext context;
    context.options = options;
    context.rank = rank;
    context.first_worker = kFirstWorker;
    context.models = testing::each_shared(models);
    context.place = memory;
    sink = testing::house_registries().sinks.create(kind, context);
    resolutions = sink->resolve(specs_of(catalogue));
  }

  /// Up to accept(). Whatever a round may write is rubbish before it.
  void receive(const Checkpoint& checkpoint, std::uint64_t version) {
    const auto loans = sink->lend();
    for (const ParamLoan& loan : loans) {
      for (const LocalBuffer& slot : loan.slots) {
        const std::vector<std::byte> rubbish(slot.bytes, std::byte{0xee});
        memory_of(slot).write(slot, rubbish);
      }
    }
    sink->begin(version);
    for (std::size_t i = 0; i < loans.size(); ++i) {
      if (resolutions[i].mode == Mode::direct) {
        write(checkpoint, checkpoint.catalogue[i], *resolutions[i].side.layout, loans[i]);
      }
    }
    if (const auto names = fallback_names(resolutions, checkpoint.catalogue); !names.empty()) {
      PlacedStream stream(checkpoint, names, place);
      sink->load_weights(stream);
    }
    sink->accept(version);
  }

  void round(const Checkpoint& checkpoint, std::uint64_t version) {
    receive(checkpoint, version);
    sink->commit(version);
  }

  std::map<std::string, std::vector<std::byte>> bytes() const {
    std::map<std::string, std::vector<std::byte>> all;
    for (const LiveParameter& live : sink->live()) {
      BOOST_TEST((live.buffer.space == place.space));
      BOOST_TEST(live.buffer.device == place.device);
      auto& out = all[live.name];
      out.resize(live.buffer.bytes);
      memory_of(live.buffer).read(live.buffer, out);
    }
    return all;
  }

  MemoryPlace place;
  Rank rank;
  std::unique_ptr<WeightSink> sink;
  std::vector<Resolution> resolutions;

 private:
  void write(const Checkpoint& checkpoint, const TensorInfo& tensor, const Layout& layout,
             const ParamLoan& loan) const {
    std::vector<std::byte> bytes = checkpoint.bytes.at(tensor.name);
    const Strides strides = row_major(tensor.shape);
    const LocalBuffer whole = host_buffer(bytes.data(), bytes.size());
    for (const RankPiece& held : layout.pieces_of(rank)) {
      const Piece& piece = held.piece;
      const Index first = element_offset(Dims::filled(piece.box.rank(), 0), piece.box.lo, strides);
      copy_region({piece.box.extents(), strides, piece.view.strides, tensor.dtype, layout.dtype()},
                  at_element(whole, first, tensor.dtype),
                  loan.slots.at(piece.view.buffer).from(piece.view.offset_bytes));
    }
  }
};

struct Family {
  const char* name;
  Options options;
  Rank workers;
};
std::ostream& operator<<(std::ostream& os, const Family& f) { return os << f.name; }

const std::vector<Family> kFamilies = {
    {"llama", testing::small_decoder({{"vocab_size", "70"}, {"intermediate_align", "16"}}), 2},
    {"llama", testing::small_decoder({{"tie_word_embeddings", "true"}}), 4},
    {"qwen3_moe",
     {{"hidden_size", "20"},
      {"num_hidden_layers", "2"},
      {"num_attention_heads", "8"},
      {"num_key_value_heads", "2"},
      {"head_dim", "4"},
      {"moe_intermediate_size", "8"},
      {"num_experts", "6"},
      {"vocab_size", "203"}},
     2},
    {"deepseek_v3", testing::small_mla({{"num_hidden_layers", "2"}}), 2},
    {"deepseek_v3", testing::with_small_blocks(testing::small_mla({{"num_hidden_layers", "1"}})),
     1},
};
const std::vector<std::string> kKinds = {"inplace", "shadow", "load_weights"};

}  // namespace

BOOST_AUTO_TEST_SUITE(device_sinks)

BOOST_DATA_TEST_CASE(every_byte_is_that_of_the_same_sink_in_host_memory,
                     bdata::make(kFamilies) * bdata::make(kKinds), family, kind) {
  const auto model = make_model(family.name, family.options);
  const auto models = models_of(*model, family.workers, family.workers, model->catalogue());
  for (Rank worker = 0; worker < family.workers; ++worker) {
    PlacedSink here(kind, models, worker, model->catalogue(), {});
    PlacedSink there(kind, models, worker, model->catalogue(), kDevice);
    for (int round = 1; round <= 2; ++round) {
      const Checkpoint checkpoint = make_checkpoint(model->catalogue(), round);
      here.round(checkpoint, static_cast<std::uint64_t>(round));
      there.round(checkpoint, static_cast<std::uint64_t>(round));
      const auto expected = here.bytes();
      BOOST_TEST(expected.size() > 5u);
      BOOST_TEST((there.bytes() == expected));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_sink_that_only_resolves_takes_no_memory) {
  const auto model = make_model("llama", testing::small_decoder());
  const auto models = models_of(*model, 2, 2, model->catalogue());
  const std::uint64_t before = testing::paged_bytes();
  PlacedSink sink("shadow", models, 0, model->catalogue(), kDevice);
  BOOST_TEST(testing::paged_bytes() == before);
  sink.sink->lend();
  BOOST_TEST(testing::paged_bytes() > before);
}

BOOST_AUTO_TEST_CASE(a_shadow_on_a_device_serves_the_last_version_until_the_commit) {
  const auto model = make_model("llama", testing::small_decoder());
  const auto models = models_of(*model, 2, 2, model->catalogue());
  PlacedSink sink("shadow", models, 1, model->catalogue(), kDevice);
  sink.round(make_checkpoint(model->catalogue(), 1), 1);
  const auto first = sink.bytes();
  sink.receive(make_checkpoint(model->catalogue(), 2), 2);
  BOOST_TEST((sink.bytes() == first));
  sink.sink->roll_back();
  BOOST_TEST((sink.bytes() == first));
  BOOST_TEST((sink.sink->version() == 1u));
  sink.round(make_checkpoint(model->catalogue(), 2), 3);
  BOOST_TEST((sink.bytes() != first));
}

/// Of [3, 4], columns 1 and 2 belong to nobody.
BOOST_AUTO_TEST_CASE(zeroed_columns_leave_their_neighbours_alone) {
  const Catalogue catalogue = {{"left", DType::bf16, {3}}, {"right", DType::bf16, {3}}};
  WorkerModel model;
  WorkerParameter parameter;
  parameter.name = "w";
  parameter.dtype = DType::bf16;
  parameter.shape = {3, 4};
  parameter.sections = {{"left", Box::whole({3}), 0, {4}}, {"right", Box::whole({3}), 3, {4}}};
  parameter.padding = {{{0, 1}, {3, 3}}};
  model.parameters = {parameter};
  const auto models = std::make_shared<const Models>(Models{model});
  for (const std::string& kind : kKinds) {
    PlacedSink sink(kind, models, 0, catalogue, kDevice);
    const Checkpoint checkpoint = make_checkpoint(catalogue);
    sink.round(checkpoint, 1);
    std::vector<std::uint16_t> values(12);
    std::memcpy(values.data(), sink.bytes().at("w").data(), 24);
    BOOST_TEST(values == (std::vector<std::uint16_t>{1, 0, 0, 4, 2, 0, 0, 5, 3, 0, 0, 6}),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(a_tied_pair_on_a_device_must_be_equal) {
  const Catalogue catalogue = {{"embedding", DType::f32, {6, 2}}, {"head", DType::f32, {6, 2}}};
  WorkerModel model;
  for (const char* name : {"embedding", "head"}) {
    WorkerParameter parameter;
    parameter.name = name;
    parameter.shape = {6, 2};
    parameter.sections = {{name, Box::whole({6, 2}), 0, {2, 1}}};
    model.parameters.push_back(parameter);
  }
  model.parameters.back().same_as = "embedding";
  const auto models = std::make_shared<const Models>(Models{model});
  PlacedSink sink("inplace", models, 0, catalogue, kDevice);
  Checkpoint checkpoint = make_checkpoint(catalogue);
  BOOST_TEST(thrown_by([&] { sink.round(checkpoint, 1); }).mentions("'head' differs from"));
  sink.sink->roll_back();
  checkpoint.bytes["head"] = checkpoint.bytes["embedding"];
  sink.round(checkpoint, 2);
  BOOST_TEST((sink.sink->version() == 2u));
}

/// The kernel wants the halves the other way round.
BOOST_AUTO_TEST_CASE(a_kernels_form_is_made_on_the_host_and_written) {
  const Catalogue catalogue = {{"w", DType::f32, {4}}};
  WorkerModel model;
  WorkerParameter parameter;
  parameter.name = "w";
  parameter.shape = {4};
  parameter.sections = {{"w", Box::whole({4}), 0, {1}}};
  parameter.kernel_form = "halves swapped";
  parameter.to_kernel_form = [](const ParameterView& loaded, std::byte* live) {
    std::memcpy(live, loaded.data + 8, 8);
    std::memcpy(live + 8, loaded.data, 8);
  };
  model.parameters = {parameter};
  const auto models = std::make_shared<const Models>(Models{model});
  for (const std::string& kind : kKinds) {
    PlacedSink sink(kind, models, 0, catalogue, kDevice);
    for (std::uint64_t version = 1; version <= 2; ++version) {
      sink.round(make_checkpoint(catalogue), version);
      std::vector<float> values(4);
      std::memcpy(values.data(), sink.bytes().at("w").data(), 16);
      BOOST_TEST(values == (std::vector<float>{3, 4, 1, 2}), boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_rewrite_changes_on_the_host_what_lies_on_the_device) {
  const Catalogue catalogue = {{"w", DType::f32, {4}}, {"scale", DType::f32, {1}}};
  WorkerModel model;
  for (const TensorInfo& tensor : catalogue) {
    WorkerParameter parameter;
    parameter.name = tensor.name;
    parameter.shape = tensor.shape;
    parameter.sections = {{tensor.name, Box::whole(tensor.shape), 0, {1}}};
    model.parameters.push_back(parameter);
  }
  model.rewrites = {{{"w", "scale"}, "twice as large", [](std::span<const WritableView> views) {
                       for (const WritableView& view : views) {
                         for (Index i = 0; i < element_count(view.shape); ++i) {
                           float value = 0;
                           std::memcpy(&value, view.data + 4 * i, 4);
                           value *= 2;
                           std::memcpy(view.data + 4 * i, &value, 4);
                         }
                       }
                     }}};
  const auto models = std::make_shared<const Models>(Models{model});
  for (const std::string& kind : kKinds) {
    PlacedSink sink(kind, models, 0, catalogue, kDevice);
    for (std::uint64_t version = 1; version <= 2; ++version) {  // not twice in the second round
      const Checkpoint checkpoint = make_checkpoint(catalogue);
      sink.round(checkpoint, version);
      for (const TensorInfo& tensor : catalogue) {
        const auto count = static_cast<std::size_t>(element_count(tensor.shape));
        std::vector<float> sent(count);
        std::vector<float> kept(count);
        std::memcpy(sent.data(), checkpoint.bytes.at(tensor.name).data(), 4 * count);
        std::memcpy(kept.data(), sink.bytes().at(tensor.name).data(), 4 * count);
        for (std::size_t i = 0; i < count; ++i) {
          BOOST_TEST(sent[i] != 0);
          BOOST_TEST(kept[i] == 2 * sent[i]);
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(buffers_follow_the_order_in_which_parameters_are_sent) {
  const Catalogue catalogue = {{"b", DType::f32, {4}}, {"a", DType::f32, {8}}};
  WorkerModel model;
  for (const char* name : {"a", "b"}) {
    WorkerParameter parameter;
    parameter.name = name;
    parameter.shape = {name[0] == 'a' ? 8 : 4};
    parameter.sections = {{name, Box::whole(parameter.shape), 0, {1}}};
    model.parameters.push_back(parameter);
  }
  const auto models = std::make_shared<const Models>(Models{model});
  PlacedSink sink("inplace", models, 0, catalogue, kDevice);
  const auto loans = sink.sink->lend();
  BOOST_TEST((loans[0].slots[0].data + 16 == loans[1].slots[0].data));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace m2n
