// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/sinks/small_models.hpp"

namespace m2n::testing {

Options small_decoder(Options more) {
  more.merge(Options{{"hidden_size", "20"},
                     {"num_hidden_layers", "3"},
                     {"num_attention_heads", "8"},
                     {"num_key_value_heads", "2"},
                     {"head_dim", "4"},
                     {"intermediate_size", "40"},
                     {"vocab_size", "203"}});
  return more;
}

Options small_mla(Options more) {
  more.merge(Options{{"hidden_size", "20"},
                     {"num_hidden_layers", "3"},
                     {"num_attention_heads", "8"},
                     {"q_lora_rank", "8"},
                     {"kv_lora_rank", "6"},
                     {"qk_nope_head_dim", "4"},
                     {"qk_rope_head_dim", "4"},
                     {"v_head_dim", "4"},
                     {"intermediate_size", "64"},
                     {"moe_intermediate_size", "32"},
                     {"n_routed_experts", "6"},
                     {"n_shared_experts", "1"},
                     {"n_group", "2"},
                     {"first_k_dense_replace", "1"},
                     {"vocab_size", "203"}});
  return more;
}

Options with_small_blocks(Options options) {
  options.merge(Options{{"quantization_config", "{}"},
                        {"quantization_config.quant_method", "fp8"},
                        {"quantization_config.weight_block_size", "[4,4]"}});
  return options;
}

}  // namespace m2n::testing
