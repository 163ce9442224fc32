// SPDX-FileCopyrightText: The m2n authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Trainers whose weights become f8_e4m3 with block scales on their way: their sources, and the
/// values that must arrive.

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "core/api/source.hpp"
#include "core/api/values.hpp"

namespace m2n {

/// How tensors are quantised, by name.
using Quantised = std::map<std::string, Quantise, std::less<>>;

/// The weights of @p catalogue, a checkpoint's, that are f8_e4m3 and have their f32 scales in
/// `<name>_scale_inv`. @param blocks  Extents of a block in the last dimensions; those before have
/// blocks of one element.
/// @throws Error{usage} when there is none, or when the scales of one have another shape.
Quantised quantised_weights(const Catalogue& catalogue, const Dims& blocks);

/// What a trainer holds of @p checkpoint: the weights of @p quantised as @p dtype, and no scales.
Catalogue trained_catalogue(const Catalogue& checkpoint, const Quantised& quantised, DType dtype);

/// Offers what @p base offers, quantised where @p quantised says so. Behind such a parameter follow
/// its scales, unless base offers them itself: then they are overwritten. They lie as the weights
/// do, in memory of this source, and are computed whenever it is borrowed from.
std::unique_ptr<WeightSource> make_quantising_source(std::unique_ptr<WeightSource> base, Rank rank,
                                                     const Quantised& quantised);

/// What arrives of @p base: the weights of @p quantised as f8_e4m3, and their scales. Scales of a
/// tensor are computed once, when the first of it is read.
std::unique_ptr<TensorValues> make_quantised_values(std::shared_ptr<const TensorValues> base,
                                                    const Quantised& quantised);

}  // namespace m2n
